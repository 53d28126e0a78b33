"""`qmq completion` prints what a shell needs to complete commands, options, subjects and groups.

typer completes commands and options (shtab and argcomplete read argparse, so they do not help). This module adds completion of names from
the cluster (qmq/cli/names.py). If the cluster does not answer within five seconds, no name is offered.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Annotated, Final, get_type_hints

import typer
from typer.completion import get_completion_script  # type: ignore[attr-defined]

from qmq.cli.added_options import registered
from qmq.cli.names import broker_group_names, group_names, subject_names
from qmq.cli.output import SERVER, Json, fail, show
from qmq.errors import InvalidArgument, QmqError
from qmq.security.contexts import SERVER_VARIABLE, environment_of

SHELLS: Final = ("bash", "zsh", "fish")
_SUBJECTS: Final = frozenset({"subject", "subjects", "source", "target", "prefix"})
_BROKER_COMMANDS: Final = ("qmq broker", "qmq delay", "qmq replica", "qmq transfer")
Complete = Callable[[typer.Context, str], list[str]]


def completion(
    shell: Annotated[str, typer.Argument(help="bash, zsh or fish.")],
    as_json: Json = False,
) -> None:
    """Print a script that makes the shell complete qmq's commands, options, subjects and groups.

    bash: eval "$(qmq completion bash)" in ~/.bashrc; zsh: the same in ~/.zshrc, after compinit; fish: qmq completion fish | source.
    """
    if shell not in SHELLS:
        fail(InvalidArgument(f"completion is for {', '.join(SHELLS)}, not {shell!r}"))
    script = get_completion_script(prog_name="qmq", complete_var="_QMQ_COMPLETE", shell=shell)
    if as_json:
        show("", ("shell", "script"), [(shell, script)], as_json=True)
        return
    typer.echo(script)


def complete_names(app: typer.Typer) -> None:
    """Add completion to every parameter that takes the name of a subject or a group."""
    for info, command in registered(app, "qmq"):
        if info.callback is None:
            continue
        hints = get_type_hints(info.callback, include_extras=True)
        info.callback.__annotations__ = hints  # Evaluating the annotations again would lose what was stored in them.
        for name, hint in hints.items():
            found = completer_of(command, name)
            if found is not None and hasattr(hint, "__metadata__"):
                hint.__metadata__[0].autocompletion = found


def completer_of(command: str, parameter: str) -> Complete | None:
    """The completion function of a parameter, or None. Pure."""
    if parameter in _SUBJECTS or (parameter == "name" and command.startswith("qmq subject")):
        return subjects
    if parameter == "group":
        return broker_groups if command.startswith(_BROKER_COMMANDS) else groups
    if parameter == "words":
        return either if command.startswith("qmq dlq") else subjects
    return None


def subjects(context: typer.Context, incomplete: str) -> list[str]:
    """Subjects that start with the typed text."""
    return _beginning(incomplete, subject_names(_server(context)))


def groups(context: typer.Context, incomplete: str) -> list[str]:
    """Consumer groups that start with the typed text; only those of the subject, if the command line names one."""
    subject = context.params.get("subject")
    return _beginning(incomplete, group_names(_server(context), subject if isinstance(subject, str) else ""))


def broker_groups(context: typer.Context, incomplete: str) -> list[str]:
    """Broker groups that start with the typed text."""
    return _beginning(incomplete, broker_group_names(_server(context)))


def either(context: typer.Context, incomplete: str) -> list[str]:
    """Groups and subjects that start with the typed text."""
    return sorted({*subjects(context, incomplete), *groups(context, incomplete)})


def _beginning(incomplete: str, names: list[str]) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


def _server(context: typer.Context) -> str:
    """The server that the command would use. Completion runs before the root command has read the context, so it is read here."""
    try:
        os.environ.update(environment_of(uses_current=True))
    except (OSError, QmqError):
        return ""
    given = context.params.get("server")
    return given if isinstance(given, str) and given != SERVER else os.environ.get(SERVER_VARIABLE, SERVER)
