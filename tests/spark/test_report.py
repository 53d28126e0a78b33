"""Reports: the page needs no other file, has the findings, and escapes users' text."""

from __future__ import annotations

import json
import re
from datetime import UTC, date, datetime
from decimal import Decimal
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path
from xml.etree import ElementTree

import pyarrow.parquet as pq
import pytest
from pyspark_qmq.jobs.report import (
    PAGE_ROWS_MAX,
    TEXT_ROWS_MAX,
    Made,
    Plot,
    Report,
    ReportTable,
    cell,
    html,
    plain,
    summary,
    svg,
    text,
    write,
)

EVIL = "</pre></title><script>alert(1)</script>&\"'<img src=x onerror=alert(1)>-->$\\frac{$"
MADE = Made(datetime(2026, 11, 21, 16, 0, tzinfo=UTC), f"qmq spark audit --subject '{EVIL}'")

BARS = Plot(
    "Messages per day",
    "bar",
    ["2026-01-01", EVIL],
    {"orders": [1, 2], EVIL: [3.5, 4]},
    "day",
    "messages",
)
LINE = Plot(
    "Lag",
    "line",
    [datetime(2026, 1, 1, hour, tzinfo=UTC) for hour in range(3)],
    {"g1": [0, 5, 2]},
    EVIL,
    EVIL,
)
BINS = Plot(
    "Latency",
    "histogram",
    [0, 1, 10, 100],
    {"g1": [5, 0, 7]},
    "ms",
    "messages",
    log_x=True,
    log_y=True,
)
SHARES = Plot(
    "Latency, shares",
    "cdf",
    [-3.0, 0, 5, 60_000],
    {"g1": [0.1, 0.2, 0.9, 1.0], "g2": [0, 0, 0, 1]},
    "ms",
    "share",
    log_x=True,
)
NOTHING = Plot("No data", "bar", [], {}, "", "")
KEYS = ReportTable("Keys", ("key", "messages"), ((EVIL, 1_234_567), (b"\xff\x00", None)), "keys")

FOUND = Report(
    "order_audit",
    f"1 key is out of order: {EVIL}",
    False,
    {"keys": 12_000, "worst": EVIL, "share": 0.25, "subjects": ["a", "b"]},
    (KEYS, ReportTable("None", ("x",), (), "none")),
    (BARS, LINE, BINS, SHARES, NOTHING),
    f"key {EVIL}\n  0@g1 12",
)


