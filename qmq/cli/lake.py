"""`qmq lake`: subjects as Apache Iceberg tables (docs/LAKE.md).

Needs `pip install qmq[lake]`; nothing of the extra is loaded before it is used.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

import qmq.blocking
from qmq.cli.arguments import SECONDS_MAX
from qmq.cli.output import SERVER, Json, Server, fail, show
from qmq.cli.roles import MetricsFlags, taking
from qmq.client.listening.listeners import asked_in_main_thread
from qmq.errors import InvalidArgument, QmqError

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog
    from pyspark_qmq.lake.table import LakeTable
    from pyspark_qmq.lake.writer import LakeCounters, RoundResult

    from qmq.columns.options import ReadOptions

app = typer.Typer(no_args_is_help=True, help="Subjects as Apache Iceberg tables.")


@dataclass(frozen=True, kw_only=True)
class CatalogFlags:
    """The catalog of the tables."""

    catalog: Annotated[
        str, typer.Option("--catalog", help="The catalog's name in PyIceberg's configuration.")
    ] = "lake"
    catalog_uri: Annotated[
        str,
        typer.Option(
            "--catalog-uri",
            envvar="QMQ_LAKE_CATALOG_URI",
            help="sqlite:///…, postgresql+psycopg://… or http(s)://…",
        ),
    ] = ""
    warehouse: Annotated[
        str,
        typer.Option(
            "--warehouse",
            envvar="QMQ_LAKE_WAREHOUSE",
            help="The folder or bucket of the tables: file:///…, s3://…",
        ),
    ] = ""
    namespace: Annotated[str, typer.Option("--namespace", help="The namespace of the tables.")] = (
        "qmq"
    )
    properties: Annotated[
        list[str] | None,
        typer.Option("-P", "--property", metavar="KEY=VALUE", help="A property for PyIceberg."),
    ] = None

    def load(self) -> Catalog:
        """Raises InvalidArgument, CatalogAway."""
        from pyspark_qmq.lake.catalog import open_catalog

        return open_catalog(self.catalog, self.catalog_uri, self.warehouse, self.properties or [])

    def open(self) -> AbstractContextManager[Catalog]:
        """Raises as `load`."""
        return closing(self.load())


@dataclass(frozen=True, kw_only=True)
class LogFlags:
    """The subjects and logs that `follow` reads."""

    subject: Annotated[
        list[str] | None, typer.Option("--subject", help="A subject; repeatable.")
    ] = None
    pattern: Annotated[
        str,
        typer.Option(
            "--pattern", help="Regular expression for subjects, including subjects created later."
        ),
    ] = ""
    path: Annotated[
        list[str] | None,
        typer.Option(
            "--path", help="A broker's data folder: read files instead of asking brokers."
        ),
    ] = None
    routes: Annotated[
        str, typer.Option("--routes", help="With --path: a file of `qmq route export`.")
    ] = ""
    start: Annotated[
        str, typer.Option("--from", help="Where a new table starts: earliest or latest.")
    ] = "earliest"
    skip_lost: Annotated[
        bool,
        typer.Option(
            "--skip-lost", help="Continue although retention deleted messages that a table lacks."
        ),
    ] = False
    server: Server = SERVER

    def parse(self) -> ReadOptions:
        """Raises InvalidArgument."""
        from qmq.columns.options import parse

        if bool(self.subject) == bool(self.pattern):
            raise InvalidArgument(
                "give the subjects: --subject NAME (repeatable) or --pattern REGEX"
            )
        chosen = (
            {"subscribe": ",".join(self.subject)}
            if self.subject
            else {"subscribePattern": self.pattern}
        )
        where = (
            {"qmq.path": ",".join(self.path), "qmq.routes": self.routes}
            if self.path
            else {"qmq.servers": self.server}
        )
        lost = str(not self.skip_lost).lower()
        options = {**chosen, **where, "startingOffsets": self.start, "failOnDataLoss": lost}
        return parse({key: value for key, value in options.items() if value}, is_stream=True)


@dataclass(frozen=True, kw_only=True)
class FollowOptions(MetricsFlags, CatalogFlags, LogFlags):
    typed: Annotated[
        bool,
        typer.Option(
            "--typed",
            help=(
                "Decode bodies by the subject's schema, which --server knows; what does not fit "
                "is kept apart."
            ),
        ),
    ] = False
    once: Annotated[
        bool, typer.Option("--once", help="Write the messages that are committed now, and exit.")
    ] = False
    interval_s: Annotated[
        float, typer.Option("--interval", min=0.1, max=SECONDS_MAX, help="Seconds between commits.")
    ] = 10.0

    @contextmanager
    def showing(self, counters: LakeCounters) -> Iterator[None]:
        """Serve the metrics in their own thread, if there is a port for them. Raises OSError if it
        is taken.
        """
        from qmq.blocking.loop_thread import LoopThread
        from qmq.metrics.figures import Readiness
        from qmq.node.metrics import serving
        from qmq.node.metrics.copies import LakeMetrics
        from qmq.rpc.network import NETWORK

        if self.metrics_port is None:
            yield
            return
        thread, host, last = (
            LoopThread(),
            serving.metrics_host("127.0.0.1", self.metrics_host),
            None,
        )
        thread.start()
        try:
            served = thread.run(
                serving.serve(
                    host,
                    self.metrics_port,
                    [LakeMetrics(counters.rows, counters.waits)],
                    lambda: Readiness(True, "ok"),
                    NETWORK,
                )
            )
            if served is not None:
                typer.echo(f"qmq lake follow: metrics at {served.address}")
                last = served.stop
                yield
        finally:
            thread.close(last)


@dataclass(frozen=True, kw_only=True)
class SubjectFlag:
    subject: Annotated[str, typer.Option("--subject", help="The subject.")]


@dataclass(frozen=True, kw_only=True)
class TableOptions(CatalogFlags, SubjectFlag):
    """An existing table."""

    rejected: Annotated[
        bool,
        typer.Option(
            "--rejected", help="The table of messages that do not fit the subject's schema."
        ),
    ] = False
    as_json: Json = False

    @contextmanager
    def found(self) -> Iterator[tuple[LakeTable, Any]]:
        """The table, and the operations on it."""
        with _loaded():
            from pyspark_qmq.lake import maintenance
            from pyspark_qmq.lake.table import find_table

            with self.open() as catalog:
                yield (
                    find_table(catalog, self.namespace, self.subject, is_rejected=self.rejected),
                    maintenance,
                )

    def complete(self) -> None:
        """Add the rejected messages of a writer that died, so that expiry does not delete their
        files as leftovers.
        """
        from pyspark_qmq.lake.table import find_table
        from pyspark_qmq.lake.typed import complete

        with self.open() as catalog:
            complete(
                find_table(catalog, self.namespace, self.subject),
                find_table(catalog, self.namespace, self.subject, is_rejected=True),
            )


KEEP_H_MAX: Final = 1_000 * 365 * 24
"""So that the moment from which snapshots are kept is in the calendar."""


@dataclass(frozen=True, kw_only=True)
class ExpireOptions(TableOptions):
    keep_h: Annotated[
        float,
        typer.Option("--keep", min=0.0, max=KEEP_H_MAX, help="How many hours snapshots are kept."),
    ] = 24.0 * 7


@dataclass(frozen=True, kw_only=True)
class MigrateOptions(CatalogFlags):
    folder: Annotated[
        Path,
        typer.Argument(help="A folder that `qmq spark archive --out` of an older version wrote."),
    ]
    as_json: Json = False


@app.command("follow")
@taking(FollowOptions)
def follow(_: typer.Context, options: FollowOptions) -> None:
    """Write committed messages into tables, until SIGTERM or Ctrl-C. Each message is in its table
    once, even if several writers run.
    """
    with _loaded():
        from pyspark_qmq.lake.writer import (
            LakeCounters,
            LakeOptions,
            LakeWriter,
            catalog_when_it_answers,
        )

        with ExitStack() as stack:
            schemas = (
                stack.enter_context(qmq.blocking.connect(options.server)).metadata.subject_schemas
                if options.typed
                else None
            )
            asked, counters, stopping = options.parse(), LakeCounters(), threading.Event()
            if options.once:
                catalog: Catalog | None = options.load()
            else:
                stack.enter_context(options.showing(counters))
                stack.enter_context(asked_in_main_thread(stopping.set))
                catalog = catalog_when_it_answers(
                    options.load, stopping, options.interval_s, counters
                )
            if catalog is None:
                return
            stack.callback(catalog.close)
            writer = LakeWriter(
                catalog, asked, LakeOptions(options.namespace), schemas=schemas, counters=counters
            )
            stack.callback(writer.close)
            if options.once:
                writer.drain(_told)
            else:
                writer.run(stopping, options.interval_s, _told)


@app.command("migrate")
@taking(MigrateOptions)
def migrate(_: typer.Context, options: MigrateOptions) -> None:
    """Copy an archive of an older version into tables, once. Its subjects must have no tables yet;
    `follow` then continues behind it.
    """
    with _loaded():
        from pyspark_qmq.lake.migration import migrate

        with options.open() as catalog:
            done = list(migrate(options.folder, catalog, options.namespace))
        show(
            f"migrated from {options.folder}",
            ("subject", "files", "rows"),
            done,
            as_json=options.as_json,
        )


@app.command("show")
@taking(TableOptions)
def show_table(_: typer.Context, options: TableOptions) -> None:
    """Show a table: files, rows and bytes of each day."""
    with options.found() as (table, lake):
        show(
            table.name,
            ("day", "files", "rows", "bytes"),
            lake.totals(table),
            as_json=options.as_json,
        )


@app.command("positions")
@taking(TableOptions)
def show_positions(_: typer.Context, options: TableOptions) -> None:
    """Show a table's position in each queue of its subject."""
    with options.found() as (table, _lake):
        rows = [
            (key.partition, key.broker_group, at) for key, at in sorted(table.positions().items())
        ]
        show(
            f"positions of {options.subject}",
            ("partition", "broker group", "next sequence"),
            rows,
            as_json=options.as_json,
        )


