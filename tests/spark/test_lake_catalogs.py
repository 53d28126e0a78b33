"""The same tables in PostgreSQL and in a REST catalog: the one of Apache Iceberg's tests, in a
separate process.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

import pytest
from lake_support import PROMISES, Lake, expiry_deletes_what_no_snapshot_names_and_nothing_else
from publishing import send
from pyspark_qmq.lake.catalog import CatalogAway, answering_catalog, open_catalog
from support import NodeProcess, eventually_sync, needs
from support.databases import PostgresServer
from typer.testing import CliRunner

from qmq.cli.app import app
from qmq.errors import InvalidArgument

pytestmark = [pytest.mark.sampled, pytest.mark.xdist_group("lake catalogs")]

PROGRAM = Path(__file__).parent / "iceberg_rest" / "IcebergRestCatalog.java"


class CatalogAddress(NamedTuple):
    uri: str
    warehouse: str

    @property
    def words(self) -> list[str]:
        """The options of `qmq lake`."""
        return [
            "--catalog-uri",
            self.uri,
            *(["--warehouse", self.warehouse] if self.warehouse else []),
        ]


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    server = PostgresServer()
    server.create_files()
    server.start()
    yield server
    server.remove()


@pytest.fixture
def rest(tmp_path: Path) -> Iterator[Callable[[], CatalogAddress]]:
    """Start a REST catalog with its warehouse in the test's folder."""
    running: list[subprocess.Popen[str]] = []

    def start() -> CatalogAddress:
        jars, java = needs.find_iceberg_rest(), shutil.which("java")
        if jars is None or java is None:
            pytest.skip(needs.NO_ICEBERG_REST)
        command = [java, "-cp", f"{jars}/*", str(PROGRAM), str(tmp_path)]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        running.append(process)
        assert process.stdout is not None
        return CatalogAddress(f"http://127.0.0.1:{int(process.stdout.readline())}", "")

    yield start
    for each in running:
        each.kill()
        each.communicate()


@pytest.fixture(params=["postgresql", "rest"])
def address(
    request: pytest.FixtureRequest, tmp_path: Path, rest: Callable[[], CatalogAddress]
) -> CatalogAddress:
    if request.param == "rest":
        return rest()
    server: PostgresServer = request.getfixturevalue("postgres")
    return CatalogAddress(server.create_database().sync_url, f"file://{tmp_path}/warehouse")


@pytest.fixture
def lake(node_process: NodeProcess, address: CatalogAddress) -> Iterator[Lake]:
    node_process.start()
    found = Lake(open_catalog("lake", address.uri, address.warehouse), node_process.address)
    yield found
    found.close()


@pytest.mark.parametrize(
    "promise",
    PROMISES,
    ids=lambda each: each.__name__,
)
def test_the_promises_about_sqlite_hold(lake: Lake, promise: Callable[[Lake], None]) -> None:
    promise(lake)


