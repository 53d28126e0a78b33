"""`qmq lake`: subjects as Apache Iceberg tables (docs/LAKE.md).

Needs `pip install qmq[lake]`; nothing of the extra is loaded before it is used.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from qmq.cli.output import SERVER, Json, Server, fail, show
from qmq.errors import InvalidArgument, QmqError

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog
    from pyspark_qmq.lake.lake_table import LakeTable
    from pyspark_qmq.lake.lake_writer import RoundResult
    from pyspark_qmq.read_options import ReadOptions

app = typer.Typer(no_args_is_help=True, help="Subjects as Apache Iceberg tables.")

Subjects = Annotated[list[str] | None, typer.Option("--subject", help="A subject; give it as often as there are some.")]
Subject = Annotated[str, typer.Option("--subject", help="The subject.")]
Name = Annotated[str, typer.Option("--catalog", help="The catalog's name in PyIceberg's configuration.")]
Uri = Annotated[
    str, typer.Option("--catalog-uri", envvar="QMQ_LAKE_CATALOG_URI", help="sqlite:///…, postgresql+psycopg://… or http(s)://…")
]
Warehouse = Annotated[str, typer.Option("--warehouse", envvar="QMQ_LAKE_WAREHOUSE", help="Where tables lie: file:///…, s3://…")]
Namespace = Annotated[str, typer.Option("--namespace", help="The namespace of the tables.")]
Properties = Annotated[list[str] | None, typer.Option("-P", "--property", metavar="KEY=VALUE", help="A property for PyIceberg.")]

_NAME: Final = "lake"
_NAMESPACE: Final = "qmq"


@app.command("follow")
def follow(
    subject: Subjects = None,
    pattern: Annotated[str, typer.Option("--pattern", help="Subjects by a regular expression, also those that come later.")] = "",
    path: Annotated[list[str] | None, typer.Option("--path", help="A broker's data folder: read files instead of asking brokers.")] = None,
    routes: Annotated[str, typer.Option("--routes", help="With --path: a file of `qmq route export`.")] = "",
    start: Annotated[str, typer.Option("--from", help="Where a new table begins: earliest or latest.")] = "earliest",
    once: Annotated[bool, typer.Option("--once", help="Write what is committed now, and end.")] = False,
    interval_s: Annotated[float, typer.Option("--interval", min=0.1, help="Seconds between commits.")] = 10.0,
    skip_lost: Annotated[bool, typer.Option("--skip-lost", help="Go on when retention deleted messages that a table misses.")] = False,
    catalog: Name = _NAME,
    catalog_uri: Uri = "",
    warehouse: Warehouse = "",
    namespace: Namespace = _NAMESPACE,
    properties: Properties = None,
    server: Server = SERVER,
) -> None:
    """Write committed messages into tables, until SIGTERM or Ctrl-C. Each is there once, also if several run."""
    source = _Source(subject or [], pattern, path or [], routes, start, skip_lost, server)
    with _loaded():
        from pyspark_qmq.lake.catalogs import open_catalog
        from pyspark_qmq.lake.lake_writer import LakeOptions, LakeWriter

        asked = source.parse()
        opened = open_catalog(catalog, catalog_uri, warehouse, properties or [])
        writer = LakeWriter(opened, asked, LakeOptions(namespace))
        try:
            if once:
                writer.drain(_told)
            else:
                writer.run(_until_signal(), interval_s, _told)
        finally:
            writer.close()


@app.command("migrate")
def migrate(
    folder: Annotated[Path, typer.Argument(help="A folder that `qmq spark archive --out` of an older version wrote.")],
    catalog: Name = _NAME,
    catalog_uri: Uri = "",
    warehouse: Warehouse = "",
    namespace: Namespace = _NAMESPACE,
    properties: Properties = None,
    as_json: Json = False,
) -> None:
    """Copy an archive of an older version into tables, once. Its subjects must have no tables yet; `follow` then goes on behind it."""
    with _loaded():
        from pyspark_qmq.lake.archive_migration import migrate
        from pyspark_qmq.lake.catalogs import open_catalog

        done = list(migrate(folder, open_catalog(catalog, catalog_uri, warehouse, properties or []), namespace))
        show(f"migrated from {folder}", ("subject", "files", "rows"), done, as_json=as_json)


@app.command("show")
def show_table(
    subject: Subject,
    catalog: Name = _NAME,
    catalog_uri: Uri = "",
    warehouse: Warehouse = "",
    namespace: Namespace = _NAMESPACE,
    properties: Properties = None,
    as_json: Json = False,
) -> None:
    """Show a table: files, rows and bytes of each day."""
    with _table(subject, catalog, catalog_uri, warehouse, namespace, properties) as (table, lake):
        show(f"{namespace}.{subject}", ("day", "files", "rows", "bytes"), lake.totals(table), as_json=as_json)


@app.command("positions")
def show_positions(
    subject: Subject,
    catalog: Name = _NAME,
    catalog_uri: Uri = "",
    warehouse: Warehouse = "",
    namespace: Namespace = _NAMESPACE,
    properties: Properties = None,
    as_json: Json = False,
) -> None:
    """Show how far a table has each queue of its subject."""
    with _table(subject, catalog, catalog_uri, warehouse, namespace, properties) as (table, _):
        rows = [(key.partition, key.broker_group, at) for key, at in sorted(table.positions().items())]
        show(f"positions of {subject}", ("partition", "broker group", "next sequence"), rows, as_json=as_json)


@app.command("compact")
def compact(
    subject: Subject,
    catalog: Name = _NAME,
    catalog_uri: Uri = "",
    warehouse: Warehouse = "",
    namespace: Namespace = _NAMESPACE,
    properties: Properties = None,
    as_json: Json = False,
) -> None:
    """Make few sorted files of the many small ones of days that are over."""
    with _table(subject, catalog, catalog_uri, warehouse, namespace, properties) as (table, lake):
        done = [(each.day.isoformat(), each.files_before, each.rows) for each in lake.compact(table, datetime.now(UTC).date())]
        show("compacted", ("day", "files before", "rows"), done, as_json=as_json)


@app.command("expire")
def expire(
    subject: Subject,
    keep_h: Annotated[float, typer.Option("--keep", min=0.0, help="Hours for which snapshots stay.")] = 24.0 * 7,
    catalog: Name = _NAME,
    catalog_uri: Uri = "",
    warehouse: Warehouse = "",
    namespace: Namespace = _NAMESPACE,
    properties: Properties = None,
    as_json: Json = False,
) -> None:
    """Forget old snapshots. Delete files that no snapshot names, and that are older than a day."""
    with _table(subject, catalog, catalog_uri, warehouse, namespace, properties) as (table, lake):
        done = lake.expire(table, datetime.now(UTC), timedelta(hours=keep_h))
        show("expired", ("snapshots", "files"), [(done.snapshots, done.files)], as_json=as_json)


@dataclass(frozen=True, slots=True)
class _Source:
    """What `follow` reads."""

    subjects: list[str]
    pattern: str
    paths: list[str]
    routes: str
    start: str
    skips_lost: bool
    server: str

    def parse(self) -> ReadOptions:
        from pyspark_qmq.read_options import parse

        if bool(self.subjects) == bool(self.pattern):
            raise InvalidArgument("say which subjects: --subject, as often as there are some, or --pattern")
        chosen = {"subscribe": ",".join(self.subjects)} if self.subjects else {"subscribePattern": self.pattern}
        where = {"qmq.path": ",".join(self.paths), "qmq.routes": self.routes} if self.paths else {"qmq.servers": self.server}
        lost = str(not self.skips_lost).lower()
        options = {**chosen, **where, "startingOffsets": self.start, "failOnDataLoss": lost}
        return parse({key: value for key, value in options.items() if value}, is_stream=True)


@contextmanager
def _loaded() -> Iterator[None]:
    """Errors as the command line tells them; a library that is missing, too."""
    try:
        yield
    except ModuleNotFoundError as cause:
        missing = (cause.name or "").split(".")[0]
        if missing in ("qmq", "pyspark_qmq"):
            raise
        fail(InvalidArgument(f"qmq lake needs more libraries ({missing} is missing): pip install 'qmq[lake]'"))
    except QmqError as failure:
        fail(failure)


@contextmanager
def _table(
    subject: str, name: str, uri: str, warehouse: str, namespace: str, properties: list[str] | None
) -> Iterator[tuple[LakeTable, Any]]:
    """A table that there is, and what can be done with it."""
    with _loaded():
        from pyspark_qmq.lake import table_maintenance
        from pyspark_qmq.lake.catalogs import open_catalog
        from pyspark_qmq.lake.lake_table import find_table

        catalog: Catalog = open_catalog(name, uri, warehouse, properties or [])
        yield find_table(catalog, namespace, subject), table_maintenance


def _told(done: RoundResult) -> None:
    what = "another writer was faster" if done.is_refused else f"{done.rows:,} messages in {done.files} files"
    typer.echo(f"{done.subject}: {what}")


def _until_signal() -> threading.Event:
    stopping = threading.Event()

    def stop(*_: object) -> None:
        stopping.set()

    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, stop)
    return stopping
