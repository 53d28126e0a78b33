"""Draws a route as a line of text: the logical partitions from 0 to N in cells as wide as their ranges. Pure; `plain` has no colour.

    │1░░░░░░░░░░│3▒▒▒▒│4░░░░│2▒▒▒▒▒▒▒▒▒▒│
    0           256   384   512      1024
    ░ g1  ▒ g2

Rules:
* A cell begins with its wall and is at least that one column wide, even for a tiny range; its neighbours get narrower.
* If there are more cells than columns, the first cells get one column each, and the line ends in "and N more".
* The position of a kind (a broker group, a version) in `kinds` determines its pattern and colour: bars with the same kinds look the same.
* A label or a number that does not fit is left out, because a truncated number would be misread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from rich.text import Text

PATTERNS: Final = "░▒▓─═"
COLORS: Final = ("green", "cyan", "magenta", "yellow", "blue", "red")
"""The number of colours is coprime to the number of patterns, so a pair of pattern and colour repeats only after 30 kinds."""

_WALL: Final = "│"


class DrawnRange(NamedTuple):
    """Logical partitions `first` to `end` - 1; `kind` chooses the pattern."""

    first: int
    end: int
    label: str
    kind: str


def draw(cells: Sequence[DrawnRange], columns: int, kinds: Sequence[str]) -> Text:
    """The bar, the ruler below it, and the legend, in `width` columns."""
    bar, ruler = draw_bar(cells, columns, kinds), draw_ruler(cells, columns)
    return Text("\n").join([bar, ruler, draw_legend(kinds, columns)])


def kinds_of(*bars: Sequence[DrawnRange]) -> list[str]:
    """All kinds of the bars, sorted."""
    return sorted({cell.kind for bar in bars for cell in bar})


def walls(cells: Sequence[DrawnRange], columns: int) -> list[int]:
    """The column of each cell's wall, followed by the column of the closing wall. Needs more columns than cells."""
    whole = cells[-1].end - cells[0].first
    inner = columns - 1
    found = [round((cell.first - cells[0].first) * inner / whole) for cell in cells] + [inner]
    for place in range(1, len(found)):
        found[place] = max(found[place], found[place - 1] + 1)
    found[-1] = inner
    for place in range(len(found) - 2, -1, -1):
        found[place] = min(found[place], found[place + 1] - 1)
    return found


def draw_bar(cells: Sequence[DrawnRange], columns: int, kinds: Sequence[str]) -> Text:
    """The line of cells."""
    shown = cells[: _room(cells, columns)]
    at = walls(shown, columns) if len(shown) == len(cells) else range(len(shown) + 1)
    line = Text()
    for cell, first, end in zip(shown, at, at[1:], strict=False):
        pattern, color = _look(cell.kind, kinds)
        room = end - first - 1
        label = cell.label if len(cell.label) <= room else ""
        line.append(_WALL, color).append(label, f"bold {color}").append(pattern * (room - len(label)), color)
    line.append(_WALL)
    if len(shown) < len(cells):
        line.append(f" and {len(cells) - len(shown)} more")
    return line


def _room(cells: Sequence[DrawnRange], columns: int) -> int:
    """How many cells can be shown."""
    return len(cells) if len(cells) < columns else max(1, columns - 1 - len(f" and {len(cells)} more"))


def draw_ruler(cells: Sequence[DrawnRange], columns: int) -> Text:
    """The first logical partition of each cell below its wall, if there is room, and the end below the closing wall."""
    room = _room(cells, columns)
    if room < len(cells):
        return Text(f"{cells[0].first} to {cells[room - 1].end} of {cells[-1].end}", "dim")
    last = str(cells[-1].end)
    line = ""
    for cell, at in zip(cells, walls(cells, columns), strict=False):
        number = str(cell.first)
        is_apart = not line or at > len(line)
        if is_apart and at + len(number) < columns - len(last):
            line = line.ljust(at) + number
    return Text(line + last.rjust(columns - len(line)), "dim")


def draw_legend(kinds: Sequence[str], columns: int) -> Text:
    """The pattern of each kind."""
    legend, used = Text(), 0
    for kind in kinds:
        pattern, color = _look(kind, kinds)
        item = f"{pattern} {kind}"
        if used and used + 2 + len(item) > columns:
            legend.append("\n")
            used = 0
        gap = "  " if used else ""
        legend.append(gap).append(item, color)
        used += len(gap) + len(item)
    return legend


def _look(kind: str, kinds: Sequence[str]) -> tuple[str, str]:
    place = list(kinds).index(kind)
    return PATTERNS[place % len(PATTERNS)], COLORS[place % len(COLORS)]
