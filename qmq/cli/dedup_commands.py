"""`qmq dedup` is about the table in which an application records the messages it has handled (docs/DEDUP.md)."""

from __future__ import annotations

from typing import Annotated

import typer

from qmq.cli.output import fail
from qmq.errors import QmqError
from qmq.sql.dedup_tables import TABLE, migration

app = typer.Typer(no_args_is_help=True, help="The deduplication table in an application's own database.")


@app.callback()
def _root() -> None:
    """With a callback, typer keeps `migration` as a subcommand."""


@app.command("migration")
def print_migration(
    dialect: Annotated[str, typer.Option("--dialect", help="sqlite, postgresql or mysql (also for MariaDB).")],
    table: Annotated[str, typer.Option("--table", help="The table.")] = TABLE,
) -> None:
    """Print the SQL statements that create the table."""
    try:
        typer.echo(migration(dialect, table), nl=False)
    except QmqError as failure:
        fail(failure)
