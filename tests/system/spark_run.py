"""Fault runs of Spark on three broker groups: the rows of the archive, and the messages of the log, while drivers are killed."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.catalog import Catalog, load_catalog
from pyspark_qmq.lake.catalog import table_name

from system.ordered_cluster import OrderedCluster, Shape, running_cluster
from system.spark_driver import DriverProcess, kill_at_random
from system.spark_workload import Row, anomalies, change_now_and_then, create, publish, read_log, source_rows

SHAPE = Shape(etcds=1, metas=1, groups=3, replicas=1)
SECURED_SHAPE = Shape(etcds=3, metas=1, groups=2, replicas=3)
"""The shape of docker-compose.secure.yml."""
TESTS = Path(__file__).resolve().parents[1]
FILES_PER_KILL = 20
COMMITS_PER_KILL = 10
"""Enough that no life comes to the end of them."""

Step = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The findings of a proof."""

    rows: int
    changes: int
    moments: dict[str, int]
    anomalies: list[str] = field(default_factory=list)
    figures: dict[str, int] = field(default_factory=dict)


@contextmanager
def cluster(folder: Path, *, secure: bool = False) -> Iterator[OrderedCluster]:
    """Broker groups on loopback: drivers die here, not brokers. With `secure` everybody shows a certificate, and rules are enforced."""
    with running_cluster(folder, SECURED_SHAPE if secure else SHAPE, "loopback", secure=secure) as found:
        yield found


class Beside:
    """Runs a coroutine in a thread with its own loop."""

    def __init__(self, work: Callable[[], Coroutine[Any, Any, int]]) -> None:
        self._work = work
        self._found = 0
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._found = asyncio.run(self._work())
        except BaseException as failure:
            self._failure = failure

    def join(self) -> int:
        """Wait for its end, and what it gave. Raises what it ended with."""
        self._thread.join()
        if self._failure is not None:
            raise self._failure
        return self._found


def archive_run(
    found: OrderedCluster, folder: Path, *, rows: int, changes: int, kills: int, seed: int, step: Step = lambda _: None
) -> Outcome:
    """A stream into the archive, its driver killed so often, beside a publisher; then what is in the archive."""
    subject, table = f"flights.archive.{seed}", source_rows(rows)
    asyncio.run(create(found.server, subject))
    lake = {"uri": f"sqlite:///{folder}/catalog.db", "warehouse": f"file://{folder}/warehouse"}
    words = [
        "-m",
        "pyspark_qmq.jobs.archive",
        "--servers",
        found.server,
        "--subject",
        subject,
        "--catalog-uri",
        lake["uri"],
        "--warehouse",
        lake["warehouse"],
        "--master",
        "local[2]",
        "-o",
        f"maxOffsetsPerTrigger={rows // (COMMITS_PER_KILL * (kills + 1))}",
    ]
    publisher = Beside(lambda: publish(found.server, subject, table, changes, seed))
    driver = DriverProcess([*words, "--continuous", "0.2"], folder / "archive.log")
    try:
        moments = kill_at_random(driver, kills, Random(seed), lambda: len(list(folder.glob("warehouse/**/*.parquet"))), step)
        made = publisher.join()
        last = DriverProcess(words, folder / "archive.log")
        last.start()
        status = last.finish()
    finally:
        driver.kill()
    wrong = [] if status == 0 else [f"the last driver ended with {status}: {last.tail()}"]
    with closing(load_catalog("lake", **lake)) as catalog:
        wrong += archive_anomalies(catalog, subject, table)
    return Outcome(rows, made, moments, wrong)


def archive_anomalies(catalog: Catalog, subject: str, table: list[Row]) -> list[str]:
    """Anomalies that any reader of Iceberg finds: each row must exist once, and each key's rows in the order of sending."""
    columns = ("route_version", "partition", "sequence", "key", "body")
    found = catalog.load_table(("qmq", table_name(subject))).scan(selected_fields=columns).to_arrow()
    lines = [body.decode() for body in found["body"].to_pylist()]
    wrong = anomalies(list(Counter(lines).items()), table)
    return wrong + order_anomalies(found)


def order_anomalies(found: pa.Table) -> list[str]:
    """Keys whose rows are not in the order of their numbers."""
    wrong: list[str] = []
    newest: dict[bytes, int] = {}
    for each in found.sort_by([("route_version", "ascending"), ("partition", "ascending"), ("sequence", "ascending")]).to_pylist():
        number = int(each["body"].split(b",", 1)[0])
        if number <= newest.get(each["key"], -1):
            wrong.append(f"key {each['key']!r}: {number} behind {newest[each['key']]}")
        newest[each["key"]] = number
    return wrong


def sink_run(
    found: OrderedCluster, folder: Path, *, rows: int, changes: int, kills: int, seed: int, step: Step = lambda _: None
) -> Outcome:
    """A stream from files into an ordered subject, its driver killed so often, while partitions are changed; then what is in the log."""
    subject, table = f"flights.sink.{seed}", source_rows(rows)
    asyncio.run(create(found.server, subject))
    files = folder / "files"
    files.mkdir()
    count = FILES_PER_KILL * (kills + 1)  # enough that no life comes to the end of them
    for at in range(count):
        some = table[at * len(table) // count : (at + 1) * len(table) // count]
        columns = {name: [getattr(row, name) for row in some] for name in Row._fields}
        pq.write_table(pa.table(columns), files / f"{at:03d}.parquet")
    checkpoint = folder / "checkpoint"
    driver = DriverProcess(
        [
            str(TESTS / "system" / "spark_sink_driver.py"),
            "--server",
            found.server,
            "--files",
            str(files),
            "--subject",
            subject,
            "--checkpoint",
            str(checkpoint),
            "--per-trigger",
            "2",
        ],
        folder / "sink.log",
    )
    changer = Beside(lambda: change_now_and_then(found.server, subject, changes, seed))
    try:
        moments = kill_at_random(driver, kills, Random(seed), lambda: len(list(checkpoint.glob("commits/[0-9]*"))), step)
        made = changer.join()
        driver.start()
        status = driver.finish()
    finally:
        driver.kill()
    wrong = [] if status == 0 else [f"the last driver ended with {status}: {driver.tail()}"]
    log, _ = read_log(found.server, subject)
    wrong += anomalies(list(Counter(body.decode() for body in log["body"].to_pylist()).items()), table)
    return Outcome(rows, made, moments, wrong)
