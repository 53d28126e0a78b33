"""QMQ's tables in applications' databases: `qmq outbox` manages outboxes: migration, watchdog,
rejected messages (docs/OUTBOX.md); `qmq dedup` is about the table in which an application records
the messages it has handled (docs/DEDUP.md).

A database is given as a SQLAlchemy URL such as `postgresql+psycopg://shop@db.example/shop`; URLs of
async drivers work, too.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import typer

import qmq
from qmq.cli.arguments import COUNT_MAX
from qmq.cli.output import SERVER, DryRun, Json, Server, fail, run, show, time_text
from qmq.errors import InvalidArgument, QmqError
from qmq.operations.text import key_text
from qmq.sql.dedup_tables import TABLE as DEDUP_TABLE
from qmq.sql.dedup_tables import migration as dedup_migration
from qmq.sql.dialects import check_installed
from qmq.sql.outbox_tables import TABLE, migration
from qmq.text import INT64_MAX

if TYPE_CHECKING:
    from qmq.sql.outbox_admin import Listed, OutboxAdmin

_R = TypeVar("_R")

app = typer.Typer(
    no_args_is_help=True,
    help="The outbox: messages sent in an application's database transactions.",
)

Database = Annotated[
    str, typer.Option("--db", envvar="QMQ_OUTBOX_DB", help="The database's SQLAlchemy URL.")
]
Databases = Annotated[
    list[str],
    typer.Option("--db", envvar="QMQ_OUTBOX_DB", help="A database's SQLAlchemy URL; repeatable."),
]
Table = Annotated[str, typer.Option("--table", help="The outbox's table.")]
Ids = Annotated[
    list[int] | None,
    typer.Argument(
        min=0, max=INT64_MAX, help="Message ids: the first column of `qmq outbox list`."
    ),
]
All = Annotated[bool, typer.Option("--all", help="All messages that were set aside.")]

_COLUMNS: Final = (
    "id",
    "subject",
    "key",
    "bytes",
    "created",
    "due",
    "state",
    "attempts",
    "claimed by",
    "last error",
    "message id",
)


@app.command("migration")
def print_migration(
    dialect: Annotated[
        str, typer.Option("--dialect", help="sqlite, postgresql or mysql (also for MariaDB).")
    ],
    table: Table = TABLE,
) -> None:
    """Print the SQL statements that create an outbox's tables."""
    try:
        typer.echo(migration(dialect, table), nl=False)
    except QmqError as failure:
        fail(failure)


@app.command("watchdog")
def watchdog(
    db: Databases,
    table: Annotated[
        list[str] | None, typer.Option("--table", help="An outbox table; repeatable.")
    ] = None,
    debezium: Annotated[
        str | None,
        typer.Option(
            "--debezium",
            metavar="TABLE[:COLUMN]",
            help=(
                "A table in Debezium's layout whose rows are sent, too, in the order of COLUMN "
                "or id."
            ),
        ),
    ] = None,
    server: Server = SERVER,
) -> None:
    """Send messages that committed transactions left in outboxes. Run two or more watchdogs: for
    each table, one of them is active.
    """
    run(_watch(db, table or [TABLE], server, debezium))


@app.command("list")
def list_messages(
    db: Database,
    table: Table = TABLE,
    aside: Annotated[
        bool,
        typer.Option(
            "--aside",
            help="Only messages that were set aside because they cannot be sent unchanged.",
        ),
    ] = False,
    limit: Annotated[
        int, typer.Option("--limit", min=1, max=COUNT_MAX, help="Show at most this many.")
    ] = 100,
    as_json: Json = False,
) -> None:
    """List the messages in an outbox, in sending order."""

    async def _list(admin: OutboxAdmin) -> list[Listed]:
        return await admin.list(limit, only_aside=aside)

    rows = [_row(each) for each in run(_looking_into(db, table, _list))]
    show(f"outbox {table}", _COLUMNS, rows, as_json=as_json)


