"""`qmq context` stores connection settings of clusters under names (docs/ACCESS.md)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qmq.cli.arguments import tls_option
from qmq.cli.output import Json, fail, show
from qmq.client.client import parse_addresses
from qmq.errors import InvalidArgument, QmqError
from qmq.security.contexts import ClusterContext, ContextFile

app = typer.Typer(no_args_is_help=True, help="Named clusters: addresses, certificates and tokens.")

Name = Annotated[str, typer.Argument(help="The context's name.")]
Pem = Path | None


@app.command("add")
def add(
    name: Name,
    server: Annotated[str, typer.Option("--server", "-s", help="The metaservers: HOST:PORT,HOST:PORT.")] = "",
    ca: Annotated[Pem, tls_option("ca", has_variable=False)] = None,
    cert: Annotated[Pem, tls_option("cert", has_variable=False)] = None,
    key: Annotated[Pem, tls_option("key", has_variable=False)] = None,
    token_file: Annotated[Pem, typer.Option("--token-file", help="File with the client's token.")] = None,
    as_json: Json = False,
) -> None:
    """Add a context, or replace the one of the same name. The first context becomes the current one."""
    if not any((server, ca, cert, key, token_file)):
        fail(
            InvalidArgument(
                f"context {name!r} sets nothing: give --server HOST:PORT, and what the cluster asks for (--tls-..., --token-file)"
            )
        )
    paths = ["" if path is None else str(path.absolute()) for path in (ca, cert, key, token_file)]
    try:
        if server:
            parse_addresses(server)
        ContextFile.of_user().add(ClusterContext(name, server, *paths))
    except (OSError, QmqError) as failure:
        fail(failure)
    _tell(name, "added", as_json)


@app.command("use")
def use(name: Name, as_json: Json = False) -> None:
    """Make a context the current one. Commands use it unless an option or a variable says otherwise."""
    try:
        ContextFile.of_user().use(name)
    except (OSError, QmqError) as failure:
        fail(failure)
    _tell(name, "used", as_json)


@app.command("remove")
def remove(name: Name, as_json: Json = False) -> None:
    """Remove a context. The files that it names stay."""
    try:
        ContextFile.of_user().remove(name)
    except (OSError, QmqError) as failure:
        fail(failure)
    _tell(name, "removed", as_json)


@app.command("list")
def list_contexts(as_json: Json = False) -> None:
    """List all contexts."""
    try:
        current, contexts = ContextFile.of_user().load()
    except (OSError, QmqError) as failure:
        fail(failure)
    rows = [
        ("*" if each.name == current else "", each.name, each.server, each.tls_ca, each.tls_cert, each.token_file)
        for _, each in sorted(contexts.items())
    ]
    show("contexts", ("current", "name", "server", "ca", "certificate", "token file"), rows, as_json=as_json)


def _tell(name: str, done: str, as_json: bool) -> None:
    """Print JSON if asked; print nothing for people, as a successful Unix command does."""
    if as_json:
        show("", ("context", "done"), [(name, done)], as_json=True)
