"""`qmq context` stores connection settings of clusters under names (docs/ACCESS.md). `qmq config`
shows the settings that commands use, and where each one comes from.

Precedence: argument, variable, context, default (qmq/security/contexts.py).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from qmq.cli.arguments import GIVEN, tls_option
from qmq.cli.output import SERVER, Json, fail, show
from qmq.errors import InvalidArgument, QmqError
from qmq.process.address import parse_addresses
from qmq.security.contexts import (
    CONTEXT_VARIABLE,
    SERVER_VARIABLE,
    ClusterContext,
    ContextFile,
    environment_of,
)

app = typer.Typer(no_args_is_help=True, help="Named clusters: addresses, certificates and tokens.")

Name = Annotated[str, typer.Argument(help="The context's name.")]
Pem = Path | None


@app.command("add")
def add(
    name: Name,
    server: Annotated[
        str, typer.Option("--server", "-s", help="The metaservers: HOST:PORT,HOST:PORT.")
    ] = "",
    ca: Annotated[Pem, tls_option("ca", has_variable=False)] = None,
    cert: Annotated[Pem, tls_option("cert", has_variable=False)] = None,
    key: Annotated[Pem, tls_option("key", has_variable=False)] = None,
    token_file: Annotated[
        Pem, typer.Option("--token-file", help="File with the client's token.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Add a context, or replace the one of the same name.
    The first context becomes the current one.
    """
    if not any((server, ca, cert, key, token_file)):
        fail(
            InvalidArgument(
                f"context {name!r} sets nothing: give --server HOST:PORT, and what the "
                "cluster asks for (--tls-..., --token-file)"
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
    """Make a context the current one. Commands use it unless an option or a
    variable says otherwise.
    """
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
        (
            "*" if each.name == current else "",
            each.name,
            each.server,
            each.tls_ca,
            each.tls_cert,
            each.token_file,
        )
        for _, each in sorted(contexts.items())
    ]
    show(
        "contexts",
        ("current", "name", "server", "ca", "certificate", "token file"),
        rows,
        as_json=as_json,
    )


def _tell(name: str, done: str, as_json: bool) -> None:
    """Print JSON if asked; print nothing for people, as a successful Unix command does."""
    if as_json:
        show("", ("context", "done"), [(name, done)], as_json=True)


HIDDEN: Final = "(hidden)"
_SECRETS: Final = ("TOKEN", "PASSWORD", "_DB")
_CLIENT: Final = (
    ("server", SERVER_VARIABLE, SERVER),
    ("context", CONTEXT_VARIABLE, ""),
    ("tls ca", "QMQ_TLS_CA", ""),
    ("tls certificate", "QMQ_TLS_CERT", ""),
    ("tls key", "QMQ_TLS_KEY", ""),
    ("token file", "QMQ_TOKEN_FILE", ""),
    ("token", "QMQ_TOKEN", ""),
    ("state folder", "QMQ_STATE_DIR", ""),
)
_COLUMNS: Final = ("setting", "value", "from", "variable")


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting: its value and its origin; both empty if it is not set."""

    name: str
    value: str
    origin: str
    variable: str

    def row(self) -> tuple[str, str, str, str]:
        """The table row; secrets are masked."""
        is_secret = self.value and any(self.variable.endswith(each) for each in _SECRETS)
        return self.name, HIDDEN if is_secret else self.value, self.origin, self.variable


def settings_of(
    server: str | None, environment: Mapping[str, str], current: str, whole: Mapping[str, str]
) -> list[Setting]:
    """The settings of a client. `current`: the current context; `whole`: the environment with the
    context applied. Pure.
    """
    found = []
    for name, variable, default in _CLIENT:
        if name == "server" and server is not None:
            found.append(Setting(name, server, "argument", variable))
        elif variable in environment:
            found.append(Setting(name, environment[variable], "environment", variable))
        elif name == "context" and current:
            found.append(Setting(name, current, "current context", variable))
        elif variable in whole:
            found.append(Setting(name, whole[variable], f"context {current}", variable))
        else:
            found.append(Setting(name, default, "default" if default else "", variable))
    return found


def other_variables(
    environment: Mapping[str, str], read_by: Mapping[str, Iterable[str]]
) -> list[Setting]:
    """Other QMQ_ variables, with the commands that read them. A variable that no command reads is
    probably misspelt. Pure.
    """
    known = {variable for _, variable, _ in _CLIENT}
    found = []
    for variable in sorted(
        each for each in environment if each.startswith("QMQ_") and each not in known
    ):
        commands = sorted(read_by.get(variable, ()))
        origin = (
            f"environment, for {', '.join(commands)}"
            if commands
            else "environment, but no command reads it"
        )
        found.append(
            Setting(
                variable.removeprefix("QMQ_").lower().replace("_", " "),
                environment[variable],
                origin,
                variable,
            )
        )
    return found


def variables_of(command: Any, name: str = "qmq") -> dict[str, set[str]]:
    """The commands below a typer command that read each variable."""
    found: dict[str, set[str]] = {}
    for parameter in command.params:
        given = parameter.envvar or ()
        for variable in (given,) if isinstance(given, str) else given:
            found.setdefault(variable, set()).add(name)
    for variable in getattr(command.callback, "more_variables", ()):
        found.setdefault(variable, set()).add(name)
    for word, below in getattr(command, "commands", {}).items():
        for variable, names in variables_of(below, f"{name} {word}").items():
            found.setdefault(variable, set()).update(names)
    return found


def config(
    context: typer.Context,
    server: Annotated[
        str | None,
        typer.Option(
            "--server",
            "-s",
            help="As for other commands; shows that the argument takes precedence.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show the settings that commands use, and the origin of each: argument, environment, context
    or default.
    """
    environment = context.find_root().meta.get(GIVEN, os.environ)
    try:
        whole = environment_of(environment, uses_current=True)
        current = environment.get(CONTEXT_VARIABLE) or ContextFile.of_user(environment).load()[0]
    except (OSError, QmqError) as failure:
        fail(failure if isinstance(failure, QmqError) else InvalidArgument(str(failure)))
    found = settings_of(server, environment, current, whole)
    found += other_variables(environment, variables_of(context.find_root().command))
    show("settings", _COLUMNS, [each.row() for each in found], as_json=as_json)
