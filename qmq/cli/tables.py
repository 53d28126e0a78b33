"""Tables and texts for people, printed with rich. Only commands that print them import this module:
a server does not need rich.

Tables have one style, without boxes, and are fitted to the terminal, whose width the caller passes.
If the terminal is too narrow, these steps are taken one after another until the table fits:

    1  times are relative ("3 s ago"), and durations in words; only a wide table has exact ones 2
    columns that are empty, or have the same short value in every row, are left out, from the right
    3  the widest columns of text are cut, with "…", to CUT_CHARS_MIN characters at least 4  columns
    are left out, from the right; the first one stays

Ids are never cut, because people copy them, and are left out last. A wide table (`--wide`, or
standard output that is not a terminal) is as wide as necessary, with exact times.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook, RenderResult
from rich.segment import Segment
from rich.text import Text

from qmq.cli.arguments import View, age
from qmq.operations.text import Duration, Time
from qmq.process.event_loop import time_of
from qmq.text import JOINERS, visible

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
