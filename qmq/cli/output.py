"""The output of the CLI: tables for people, JSON for programs, and error messages that say what to do."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Annotated, Any, Final, NoReturn, TypeVar

import typer
from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook, RenderResult
from rich.markup import escape
from rich.segment import Segment
from rich.text import Text

import qmq
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
    """A renderable whose user-written text has its control characters escaped. Colours added by rich stay."""

    def __init__(self, inner: ConsoleRenderable) -> None:
        self._inner = inner

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for part in console.render(self._inner, options):
            yield part if part.control else Segment(visible(part.text), part.style)


class _Escaping(RenderHook):
    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [_Escaped(each) for each in renderables]


def escape_controls(console: Console) -> Console:
    """Make the console escape control characters in everything that it prints."""
    console.push_render_hook(_Escaping())
    return console


console = escape_controls(Console(emoji=False))  # rich writes an emoji for ":x:", also in what users wrote
errors = escape_controls(Console(stderr=True, emoji=False))

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would change, without changing it.")]
Server = Annotated[str, typer.Option("--server", "-s", envvar="QMQ_SERVER", help="The metaservers: HOST:PORT,HOST:PORT.")]
SERVER: Final = "localhost:20880"

_R = TypeVar("_R")


def show(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], *, as_json: bool, silent: Mapping[str, str] | None = None
) -> None:
    """Print rows as a table, or as a JSON array of objects with the columns as names. The title is printed above a table in a terminal; the
    title of a dry run is printed always.

    `silent`: groups whose rows are missing, with the reason. If there are any, each JSON object lists them in `silent_groups`.
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


def say(sentence: str, columns: Sequence[str], row: Sequence[Any], *, as_json: bool) -> None:
    """Print what a command did: a sentence for people, a JSON array of one object for programs."""
    if as_json:
        show("", columns, [row], as_json=True)
    else:
        console.print(Text(sentence), soft_wrap=True)


def tell_silent(silent: Mapping[str, str]) -> None:
    """Report on standard error which groups are missing from a partial answer, and why."""
    for group, reason in sorted(silent.items()):
        errors.print(Text(f"partial: broker group {group} is missing ({reason})"), soft_wrap=True)


def fail(failure: BaseException) -> NoReturn:
    """Print an error, with a suggestion for an unknown name, and exit: 2 wrong usage, 3 no answer, 1 any other error."""
    errors.print(f"[red]error:[/red] {escape(str(failure))}", highlight=False, soft_wrap=True)
    more = hint(failure)
    if more:
        errors.print(more, highlight=False, markup=False, soft_wrap=True)
    if isinstance(failure, CallerError):
        raise typer.Exit(EXIT_CALLER)
    raise typer.Exit(EXIT_UNAVAILABLE if isinstance(failure, Unavailable | CoordinationUnavailable) else EXIT_FAILED)


def run(work: Coroutine[Any, Any, _R]) -> _R:
    """Run a coroutine in a fast event loop, with the file-descriptor limit raised to its maximum. A QmqError is printed and exits."""
    raise_limit()
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            return runner.run(work)
    except QmqError as failure:
        fail(failure)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def ask(server: str, question: Callable[[qmq.Client], Awaitable[_R]]) -> _R:
    """The answer to one question. Connects to the cluster and disconnects again. Errors are those of `run`."""

    async def connected() -> _R:
        async with qmq.connect(server) as mq:
            return await question(mq)

    return run(connected())


def time_text(time_ms: int) -> Time:
    """A time for people; empty for 0."""
    return Time(time_ms)
