"""Ordered load against a node process: through all changes of the route the history keeps every
promise, and a followed table equals the source.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from binlog import OutOfOrder, Source
from history.events import load
from history.ordered.checkers import OrderedReport
from history.ordered.events import Deliver
from support import NodeProcess, eventually
from system.ordered_workload import (
    ConsumerProcess,
    Follower,
    Item,
    OrderedWorkload,
    binlog_sources,
    flight_sources,
    followed,
    parse,
)

import qmq
from qmq.model import Order, SubjectConfig
from qmq.proto.v1 import meta_pb2 as pb

ROWS = int(os.environ.get("QMQ_BINLOG_ROWS", "20000"))
SLOW_S = 120.0
"""Durations do not matter here."""


async def create(server: str, subject: str, partitions: int) -> None:
    async with qmq.connect(server) as client:
        await client.metadata.create_subject(
            SubjectConfig(subject, order=Order.STRICT, logical_partitions=1024),
            partitions=partitions,
        )


@asynccontextmanager
async def closing(work: OrderedWorkload) -> AsyncIterator[OrderedWorkload]:
    try:
        yield work
    finally:
        await work.close()


async def change(work: OrderedWorkload, **operation: object) -> None:
    """One change of the route under load."""
    await work.wait_for_acks(1_000)
    await work.client.metadata.change_route(work.subject, **operation)  # type: ignore[arg-type]
    await work.wait_for_acks(1_000)


async def stop(work: OrderedWorkload) -> OrderedReport:
    return await work.stop(slow_s=SLOW_S)


@pytest.mark.long
async def test_flights_of_each_aircraft_stay_in_order_through_route_changes(
    node_process: NodeProcess, tmp_path: Path
) -> None:
    server = node_process.start()
    await create(server, "flights", 2)
    load_ = OrderedWorkload(
        server,
        "flights",
        tmp_path / "h.jsonl",
        sources=flight_sources(2),
        consumers={"g": 2, "h": 1},
    )
    async with closing(load_) as work:
        await work.start()
        await change(work, split=pb.SplitOperation(partition=1, at=[100, 300]))
        await change(work, merge=pb.MergeOperation(partitions=[4, 5]))
        await change(work, move=pb.MoveOperation(partition=2, broker_group="broker-0"))
        report = await stop(work)
    assert report.ok, report
    assert (report.counts["changes"], report.counts["failed"], report.counts["unknown"]) == (
        3,
        0,
        0,
    )
    assert report.counts["deliveries"] >= 2 * report.counts["acknowledged"] >= 12_000
    assert report.write_pauses["a change"].found_ns


@pytest.mark.long
async def test_a_table_that_follows_a_binlog_through_route_changes_equals_the_source(
    node_process: NodeProcess, tmp_path: Path
) -> None:
    server, source, follower = node_process.start(), Source(seed=3, keys=10_000), Follower()
    await create(server, "binlog", 2)
    sources = binlog_sources(2, source, ROWS)
    load_ = OrderedWorkload(
        server,
        "binlog",
        tmp_path / "h.jsonl",
        sources=sources,
        consumers={"g": 2},
        followers={"g": follower},
    )
    async with closing(load_) as work:
        await work.start()
        await change(work, split=pb.SplitOperation(partition=2, at=[700]))
        await change(work, merge=pb.MergeOperation(partitions=[1, 3]))
        await work.wait_for_end()
        report = await stop(work)
    assert report.ok, report
    assert report.counts["acknowledged"] == ROWS
    assert follower.replica.dump() == source.dump()
    changes = list(Source(seed=3, keys=10_000).changes(ROWS))
    assert followed(load(tmp_path / "h.jsonl"), changes, "g") == source.dump(), (
        "the history alone tells it as well"
    )


async def test_a_change_that_comes_out_of_order_stops_the_workload(
    node_process: NodeProcess, tmp_path: Path
) -> None:
    """The follower detects it: here the producer itself leaves out one change of each key."""
    server, follower = node_process.start(), Follower()
    await create(server, "binlog", 1)
    changes = [
        Item(each.key, each.encode())
        for each in Source(seed=3, keys=5).changes(500)
        if each.serial != 2
    ]
    load_ = OrderedWorkload(
        server,
        "binlog",
        tmp_path / "h.jsonl",
        sources=[iter(changes)],
        consumers={"g": 1},
        followers={"g": follower},
    )
    async with closing(load_) as work:
        await work.start()
        await work.wait_for_end()
        with pytest.raises(OutOfOrder, match="when change 2 was to come"):
            await stop(work)


async def test_a_killed_or_stopped_consumer_leaves_a_history_that_keeps_every_promise(
    node_process: NodeProcess, tmp_path: Path
) -> None:
    server, path = node_process.start(), tmp_path / "h.jsonl"
    await create(server, "flights", 2)
    load_ = OrderedWorkload(
        server, "flights", path, sources=flight_sources(2), consumers={"g": 1}, elsewhere=["h"]
    )
    other = ConsumerProcess(server, "flights", "h", "h-0", path, lease_ms=1_000)
    try:
        async with closing(load_) as work:
            other.start()
            await work.start()
            await given(path, "h", 500)
            other.kill()
            assert not other.is_alive
            other.start()
            await given(path, "h", 1_000)
            other.pause()
            await asyncio.sleep(1.5)  # the fault itself: longer than its lease
            other.resume()
            await given(path, "h", 2_000)
            report = await stop(work)
        other.stop()
    finally:
        other.kill()
    assert report.ok, report
    lives = {
        event.process for event in load(path) if isinstance(event, Deliver) and event.group == "h"
    }
    assert len(lives) == 2


async def given(path: Path, group: str, count: int) -> None:
    """Wait until the history has this many deliveries to a group."""

    def seen() -> int:
        return sum(isinstance(event, Deliver) and event.group == group for event in load(path))

    await eventually(lambda: seen() >= count, within_s=240.0, look_s=0.1)


def test_a_body_names_its_sender() -> None:
    assert parse(b"p0 17\nAda,1\n2") == ("p0", 17, b"Ada,1\n2")


def test_sources_share_keys_out_and_keep_their_order() -> None:
    one, two = [list(source) for source in binlog_sources(2, Source(seed=1, keys=50), 1_000)]
    assert not {item.key for item in one} & {item.key for item in two}
    assert len(one) + len(two) == 1_000
    first = next(flight_sources(1)[0])
    assert first.key.encode() in first.payload
