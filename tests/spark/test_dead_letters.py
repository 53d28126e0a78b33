"""Messages that failed for good, by cause, and their replay."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from publishing import at, dataset, delivery
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark_qmq.jobs import dead_letters
from pyspark_qmq.jobs.dead_letters import (
    REPLAYED,
    Pace,
    ReplayedKey,
    failed_ranges,
    letters,
    not_replayed,
    outgoing,
)
from pyspark_qmq.jobs.dead_letters import dead_letters as read_dead
from pyspark_qmq.jobs.job import main
from support import NodeProcess, eventually, node_config, running

import qmq
from qmq.model import Order, SubjectConfig

pytestmark = pytest.mark.sampled

DEAD = """subject string, partition int, broker_group string, sequence long, key binary, tags array<string>, message_id string,
append_time timestamp, body binary, headers map<string,binary>, create_time timestamp"""  # noqa: E501


def dead(spark: SparkSession, *rows: dict[str, Any]) -> DataFrame:
    """Messages of a dead-letter subject; values that are not given are the simplest."""
    found = []
    for number, row in enumerate(rows):
        found.append(
            (
                "dead",
                0,
                row.get("broker_group", "g"),
                row.get("sequence", number),
                row.get("key"),
                row.get("tags", []),
                f"{number:032x}",
                at(row.get("append_time", number)),
                b"%d" % number,
                row.get("headers"),
                at(0),
            )
        )
    return spark.createDataFrame(found, DEAD)


def reasons(error: bytes = b"boom", subject: bytes = b"s", **more: bytes) -> dict[str, bytes]:
    return {"qmq-error": error, "qmq-subject": subject, "qmq-group": b"ops", **more}


def read(found: DataFrame) -> DataFrame:
    return read_dead(found, "qmq-error", "qmq-subject", "qmq-group")


def parked(sequence: int, verdict: str = "parked", **others: Any) -> dict[str, Any]:
    event = {"settled": None if verdict == "parked" else 5, "pulled": None}
    simplest = {"attempt": None, "key": b"k", "first_lp": 2, "end_lp": 3, "partition": 3}
    return delivery(sequence, sequence, verdict, **event, **{**simplest, **others})


# --- causes ---------------------------------------------------------------------------------------


def test_each_cause_is_found_and_nothing_else(spark: SparkSession) -> None:
    rows = [
        delivery(0, 9, "ack", 0, 1),
        delivery(10, 10, "nack", 0, 1, attempt=9),
        delivery(10, 10, "waiting", None, None, attempt=6),
        delivery(11, 12, "open", 0, None, attempt=6),
        delivery(13, 13, "open", 0, None, attempt=5),
        delivery(20, 24, "expired", None, 7, attempt=None),
        parked(30, attempt=0, verdict="drop"),
    ]
    found = failed_ranges(dataset(spark, "deliveries", rows), 5).collect()
    assert sorted(
        (row.cause, row.first_sequence, row.last_sequence, row.attempts) for row in found
    ) == [
        ("expired", 20, 24, None),
        ("failing", 10, 10, 5),
        ("failing", 11, 12, 5),
        ("skipped", 30, 30, 0),
    ]


def test_a_parked_message_says_whether_it_failed_itself_and_is_none_once_replayed(
    spark: SparkSession,
) -> None:
    rows = [
        parked(5, "park", attempt=3),
        parked(8, "park", attempt=0),
        parked(5),
        parked(8),
        parked(9),
        parked(15, "park", attempt=3),
        parked(15, "replay"),
    ]
    found = failed_ranges(dataset(spark, "deliveries", rows), 5).collect()
    causes = sorted((row.first_sequence, row.cause, row.attempts) for row in found)
    assert causes == [(5, "parked", 3), (8, "follower", 0), (9, "parked", None)]


def test_messages_that_are_kept_are_named_and_others_counted(spark: SparkSession) -> None:
    messages = spark.createDataFrame(
        [("s", 0, "g", 10, None, b"key", ["a", "b"], "id", at(0))],
        "subject string, partition int, broker_group string, sequence long, "
        "logical_partition int, key binary, tags array<string>, "
        "message_id string, append_time timestamp",
    )
    ranges = failed_ranges(
        dataset(spark, "deliveries", [delivery(8, 12, "expired", None, 7, attempt=None)]), 5
    )
    every = letters(messages, ranges)
    assert [
        (row.sequence, row.cause, row.consumer_group, bytes(row.key)) for row in every.collect()
    ] == [(10, "expired", "ops", b"key")]
    assert [(row.messages, row.cause) for row in dead_letters.counted(ranges, None)] == [
        (5, "expired")
    ]
    assert [(row.tag, row.messages) for row in dead_letters.tagged(every, None)] == [
        ("a", 1),
        ("b", 1),
    ]


def test_dead_letters_are_counted_by_their_headers(spark: SparkSession) -> None:
    letters_of = read(
        dead(
            spark,
            {"headers": reasons()},
            {"headers": reasons(b"late", tags=b"x")},
            {"headers": None},
            {"headers": {}},
        )
    )
    empty = failed_ranges(dataset(spark, "deliveries", []), 5)
    found = [
        (row.cause, row.consumer_group, row.messages)
        for row in dead_letters.counted(empty, letters_of)
    ]
    assert found == [("unknown", None, 2), ("boom", "ops", 1), ("late", "ops", 1)]


def test_no_dead_letter_is_clean_and_some_are_a_finding() -> None:
    assert dead_letters.report([], [], [], [], {}, 0, {}).is_clean
    row = Row(cause="boom", subject="s", consumer_group="ops", messages=3, attempts=None)
    found = dead_letters.report([row], [], [], [], {}, 0, {})
    assert (found.is_clean, found.headline) == (
        False,
        "3 messages failed for good, most of them because of 'boom' (3)",
    )
    assert dead_letters.report([row], [], [], [], {}, 3, {}).is_clean


# --- giving back ----------------------------------------------------------------------------------


def test_what_goes_out_is_the_message_as_it_was_with_a_mark_and_in_order(
    spark: SparkSession,
) -> None:
    rows = [
        {
            "headers": reasons(mine=b"1"),
            "key": b"k",
            "tags": ["t"],
            "append_time": 9,
            "sequence": 4,
        },
        {
            "headers": reasons(**{REPLAYED: b"dead/0@g#1"}),
            "key": b"k",
            "append_time": 3,
            "sequence": 2,
        },
    ]
    second, first = sorted(
        outgoing(read(dead(spark, *rows))).collect(), key=lambda row: -row.number
    )
    assert (first.number, second.number) == (0, 1)
    assert (
        second.subject,
        bytes(second.key),
        second.tags,
        bytes(second.body),
        second.message_id,
    ) == ("s", b"k", ["t"], b"0", "0" * 32)
    assert {name: bytes(value) for name, value in second.headers.items()} == {
        "mine": b"1",
        REPLAYED: b"dead/0@g#4",
    }
    assert {name: bytes(value) for name, value in first.headers.items()} == {
        REPLAYED: b"dead/0@g#2"
    }


def test_what_was_given_back_before_is_left_out(spark: SparkSession) -> None:
    found = read(
        dead(
            spark,
            {"headers": reasons()},
            {"headers": reasons()},
            {"headers": reasons(), "broker_group": "h", "sequence": 0},
        )
    )
    stored = spark.createDataFrame(
        [({REPLAYED: b"dead/0@g#0"},), ({"x": b"dead/0@g#1"},), (None,)],
        "headers map<string,binary>",
    )
    assert sorted(row.mark for row in not_replayed(found, stored).collect()) == [
        "dead/0@g#1",
        "dead/0@h#0",
    ]


class Times:
    """A clock that advances only by sleeping."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.slept.append(seconds)


