"""Adds options that many commands share, so that no command has to pass them on: `--wide` to every command, and `--watch` with `--interval`
to commands that show something.
"""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from typing import Annotated, Any, Final, NoReturn, get_type_hints

import typer
from typer.models import CommandInfo, TyperInfo

from qmq.cli.names import Given
from qmq.cli.output import EXIT_UNAVAILABLE, View, console

Call = Callable[[], Any]
Wide = Annotated[bool, typer.Option("--wide", help="Show full-width tables, with exact times.")]

Watch = Annotated[bool, typer.Option("--watch", "-w", help="Refresh until Ctrl-C.")]
Interval = Annotated[float, typer.Option("--interval", min=0.1, help="With --watch: seconds between refreshes.")]
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
    """All commands of an application with their full names, including groups that can be called without a verb."""
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


def with_option(callback: Callable[..., Any], name: str, hint: Any, default: Any, act: Callable[[Any, Call], Any]) -> Callable[..., Any]:
    """The command with one more option. `act` gets the option's value and a function that runs the command."""

    @wraps(callback)
    def command(*positional: Any, **named: Any) -> Any:
        value = named.pop(name, default)
        return act(value, lambda: callback(*positional, **named))

    hints = get_type_hints(callback, include_extras=True) | {name: hint}
    known = inspect.signature(callback).parameters
    given = [each.replace(annotation=hints.get(each.name, each.annotation)) for each in known.values()]
    added = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)
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
    """Run the command once. In a terminal, the new output replaces the old one in a single write."""
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
    """The same command; it also records its arguments, which error messages quote."""

    @wraps(callback)
    def command(*positional: Any, **named: Any) -> Any:
        Given.values, Given.words = named, sys.argv[1:]
        return callback(*positional, **named)

    return command
