"""Adds options that many commands share, so that no command has to pass them on: `--wide` to every
command, and `--watch` with `--interval` to commands that show something.

`qmq completion` prints what a shell needs to complete commands, options, subjects and groups. typer
completes commands and options (shtab and argcomplete read argparse, so they do not help). This
module adds completion of names from the cluster (qmq/cli/names.py). If the cluster does not answer
within five seconds, no name is offered.
"""

from __future__ import annotations

import gc
import inspect
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from typing import Annotated, Any, Final, NoReturn, get_type_hints

import typer
from typer.completion import get_completion_script  # type: ignore[attr-defined]
from typer.models import CommandInfo, TyperInfo

from qmq.cli.arguments import SECONDS_MAX, View, require_utf8
from qmq.cli.names import Given, broker_group_names, group_names, subject_names
from qmq.cli.output import EXIT_UNAVAILABLE, SERVER, Json, fail, show
from qmq.errors import InvalidArgument, QmqError
from qmq.security.contexts import SERVER_VARIABLE, environment_of

Call = Callable[[], Any]
Wide = Annotated[bool, typer.Option("--wide", help="Show full-width tables, with exact times.")]

Watch = Annotated[bool, typer.Option("--watch", "-w", help="Refresh until Ctrl-C.")]
Interval = Annotated[
    float,
    typer.Option(
        "--interval", min=0.1, max=SECONDS_MAX, help="With --watch: seconds between refreshes."
    ),
]
VIEWS: Final = frozenset(
    {
        "list",
        "show",
        "lag",
        "stats",
        "status",
        "settings",
        "history",
        "whoami",
        "meta",
        "broker",
        "trace",
        "why",
        "explain",
        "describe",
        "positions",
        "policy",
        "doctor",
    }
)
"""Last words of the commands that can be watched."""
CLEAR: Final = "\x1b[H\x1b[2J"


def add_options(app: typer.Typer) -> None:
    """Add the options to all commands of an application, those of its groups included."""
    for info, name in registered(app, "qmq"):
        if info.callback is not None:
            parameters = parameters_in(info)
            if "as_json" in parameters:
                if is_view(name) and "watch" not in parameters and "watching" not in parameters:
                    info.callback = with_option(info.callback, "watch", Watch, False, _repeatedly)
                    info.callback = with_option(info.callback, "interval_s", Interval, 2.0, _each)
                info.callback = with_option(info.callback, "wide", Wide, False, _widely)
            info.callback = _remembered(info.callback)


def registered(app: typer.Typer, name: str) -> Iterator[tuple[CommandInfo | TyperInfo, str]]:
    """All commands of an application with their full names, including groups that can be called
    without a verb.
    """
    for command in app.registered_commands:
        yield command, f"{name} {command.name}"
    for group in app.registered_groups:
        if group.typer_instance is not None:
            below = f"{name} {group.name}"
            if group.typer_instance.registered_callback is not None:
                yield group.typer_instance.registered_callback, below
            yield from registered(group.typer_instance, below)


def parameters_in(info: CommandInfo | TyperInfo) -> Mapping[str, inspect.Parameter]:
    """The parameters of a command's function, by name."""
    return {} if info.callback is None else inspect.signature(info.callback).parameters


def with_option(
    callback: Callable[..., Any],
    name: str,
    hint: Any,
    default: Any,
    act: Callable[[Any, Call], Any],
) -> Callable[..., Any]:
    """The command with one more option.
    `act` gets the option's value and a function that runs the command.
    """

    @wraps(callback)
    def command(*positional: Any, **named: Any) -> Any:
        value = named.pop(name, default)
        return act(value, lambda: callback(*positional, **named))

    hints = get_type_hints(callback, include_extras=True) | {name: hint}
    known = inspect.signature(callback).parameters
    given = [
        each.replace(annotation=hints.get(each.name, each.annotation)) for each in known.values()
    ]
    added = inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint
    )
    command.__signature__ = inspect.Signature([*given, added])  # type: ignore[attr-defined]
    command.__annotations__ = hints
    return command


