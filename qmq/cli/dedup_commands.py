"""`qmq dedup`: the table in which an application records which messages are done (docs/DEDUP.md)."""

from __future__ import annotations

from typing import Annotated

import typer

from qmq.cli.output import fail
from qmq.errors import QmqError
from qmq.sql.dedup_tables import TABLE, migration

app = typer.Typer(no_args_is_help=True, help="The table of messages that are done, in applications' own databases.")


@app.callback()
def _root() -> None:
    """Keeps `migration` a command of its own."""


@app.command("migration")
def print_migration(
    dialect: Annotated[str, typer.Option("--dialect", help="sqlite, postgresql or mysql (MariaDB too).")],
    table: Annotated[str, typer.Option("--table", help="The table.")] = TABLE,
) -> None:
    """Print the statements that make the table."""
    try:
        typer.echo(migration(dialect, table), nl=False)
    except QmqError as failure:
        fail(failure)
