"""Options that many commands share are added to them here, once, so that no command has to pass them on: `--wide`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from typing import Annotated, Any, get_type_hints

import typer
from typer.models import CommandInfo, TyperInfo

from qmq.cli.nearest import Given
from qmq.cli.table import View

Call = Callable[[], Any]
Wide = Annotated[bool, typer.Option("--wide", help="Show tables as wide as they are, with exact times.")]


def add_options(app: typer.Typer) -> None:
    """Give them to the commands of an application, and of its groups."""
    for info, _ in registered(app, "qmq"):
        if info.callback is not None:
            if "as_json" in parameters_in(info):
                info.callback = with_option(info.callback, "wide", Wide, False, _widely)
            info.callback = _remembered(info.callback)


def registered(app: typer.Typer, name: str) -> Iterator[tuple[CommandInfo | TyperInfo, str]]:
    """All commands below an application, each with its full name; also groups that are commands by themselves."""
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
    """A command with one more option: its value goes to `act`, with the call of the command itself."""

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


def _widely(is_wide: bool, call: Call) -> Any:
    View.is_wide = is_wide
    return call()


def _remembered(callback: Callable[..., Any]) -> Callable[..., Any]:
    """The same command, which leaves for error messages what it was called with."""

    @wraps(callback)
    def command(*positional: Any, **named: Any) -> Any:
        Given.values, Given.words = named, sys.argv[1:]
        return callback(*positional, **named)

    return command