def is_view(name: str) -> bool:
    """Whether a command, given by its full name, can be watched."""
    return name.split()[-1] in VIEWS


class WatchPace:
    """Whether this process refreshes its command, and how often."""

    is_watching = False
    interval_s = 2.0


def _each(interval_s: float, call: Call) -> Any:
    WatchPace.interval_s = interval_s
    return call()


def _repeatedly(is_watching: bool, call: Call) -> Any:
    return refreshed(call) if is_watching else call()


def refreshed(call: Call) -> NoReturn:
    """Run a command until Ctrl-C. Continue while no server answers; stop at any other error."""
    WatchPace.is_watching = True
    try:
        while True:
            _look(call)
            time.sleep(WatchPace.interval_s)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    finally:
        WatchPace.is_watching = False


def _look(call: Call) -> None:
    """Run the command once. In a terminal,
    the new output replaces the old one in a single write.
    """
    from qmq.cli.tables import console

    with console.capture() as captured:
        try:
            call()
        except typer.Exit as end:
            if end.exit_code != EXIT_UNAVAILABLE:
                raise
    sys.stdout.write((CLEAR if console.is_terminal else "") + captured.get())
    sys.stdout.flush()


def _widely(is_wide: bool, call: Call) -> Any:
    View.is_wide = is_wide
    return call()


def _remembered(callback: Callable[..., Any]) -> Callable[..., Any]:
    """The same command; it also records its arguments, which error messages quote, and begins with
    the collector of garbage, which `main` disables. What was imported is never garbage. Texts that
    are not UTF-8 are refused: no name, prefix or key holds other bytes.
    """

    @wraps(callback)
    def command(*positional: Any, **named: Any) -> Any:
        if not gc.isenabled():
            gc.freeze()  # so that no later search looks at it
            gc.enable()
        Given.values, Given.words = named, sys.argv[1:]
        for name, value in named.items():
            for each in value if isinstance(value, list | tuple) else (value,):
                if isinstance(each, str):
                    require_utf8(name, each)
        return callback(*positional, **named)

    return command


SHELLS: Final = ("bash", "zsh", "fish")
_SUBJECTS: Final = frozenset({"subject", "subjects", "source", "target", "prefix"})
_BROKER_COMMANDS: Final = ("qmq broker", "qmq delay", "qmq replica", "qmq transfer")
Complete = Callable[[typer.Context, str], list[str]]


def completion(
    shell: Annotated[str, typer.Argument(help="bash, zsh or fish.")],
    as_json: Json = False,
) -> None:
    """Print a script that makes the shell complete qmq's commands, options, subjects and groups.

    bash: eval "$(qmq completion bash)" in ~/.bashrc; zsh: the same in ~/.zshrc, after compinit;
    fish: qmq completion fish | source.
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
        info.callback.__annotations__ = (
            hints  # Evaluating the annotations again would lose what was stored in them.
        )
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
    """Consumer groups that start with the typed text; only those of the subject, if the command
    line names one.
    """
    subject = context.params.get("subject")
    return _beginning(
        incomplete, group_names(_server(context), subject if isinstance(subject, str) else "")
    )


def broker_groups(context: typer.Context, incomplete: str) -> list[str]:
    """Broker groups that start with the typed text."""
    return _beginning(incomplete, broker_group_names(_server(context)))


def either(context: typer.Context, incomplete: str) -> list[str]:
    """Groups and subjects that start with the typed text."""
    return sorted({*subjects(context, incomplete), *groups(context, incomplete)})


def _beginning(incomplete: str, names: list[str]) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


def _server(context: typer.Context) -> str:
    """The server that the command would use. Completion runs before the root command has read the
    context, so it is read here.
    """
    try:
        os.environ.update(environment_of(uses_current=True))
    except (OSError, QmqError):
        return ""
    given = context.params.get("server")
    return (
        given
        if isinstance(given, str) and given != SERVER
        else os.environ.get(SERVER_VARIABLE, SERVER)
    )
