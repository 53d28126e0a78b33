"""The contract's page as data: its sentences, and what holds each of them. Pure.

A marker is a comment of HTML, which no reader of the page sees:

    * **An acknowledged message is stored once.** <!-- checker: stored_once --> A batch keeps ...
      ... so replay rebuilds them. <!-- test: test_name -->

It stands for the text between the marker before it and itself, within its *unit*: an item of a
list, a paragraph, or a row of a table.

    checker: NAME, NAME    checkers of the campaign (tests/campaign/checkers)
    test: NAME, NAME       tests elsewhere, where clients cannot see what is promised
    no promise             an explanation, a name, a reference
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

MARKER: Final = re.compile(r"<!--\s*(?:(checker|test):\s*([\w,\s]+?)|(no promise))\s*-->")
HEAD: Final = re.compile(r"#|\||-{3}|$")


@dataclass(frozen=True, slots=True)
class Statement:
    """A piece of the page and what holds it; kind is empty where nothing does."""

    text: str
    kind: str
    """checker, test, no promise, or empty."""
    names: tuple[str, ...]


def statements(page: str) -> list[Statement]:
    """All statements, in the order of the page."""
    return [each for unit in _units(page) for each in _statements(unit)]


def _statements(unit: str) -> Iterator[Statement]:
    begin = 0
    for found in MARKER.finditer(unit):
        text = unit[begin : found.start()].strip()
        names = tuple(re.split(r"[,\s]+", found[2].strip())) if found[2] else ()
        yield Statement(text, found[1] or found[3], names)
        begin = found.end()
    rest = unit[begin:].strip(" |")
    if rest:
        yield Statement(rest, "", ())


def _units(page: str) -> Iterator[str]:
    unit: list[str] = []
    lines = [line.strip() for line in page.splitlines()]
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        is_row = line.startswith("| ") and not following.startswith("|---")
        if (HEAD.match(line) or line.startswith("* ")) and unit:
            yield " ".join(unit)
            unit = []
        if is_row:
            yield line
        elif not HEAD.match(line):
            unit.append(line)
    if unit:
        yield " ".join(unit)
