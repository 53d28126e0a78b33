"""Lags of groups, and latencies of messages: with figures known in advance, and on a node's
folder.
"""

from __future__ import annotations

import asyncio
import json
from datetime import timedelta
from math import isnan
from pathlib import Path
from random import Random
from typing import Any

import pytest
from publishing import START_MS, dataset, delivery, messages, standing
from pyspark.sql import SparkSession
from pyspark_qmq.jobs import lag_report
from pyspark_qmq.jobs.job import covered, main
from pyspark_qmq.jobs.lag_figures import (
    PERCENTAGES,
    GroupLag,
    LagStep,
    Position,
    group_lags,
    lag_series,
    log_edges,
    quantile,
    share_at,
)
from support import eventually, node_config, running

import qmq
from qmq.columns.model import QueueKey, SourceQueue
from qmq.model import Order, SubjectConfig

pytestmark = pytest.mark.sampled

KEY = QueueKey("s", 0, "g")
PARTITION = QueueKey("s", 3, "g")


def position(
    next_sequence: int | None = 0,
    *,
    done: int = 0,
    queue: QueueKey = KEY,
    held: int = 0,
    waiting: int = 0,
) -> Position:
    return Position(queue, "ops", START_MS, done, next_sequence, held, waiting)


# --- figures --------------------------------------------------------------------------------------


def test_lag_is_what_was_not_handed_out_and_what_came_back() -> None:
    (found,) = group_lags(
        [position(70, done=60, held=4, waiting=3)], {KEY: SourceQueue(KEY, 0, 100)}
    )
    assert found == GroupLag("s", "ops", 37, 0, 4, 3, 0, 0, 0, 0)


def test_a_group_behind_retention_has_lost_undelivered_messages() -> None:
    (found,) = group_lags([position(20)], {KEY: SourceQueue(KEY, 50, 100)})
    assert (found.lag, found.lost) == (50, 30)
    (held,) = group_lags([position(60, done=20, held=5)], {KEY: SourceQueue(KEY, 50, 100)})
    assert (held.lag, held.lost) == (45, 0)


def test_a_closed_partition_that_is_done_has_lost_nothing() -> None:
    (found,) = group_lags(
        [position(None, done=101, queue=PARTITION)],
        {PARTITION: SourceQueue(PARTITION, 100, 100, is_sealed=True)},
    )
    assert (found.lag, found.lost) == (0, 0)


def test_partitions_where_a_group_has_not_begun_lie_before_it() -> None:
    other, closed = QueueKey("s", 4, "g"), QueueKey("s", 1, "g")
    queues = {
        each.key: each
        for each in (
            SourceQueue(PARTITION, 0, 10),
            SourceQueue(other, 5, 20),
            SourceQueue(closed, 0, 99, is_sealed=True),
        )
    }
    (found,) = group_lags([position(None, done=10, queue=PARTITION)], queues)
    assert (found.lag, found.not_begun) == (15, 1)


def test_groups_are_sorted_by_lag_and_unknown_queues_do_not_count() -> None:
    far = position(10)._replace(group="far")
    found = group_lags(
        [position(90), far, position(queue=PARTITION)], {KEY: SourceQueue(KEY, 0, 100)}
    )
    assert [(each.group, each.lag) for each in found] == [("far", 90), ("ops", 10)]


def test_lag_over_time_follows_ends_and_positions_and_is_unknown_before_the_first() -> None:
    ends = {KEY: [LagStep(0, 10), LagStep(3, 30)]}
    found = lag_series(5, ends, [(1, position(4)), (4, position(30, held=2))], {KEY: 0})["s", "ops"]
    assert isnan(found[0])
    assert found[1:] == [6, 6, 26, 2]


def test_lag_over_time_is_summed_over_queues() -> None:
    ends = {KEY: [LagStep(0, 10)], PARTITION: [LagStep(1, 5)]}
    found = lag_series(
        2,
        ends,
        [(0, position(4)), (0, position(None, done=1, queue=PARTITION))],
        {KEY: 0, PARTITION: 0},
    )
    assert found == {("s", "ops"): [6, 10]}


def test_shares_go_through_the_quantiles() -> None:
    values = [1_000 * each for each in PERCENTAGES]
    assert share_at(values, [-1, 0, 250, 995, 1_000, 5_000]) == pytest.approx(
        [0, 0, 0.25, 0.995, 1, 1]
    )
    assert share_at([7.0] * len(PERCENTAGES), [6, 7]) == [0, 1]
    assert quantile(values, 0.999) == 999


def test_edges_of_a_curve_reach_from_the_lowest_to_the_highest() -> None:
    found = log_edges(-40, 5_000)
    assert (found[0], found[1]) == (-40, 1)
    assert found[-1] == pytest.approx(5_000)
    assert found == sorted(found)
    assert log_edges(0, 0)[0] == 0


# --- in Spark -------------------------------------------------------------------------------------


