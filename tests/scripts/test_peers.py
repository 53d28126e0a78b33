"""The comparison with peers: what it counts, what it says, and that pages hold what its record says
(bench/peers).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[2] / "bench" / "peers"))

import compare
import page
import servers
import spark_rows
import verdict
from rows import ROWS, Row
from session import Session, Times
from spark_rows import SPARK_ROWS, SparkRow, Stage

ROOT = Path(__file__).parents[2]


def test_lost_and_repeated_messages_are_counted() -> None:
    found = verdict.compare([2, 2, 2, 1], [[1, 0, 2, 1], [1, 1, 2, 0]])
    assert (found.count, found.lost, found.twice) == (7, 1, 2)


def test_a_rate_is_that_of_the_slowest_side() -> None:
    reports = [{"seconds": 2.0, "cpu_s": 1.0}, {"seconds": 4.0, "cpu_s": 0.5}]
    found = verdict.figures_of(
        reports, 0.25, Row("r", "publish", consumers=1), verdict.Compared(1_000_000, 0, 0)
    )
    assert (found["messages/s"], found["server, us"], found["clients, us"]) == (250_000, 0.25, 1.5)


def test_the_ratio_is_above_one_where_we_are_better() -> None:
    quick, slow = verdict.summary([{"messages/s": 3.0}]), verdict.summary([{"messages/s": 2.0}])
    assert verdict.ratio(quick, slow) == 1.5
    soon, late = ({"messages/s": 1.0, "p50, ms": each} for each in (0.5, 1.0))
    assert verdict.ratio(verdict.summary([soon]), verdict.summary([late])) == 2


def test_a_median_stands_with_its_range() -> None:
    values = [{"messages/s": each} for each in (2.0e6, 1.0e6, 4.0e6)]
    assert page.ranged(verdict.summary(values)["messages/s"]) == "2 M (1 M to 4 M)"


def whole() -> dict[str, object]:
    def figures(rate: float) -> list[verdict.Figures]:
        return [{"messages/s": rate, "lost": 0, "twice": 0}]

    rows = {
        "won": {"QMQ": figures(3e6), "Kafka": figures(1e6), "NATS": figures(2e6)},
        "lost": {"QMQ": figures(100), "NATS": figures(200)},
        "late": {
            "QMQ": [{"messages/s": 1e3, "p50, ms": 1.0, "p99, ms": 4.0, "p99.9, ms": 9.0}],
            "NATS": [{"messages/s": 1e3, "p50, ms": 2.0, "p99, ms": 2.0, "p99.9, ms": 9.0}],
        },
        "started": {"QMQ": [{"idle, MiB": 90.0}], "NATS": [{"idle, MiB": 9.0}]},
    }
    return {
        **{
            "command": "scripts/bench --peers",
            "date": "2026-01-01",
            "commit": "0" * 40,
            "runs": 1,
            "rows": rows,
            "versions": {"NATS": "2"},
        },
        "missing": {"Kafka: lost": "Traceback\nno such row"},
        "machine": {"cores": 2, "processor": "a processor", "memory, GiB": 24},
        "systems": {"QMQ": {"durability": "one replica", "settings": "defaults"}},
    }


def test_the_short_table_has_the_best_peer_of_each_row_and_the_rows_that_we_lose() -> None:
    lines = page.short(whole()).splitlines()[2:]
    assert lines == [
        "| won: messages/s | 3 M (3 M to 3 M) | NATS | 2 M (2 M to 2 M) | 1.5 |",
        "| **lost**: messages/s | 100 (100 to 100) | NATS | 200 (200 to 200) | **0.5** |",
        "| late: p50, ms | 1 (1 to 1) | NATS | 2 (2 to 2) | 2 |",
        "| **late**: p99, ms | 4 (4 to 4) | NATS | 2 (2 to 2) | **0.5** |",
        "| **started**: idle, MiB | 90 (90 to 90) | NATS | 9 (9 to 9) | **0.1** |",
        "",
        "`scripts/bench --peers`, commit 000000000000, 1 runs: medians (least to most); "
        "2 cores, a processor, 24 GiB",
    ]


def test_the_chinese_table_has_words_for_each_row_and_figure() -> None:
    assert {row.name for row in (*ROWS, *SPARK_ROWS)} <= set(page.CHINESE)
    if page.RECORD.exists():
        record = json.loads(page.RECORD.read_text())
        assert len(page.short(record, page.chinese)) > 0


def test_blocks_of_a_page_come_from_the_record() -> None:
    text = "# Peers\n<!-- peers: short -->\nan old figure\n<!-- end of peers -->\nrest\n"
    found = page.filled(text, whole())
    assert "an old figure" not in found
    assert "`scripts/bench --peers`, commit" in found
    assert page.filled(found, whole()) == found


@pytest.mark.parametrize("name", page.PAGES)
def test_each_page_says_what_the_record_says(name: str) -> None:
    text = (ROOT / name).read_text() if (ROOT / name).exists() else ""
    if page.RECORD.exists():
        assert page.filled(text, json.loads(page.RECORD.read_text())) == text, (
            "run `python bench/peers/page.py`"
        )
    else:
        assert "<!-- peers:" not in text, (
            "a block of figures needs docs/peers.json: scripts/bench --peers --record"
        )


def test_each_run_begins_with_another_system_and_has_all() -> None:
    found = compare.turns(2, ["a", "b", "c"])
    assert found == [(0, "a"), (0, "b"), (0, "c"), (1, "b"), (1, "c"), (1, "a")]


def test_rows_have_names_of_their_own_and_needs_that_some_system_offers() -> None:
    assert len({row.name for row in (*ROWS, *SPARK_ROWS)}) == len(ROWS) + len(SPARK_ROWS)
    assert {row.needs for row in ROWS} - {""} <= servers.ALL


@pytest.mark.parametrize(
    "row",
    [
        Row("two tasks", "awaited", {"tasks": 2}),
        Row("one by one", "publish", {"each": True}, consumers=1),
        Row("backlog", "publish", {"partitions": 3}, consumers=2, is_backlog=True),
        Row("ordered", "publish", {"ordered": True, "partitions": 2}, consumers=1),
        Row("groups at a rate", "paced", {"per_s": 200, "groups": 3}, consumers=1),
        Row("flushed", "awaited", {"flushed": True}),
    ],
    ids=lambda row: row.name,
)
def test_a_real_node_is_measured_and_all_that_it_acknowledged_arrives(
    row: Row, tmp_path: Path
) -> None:
    server = servers.qmq(tmp_path)
    try:
        found = Session(
            servers.PEERS[0], server, Path(sys.executable), is_flushed=row.is_flushed
        ).measure(row, Times(0.05, 0.2))
    finally:
        server.stop()
    assert found["messages/s"] > 0
    assert (found["lost"], found["twice"]) == (0, 0)
    assert ("p99, ms" in found) is (row.producer == "paced")


HASHES = 2**53 + 1
"""The sum of a row, which a float does not hold."""


class FakeJob:
    """Stands for Spark's process. `forgets`: a format that loses one row of each write; `fails`:
    one that cannot be read.
    """

    pid = 0

    def __init__(self, forgets: str = "", fails: str = "") -> None:
        self.asked: list[tuple[str, str]] = []
        self._forgets, self._fails = forgets, fails
        self._stored: dict[tuple[str, str], int] = {}
        self._answer: dict[str, object] = {}

    def say(self, line: str) -> None:
        command = json.loads(line)
        name = next(iter(command))
        if name == "make":
            self._answer = {"done": [100, 100 * HASHES]}
            return
        way = command[name]
        options = way["options"]
        place = (
            way["format"],
            options.get("topic")
            or options.get("subscribe")
            or options.get("subject")
            or options["path"],
        )
        self.asked.append((name, way["format"]))
        times = command.get("at_least", 1)
        if name == "write":
            self._stored[place] = self._stored.get(place, 0) + times * (
                100 - (way["format"] == self._forgets)
            )
        found = self._stored[place]
        self._answer = {
            "done": [found, found * HASHES] if name == "count" else [times, 0.5 * times]
        }
        if name == "read" and way["format"] == self._fails:
            self._answer = {"failed": "no such reader"}

    def hear_any(self, timeout_s: float) -> dict[str, object]:
        return self._answer


def spark_figures(job: FakeJob, row: SparkRow, run: int = 0) -> dict[str, Any]:
    """What a stage says of a row without Kafka, whose topics a real server makes."""
    found: dict[str, Any] = {}
    node = servers.Server("127.0.0.1:1", Path("node"))
    systems = [spark_rows.OURS, spark_rows.PARQUET]

    def tell(_: str, system: str, said: verdict.Figures | Exception) -> None:
        found[system] = said

    stage = Stage(job, {spark_rows.OURS: node}, Path("folder"), Path(sys.executable))  # type: ignore[arg-type]
    stage.measure(row.of(systems), systems, Times(0, 0), run, tell)
    return found


READS, WRITES = (
    SparkRow("read", 100, spark_rows.BROKERS),
    SparkRow("write", 100, spark_rows.SINKS, writes=True),
)


@pytest.mark.parametrize("row", [READS, WRITES], ids=lambda row: row.name)
def test_a_spark_row_has_a_rate_for_each_system_and_alternates(row: SparkRow) -> None:
    job = FakeJob()
    found = spark_figures(job, row)
    assert set(found) == {"QMQ", "Parquet"}
    assert all(
        (said["messages/s"], said["lost"], said["twice"]) == (200, 0, 0) for said in found.values()
    )
    worked = [form for name, form in job.asked if name == row.name]
    assert worked[-6:] == ["qmq", "parquet", "parquet", "qmq", "qmq", "parquet"]


def test_rows_that_a_spark_sink_lost_are_counted() -> None:
    found = spark_figures(FakeJob(forgets="qmq"), WRITES)
    assert found["QMQ"]["lost"] == spark_rows.WARM_TIMES + spark_rows.TURNS
    assert found["Parquet"]["lost"] == 0


def test_a_system_that_spark_cannot_read_is_left_out_and_the_others_are_measured() -> None:
    found = spark_figures(FakeJob(fails="qmq"), READS)
    assert str(found["QMQ"]) == "no such reader"
    assert found["Parquet"]["messages/s"] == 200


def test_each_system_of_a_spark_row_can_store_rows_and_count_them() -> None:
    assert (
        {system for row in SPARK_ROWS for system in row.ways}
        == set(spark_rows.SINKS)
        == set(spark_rows.BROKERS)
    )
    assert {row.size for row in SPARK_ROWS} == set(spark_rows.COUNTS)
    assert set(spark_rows.SINKS) == {*spark_rows.SYSTEMS, "QMQ"}


def test_processes_of_spark_that_ended_take_no_time_back() -> None:
    assert spark_rows.used_s({1: 5.0, 2: 8.0}, {1: 5.5, 3: 0.25}) == 0.75


def test_all_descendants_of_a_process_are_counted() -> None:
    with subprocess.Popen(
        ["sh", "-c", "sleep 60 & echo $!; wait"], stdout=subprocess.PIPE, text=True
    ) as shell:
        assert shell.stdout is not None
        child = int(shell.stdout.readline())
        try:
            assert set(servers.cpu_by_process([shell.pid])) == {shell.pid, child}
        finally:
            os.kill(child, signal.SIGTERM)
