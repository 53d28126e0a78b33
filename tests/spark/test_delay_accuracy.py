"""The accuracy of delayed messages: with errors known in advance, and on a node's folder."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from publishing import START_MS, at, dataset
from pyspark.sql import DataFrame, SparkSession
from pyspark_qmq.jobs import delay_accuracy
from pyspark_qmq.jobs.delay_accuracy import (
    CAME,
    EARLY,
    LOST,
    DelayFinding,
    figures,
    horizons,
    judged,
    oldest_kept,
)
from pyspark_qmq.jobs.job import main
from pyspark_qmq.jobs.lag_figures import quantile
from support import eventually, node_config, running

import qmq
from qmq.columns.model import QueueKey, SourceQueue

pytestmark = pytest.mark.sampled

MINUTE = 60_000
LOG = "subject string, partition int, broker_group string, message_id string, append_time timestamp"
REACHES_BACK = {"s": 0}


def row(
    message_id: str, due: int, state: str = "delivered", sent: int = -1_000, **others: Any
) -> dict[str, Any]:
    """A row of the schedule; times in ms."""
    times = {"due_time": due, "append_time": sent, "create_time": sent, "bucket": 0}
    flags = {"is_recurring": False, "is_directed": False}
    return {
        "message_id": message_id,
        "delay_group": "d",
        "ordinal": 0,
        "state": state,
        **times,
        **flags,
        **others,
    }


def log(spark: SparkSession, rows: Iterable[tuple[str, int]]) -> DataFrame:
    """A log of pairs: message id, time of storing."""
    return spark.createDataFrame(
        [("s", 0, "g", message_id, at(time)) for message_id, time in rows], LOG
    )


def judge(
    spark: SparkSession,
    schedule: list[dict[str, Any]],
    stored: list[tuple[str, int]],
    reaches: dict[str, int] | None = None,
    now: int = 0,
) -> DataFrame:
    since = REACHES_BACK if reaches is None else reaches
    return judged(
        dataset(spark, "schedules", schedule), log(spark, stored), since, START_MS + now, 10
    )


# --- verdicts -------------------------------------------------------------------------------------


def test_each_message_has_the_verdict_that_its_state_and_the_log_give_it(
    spark: SparkSession,
) -> None:
    """`later_log` is a subject of whose log the first five seconds are gone."""
    judgements: list[tuple[dict[str, Any], int | None, str]] = [
        (row("right", 100), 100, CAME),
        (row("early", 100), 89, EARLY),
        (row("clocks differ", 100), 91, CAME),
        (row("lost", 5_000, subject="later_log"), None, LOST),
        (row("gone", 4_999, subject="later_log"), None, "gone"),
        (row("nowhere", 9_000, subject="unknown"), None, "gone"),
        (row("later", 9_000, "pending"), None, "waiting"),
        (row("just", -1_000, "planned"), None, "waiting"),
        (row("old", -2 * MINUTE, "pending"), None, "overdue"),
        (row("pending at the checkpoint", -2 * MINUTE, "pending"), -2 * MINUTE + 3, CAME),
        (row("kept", 5, "cancelled"), None, "cancelled"),
        (row("came all the same", 5, "cancelled"), 6, "resurrected"),
    ]
    stored = [(each["message_id"], time) for each, time, _ in judgements if time is not None]
    schedule = [each for each, _, _ in judgements]
    reaches = REACHES_BACK | {"later_log": START_MS + 5_000}
    assert {
        each.message_id: each.verdict for each in judge(spark, schedule, stored, reaches).collect()
    } == {each["message_id"]: verdict for each, _, verdict in judgements}


def test_moved_messages_seeds_and_directed_ones_are_left_out(spark: SparkSession) -> None:
    schedule = [
        row("moved", 5, "moved"),
        row("moved", 900),
        row("seed", 5, "cancelled", is_recurring=True),
        row("run", 60, is_recurring=True),
        row("directed", 5, is_directed=True),
    ]
    found = judge(spark, schedule, [("moved", 901), ("run", 61)]).collect()
    assert {each.message_id: each.verdict for each in found} == {"moved": CAME, "run": CAME}


def test_a_message_that_is_there_twice_is_judged_by_the_first(spark: SparkSession) -> None:
    (found,) = judge(spark, [row("a", 5)], [("a", 99), ("a", 7)]).collect()
    assert (found.verdict, found.error_ms, found.copies) == (CAME, 2, 2)


def test_a_message_that_was_due_before_it_was_stored_is_measured_from_then(
    spark: SparkSession,
) -> None:
    (found,) = judge(spark, [row("a", -9_000, sent=0)], [("a", 20)]).collect()
    assert (found.verdict, found.error_ms, found.delay) == (CAME, 20, "up to 1 s")


def test_the_log_reaches_back_to_the_oldest_message_of_the_queue_that_lost_most() -> None:
    keys = [
        QueueKey("s", 0, "g"),
        QueueKey("s", 0, "h"),
        QueueKey("t", 0, "g"),
        QueueKey("u", 0, "g"),
    ]
    queues = [
        SourceQueue(keys[0], 5, 9),
        SourceQueue(keys[1], 7, 9),
        SourceQueue(keys[2], 0, 9),
        SourceQueue(keys[3], 9, 9),
    ]
    found = horizons(queues, {tuple(keys[0]): 100, tuple(keys[1]): 200, tuple(keys[2]): 300})
    assert (found["s"], found["t"]) == (200, 0)
    assert found["u"] > 1 << 60


# --- figures --------------------------------------------------------------------------------------


def test_quantiles_of_errors_are_exact_by_delay_and_by_hour(spark: SparkSession) -> None:
    hour = 3_600_000
    schedule = [row(f"a{each}", 0, sent=-500) for each in range(101)] + [
        row(f"b{each}", hour, sent=0) for each in range(11)
    ]
    stored = [(f"a{each}", each) for each in range(101)] + [
        (f"b{each}", hour + 10 * each) for each in range(11)
    ]
    counts, twice, by_delay, by_hour, (edges, bins), some = figures(judge(spark, schedule, stored))
    assert (counts, twice, some) == ({CAME: 112}, 0, [])
    assert [(name, messages) for name, messages, _ in by_delay] == [
        ("all", 112),
        ("up to 1 s", 101),
        ("up to 1 h", 11),
    ]
    assert [quantile(by_delay[1][2], each) for each in (0.5, 0.99, 0.999, 1.0)] == pytest.approx(
        [50, 99, 99.9, 100]
    )
    assert [(name, messages) for name, messages, _ in by_hour] == [
        ("2023-11-14 22h", 101),
        ("2023-11-14 23h", 11),
    ]
    assert sum(bins) == 112
    assert len(edges) == len(bins) + 1


def test_findings_are_listed_with_their_times(spark: SparkSession) -> None:
    *_, some = figures(judge(spark, [row("early", 500), row("lost", 700)], [("early", 100)]))
    assert some == [
        DelayFinding(EARLY, "s", "early", "d", START_MS + 500, START_MS + 100, -400, "delivered"),
        DelayFinding(LOST, "s", "lost", "d", START_MS + 700, None, None, "delivered"),
    ]
    assert "is not in the log" in str(some[1])
    report = delay_accuracy.report({EARLY: 1, LOST: 1}, 0, [], [], ([], []), some, START_MS, {})
    assert (report.is_clean, report.headline) == (False, "1 early, 1 lost of 2 delayed messages")


def test_an_empty_schedule_is_clean(spark: SparkSession) -> None:
    found = delay_accuracy.report(*figures(judge(spark, [], [])), START_MS, {})
    assert (found.is_clean, found.headline) == (True, "no delayed message is known here")


def test_the_oldest_kept_message_of_each_queue_is_found(spark: SparkSession) -> None:
    assert oldest_kept(log(spark, [("a", 30), ("b", 20)])) == {("s", 0, "g"): START_MS + 20}


# --- whole ----------------------------------------------------------------------------------------


async def send(data: Path) -> None:
    """Twelve delayed messages that are delivered, one that is moved and delivered, one cancelled,
    one still waiting, and one without a delay.
    """
    async with running(node_config(data, delay=True)) as node, qmq.connect(node.address) as mq:
        for each in range(12):
            await mq.send("s", b"%d" % each, delay=timedelta(milliseconds=50 * each))
        moved, gone = [
            (await mq.send("s", b"x", delay=timedelta(days=each))).delayed_id for each in (3, 4)
        ]
        assert moved is not None
        assert gone is not None
        await mq.delayed.move(moved, timedelta(milliseconds=200))
        await mq.delayed.cancel(gone)
        await mq.send("s", b"much later", delay=timedelta(days=30))
        await mq.send("s", b"now")
        await eventually(
            lambda: (queue := node.store.queue("s", 0)) is not None and queue.next_sequence == 14
        )


async def test_every_delayed_message_of_a_node_is_found_and_none_early(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await send(tmp_path / "node")
    argv = ["--path", str(tmp_path / "node"), "--subject", "s", "--out", str(tmp_path / "out")]
    assert main(delay_accuracy.JOB, argv, spark) == 0, capsys.readouterr().err
    found = json.loads((tmp_path / "out" / "delay_accuracy.json").read_text())
    facts = {name: number for name, number in found["facts"].items() if name != "as of"}
    assert facts == {
        "delayed messages": 15,
        "cancelled": 1,
        "delivered": 13,
        "waiting": 1,
        "more than once": 0,
    }
    assert found["tables"][0]["rows"][0][:2] == ["all", 13]
    assert "How late messages came" in (tmp_path / "out" / "delay_accuracy.html").read_text()


async def test_brokers_and_a_delay_groups_folder_tell_the_same(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await send(tmp_path / "node")
    async with running(node_config(tmp_path / "node", delay=True)) as node:
        argv = (
            f"--servers {node.address} --delay-path {tmp_path / 'node'} --subject s --json".split()
        )
        assert await asyncio.to_thread(main, delay_accuracy.JOB, argv, spark) == 0, (
            capsys.readouterr().err
        )
    facts = json.loads(capsys.readouterr().out)["facts"]
    assert (facts["delivered"], facts["cancelled"], facts["waiting"]) == (13, 1, 1)


def test_a_schedule_is_needed(spark: SparkSession, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(delay_accuracy.JOB, ["--servers", "localhost:1", "--subject", "s"], spark) == 2
    assert "--delay-path" in capsys.readouterr().err