def test_messages_leave_no_faster_than_the_rate() -> None:
    times = Times()
    pace = Pace(100, lambda: times.now_s, times.sleep)
    for count in (100, 50, 0, 10):
        pace.wait()
        pace.went(count)
    assert times.slept == [1.0, 0.5]
    assert pace.slice_rows == 100
    unlimited = Pace(0, lambda: times.now_s, times.sleep)
    unlimited.went(10**9)
    unlimited.wait()
    assert times.slept == [1.0, 0.5]


# --- whole ----------------------------------------------------------------------------------------


async def fail(mq: qmq.Client) -> None:
    """For an ordered subject: park the key `bad` with the messages that follow. For an unordered
    one: let a message fail repeatedly.
    """
    await mq.metadata.create_subject(
        SubjectConfig("paid", order=Order.STRICT, logical_partitions=8), partitions=2
    )
    for each in range(12):
        await mq.send(
            "paid", b"%d" % each, key="bad" if each in (3, 6) else f"k{each}", tags=["vip"]
        )

    seen: list[bytes] = []

    async def handle(message: Any) -> None:
        seen.append(message.body)
        if message.key == "bad":
            raise ValueError("no")

    async with mq.ordered_consumer(
        "paid", "ops", on_failure="park", attempts_max=2, retry_delays_s=(0.0,)
    ) as consumer:
        task = asyncio.create_task(consumer.run(handle))
        await eventually(lambda: len(set(seen)) == 11)
        async with asyncio.timeout(20):
            while sum(each.messages for each in await mq.metadata.parked("paid", "ops")) < 2:
                await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await mq.send("jobs", b"hopeless", tags=["night"])
    async with mq.consumer("jobs", "workers") as worker:
        for _ in range(3):
            (message,) = await worker.pull(1, timedelta(seconds=5))
            message.nack(timedelta(0))