def test_a_database_that_goes_away_is_waited_for_and_each_message_is_there_once(
    node_process: NodeProcess,
    postgres: PostgresServer,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The test kills the database three times while a writer works, which continues by itself."""
    node_process.start()
    catalog = open_catalog(
        "lake", postgres.create_database().sync_url, f"file://{tmp_path}/warehouse"
    )
    lake = Lake(catalog, node_process.address)
    writer, stopping = lake.writer(lake.asked("orders")), threading.Event()
    send(lake.server, "orders", sent := ["first"])
    running = threading.Thread(target=writer.run, args=(stopping, 0.05, lambda _: None))
    running.start()
    try:
        eventually_sync(lambda: writer.counters.rows.get("orders") == 1)
        for number in range(3):
            waits = writer.counters.waits["catalog"]
            postgres.kill()
            try:
                send(lake.server, "orders", more := [f"{number} {each}" for each in range(10)])
                sent += more
                eventually_sync(lambda waits=waits: writer.counters.waits["catalog"] > waits + 1)  # type: ignore[misc]
                assert writer.counters.rows["orders"] == len(sent) - len(more)
            finally:
                postgres.start()
            eventually_sync(lambda all_sent=sent: writer.counters.rows["orders"] == len(all_sent))  # type: ignore[misc]
    finally:
        stopping.set()
        running.join()
    assert lake.bodies("orders") == sent
    assert writer.counters.waits["cluster"] == 0
    assert "the lake waits for the catalog: [E300] OperationalError" in caplog.text
    lake.close()


def test_follow_waits_for_a_catalog_that_is_away_when_it_begins(
    node_process: NodeProcess, postgres: PostgresServer, tmp_path: Path
) -> None:
    server = node_process.start()
    uri = postgres.create_database().sync_url
    send(server, "orders", ["a", "b"])
    where = [
        "--catalog-uri",
        uri,
        "--warehouse",
        f"file://{tmp_path}/warehouse",
        "--server",
        server,
        "--interval",
        "0.1",
    ]
    command = [sys.executable, "-m", "qmq.cli", "lake", "follow", "--subject", "orders", *where]
    postgres.kill()
    try:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        assert process.stderr is not None
        assert (
            "the lake waits for the catalog: [E300] OperationalError" in process.stderr.readline()
        )
    finally:
        postgres.start()
    assert process.stdout.readline() == "orders: 2 messages in 1 files\n"
    process.send_signal(signal.SIGTERM)
    process.communicate()
    assert process.returncode == 0


def test_a_catalog_that_refuses_is_no_catalog_that_is_away(postgres: PostgresServer) -> None:
    uri = postgres.create_database().sync_url
    with pytest.raises(InvalidArgument, match="does not exist"):
        open_catalog("lake", re.sub(r"/test_\d+", "/nothing", uri), "")
    with pytest.raises(InvalidArgument, match="unable to open database file"):
        open_catalog("lake", "sqlite:////nowhere/at/all.db", "")


def test_a_rest_catalog_that_cannot_work_now_or_is_gone_is_away() -> None:
    with listening("127.0.0.1") as server:
        found = open_catalog("lake", f"http://127.0.0.1:{server.server_port}", "")
        with pytest.raises(CatalogAway, match="ServiceUnavailableError"), answering_catalog():
            found.load_table("qmq.orders")
    with pytest.raises(CatalogAway, match="ConnectionError"), answering_catalog():
        found.load_table("qmq.orders")
    found.close()


class Unable(BaseHTTPRequestHandler):
    """A REST catalog that only describes its abilities, and refuses every other request."""

    def do_GET(self) -> None:  # the server looks for this name
        is_config = self.path.startswith("/v1/config")
        body = (
            b'{"defaults": {}, "overrides": {}}'
            if is_config
            else b'{"error": {"message": "later", "type": "Busy", "code": 503}}'
        )
        self.send_response(200 if is_config else 503)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_HEAD(self) -> None:
        self.do_GET()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def listening(host: str) -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer((host, 0), Unable) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        yield server
        server.shutdown()
        serving.join()


def test_expiry_deletes_what_no_snapshot_names(lake: Lake, tmp_path: Path) -> None:
    expiry_deletes_what_no_snapshot_names_and_nothing_else(lake, tmp_path)


def test_a_typed_table_is_written_and_shown_by_the_command_line(
    node_process: NodeProcess, address: CatalogAddress, tmp_path: Path
) -> None:
    node_process.start()
    server = ["--server", node_process.address]

    def run(*words: str) -> str:
        done = CliRunner().invoke(app, list(words))
        assert done.exit_code == 0, done.output
        return done.stdout

    send(node_process.address, "orders", ['{"id":1}', "bad", '{"id":2}'])
    (tmp_path / "schema.json").write_text(
        '{"type": "object", "properties": {"id": {"type": "integer"}}}'
    )
    run(
        "subject",
        "schema",
        "set",
        "orders",
        "--json-schema",
        str(tmp_path / "schema.json"),
        *server,
    )
    told = run(
        "lake", "follow", "--subject", "orders", "--typed", "--once", *address.words, *server
    )
    assert told == (
        "orders: 3 messages in 2 files; 1 of them do not fit the schema (qmq lake show "
        "--rejected)\n"
    )
    for more, rows in (((), 2), (("--rejected",), 1)):
        (day,) = json.loads(
            run("lake", "show", "--subject", "orders", "--json", *more, *address.words)
        )
        assert (day["files"], day["rows"]) == (1, rows)
    run("lake", "expire", "--subject", "orders", "--rejected", *address.words)