def test_latencies_are_exact(spark: SparkSession) -> None:
    every = messages(spark, [(each, -3, 0) for each in range(1_000)])
    rows = [delivery(each, each, "ack", 2 * each, 10 * each) for each in range(1_000)]
    (found,) = lag_report.measured(every, dataset(spark, "deliveries", rows)).collect()
    assert (found.settled, found.retried, found.attempt_max) == (1_000, 0, 1)
    shares = [quantile(found.stored, each) for each in (0.0, 0.5, 0.9, 0.99, 0.999, 1.0)]
    assert shares == pytest.approx([0, 4995, 8991, 9890.1, 9980.01, 9990])
    assert quantile(found.created, 1.0) == 9_993
    assert quantile(found.pulled, 0.5) == 999


def test_failed_tries_count_as_attempts_and_messages_returned_unworked_not_as_pulled(
    spark: SparkSession,
) -> None:
    """A negative latency, of a clock that is ahead, is not clipped."""
    rows = [
        delivery(0, 1, "nack", 5, 10),
        delivery(0, 0, "ack", 20, 30, attempt=2),
        delivery(1, 1, "waiting", None, None, attempt=2),
        delivery(2, 2, "release", 5, 6),
        delivery(2, 2, "return", 7, 8),
        delivery(2, 2, "ack", 9, 10),
    ]
    (found,) = lag_report.measured(
        messages(spark, [(0, 500, 0), (1, 0, 0), (2, 0, 0)]), dataset(spark, "deliveries", rows)
    ).collect()
    assert (found.settled, found.retried, found.attempt_max) == (2, 1, 2)
    assert [quantile(found.stored, each) for each in (0.0, 1.0)] == [10, 30]
    assert [quantile(found.pulled, each) for each in (0.0, 1.0)] == [5, 9]
    assert (found.created_negative, found.stored_negative) == (1, 0)
    assert quantile(found.created, 0.0) == -470


def test_lanes_settle_messages_of_their_own_logical_partitions(spark: SparkSession) -> None:
    every = messages(
        spark, [(each, 0, each) for each in range(10)], 3, [each % 2 for each in range(10)]
    )
    lanes = [
        delivery(0, 9, "done", None, 100, partition=3, first_lp=0, end_lp=1),
        delivery(0, 4, "done", None, 50, partition=3, first_lp=1, end_lp=2),
    ]
    found = (
        covered(every, dataset(spark, "deliveries", lanes)).select("sequence", "first_lp").collect()
    )
    assert sorted((row.sequence, row.first_lp) for row in found) == [
        (0, 0),
        (1, 1),
        (2, 0),
        (3, 1),
        (4, 0),
        (6, 0),
        (8, 0),
    ]


@pytest.mark.parametrize("broadcast_rows_max", [0, 1_000_000])
def test_messages_meet_exactly_the_ranges_they_lie_in(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch, broadcast_rows_max: int
) -> None:
    monkeypatch.setattr("pyspark_qmq.jobs.job._BROADCAST_ROWS_MAX", broadcast_rows_max)
    random = Random(5)
    numbers = sorted(random.sample(range(1_000), 300))
    spans = [
        (first, first + random.choice([0, 1, 63, 64, 65, 400]))
        for first in random.choices(range(1_000), k=60)
    ]
    every = messages(spark, [(each, 0, 0) for each in numbers])
    found = covered(
        every, dataset(spark, "deliveries", [delivery(*span, "ack", 0, 0) for span in spans])
    ).collect()
    assert sorted((row.sequence, row.first_sequence, row.last_sequence) for row in found) == sorted(
        (number, first, last)
        for first, last in spans
        for number in numbers
        if first <= number <= last
    )


def test_the_newest_standing_and_the_oldest_open_message_are_found(spark: SparkSession) -> None:
    rows = [standing(0, 0, 5), standing(9_000, 7, 9, held=2), standing(2_000, 3, 6)]
    (row,) = lag_report.newest(dataset(spark, "progress", rows)).collect()
    found = lag_report.position_of(row)
    assert found == Position(KEY, "ops", START_MS + 9_000, 7, 9, 2)
    every = messages(spark, [(each, 0, 100 * each) for each in range(20)])
    assert lag_report.oldest_open(spark, every, [found], {KEY: SourceQueue(KEY, 0, 20)}) == {
        (KEY, "ops"): START_MS + 700
    }
    assert (
        lag_report.oldest_open(
            spark, every, [found._replace(done_before=20)], {KEY: SourceQueue(KEY, 0, 20)}
        )
        == {}
    )


def test_lag_over_time_is_that_of_each_moment(spark: SparkSession) -> None:
    every = messages(spark, [(each, 0, 1_000 * each) for each in range(60)])
    rows = [standing(0, 0, 0), standing(30_000, 30, 30), standing(59_000, 60, 60)]
    axis, found = lag_report.over_time(
        every, dataset(spark, "progress", rows), {KEY: SourceQueue(KEY, 0, 60)}, START_MS + 59_999
    )
    lags = found["s", "ops"]
    assert len(axis) == lag_report.STEPS
    assert (lags[0], lags[29], lags[30], lags[58], lags[59]) == (1, 30, 1, 29, 0)


def test_without_messages_there_is_no_curve(spark: SparkSession) -> None:
    assert lag_report.over_time(
        messages(spark, []), dataset(spark, "progress", []), {}, START_MS
    ) == ([], {})