def tables_of(folder: Path) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    for each in json.loads((folder / "dead_letters.json").read_text())["tables"]:
        yield each["name"], [dict(zip(each["columns"], row, strict=True)) for row in each["rows"]]


@pytest.mark.long
async def test_a_folder_of_a_node_tells_what_failed_and_why(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with running(node_config(tmp_path / "node")) as node, qmq.connect(node.address) as mq:
        await fail(mq)
    argv = f"--path {tmp_path / 'node'} --pattern .* --attempts 3 --out {tmp_path / 'out'}".split()
    assert main(dead_letters.JOB, argv, spark) == 1, capsys.readouterr().err
    tables = dict(tables_of(tmp_path / "out"))
    assert {
        (row["cause"], row["subject"], row["group"], row["messages"], row["most attempts"])
        for row in tables["causes"]
    } == {
        ("parked", "paid", "ops", 1, 2),
        ("follower", "paid", "ops", 1, 0),
        ("failing", "jobs", "workers", 1, 3),
    }
    assert {(row["cause"], row["tag"]) for row in tables["tags"]} == {
        ("parked", "vip"),
        ("follower", "vip"),
        ("failing", "night"),
    }
    assert [(row["key"], row["messages"]) for row in tables["parked_keys"]] == [("bad", 2)]
    assert spark.read.parquet(str(tmp_path / "out" / "letters.parquet")).count() == 3


@pytest.mark.long
async def test_parked_keys_are_given_back_by_the_brokers(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with running(node_config(tmp_path / "node")) as node, qmq.connect(node.address) as mq:
        await fail(mq)
        argv = ["--servers", node.address, "--subject", "paid", "--replay"]
        assert (
            await asyncio.to_thread(main, dead_letters.JOB, [*argv, "--dry-run", "--json"], spark)
            == 1
        )
        planned = json.loads(capsys.readouterr().out)["facts"]
        assert planned["would be given back by brokers"] == 2
        assert len(await mq.metadata.parked("paid", "ops")) == 1
        assert await asyncio.to_thread(main, dead_letters.JOB, [*argv, "--json"], spark) == 0
        assert json.loads(capsys.readouterr().out)["facts"]["given back by brokers"] == 2
        assert await mq.metadata.parked("paid", "ops") == []


async def send_dead(address: str) -> None:
    """20 dead letters of two subjects, for two reasons, and one without an origin."""
    async with qmq.connect(address) as mq:
        for subject in ("s", "t"):
            await mq.metadata.create_subject(SubjectConfig(subject))
        for each in range(20):
            headers = {
                "why": "boom" if each % 2 else "late",
                "where": "s" if each < 15 else "t",
                "mine": "1",
            }
            await mq.send(
                "dead", str(each).encode(), key=f"k{each % 3}", headers=headers, tags=["x"]
            )
        await mq.send("dead", b"homeless")


def test_messages_of_a_dead_letter_subject_are_sent_again_each_once(
    spark: SparkSession, node_process: NodeProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    address = node_process.start()
    asyncio.run(send_dead(address))
    names = ["--cause-header", "why", "--subject-header", "where", "--json"]
    argv = ["--servers", address, "--subject", "s", "--dead-subject", "dead", *names]

    def run(*more: str) -> dict[str, Any]:
        # the homeless one is always left
        assert main(dead_letters.JOB, [*argv, *more], spark) == 1, capsys.readouterr().err
        return json.loads(capsys.readouterr().out)["facts"]  # type: ignore[no-any-return]

    planned = run("--replay", "--dry-run")
    assert planned["dead letters"] == 21
    assert (planned["would be sent again"], planned["without original subject"]) == (20, 1)
    assert run("--replay", "--cause", "boom", "--cause", "unknown")["sent again"] == 10
    assert run("--replay", "--rate", "0")["sent again"] == 10
    last = run("--replay")
    assert (last["sent again"], last["sent again before"]) == (0, 20)
    found = asyncio.run(stored(address, {"s": 15, "t": 5, "dead": 21}))
    sent = {message.body: message for message in found["dead"]}
    for message in found["s"] + found["t"]:
        assert (message.id, message.key, message.tags) == (
            sent[message.body].id,
            sent[message.body].key,
            ("x",),
        )
        assert set(message.headers) == {"why", "where", "mine", REPLAYED}
    assert sorted(int(message.body) for message in found["s"]) == list(range(15))
    assert sorted(int(message.body) for message in found["t"]) == list(range(15, 20))
    for replay in (range(0, 15, 2), range(1, 15, 2)):
        assert [int(each.body) for each in found["s"] if int(each.body) in replay] == list(
            replay
        ), "order is not kept"


async def stored(address: str, counts: dict[str, int]) -> dict[str, list[Any]]:
    """All messages of some subjects."""
    async with qmq.connect(address) as mq:
        return {subject: await everything(mq, subject, count) for subject, count in counts.items()}


async def everything(mq: qmq.Client, subject: str, count: int) -> list[Any]:
    """All messages of a subject, in the order of the log."""
    async with mq.consumer(subject, "reader") as consumer:
        found: list[Any] = []
        while len(found) < count:
            found += await consumer.pull(count - len(found), timedelta(seconds=5))
    return sorted(found, key=lambda message: message.sequence)


def test_a_replay_needs_brokers(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(dead_letters.JOB, ["--path", str(tmp_path), "--subject", "s", "--replay"], spark) == 2
    )
    assert "--replay needs --servers" in capsys.readouterr().err


def test_keys_that_are_no_longer_parked_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, bytes]] = []

    class Metadata:
        async def unpark(
            self, subject: str, group: str, partition: int, key: bytes, *, replay: bool
        ) -> int:
            asked.append((partition, key))
            if partition == 2:
                raise qmq.errors.UnknownGroup("gone")
            return 4

    class Cluster:
        def __init__(self, addresses: list[str], *, create_subjects: bool) -> None:
            self.metadata = Metadata()

        async def close(self) -> None: ...

    monkeypatch.setattr(dead_letters, "Client", Cluster)
    keys = [
        ReplayedKey("s", "g", b"k", 5, 1),
        ReplayedKey("s", "g", b"k", 2, 1),
        ReplayedKey("s", "g", b"a", 7, 1),
    ]
    assert dead_letters.unpark("x:1", keys, Pace(0)) == 8
    assert asked == [(7, b"a"), (2, b"k"), (5, b"k")]
