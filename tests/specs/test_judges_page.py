"""The tables of docs/JUDGES.md have what the tests show."""

from __future__ import annotations

from itertools import takewhile
from pathlib import Path

import ordersim.bugs
from sim.bugs import BUGS

from specs import ordering_traces, test_ordering_traces
from specs.mistakes import ORDERING_MISTAKES, REPLICATION_MISTAKES
from specs.replication_traces import OUTSIDE
from specs.test_traces import REFUSED_AT

PAGE = Path(__file__).resolve().parents[2] / "docs" / "JUDGES.md"


def table(first: str) -> list[list[str]]:
    """The rows of the table whose first column has this name."""
    lines = PAGE.read_text().splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith(f"| {first} |"))
    return [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in takewhile(lambda line: line, lines[begin + 2 :])]


def test_the_page_lists_each_mistake_of_the_specifications() -> None:
    for first, mistakes in (("in Replication", REPLICATION_MISTAKES), ("in Ordering", ORDERING_MISTAKES)):
        assert table(first) == [[each.name, each.breaks, str(each.steps)] for each in mistakes]


def test_the_page_says_of_each_planted_bug_whether_its_traces_are_refused() -> None:
    assert table("planted bug") == [[name, str(REFUSED_AT.get(name) or OUTSIDE[name])] for name in BUGS]
    assert not set(REFUSED_AT) & set(OUTSIDE)


def test_the_page_says_which_bugs_of_ordered_messages_are_refused() -> None:
    refused, outside = test_ordering_traces.REFUSED_AT, ordering_traces.OUTSIDE
    assert table("planted bug of ordered messages") == [[name, str(refused.get(name) or outside[name])] for name in ordersim.bugs.BUGS]
    assert not set(refused) & set(outside)
