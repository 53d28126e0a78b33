"""`transformWithState` over an ordered subject: sessions of a key, whose events come in their order
across splits, merges, moves and restarts.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from publishing import change_route, create_ordered, send_ordered
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle
from support import NodeProcess

from qmq.proto.v1 import meta_pb2 as pb

pytestmark = [pytest.mark.long, pytest.mark.smoke]
STORE = "spark.sql.streaming.stateStore.providerClass"
ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
KEYS = 12


def events(count: int) -> list[tuple[str, str]]:
    """Key and event, numbered by key: each session has an `open`, then as many `step` as its
    number, then a `close`.
    """
    at = dict.fromkeys(range(KEYS), (1, 0, 0))
    found = []
    for number in range(count):
        key = number % KEYS
        session, done, sequence = at[key]
        kind = "open" if done == 0 else "step" if done <= session else "close"
        found.append((f"k{key:02}", f"{sequence} {kind}"))
        is_last = kind == "close"
        at[key] = (session + is_last, 0 if is_last else done + 1, sequence + 1)
    return found


def sessions_by_key() -> StatefulProcessor:
    """Emits each finished session, and each event that is not the next one of its key. It is
    defined in a function, so that executors get it by value."""

    class Sessions(StatefulProcessor):
        def init(self, handle: StatefulProcessorHandle) -> None:
            self.state = handle.getValueState("open", "session int, steps int, due int")

        def handleInputRows(self, key: Any, rows: Iterator[Any], timers: Any) -> Iterator[Row]:
            session, steps, due = self.state.get() if self.state.exists() else (1, 0, 0)
            for row in sorted(rows, key=lambda each: each.sequence):
                number, kind = bytes(row.body).decode().split()
                if int(number) != due:
                    yield Row(key=key[0], session=-1, steps=int(number))
                due = int(number) + 1
                steps += kind == "step"
                if kind == "close":
                    yield Row(key=key[0], session=session, steps=steps)
                    session, steps = session + 1, 0
            self.state.update((session, steps, due))

        def close(self) -> None:
            """Nothing is open."""

    return Sessions()


@pytest.fixture
def rocksdb(spark: SparkSession) -> Iterator[None]:
    before = spark.conf.get(STORE)
    spark.conf.set(STORE, ROCKSDB)
    yield
    spark.conf.set(STORE, str(before))


@pytest.mark.usefixtures("rocksdb")
def test_sessions_of_keys_are_whole_across_route_changes_and_restarts(
    spark: SparkSession, node_process: NodeProcess, tmp_path: Path
) -> None:
    server = node_process.start()
    create_ordered(server, "visits", partitions=2)
    sent = events(1_200)
    found: dict[int, list[Row]] = {}

    def keep(frame: DataFrame, number: int) -> None:
        found[number] = frame.collect()

    def run() -> None:
        """Run the query to the present end, from its checkpoint."""
        visits = (
            spark.readStream.format("qmq")
            .options(**{"qmq.servers": server, "subscribe": "visits"})
            .options(**{"startingOffsets": "earliest", "maxOffsetsPerTrigger": "150"})
            .load()
            .selectExpr("cast(key as string) as key", "body", "sequence")
        )
        sessions = visits.groupBy("key").transformWithState(
            statefulProcessor=sessions_by_key(),
            outputStructType="key string, session int, steps int",
            outputMode="Append",
            timeMode="None",
        )
        writer = sessions.writeStream.foreachBatch(keep).outputMode("append")
        writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint"))
        writer.trigger(availableNow=True).start().awaitTermination()

    changes: list[dict[str, Any]] = [
        {"split": pb.SplitOperation(partition=1, at=[200])},
        {"merge": pb.MergeOperation(partitions=[4, 2])},
        {"move": pb.MoveOperation(partition=3, broker_group="broker-0")},
    ]
    for part in range(4):
        send_ordered(server, "visits", sent[part * 300 : part * 300 + 300])
        if part % 2:
            run()
        if part < len(changes):
            change_route(server, "visits", **changes[part])
    whole = [(key, int(body.split()[0])) for key, body in sent if body.endswith("close")]
    emitted = sorted((row.key, row.session, row.steps) for rows in found.values() for row in rows)
    expected = []
    for key in sorted({key for key, _ in whole}):
        count = sum(each == key for each, _ in whole)
        expected += [(key, session, session) for session in range(1, count + 1)]
    assert emitted == expected
    assert len(found) > 8, "in many micro-batches"
