"""A micro-batch that is planned again has the same tasks, though its source grows, shrinks or moves
meanwhile. Without a JVM.
"""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path

import pytest
from file_support import Traffic, forget_old, mark, rows_of
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.streaming.datasource import ReadAllAvailable
from pyspark.sql.types import StructType
from pyspark_qmq.reader import TaskPartition
from pyspark_qmq.stream import LogStreamReader
from qmq_ordering.routes import LpRange
from sink_node import node_thread

import qmq
from qmq.columns.model import (
    ALL,
    QueueKey,
    QueuePiece,
    ReadSelection,
    RoutePartition,
    Routes,
    SourceQueue,
    Topology,
)
from qmq.columns.options import parse
from qmq.columns.planning import Plan, are_cut, per_task, stream_tasks
from qmq.errors import InvalidArgument, MessagesExpired

GROUPS = ("g1", "g2", "g3", "g4")
SUBJECTS = ("bank", "clicks", "orders")
Ranges = list[tuple[QueueKey, int, int] | None]


class WholeLog:
    """A log that knows the sizes of now, and cuts by them, as brokers do."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology

    def pieces(self, queue: QueueKey, first: int, end: int, bytes_max: int) -> list[QueuePiece]:
        found = self._topology.queues.get(queue)
        size = (
            found.stored_bytes / max(found.end - found.start, 1) * (end - first)
            if found is not None
            else 0.0
        )
        count = min(max(int(size // bytes_max) + 1, 1), end - first)
        marks = (
            [first + (end - first) * each // count for each in range(count + 1)]
            if count
            else [first]
        )
        return [QueuePiece(queue, a, b) for a, b in pairwise(marks)]


def partition_of(subject: str) -> int:
    """The subject `bank` is ordered."""
    return 1 if subject == "bank" else 0


@st.composite
def topologies(draw: st.DrawFn, ends: st.SearchStrategy[int]) -> Topology:
    """Queues of any sizes; the routes of the ordered subject are known."""
    queues: dict[QueueKey, SourceQueue] = {}
    for key in draw(
        st.sets(
            st.builds(QueueKey, st.sampled_from(SUBJECTS), st.just(0), st.sampled_from(GROUPS)),
            max_size=8,
        )
    ):
        own = key._replace(partition=partition_of(key.subject))
        end = draw(ends)
        queues[own] = SourceQueue(
            own, draw(st.integers(0, end)), end, draw(st.integers(0, 5_000)) * end
        )
    part = RoutePartition(1, LpRange(0, 512), "g1", 1)
    return Topology(queues, {"bank": Routes(1024, 1, {1: part} if draw(st.booleans()) else {})})


def planned(
    topology: Topology,
    start: dict[QueueKey, int],
    end: dict[QueueKey, int],
    cuts: dict[str, int],
    **options: object,
) -> Ranges:
    selection = ReadSelection(keys=(b"k",)) if options.get("has_keys") else ALL
    found = stream_tasks(WholeLog(topology), topology, start, end, cuts, selection)  # type: ignore[arg-type]
    return [
        None if each is None else (each.piece.queue, each.piece.first, each.piece.end)
        for each in found
    ]


@given(
    topologies(st.integers(1, 2_000)),
    topologies(st.integers(1, 4_000)),
    st.data(),
    st.builds(Plan, st.integers(1, 200_000), st.integers(1, 9)),
    st.booleans(),
)
def test_tasks_follow_from_offsets_whatever_changes_between_two_plans(
    before: Topology, after: Topology, data: st.DataObject, plan: Plan, has_keys: bool
) -> None:
    end = {key: queue.end for key, queue in before.queues.items()}
    start = {key: data.draw(st.integers(0, at)) for key, at in end.items()}
    cuts = per_task(before, start, end, plan)
    assert are_cut(start, end, cuts)
    first = planned(before, start, end, cuts, has_keys=has_keys)
    again = planned(after, start, end, cuts, has_keys=has_keys)
    assert len(again) == len(first), "a sink knows rows by the number of their task"
    for one, other in zip(first, again, strict=True):
        if one is not None and other is not None:
            assert one[0] == other[0]
            lost = max(
                before.queues[one[0]].start,
                after.queues[one[0]].start if one[0] in after.queues else 0,
            )
            assert max(one[1], lost) == max(other[1], lost), (
                "only what retention deleted is missing"
            )
            assert one[2] == other[2]


@given(
    topologies(st.integers(1, 2_000)), st.builds(Plan, st.integers(1, 200_000), st.integers(1, 9))
)
def test_the_tasks_of_a_micro_batch_have_each_message_once(topology: Topology, plan: Plan) -> None:
    end = {key: queue.end for key, queue in topology.queues.items()}
    start = {key: queue.start for key, queue in topology.queues.items()}
    found = planned(topology, start, end, per_task(topology, start, end, plan))
    covered: dict[QueueKey, int] = dict(start)
    for each in found:
        assert each is not None
        assert each[1] == covered[each[0]]
        covered[each[0]] = each[2]
    assert covered == {key: max(start[key], at) for key, at in end.items()}


# --- real files -----------------------------------------------------------------------------------


def driver(**options: str) -> LogStreamReader:
    """The source as another driver makes it."""
    found = LogStreamReader(
        parse({"startingOffsets": "earliest", **options}, is_stream=True), StructType()
    )
    found.stop()  # forgets what an earlier one knew
    return found


def pieces_of(
    reader: LogStreamReader, start: dict[str, dict[str, int]], end: dict[str, dict[str, int]]
) -> list[QueuePiece | None]:
    parts = [each for each in reader.partitions(start, end) if isinstance(each, TaskPartition)]
    return [None if each.task is None else each.task.piece for each in parts]


def spans(pieces: list[QueuePiece | None]) -> Ranges:
    return [None if each is None else (each.queue, each.first, each.end) for each in pieces]


@pytest.mark.parametrize("count", [1, 3, 40])
def test_a_file_stream_has_the_same_tasks_and_rows_after_more_and_larger_messages(
    traffic: Traffic, count: int
) -> None:
    for _ in range(60):
        traffic.send("a")
    mark(traffic.store)
    options = {"path": str(traffic.folder), "subscribe": "a", "maxBytesPerPartition": "900"}
    reader = driver(**options)
    start = reader.initialOffset()
    end = reader.latestOffset(start, ReadAllAvailable())
    first = pieces_of(reader, start, end)
    rows = [rows_of([each]) for each in first if each is not None]
    assert len(rows) > 3
    for _ in range(count):
        traffic.send("a", count=traffic.random.randrange(1, 60))
        traffic.send("b", count=traffic.random.randrange(1, 60))
    mark(traffic.store)
    again = pieces_of(driver(**options, minPartitions="50"), start, end)
    assert spans(again) == spans(first)
    assert [rows_of([each]) for each in again if each is not None] == rows
    assert [row for each in rows for row in each] == traffic.sent["a", 0][
        : len([row for each in rows for row in each])
    ]


def test_a_file_stream_whose_messages_retention_deleted_keeps_its_cuts_or_fails(
    traffic: Traffic,
) -> None:
    for _ in range(60):
        traffic.send("a")
    mark(traffic.store)
    options = {"path": str(traffic.folder), "subscribe": "a", "maxBytesPerPartition": "900"}
    reader = driver(**options)
    start = reader.initialOffset()
    end = reader.latestOffset(start, ReadAllAvailable())
    first = pieces_of(reader, start, end)
    while traffic.store.queue("a", 0).start_sequence < end["a"]["0@g1"] // 2:  # type: ignore[union-attr]
        traffic.send("a", count=5)
        forget_old(traffic.store, retention_ms=550)
    mark(traffic.store)
    with pytest.raises(MessagesExpired):
        driver(**options).partitions(start, end)
    left = pieces_of(driver(**options, failOnDataLoss="false"), start, end)
    assert len(left) == len(first)
    assert left[0] is None
    for one, other in zip(first, left, strict=True):
        assert other is None or (
            one is not None and other.end == one.end and other.first >= one.first
        )


def test_offsets_without_news_stay_the_same_text_and_offsets_of_release_0_2_go_on(
    traffic: Traffic,
) -> None:
    for _ in range(60):
        traffic.send("a")
    mark(traffic.store)
    options = {"path": str(traffic.folder), "subscribe": "a", "maxBytesPerPartition": "900"}
    reader = driver(**options)
    end = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    assert reader.latestOffset(end, ReadAllAvailable()) == end
    old = {"a": {"0@g1": end["a"]["0@g1"]}}
    assert reader.latestOffset(old, ReadAllAvailable()) == old
    assert end == old | {"a": {**old["a"], "messagesPerTask": end["a"]["messagesPerTask"]}}
    planned_by_size = pieces_of(reader, {"a": {"0@g1": 0}}, old)
    assert [each for each in spans(planned_by_size) if each is not None][-1][2] == old["a"]["0@g1"]
    assert len(planned_by_size) > 3
    with pytest.raises(InvalidArgument, match="messagesPerTask"):
        reader.partitions({"a": {"0@g1": 0}}, {"a": {"0@g1": 3, "messagesPerTask": 0}})


# --- a real node ----------------------------------------------------------------------------------


def test_a_stream_from_brokers_has_the_same_tasks_after_larger_messages(tmp_path: Path) -> None:
    with node_thread(tmp_path) as node:
        node.create("in")

        async def send(count: int, size: int) -> None:
            async with qmq.connect(node.address) as mq:
                await asyncio.gather(
                    *[mq.send("in", b"%06d" % number + bytes(size)) for number in range(count)]
                )

        node.run(send(300, 200))
        options = {"qmq.servers": node.address, "subscribe": "in", "maxBytesPerPartition": "25000"}
        reader = driver(**options)
        start = reader.initialOffset()
        end = reader.latestOffset(start, ReadAllAvailable())
        first = spans(pieces_of(reader, start, end))
        node.run(send(200, 5_000))
        again = spans(pieces_of(driver(**options), start, end))
        reader.stop()
    assert again == first
    assert 2 < len(first) < 20