# --- the report -----------------------------------------------------------------------------------


def test_a_group_that_lost_messages_is_a_finding() -> None:
    found = lag_report.report(
        [position(20)], {KEY: SourceQueue(KEY, 50, 100)}, {}, [], ([], {}), START_MS, 20
    )
    assert not found.is_clean
    assert found.headline == "retention deleted 30 messages before ops consumed them"


def test_a_subject_without_consumers_is_clean_and_says_so() -> None:
    found = lag_report.report([], {KEY: SourceQueue(KEY, 0, 100)}, {}, [], ([], {}), START_MS, 20)
    assert found.is_clean
    assert "no group" in found.headline
    assert found.tables[0].rows == ()


# --- whole ----------------------------------------------------------------------------------------


async def take(consumer: Any, count: int) -> list[Any]:
    """Receive `count` messages, in as many pulls as necessary."""
    found: list[Any] = []
    while len(found) < count:
        found += await consumer.pull(count - len(found), timedelta(seconds=5))
    return found


async def consume(data: Path) -> None:
    """60 messages; ops does 50 of them, one at its second attempt, and leaves with the rest; audit
    reads one tag.
    """
    async with running(node_config(data)) as node, qmq.connect(node.address) as mq:
        for each in range(60):
            await mq.send("s", b"%d" % each, tags=["odd" if each % 2 else "even"])
        async with mq.consumer("s", "ops") as consumer:
            first = await take(consumer, 60)
            first[7].nack(timedelta(0))
            (again,) = await take(consumer, 1)
            assert (again.sequence, again.attempt) == (7, 2)
            for message in [*first[:7], *first[8:50], again]:
                await message.ack_sync()
        async with mq.consumer("s", "audit", tags_any=["odd"]) as consumer:
            for message in await take(consumer, 30):
                await message.ack_sync()


async def test_a_folder_of_a_node_tells_how_far_its_groups_are(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await consume(tmp_path / "node")
    argv = ["--path", str(tmp_path / "node"), "--subject", "s", "--out", str(tmp_path / "out")]
    assert main(lag_report.JOB, argv, spark) == 0, capsys.readouterr().err
    found = json.loads((tmp_path / "out" / "lag_report.json").read_text())
    tables = {
        each["name"]: [dict(zip(each["columns"], row, strict=True)) for row in each["rows"]]
        for each in found["tables"]
    }
    ops, audit = (
        next(row for row in tables["groups"] if row["group"] == name) for name in ("ops", "audit")
    )
    assert (ops["not done"], ops["lost"], ops["consumers"]) == (10, 0, 0)
    assert audit["not done"] <= 1  # what is behind the last that it wants
    attempts = {row["group"]: row for row in tables["attempts"]}
    assert (
        attempts["ops"]["done"],
        attempts["ops"]["at a later attempt"],
        attempts["ops"]["most attempts"],
    ) == (50, 1, 2)
    assert attempts["audit"]["done"] == 30
    assert {(row["group"], row["measured"]) for row in tables["latencies"]} >= {
        ("ops", "from storing"),
        ("ops", "to the pull"),
    }
    assert all(row["min"] >= 0 for row in tables["latencies"] if row["measured"] != "from creation")
    page = (tmp_path / "out" / "lag_report.html").read_text()
    assert "Messages not done, over time" in page


async def test_lanes_of_an_ordered_subject_are_measured_too(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[int] = []

    async def handle(message: Any) -> None:
        seen.append(message.sequence)

    async with running(node_config(tmp_path / "node")) as node, qmq.connect(node.address) as mq:
        await mq.metadata.create_subject(
            SubjectConfig("paid", order=Order.STRICT, logical_partitions=8), partitions=2
        )
        for each in range(24):
            await mq.send("paid", b"%d" % each, key=f"k{each % 7}")
        async with mq.ordered_consumer("paid", "ops") as consumer:
            task = asyncio.create_task(consumer.run(handle))
            await eventually(lambda: len(seen) == 24)
            queues = [each for each in node.store.queues.values() if each.is_ordered]
            await eventually(
                lambda: all(
                    each.lanes["ops"].done_before() == each.next_sequence for each in queues
                )
            )
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    assert (
        main(
            lag_report.JOB, ["--path", str(tmp_path / "node"), "--subject", "paid", "--json"], spark
        )
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    tables = {each["name"]: each["rows"] for each in found["tables"]}
    assert [row[:3] for row in tables["groups"]] == [["paid", "ops", 0]]
    assert [row[:5] for row in tables["attempts"]] == [["paid", "ops", 24, 0, 1]]
    assert {row[2] for row in tables["latencies"]} == {"from creation", "from storing"}, (
        "nobody knows when they were handed out"
    )


async def test_an_unknown_group_is_refused(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await consume(tmp_path / "node")
    assert (
        main(
            lag_report.JOB,
            ["--path", str(tmp_path / "node"), "--subject", "s", "--group", "opps"],
            spark,
        )
        == 2
    )
    assert "no group 'opps'" in capsys.readouterr().err