class Elements(HTMLParser):
    """All tags with their attributes, and all text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_what_users_wrote_is_never_markup() -> None:
    found = Elements(html(FOUND, MADE))
    assert not {"script", "img", "iframe", "object", "link"} & {tag for tag, _ in found.tags}
    assert not [
        name for _, attributes in found.tags for name in attributes if name.startswith("on")
    ]
    # headline, fact, table, counterexample, command
    assert found.text.count("<script>alert(1)</script>") >= 5


def test_the_page_needs_nothing_but_itself() -> None:
    page = html(FOUND, MADE)
    named = [item for _, attributes in Elements(page).tags for item in attributes.items()]
    references = [
        str(value) for name, value in named if name in ("src", "href", "xlink:href", "data")
    ]
    assert all(each.startswith("#") for each in references)
    assert not re.findall(r"url\((?!#)|@import", page)


def test_the_page_says_the_verdict_the_facts_and_the_counterexample() -> None:
    found = Elements(html(FOUND, MADE))
    figures = ("12,000", "0.25", "a, b", "1,234,567", "hex:ff00")
    for expected in (
        "order audit",
        "to be looked into",
        *figures,
        "0@g1 12",
        "2026-11-21 16:00:00",
    ):
        assert expected in found.text
    assert [tag for tag, _ in found.tags].count("svg") == 4
    assert "nothing to show" in found.text
    clean = Elements(html(Report("archive", "All is well.", True), MADE))
    assert "nothing to look into" in clean.text


@pytest.mark.parametrize("plot", [BARS, LINE, BINS, SHARES], ids=lambda each: each.kind)
def test_a_plot_is_well_formed_and_the_same_each_time(plot: Plot) -> None:
    picture = svg(plot, salt="x")
    root = ElementTree.fromstring(picture)
    assert root.tag.endswith("svg")
    assert "width" not in root.attrib
    assert svg(plot, salt="x") == picture
    assert all(
        each.attrib.get("id", "").find("_1") < 0 for each in root.iter() if each.tag.endswith("}g")
    )


def test_ids_of_two_plots_on_a_page_are_apart() -> None:
    ids = [set(re.findall(r' id="([^"]+)"', svg(BINS, salt=salt))) for salt in ("a0", "a1")]
    assert ids[0]
    assert not ids[0] & ids[1]


def test_a_plot_whose_series_do_not_fit_its_x_is_refused() -> None:
    with pytest.raises(AssertionError, match="do not fit"):
        Plot("p", "bar", [1, 2], {"s": [1]})
    with pytest.raises(AssertionError, match="do not fit"):
        Plot("p", "histogram", [1, 2], {"s": [1, 2]})


def test_cells_become_json_without_loss_of_meaning() -> None:
    assert plain((1, 2.5, float("nan"), float("inf"), None, True)) == [
        1,
        2.5,
        None,
        None,
        None,
        True,
    ]
    assert plain([b"key", b"\x00\xff", "é".encode()]) == ["key", "hex:00ff", "é"]
    assert plain(datetime(2026, 1, 1, 12, 0, 0, 5000)) == "2026-01-01T12:00:00.005Z"
    assert plain({"day": date(2026, 1, 1), "sum": Decimal(7), "mean": Decimal("7.5")}) == {
        "day": "2026-01-01",
        "sum": 7,
        "mean": 7.5,
    }


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1234567, "1,234,567"),
        (0.5, "0.5"),
        (12345.6789, "12,345.679"),
        (0.0000123, "1.23e-05"),
        (None, ""),
        (True, "yes"),
        ([1, 2], "[1, 2]"),
    ],
)
def test_cells_are_written_for_people(value: object, expected: str) -> None:
    assert cell(value) == expected


def test_the_json_twin_says_the_same(tmp_path: Path) -> None:
    page = write(FOUND, tmp_path / "new", MADE)
    assert page == tmp_path / "new" / "order_audit.html"
    found = json.loads(page.with_suffix(".json").read_text())
    assert {key: found[key] for key in summary(FOUND)} == json.loads(json.dumps(summary(FOUND)))
    assert found["plots"][3]["series"]["g1"] == [0.1, 0.2, 0.9, 1.0]
    assert found["made"] == "2026-11-21T16:00:00.000Z"


def test_tables_are_written_as_parquet_whatever_their_cells_are(tmp_path: Path) -> None:
    mixed = ReportTable("Mixed", ("a", "b", "c"), ((1, "x", None), ("two", b"\x00", None)), "mixed")
    write(Report("j", "h", True, tables=(mixed, FOUND.tables[1], KEYS)), tmp_path, MADE)
    first, second = pq.read_table(tmp_path / "mixed.parquet").to_pylist()
    assert (first, second) == (
        {"a": "1", "b": "x", "c": None},
        {"a": "two", "b": "hex:00", "c": None},
    )
    assert pq.read_table(tmp_path / "none.parquet").to_pylist() == []
    assert pq.read_table(tmp_path / "keys.parquet")["messages"].to_pylist() == [1_234_567, None]


def test_a_second_run_writes_over_the_first(tmp_path: Path) -> None:
    write(FOUND, tmp_path, MADE)
    write(Report("order_audit", "All is well.", True), tmp_path, MADE)
    assert "All is well." in (tmp_path / "order_audit.html").read_text()
    assert json.loads((tmp_path / "order_audit.json").read_text())["is_clean"] is True


def test_a_report_may_say_where_in_the_folder_it_goes(tmp_path: Path) -> None:
    assert (
        write(Report("archive", "h", True, folder="report"), tmp_path, MADE)
        == tmp_path / "report" / "archive.html"
    )


def test_long_tables_are_cut_where_people_read_and_nowhere_else(tmp_path: Path) -> None:
    long = ReportTable(
        "Long", ("number",), tuple((each,) for each in range(PAGE_ROWS_MAX + 7)), "long"
    )
    report = Report("j", "h", True, tables=(long,))
    found = Elements(html(report, MADE))
    assert [tag for tag, _ in found.tags].count("tr") == PAGE_ROWS_MAX + 1
    assert "7 more in long.parquet" in found.text
    assert f"{len(long.rows) - TEXT_ROWS_MAX:,} more" in text(report, None)
    write(report, tmp_path, MADE)
    assert pq.read_table(tmp_path / "long.parquet").num_rows == len(long.rows)


def test_text_for_a_terminal_says_it_all_and_moves_no_cursor() -> None:
    hostile = ReportTable("Keys", ("key", "messages"), (("a\x1b[2Jb\nc", 12345), ("d", 6)), "keys")
    shown = text(
        Report(
            "j", "one\x07", False, {"keys": 2}, (hostile, FOUND.tables[1]), counterexample="x\ty"
        ),
        Path("/out/j.html"),
    )
    assert shown.splitlines()[0] == "FINDINGS: one\ufffd"
    assert "\x1b" not in shown
    assert "a\ufffd[2Jb c    12,345" in shown
    assert "d                6" in shown
    assert "None: none" in shown
    assert shown.endswith("report: /out/j.html\n")


def test_the_template_is_part_of_the_package() -> None:
    assert resources.files("pyspark_qmq.jobs").joinpath("report.html.j2").is_file()
