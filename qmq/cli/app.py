"""All verbs of the command line, put together."""

from __future__ import annotations

from typing import Annotated

import typer

import qmq
from qmq.cli import consume, dev, group, logs, message, produce, subject

app = typer.Typer(
    name="qmq", no_args_is_help=True, pretty_exceptions_enable=False, help="QMQ: a distributed message broker."
)
app.command("dev")(dev.dev)
app.command("produce")(produce.produce)
app.command("consume")(consume.consume)
app.add_typer(subject.app, name="subject")
app.add_typer(group.app, name="group")
app.add_typer(message.app, name="message")
app.add_typer(logs.app, name="log")


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """QMQ: a distributed message broker."""
    if version:
        typer.echo(qmq.__version__)
        raise typer.Exit
