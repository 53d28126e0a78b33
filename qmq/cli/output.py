"""The output of the CLI: tables for people (`qmq/cli/tables.py`), JSON for programs, error messages
that say what to do, and progress bars, if standard error is a terminal.

Functions import rich when they print with it, because most runs of a command print only bytes or
JSON, and a server prints one line.

The `--help` page of a group of commands has its commands in sections, each with the whole first
sentence of its help.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn, TypeVar

import typer
from typer.core import TyperGroup

import qmq
from qmq.cli.names import hint
from qmq.errors import CallerError, CoordinationUnavailable, QmqError, Unavailable
from qmq.operations.text import Time
from qmq.process.event_loop import loop_factory
from qmq.process.files import raise_limit

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn

    from qmq.cli.administration import Administration


EXIT_CALLER: Final = 2
EXIT_UNAVAILABLE: Final = 3
EXIT_FAILED: Final = 1

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Show what would change, without changing it.")
]
Server = Annotated[
    str,
    typer.Option(
        "--server", "-s", envvar="QMQ_SERVER", help="The metaservers: HOST:PORT,HOST:PORT."
    ),
]
SERVER: Final = "localhost:20880"

_R = TypeVar("_R")


def show(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[Any]],
    *,
    as_json: bool,
    silent: Mapping[str, str] | None = None,
) -> None:
    """Print rows as a table, or as a JSON array of objects with the columns as names. The title is
    printed above a table in a terminal; the title of a dry run is printed always.

    `silent`: groups whose rows are missing, with the reason. If there are any, each JSON object
    lists them in `silent_groups`.
    """
    tell_silent(silent or {})
    if as_json and silent:
        columns, rows = (*columns, "silent groups"), [(*row, sorted(silent)) for row in rows]
    if as_json:
        names = [column.replace(" ", "_") for column in columns]
        sys.stdout.write(
            json.dumps([dict(zip(names, row, strict=True)) for row in rows], default=str) + "\n"
        )
        return
    from rich.text import Text

    from qmq.cli.tables import LineTable, console

    if title and (console.is_terminal or title.startswith("would be")):
        console.print(Text(title), style="italic", soft_wrap=True)
    console.print(LineTable(columns, rows, now_ms=time.time_ns() // 1_000_000), soft_wrap=True)


def say(sentence: str, columns: Sequence[str], row: Sequence[Any], *, as_json: bool) -> None:
    """Print what a command did: a sentence for people, a JSON array of one object for programs."""
    if as_json:
        show("", columns, [row], as_json=True)
    else:
        from rich.text import Text

        from qmq.cli.tables import console

        console.print(Text(sentence), soft_wrap=True)


def tell_silent(silent: Mapping[str, str]) -> None:
    """Report on standard error which groups are missing from a partial answer, and why."""
    for group, reason in sorted(silent.items()):
        warn(f"partial: broker group {group} is missing ({reason})")


def warn(text: str) -> None:
    """Print a line on standard error."""
    from qmq.cli.tables import errors

    errors.print(text, highlight=False, markup=False, soft_wrap=True)


def fail(failure: BaseException) -> NoReturn:
    """Print an error, with a suggestion for an unknown name, and exit: 2 wrong usage, 3 no answer,
    1 any other error.
    """
    from rich.markup import escape

    from qmq.cli.tables import errors

    errors.print(f"[red]error:[/red] {escape(str(failure))}", highlight=False, soft_wrap=True)
    more = hint(failure)
    if more:
        warn(more)
    if isinstance(failure, CallerError):
        raise typer.Exit(EXIT_CALLER)
    raise typer.Exit(
        EXIT_UNAVAILABLE
        if isinstance(failure, Unavailable | CoordinationUnavailable)
        else EXIT_FAILED
    )


def run(work: Coroutine[Any, Any, _R]) -> _R:
    """Run a coroutine in a fast event loop, with the file-descriptor limit raised to its maximum. A
    QmqError is printed and exits.
    """
    raise_limit()
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            return runner.run(work)
    except QmqError as failure:
        fail(failure)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def administration(server: str) -> Administration:
    """A connection for a command that neither sends nor consumes. Raises InvalidArgument."""
    from qmq.cli.administration import Administration  # has gRPC, which not all commands need

    return Administration(server)


def ask(server: str, question: Callable[[Administration], Awaitable[_R]]) -> _R:
    """The answer of the metaservers to one question. Errors are those of `run`."""

    async def connected() -> _R:
        async with administration(server) as mq:
            return await question(mq)

    return run(connected())


def ask_client(server: str, question: Callable[[qmq.Client], Awaitable[_R]]) -> _R:
    """The answer to one question that needs messages, too. Errors are those of `run`."""

    async def connected() -> _R:
        async with qmq.connect(server) as mq:
            return await question(mq)

    return run(connected())


def time_text(time_ms: int) -> Time:
    """A time for people; empty for 0."""
    return Time(time_ms)


def progress_of(*columns: ProgressColumn, quiet: bool, transient: bool = True) -> Progress:
    """Bars with these columns. With `transient`, they disappear when they end."""
    from rich.progress import Progress  # few commands show a bar

    from qmq.cli.tables import errors

    return Progress(
        *columns, console=errors, transient=transient, disable=quiet or not errors.is_terminal
    )


@contextmanager
def counting(
    what: str, total: int | None, *, quiet: bool, transient: bool = False
) -> Iterator[Callable[[int], None]]:
    """A bar that counts to `total`. The body of the `with` calls the yielded function with the
    number done so far.

    The total is an estimate, None if it is unknown: what is counted may grow, or a filter may leave
    some out. When the body ends without an error, what was done is the total, so the bar ends full.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with progress_of(*columns, quiet=quiet, transient=transient) as bars:
        task, done = bars.add_task(what, total=total), 0

        def completed(count: int) -> None:
            nonlocal done
            done = count
            bars.update(task, completed=count)

        yield completed
        bars.update(task, completed=done, total=done)


SENTENCE_CHARS_MAX: Final = 200


class Section(StrEnum):
    """The sections of `qmq --help`, in their order."""

    MESSAGES = "Messages"
    SUBJECTS = "Subjects and groups"
    CLUSTER = "The cluster"
    ACCESS = "Access"
    SERVERS = "Servers"
    APPLICATIONS = "Applications and lakes"
    HERE = "This machine"


class CommandGroup(TyperGroup):
    """A group whose help fits any terminal: sentences are wrapped, never cut."""

    def listed(self, ctx: typer.Context) -> Iterator[tuple[str, str, str]]:
        """Section, name and first sentence of each command that the help lists."""
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            if command is not None and not command.hidden:
                section = getattr(command, "rich_help_panel", None)
                sentence = command.get_short_help_str(SENTENCE_CHARS_MAX)
                yield section if isinstance(section, str) else "", name, sentence

    def format_commands(self, ctx: typer.Context, formatter: object) -> None:  # type: ignore[override]
        """Write a list for each section; commands without one come first."""
        sections: dict[str, list[tuple[str, str]]] = {section: [] for section in ("", *Section)}
        for section, name, sentence in self.listed(ctx):
            sections[section].append((name, sentence))
        for section, rows in sections.items():
            if rows:
                with formatter.section(section or "Commands"):  # type: ignore[attr-defined]
                    formatter.write_dl(rows)  # type: ignore[attr-defined]
