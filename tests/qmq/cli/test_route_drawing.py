"""Bars of routes, as text without colour."""

from __future__ import annotations

from itertools import pairwise
from textwrap import dedent

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qmq.cli.route import (
    COLORS,
    PATTERNS,
    DrawnRange,
    draw,
    draw_bar,
    draw_legend,
    draw_ruler,
    kinds_of,
    walls,
)


def cells(*ends: int, groups: int = 2) -> list[DrawnRange]:
    firsts = (0, *ends[:-1])
    return [
        DrawnRange(first, end, str(place + 1), f"g{place % groups + 1}")
        for place, (first, end) in enumerate(zip(firsts, ends, strict=True))
    ]


def drawn(found: list[DrawnRange], columns: int) -> str:
    return draw(found, columns, kinds_of(found)).plain


def picture(text: str) -> str:
    return dedent(text).strip("\n")


def test_cells_are_as_wide_as_their_ranges() -> None:
    assert drawn(cells(256, 384, 512, 1024), 40) == picture(
        """
        │1░░░░░░░░│2▒▒▒│3░░░│4▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒│
        0         256  384  512             1024
        ░ g1  ▒ g2
        """
    )
    assert drawn(cells(256, 384, 512, 1024), 80) == picture(
        """
        │1░░░░░░░░░░░░░░░░░░│2▒▒▒▒▒▒▒▒│3░░░░░░░░│4▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒│
        0                   256       384       512                                 1024
        ░ g1  ▒ g2
        """
    )


def test_a_tiny_range_keeps_its_column_and_its_neighbours_give_way() -> None:
    assert drawn(cells(1, 2, 1022, 1023, 1024), 40) == picture(
        """
        │││3░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░│││
        0 2                                 1024
        ░ g1  ▒ g2
        """
    )


def test_sixty_four_partitions_fit_into_eighty_columns() -> None:
    found = cells(*range(16, 1025, 16), groups=1)
    assert drawn(found, 80) == picture(
        """
        │││3││││7││││░││││░│││││░││││░││││░││││░│││││░││││░││││░│││││░││││░││││░││││░│││
        0 32 64  112  176  240 304 352 400 448  512 576 624 672 720 784 832 880 928 1024
        ░ g1
        """
    )
    assert drawn(found, 120) == picture(
        """
        │1│2│3││5│6│7│8│9│░││░│░│░│░│░│░││░│░│░│░│░│░││░│░│░│░│░│░│░││░│░│░│░│░│░││░│░│░│░│░│░││░│░│░│░│░│░││░│░│░│░│░│░││░│░│░│
        0 16  48 80  112 144  192 224 256  304 336 368  416 448 480 512  560 592 624  672 704 736  784 816 848  896 928 960 1024
        ░ g1
        """  # noqa: E501
    )


def test_more_partitions_than_columns_are_counted() -> None:
    assert drawn(cells(*range(16, 1025, 16), groups=1), 40) == picture(
        """
        ││││││││││││││││││││││││││││ and 37 more
        0 to 432 of 1024
        ░ g1
        """
    )


@pytest.mark.parametrize("columns", [40, 80, 120])
@given(widths=st.lists(st.integers(1, 2000), min_size=1, max_size=64))
def test_every_bar_has_the_width_it_is_given_and_a_wall_for_every_partition_shown(
    columns: int, widths: list[int]
) -> None:
    ends = [sum(widths[: place + 1]) for place in range(len(widths))]
    found = cells(*ends)
    bar = draw_bar(found, columns, kinds_of(found)).plain
    assert len(bar) == columns
    more = int(bar.split(" and ")[1].split()[0]) if " and " in bar else 0
    assert bar.count("│") == len(found) - more + 1
    assert (more == 0) == (len(found) < columns)
    assert len(draw_ruler(found, columns).plain) <= columns


@given(widths=st.lists(st.integers(1, 2000), min_size=1, max_size=38))
def test_walls_stand_at_the_begin_of_ranges_or_as_near_as_possible(widths: list[int]) -> None:
    ends = [sum(widths[: place + 1]) for place in range(len(widths))]
    found = cells(*ends)
    at = walls(found, 40)
    exact = [round(each.first * 39 / ends[-1]) for each in found]
    assert at[0] == 0
    assert at[-1] == 39
    assert all(after > before for before, after in pairwise(at))
    if all(after > before for before, after in pairwise([*exact, 39])):
        assert at[:-1] == exact


def test_groups_without_a_pattern_are_distinguished_by_colour() -> None:
    kinds = [f"group-{number}" for number in range(30)]
    looks = {
        (str(span.style), legend.plain[span.start])
        for legend in [draw_legend(kinds, 400)]
        for span in legend.spans
    }
    assert len(looks) == len(kinds) == len(PATTERNS) * len(COLORS)


def test_a_legend_is_folded_between_names() -> None:
    assert draw_legend(["alpha", "beta", "gamma"], 20).plain == "░ alpha  ▒ beta\n▓ gamma"


def test_two_bars_with_the_same_kinds_have_the_same_patterns() -> None:
    before, after = (
        [DrawnRange(0, 4, "1", "g2")],
        [DrawnRange(0, 2, "2", "g1"), DrawnRange(2, 4, "3", "g2")],
    )
    kinds = kinds_of(before, after)
    assert draw_bar(before, 9, kinds).plain == "│1▒▒▒▒▒▒│"
    assert draw_bar(after, 9, kinds).plain == "│2░░│3▒▒│"
