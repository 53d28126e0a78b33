"""Tables for people: what gives way in a narrow terminal, and what does not (qmq/cli/tables.py)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import NodeProcess, cli_process

from qmq.cli.tables import CUT_CHARS_MIN, ELLIPSIS, GAP, lay_out, relative, table_lines
from qmq.operations.text import Duration, Time

NOW_MS = 1_795_000_000_000
ID = "0123456789abcdef0123456789abcdef"
TEXTS = st.text("abc ", max_size=30)
TABLES = st.integers(1, 7).flatmap(
    lambda count: st.tuples(
        st.lists(st.text("xyz", min_size=1, max_size=12), min_size=count, max_size=count),
        st.lists(st.lists(TEXTS, min_size=count, max_size=count), max_size=5),
    )
)


@given(TABLES, st.integers(40, 200))
def test_a_table_fits_the_terminal_and_says_what_it_leaves_out(
    table: tuple[list[str], list[list[str]]], width: int
) -> None:
    headers, rows = table
    lines = [line.plain for line in table_lines(headers, rows, width=width, now_ms=NOW_MS)]
    layout = lay_out(headers, rows, width)
    assert all(len(line) <= width for line in lines)
    assert (layout.shown[0][0], len(layout.shown) + layout.left_out) == (0, len(headers)), (
        "the first column stays"
    )
    assert lines[-1].endswith("--wide shows all") == bool(layout.left_out)


def test_a_duration_is_in_words_and_in_a_wide_table_in_milliseconds() -> None:
    rows = [("billing", Duration(61_500)), ("audit", Duration(0))]
    narrow, wide = [
        [
            line.plain.split(None, 1)
            for line in table_lines(("group", "lag ms"), rows, width=width, now_ms=NOW_MS)
        ]
        for width in (80, None)
    ]
    assert narrow == [["group", "oldest"], ["billing", "1 min 1 s"], ["audit", "0 s"]]
    assert wide == [["group", "lag ms"], ["billing", "61,500"], ["audit", "0"]]


@given(TABLES)
def test_a_wide_table_cuts_and_leaves_out_nothing(table: tuple[list[str], list[list[str]]]) -> None:
    headers, rows = table
    layout = lay_out(headers, rows, None)
    assert [at for at, _ in layout.shown] == list(range(len(headers)))
    for row, line in zip(
        rows, table_lines(headers, rows, width=None, now_ms=NOW_MS)[1:], strict=True
    ):
        assert line.plain.split() == GAP.join(row).split()


def test_columns_that_say_nothing_go_before_any_text_is_cut() -> None:
    headers, rows = ("subject", "parked", "note"), [("orders", 0, "x" * 20), ("bills", 0, "y")]
    lines = [line.plain for line in table_lines(headers, rows, width=32, now_ms=NOW_MS)]
    assert lines[0].split() == ["subject", "note"]
    assert lines[1] == f"orders   {'x' * 20}"


def test_the_widest_texts_are_cut_before_columns_go_and_ids_never() -> None:
    headers, rows = ("subject", "id", "reason"), [("s" * 40, ID, "r" * 60)]
    lines = [line.plain for line in table_lines(headers, rows, width=72, now_ms=NOW_MS)]
    assert lines[1] == f"{'s' * 17}{ELLIPSIS}  {ID}  {'r' * 17}{ELLIPSIS}"
    narrow = [line.plain for line in table_lines(headers, rows, width=40, now_ms=NOW_MS)]
    assert ID in narrow[1], "an id is copied or of no use"
    assert len(narrow[1].split()[0]) == CUT_CHARS_MIN


@pytest.mark.parametrize(
    ("distance_ms", "text"),
    [
        (-400, "now"),
        (-3_900, "3 s ago"),
        (-61_000, "1 min ago"),
        (-2 * 3_600_000, "2 h ago"),
        (7_200_000, "in 2 h"),
        (-5 * 86_400_000, "5 d ago"),
        (400 * 86_400_000, "2027-12-23"),
    ],
)
def test_times_are_relative_for_people_and_exact_when_wide(distance_ms: int, text: str) -> None:
    time_ms = NOW_MS + distance_ms
    assert relative(time_ms, NOW_MS) == text
    rows = [("s", Time(time_ms))]
    assert (
        table_lines(("subject", "at"), rows, width=80, now_ms=NOW_MS)[1].plain == f"s        {text}"
    )
    assert (
        str(Time(time_ms))
        in table_lines(("subject", "at"), rows, width=None, now_ms=NOW_MS)[1].plain
    )
    assert (Time(0), relative(0, NOW_MS)) == ("", "")


def in_terminal(columns: int, *words: str) -> list[str]:
    """The output of a command in a real terminal of the given width."""
    environment = {**os.environ, "TERM": "dumb"}
    environment.pop("COLUMNS", None)
    done = cli_process.run_in_terminal(columns, words, environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.decode().replace("\r\n", "\n").splitlines()


def test_commands_fit_a_terminal_of_80_columns_without_boxes(
    node_process: NodeProcess, tmp_path: Path
) -> None:
    server = ("--server", node_process.start())
    file = tmp_path / "lines"
    file.write_text("hello\n")
    subject, group = "shop.orders.created.in.warsaw", "billing-of-the-night"
    assert in_terminal(80, "produce", subject, "--file", str(file), *server) == [
        f"sent 1 message to {subject} (broker-0)"
    ]
    in_terminal(80, "consume", subject, "--group", group, "--count", "1", *server)
    views = (
        "subject list",
        f"subject show {subject}",
        "group list",
        f"group lag {subject} {group}",
        "cluster status",
    )
    for words in map(str.split, views):
        lines = in_terminal(80, *words, *server)
        assert all(len(line) <= 80 for line in lines), lines
        assert not any(character in line for line in lines for character in "│┃━┏└─"), lines
    listed = in_terminal(80, "subject", "list", *server)
    assert "now" in listed[2] or "ago" in listed[2], "times are relative"
    wide = in_terminal(80, "subject", "list", "--wide", *server)
    assert "+00:00" in wide[2], "and exact with --wide"
