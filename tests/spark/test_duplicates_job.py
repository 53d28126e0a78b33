"""The duplicates report: each cause is reported once, and a message that is stored once is not
reported.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pytest
from publishing import create_ordered, send, send_ordered
from pyspark.sql import DataFrame, SparkSession
from pyspark_qmq.jobs.duplicates import CAUSES, JOB, copies, gaps, prepare, report, same_content
from pyspark_qmq.jobs.job import main
from support import NodeProcess

pytestmark = pytest.mark.sampled

BEGIN = datetime(2026, 11, 21, 9, tzinfo=UTC)
TYPES = {
    "subject": pa.string(),
    "partition": pa.int32(),
    "broker_group": pa.string(),
    "sequence": pa.int64(),
    "route_version": pa.int64(),
    "key": pa.binary(),
    "headers": pa.map_(pa.string(), pa.binary()),
    "message_id": pa.string(),
    "append_time": pa.timestamp("us", "UTC"),
    "producer_id": pa.string(),
    "batch_sequence": pa.int64(),
    "place": pa.int32(),
    "body": pa.binary(),
}


@dataclass(frozen=True, slots=True)
class Stored:
    """A message. `number` is its batch's; the default body is the number."""

    subject: str
    producer: int
    number: int
    sequence: int
    partition: int = 0
    broker_group: str = "a"
    key: bytes | None = None
    message_id: str = ""
    headers: tuple[tuple[str, bytes], ...] = ()
    body: bytes = b""
    after_s: int = 0

    def row(self) -> dict[str, object]:
        """The row as the data source returns it."""
        message_id = self.message_id or f"{self.producer:016x}{self.number:012x}0000"
        return {
            "subject": self.subject,
            "partition": self.partition,
            "broker_group": self.broker_group,
            "sequence": self.sequence,
            "route_version": self.partition or None,
            "key": self.key,
            "headers": list(self.headers) or None,
            "message_id": message_id,
            "append_time": BEGIN + timedelta(seconds=self.after_s),
            "producer_id": f"{self.producer:016x}",
            "batch_sequence": self.number,
            "place": 0,
            "body": self.body or b"%d %d" % (self.producer, self.number),
        }


def frame(spark: SparkSession, messages: list[Stored]) -> DataFrame:
    rows = [each.row() for each in messages]
    return spark.createDataFrame(
        pa.table(
            {name: pa.array([row[name] for row in rows], kind) for name, kind in TYPES.items()}
        )
    )


def told(found: DataFrame) -> set[tuple[str, str, int, int, int]]:
    """The reported rows: (cause, subject, partition, sequence, sequence of the earlier message)."""
    return {
        (row["cause"], row["subject"], row["partition"], row["sequence"], row["earlier_sequence"])
        for row in found.collect()
    }


def unordered(subject: str) -> list[Stored]:
    return [Stored(subject, 1, number, number) for number in range(4)]


def ordered(subject: str, again: list[int]) -> list[Stored]:
    """Partition 1 stored messages 0 to 3 of one key, and partition 2 those in `again`."""
    first = [Stored(subject, 1, number, number, partition=1, key=b"k") for number in range(4)]
    copied = [
        Stored(subject, 2, place, place, 2, "b", b"k", f"{1:016x}{number:012x}0000", after_s=60)
        for place, number in enumerate(again)
    ]
    return first + copied


