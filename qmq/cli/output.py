"""How the CLI speaks: tables for people, JSON for machines, errors that say what to do, all in one place."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Coroutine, Mapping, Sequence
from typing import Annotated, Any, Final, NoReturn, TypeVar

import typer
from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook, RenderResult
from rich.markup import escape
from rich.segment import Segment
from rich.text import Text

from qmq.cli.nearest import hint
from qmq.cli.table import LineTable
from qmq.errors import CallerError, CoordinationUnavailable, QmqError, Unavailable
from qmq.event_loop import loop_factory
from qmq.file_descriptors import raise_limit
from qmq.operations.moments import Time
from qmq.printable import visible

EXIT_CALLER: Final = 2
EXIT_UNAVAILABLE: Final = 3
EXIT_FAILED: Final = 1


class _Escaped:
    """A renderable without what would act on the terminal: of what users wrote, not of rich's own colours."""

    def __init__(self, inner: ConsoleRenderable) -> None:
        self._inner = inner

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for part in console.render(self._inner, options):
            yield part if part.control else Segment(visible(part.text), part.style)


class _Escaping(RenderHook):
    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [_Escaped(each) for each in renderables]


def escape_controls(console: Console) -> Console:
    """Let it print nothing that others wrote as it is, whatever it is given."""
    console.push_render_hook(_Escaping())
    return console


console = escape_controls(Console())
errors = escape_controls(Console(stderr=True))

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would change, and change nothing.")]
Server = Annotated[
    str, typer.Option("--server", "-s", envvar="QMQ_SERVER", help="The metaserver's address, or several: HOST:PORT,HOST:PORT.")
]
SERVER: Final = "localhost:20880"

_R = TypeVar("_R")


def show(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], *, as_json: bool, silent: Mapping[str, str] | None = None
) -> None:
    """Print rows: a table, or a JSON array of objects with the columns' names. In a terminal the title stands above a table,
    and everywhere if it says that nothing was done.

    `silent`: groups whose rows are missing, and why; if there are any, each object names them in `silent_groups`.
    """
    tell_silent(silent or {})
    if as_json and silent:
        columns, rows = (*columns, "silent groups"), [(*row, sorted(silent)) for row in rows]
    if as_json:
        names = [column.replace(" ", "_") for column in columns]
        sys.stdout.write(json.dumps([dict(zip(names, row, strict=True)) for row in rows], default=str) + "\n")
        return
    if title and (console.is_terminal or title.startswith("would be")):
        console.print(Text(title), style="italic", soft_wrap=True)
    console.print(LineTable(columns, rows, now_ms=time.time_ns() // 1_000_000), soft_wrap=True)


def tell_silent(silent: Mapping[str, str]) -> None:
    """Say on standard error that an answer is partial: which groups are missing, and why."""
    for group, reason in sorted(silent.items()):
        errors.print(Text(f"partial: broker group {group} is missing ({reason})"), soft_wrap=True)


def fail(failure: BaseException) -> NoReturn:
    """Print an error, with the nearest name for one that is unknown, and leave: 2 the call was wrong, 3 nobody answers, 1 all else."""
    errors.print(f"[red]error:[/red] {escape(str(failure))}", highlight=False, soft_wrap=True)
    more = hint(failure)
    if more:
        errors.print(more, highlight=False, markup=False, soft_wrap=True)
    if isinstance(failure, CallerError):
        raise typer.Exit(EXIT_CALLER)
    raise typer.Exit(EXIT_UNAVAILABLE if isinstance(failure, Unavailable | CoordinationUnavailable) else EXIT_FAILED)


def run(work: Coroutine[Any, Any, _R]) -> _R:
    """Run to the end in a fast event loop, with all the descriptors that may be had; QMQ's errors become messages."""
    raise_limit()
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            return runner.run(work)
    except QmqError as failure:
        fail(failure)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def time_text(time_ms: int) -> Time:
    """A time for people; empty for none."""
    return Time(time_ms)