@app.command("compact")
@taking(TableOptions)
def compact(_: typer.Context, options: TableOptions) -> None:
    """Merge the many small files of past days into a few sorted ones."""
    with options.found() as (table, lake):
        done = [
            (each.day.isoformat(), each.files_before, each.rows)
            for each in lake.compact(table, datetime.now(UTC).date())
        ]
        show("compacted", ("day", "files before", "rows"), done, as_json=options.as_json)


@app.command("expire")
@taking(ExpireOptions)
def expire(_: typer.Context, options: ExpireOptions) -> None:
    """Forget old snapshots. Delete files that no snapshot names, and that are older than a day."""
    with options.found() as (table, lake):
        if options.rejected:
            options.complete()
        done = lake.expire(table, datetime.now(UTC), timedelta(hours=options.keep_h))
        show(
            "expired",
            ("snapshots", "files"),
            [(done.snapshots, done.files)],
            as_json=options.as_json,
        )


@contextmanager
def _loaded() -> Iterator[None]:
    """Turns errors, and a missing library, into messages of the command line."""
    try:
        yield
    except ModuleNotFoundError as cause:
        missing = (cause.name or "").split(".")[0]
        if missing in ("qmq", "pyspark_qmq"):
            raise
        fail(
            InvalidArgument(
                f"qmq lake needs more libraries ({missing} is missing): pip install 'qmq[lake]'"
            )
        )
    except QmqError as failure:
        fail(failure)


def _told(done: RoundResult) -> None:
    what = (
        "another writer was faster"
        if done.is_refused
        else f"{done.rows:,} messages in {done.files} files"
    )
    if done.rejected and not done.is_refused:
        what += f"; {done.rejected:,} of them do not fit the schema (qmq lake show --rejected)"
    typer.echo(f"{done.subject}: {what}")