@pytest.mark.long
def test_each_cause_is_reported(spark: SparkSession) -> None:
    carried = f"{1:016x}{2:012x}0000"
    messages = [
        *unordered("once"),
        *unordered("directed"),
        Stored(
            "directed",
            9,
            0,
            4,
            message_id=carried,
            headers=(("qmq-group", b"g"), ("qmq-attempt", b"2")),
        ),
        *unordered("stored-twice"),
        replace(unordered("stored-twice")[2], sequence=4),
        *unordered("two-queues"),
        replace(unordered("two-queues")[2], sequence=0, broker_group="b", after_s=1),
        *unordered("repeated"),
        Stored("repeated", 9, 0, 4, message_id=carried),
        *ordered("replay", [1, 2, 3, 4]),
        *ordered("broken", [1, 3, 4]),
        *unordered("gap")[:2],
        *unordered("gap")[3:],
    ]
    rows = prepare(frame(spark, messages))
    assert told(copies(rows)) == {
        ("directed", "directed", 0, 4, 2),
        ("stored_twice", "stored-twice", 0, 4, 2),
        ("two_queues", "two-queues", 0, 0, 2),
        ("repeated", "repeated", 0, 4, 2),
        ("replay", "replay", 2, 0, 1),
        ("replay", "replay", 2, 1, 2),
        ("replay", "replay", 2, 2, 3),
        ("broken_replay", "broken", 2, 0, 1),
        ("broken_replay", "broken", 2, 1, 3),
    }
    assert told(gaps(rows)) == {("gap", "gap", 0, 3, 1)}
    found = report(rows, copies(rows).unionByName(gaps(rows)))
    assert not found.is_clean
    assert (
        found.headline
        == "2 broken_replay, 1 stored_twice, 1 two_queues, 1 repeated, 1 gap among 42 messages"
    )
    assert [row[:2] for row in found.tables[0].rows] == [
        ("replay", 3),
        ("directed", 1),
        ("broken_replay", 2),
        ("stored_twice", 1),
        ("two_queues", 1),
        ("repeated", 1),
        ("same_content", 0),
        ("gap", 1),
    ]
    assert found.counterexample.splitlines()[:4] == [
        f"broken_replay: {CAUSES['broken_replay']}",
        "  subject  broken, key k",
        (
            "  first    queue 1@a, sequence 1, stored 2026-11-21T09:00:00.000Z, message "
            "00000000000000010000000000010000"
        ),
        (
            "  then     queue 2@b, sequence 0, stored 2026-11-21T09:01:00.000Z, message "
            "00000000000000010000000000010000"
        ),
    ]
    (plot,) = found.plots
    assert (plot.x[0], plot.series["replay"]) == (BEGIN, [3.0])


@pytest.mark.long
def test_allowed_copies_are_not_findings(spark: SparkSession) -> None:
    rows = prepare(frame(spark, [*ordered("replay", [2, 3, 4]), *unordered("once")]))
    found = report(rows, copies(rows).unionByName(gaps(rows)))
    assert found.is_clean
    assert found.headline == (
        "11 messages, each stored once, but for 2 allowed copies, and no sequence is missing "
        "between them"
    )
    assert found.counterexample == ""


def test_what_an_application_sent_twice_is_found_by_content_within_the_window(
    spark: SparkSession,
) -> None:
    def paid(
        number: int, sequence: int, after_s: int, *, key: bytes = b"k", body: bytes = b"paid"
    ) -> Stored:
        return Stored("s", 1, number, sequence, key=key, body=body, after_s=after_s)

    messages = [
        paid(0, 0, 0),
        paid(1, 1, 10),
        paid(2, 2, 20, key=b"other"),
        paid(3, 3, 30, body=b"owed"),
        paid(4, 4, 71),
        paid(5, 5, 131),
        replace(paid(5, 6, 132), producer=7, message_id=f"{1:016x}{5:012x}0000"),
    ]
    rows = prepare(frame(spark, messages))
    assert told(same_content(rows, 60)) == {
        ("same_content", "s", 0, 1, 0),
        ("same_content", "s", 0, 5, 4),
    }
    assert told(copies(rows)) == {("repeated", "s", 0, 6, 5)}


def test_a_real_log_is_clean_until_the_same_is_sent_twice(
    spark: SparkSession,
    node_process: NodeProcess,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    server = node_process.start()
    send(server, "s", [f"{number}" for number in range(500)])
    create_ordered(server, "ordered", 2)
    send_ordered(
        server,
        "ordered",
        [
            (f"key-{number % 7}", "paid" if number in (3, 10) else f"{number}")
            for number in range(500)
        ],
    )
    here = ["--servers", server, "--pattern", ".*"]
    assert main(JOB, [*here, "--json"], spark) == 0, capsys.readouterr().err
    assert (
        json.loads(capsys.readouterr().out)["headline"]
        == "1,000 messages, each stored once, and no sequence is missing between them"
    )
    assert main(JOB, [*here, "--by-content", "--out", str(tmp_path)], spark) == 1
    assert "FINDINGS: 1 same_content among 1,000 messages" in capsys.readouterr().out
    (found,) = spark.read.parquet(str(tmp_path / "duplicates.parquet")).collect()
    assert (found["cause"], found["subject"], bytes(found["key"])) == (
        "same_content",
        "ordered",
        b"key-3",
    )
    assert (tmp_path / "duplicates.html").exists()
    assert main(JOB, [*here, "--window-s", "0"], spark) == 2
