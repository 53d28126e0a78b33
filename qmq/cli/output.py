"""The output of the CLI: tables for people, JSON for programs, error messages that say what to do,
and progress bars, if standard error is a terminal.

Tables have one style, without boxes, and are fitted to the terminal, whose width the caller passes.
If the terminal is too narrow, these steps are taken one after another until the table fits:

    1  times are relative ("3 s ago"), and durations in words; only a wide table has exact ones 2
    columns that are empty, or have the same short value in every row, are left out, from the right
    3  the widest columns of text are cut, with "…", to CUT_CHARS_MIN characters at least 4  columns
    are left out, from the right; the first one stays

Ids are never cut, because people copy them, and are left out last. A wide table (`--wide`, or
standard output that is not a terminal) is as wide as necessary, with exact times.

The `--help` page of a group of commands has its commands in sections, each with the whole first
sentence of its help.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn, TypeVar

import typer
from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook, RenderResult
from rich.markup import escape
from rich.segment import Segment
from rich.text import Text
from typer.core import TyperGroup

import qmq
from qmq.cli.arguments import age
from qmq.cli.names import hint
from qmq.errors import CallerError, CoordinationUnavailable, QmqError, Unavailable
from qmq.operations.text import Duration, Time
from qmq.process.event_loop import loop_factory, time_of
from qmq.process.files import raise_limit
from qmq.text import JOINERS, visible

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn

    from qmq.cli.administration import Administration

GAP: Final = "  "
CUT_CHARS_MIN: Final = 10
ELLIPSIS: Final = "…"
OLDEST: Final = {"lag ms": "oldest", "oldest ago ms": "oldest"}
"""The names of columns of milliseconds in tables that show them in words: both are the age of the
oldest waiting message.
"""
IDS: Final = frozenset({"id", "message id", "delayed id", "token"})
_SPANS: Final = (
    (60_000, 1_000, "s"),
    (3_600_000, 60_000, "min"),
    (48 * 3_600_000, 3_600_000, "h"),
    (60 * 86_400_000, 86_400_000, "d"),
)


def relative(time_ms: int, now_ms: int) -> str:
    """ "3 s ago", "in 2 h", "now"; a date from two months on; empty for 0."""
    if not time_ms:
        return ""
    distance_ms = abs(now_ms - time_ms)
    if distance_ms < 1_000:
        return "now"
    for below_ms, unit_ms, unit in _SPANS:
        if distance_ms < below_ms:
            span = f"{distance_ms // unit_ms} {unit}"
            return f"{span} ago" if time_ms < now_ms else f"in {span}"
    return f"{time_of(time_ms):%Y-%m-%d}"


class View:
    """Whether this process shows wide tables; set by `--wide`."""

    is_wide = False


class LineTable:
    """A table that rich prints. `right`: columns to align right although they hold no numbers."""

    def __init__(
        self,
        headers: Sequence[str],
        rows: Iterable[Sequence[Any]] = (),
        *,
        right: Iterable[str] = (),
        now_ms: int = 0,
    ) -> None:
        self._headers, self._rows, self._right, self._now_ms = headers, list(rows), right, now_ms

    def add_row(self, *cells: Any) -> None:
        self._rows.append(cells)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = None if View.is_wide or not console.is_terminal else options.max_width
        for line in table_lines(
            self._headers, self._rows, width=width, now_ms=self._now_ms, right=self._right
        ):
            line.no_wrap, line.overflow = True, "ignore"
            yield line


@dataclass(frozen=True, slots=True)
class TableLayout:
    """The columns to show with their widths, and the number of columns left out."""

    shown: tuple[tuple[int, int], ...]
    left_out: int


def lay_out(
    headers: Sequence[str], cells: Sequence[Sequence[str]], width: int | None
) -> TableLayout:
    """The columns that fit into `width` characters; all columns if `width` is None."""
    widths = [
        max(len(header), *[len(row[at]) for row in cells], 0) for at, header in enumerate(headers)
    ]
    shown = list(range(len(headers)))
    if width is None:
        return TableLayout(tuple((at, widths[at]) for at in shown), 0)

    def excess() -> int:
        return sum(widths[at] for at in shown) + len(GAP) * (len(shown) - 1) - width

    def leave_out(candidates: Iterable[int]) -> None:
        for at in candidates:
            if excess() > 0 and len(shown) > 1:
                shown.remove(at)

    leave_out([at for at in reversed(shown[1:]) if _says_nothing([row[at] for row in cells])])
    if excess() > 0:
        _cut([at for at in shown if headers[at] not in IDS], widths, headers, excess())
    leave_out([at for at in reversed(shown[1:]) if headers[at] not in IDS])
    return TableLayout(tuple((at, widths[at]) for at in shown), len(headers) - len(shown))


def _says_nothing(column: Sequence[str]) -> bool:
    return len(set(column)) == 1 and column[0] in ("", "0", "0 s", "False", "no", "-")


def _cut(columns: Sequence[int], widths: list[int], headers: Sequence[str], excess: int) -> None:
    """Shrink the widest column by one character at a time,
    so that the wide columns end up equally wide.
    """
    least = {at: max(CUT_CHARS_MIN, len(headers[at])) for at in columns}
    while excess > 0:
        wide = [at for at in columns if widths[at] > least[at]]
        if not wide:
            return
        widths[max(wide, key=lambda at: (widths[at], at))] -= 1
        excess -= 1


def text_of(cell: Any, *, is_wide: bool, now_ms: int) -> str:
    """A cell's text, with control characters escaped; line breaks, too, because text from others
    must not look like rows of the table.
    """
    if isinstance(cell, Time):
        return str(cell) if is_wide else relative(cell.time_ms, now_ms)
    if isinstance(cell, Duration):
        return f"{cell:,}" if is_wide else age(cell)
    if isinstance(cell, Text):
        return visible(cell.plain, JOINERS)
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if cell is None:
        return ""
    return f"{cell:,}" if isinstance(cell, int) else visible(str(cell), JOINERS)


def table_lines(
    headers: Sequence[str],
    rows: Sequence[Sequence[Any]],
    *,
    width: int | None,
    now_ms: int,
    right: Iterable[str] = (),
) -> list[Text]:
    """The lines of a table, header first; a wide table if `width` is None. Numbers and the columns
    in `right` are right-aligned.
    """
    is_wide = width is None
    to_the_right = set(right)
    if not is_wide:
        headers = [OLDEST.get(header, header) for header in headers]
        to_the_right |= {OLDEST[header] for header in to_the_right & OLDEST.keys()}
    cells = [[text_of(cell, is_wide=is_wide, now_ms=now_ms) for cell in row] for row in rows]
    layout = lay_out(headers, cells, width)
    to_right = {
        at
        for at, header in enumerate(headers)
        if header in to_the_right or (rows and _is_number(rows[0][at]))
    }
    lines = [_line([Text(header, "bold") for header in headers], headers, layout, to_right)]
    for row, texts in zip(rows, cells, strict=True):
        styled = [
            Text(text, cell.style if isinstance(cell, Text) else "")
            for cell, text in zip(row, texts, strict=True)
        ]
        lines.append(_line(styled, texts, layout, to_right))
    if layout.left_out:
        more = "column" if layout.left_out == 1 else "columns"
        lines.append(Text(f"{layout.left_out} {more} left out: --wide shows all", "dim"))
    return lines


def _is_number(cell: object) -> bool:
    return isinstance(cell, int) and not isinstance(cell, bool)


def _line(
    styled: Sequence[Text], texts: Sequence[str], layout: TableLayout, to_right: set[int]
) -> Text:
    parts = []
    for at, width in layout.shown:
        text = texts[at] if len(texts[at]) <= width else texts[at][: width - 1] + ELLIPSIS
        parts.append(
            Text(text.rjust(width) if at in to_right else text.ljust(width), styled[at].style)
        )
    line = Text(GAP).join(parts)
    line.rstrip()
    return line


EXIT_CALLER: Final = 2
EXIT_UNAVAILABLE: Final = 3
EXIT_FAILED: Final = 1


class _Escaped:
    """A renderable whose user-written text has its control characters escaped. Colours added by
    rich stay.
    """

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


console = escape_controls(
    Console(emoji=False)
)  # rich writes an emoji for ":x:", also in what users wrote
errors = escape_controls(Console(stderr=True, emoji=False))

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
    """Print an error, with a suggestion for an unknown name, and exit: 2 wrong usage, 3 no answer,
    1 any other error.
    """
    errors.print(f"[red]error:[/red] {escape(str(failure))}", highlight=False, soft_wrap=True)
    more = hint(failure)
    if more:
        errors.print(more, highlight=False, markup=False, soft_wrap=True)
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