@app.command("retry")
def retry(
    db: Database,
    ids: Ids = None,
    every: All = False,
    table: Table = TABLE,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Send messages again that were set aside."""

    async def _retry(admin: OutboxAdmin) -> tuple[str, int]:
        chosen = await _chosen(admin, ids, every)
        return (
            ("would wait again", len(chosen))
            if dry_run
            else ("wait again", await admin.retry(chosen))
        )

    _tell(run(_looking_into(db, table, _retry)), as_json)


@app.command("drop")
def drop(
    db: Database,
    ids: Ids = None,
    every: All = False,
    table: Table = TABLE,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Delete unsent messages. They will never be delivered."""

    async def _drop(admin: OutboxAdmin) -> tuple[str, int]:
        chosen = await _chosen(admin, ids, every)
        return (
            ("would be deleted", len(chosen)) if dry_run else ("deleted", await admin.drop(chosen))
        )

    _tell(run(_looking_into(db, table, _drop)), as_json)


async def _looking_into(url: str, table: str, work: Callable[[OutboxAdmin], Awaitable[_R]]) -> _R:
    """Import SQLAlchemy here, so that other commands work without it."""
    check_installed()
    from qmq.sql.outbox_admin import looking_into

    return await looking_into(url, table, work)


async def _chosen(admin: OutboxAdmin, ids: list[int] | None, every: bool) -> list[int]:
    if bool(ids) == every:
        raise InvalidArgument("give message ids, or --all for all messages that were set aside")
    return ids or list(await admin.aside())


def _tell(done: tuple[str, int], as_json: bool) -> None:
    show("outbox", ("done", "messages"), [done], as_json=as_json)


def _row(each: Listed) -> tuple[object, ...]:
    state = "set aside" if each.is_aside else "waits"
    claimed = (
        f"{each.claimed_by} for {each.claimed_ms / 1000:.1f} s"
        if each.claimed_ms and not each.is_aside
        else ""
    )
    return (
        each.id,
        each.subject,
        key_text(each.key),
        each.content_bytes,
        time_text(each.create_time_ms),
        time_text(each.due_ms or 0),
        state,
        each.attempts,
        claimed,
        each.last_error,
        each.message_id,
    )


async def _watch(urls: list[str], tables: list[str], server: str, debezium: str | None) -> None:
    """Run until SIGTERM or SIGINT."""
    check_installed()
    from qmq.sql.connection import settle
    from qmq.sql.debezium_outbox import DebeziumTable
    from qmq.sql.outbox_runner import open_engine

    name, _, column = (debezium or "").partition(":")
    source = DebeziumTable(name, order_by=column or "id") if name else None

    async def dispose(engine: Any) -> None:
        await settle(engine.dispose())

    asked = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, asked.set)
    async with AsyncExitStack() as stack:
        engines = []
        for url in urls:
            engine = open_engine(url)
            engines.append(engine)
            stack.push_async_callback(dispose, engine)
        mq = await stack.enter_async_context(qmq.connect(server))
        await stack.enter_async_context(mq.outbox_watchdog(engines, tables=tables, debezium=source))
        typer.echo(f"watching {len(urls) * len(tables)} outboxes")
        await asked.wait()


dedup = typer.Typer(
    no_args_is_help=True, help="The deduplication table in an application's own database."
)


@dedup.callback()
def _root() -> None:
    """With a callback, typer keeps `migration` as a subcommand."""


@dedup.command("migration")
def print_dedup_migration(
    dialect: Annotated[
        str, typer.Option("--dialect", help="sqlite, postgresql or mysql (also for MariaDB).")
    ],
    table: Annotated[str, typer.Option("--table", help="The table.")] = DEDUP_TABLE,
) -> None:
    """Print the SQL statements that create the table."""
    try:
        typer.echo(dedup_migration(dialect, table), nl=False)
    except QmqError as failure:
        fail(failure)
