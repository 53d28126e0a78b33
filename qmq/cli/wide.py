"""`--wide`, for every command that has `--json`: added here once, so that no command has to pass it on."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any, get_type_hints

import typer

from qmq.cli.table import View

Wide = Annotated[bool, typer.Option("--wide", help="Show tables as wide as they are, with exact times.")]


def widen(app: typer.Typer) -> None:
    """Give the option to all commands of an application, and of its groups."""
    for command in app.registered_commands:
        if command.callback is not None and "as_json" in inspect.signature(command.callback).parameters:
            command.callback = _widened(command.callback)
    for group in app.registered_groups:
        if group.typer_instance is not None:
            widen(group.typer_instance)


def _widened(callback: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(callback)
    def command(*positional: Any, wide: bool = False, **named: Any) -> Any:
        View.is_wide = wide
        return callback(*positional, **named)

    hints = get_type_hints(callback, include_extras=True) | {"wide": Wide}
    known = inspect.signature(callback).parameters
    given = [each.replace(annotation=hints.get(each.name, each.annotation)) for each in known.values()]
    wide = inspect.Parameter("wide", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Wide)
    command.__signature__ = inspect.Signature([*given, wide])  # type: ignore[attr-defined]
    command.__annotations__ = hints
    return command
