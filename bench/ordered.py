"""Benchmarks of ordered subjects: produce and consume rates compared with unordered ones, draining a backlog by lanes, and route changes.

Handlers that "take 1 ms" sleep for a millisecond, like a database query. Consumers of one process share its event loop.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final

import qmq
from bench.group import ReplicaSet
from bench.processes import Node, in_loop, together
from qmq.model import Order, SubjectConfig
from qmq.proto.v1 import meta_pb2 as pb

KEYS: Final = 10_000
HANDLER_S: Final = 0.001
BACKLOG: Final = 6_000
"""Messages for each consumer of a drain: some seconds."""
QUIET_S: Final = 3
"""A drain ends after this many seconds without a message."""


def keys_of(count: int) -> list[bytes]:
    """Keys of `count` messages, drawn from `KEYS` keys in random order."""
    return [b"key-%05d" % (number * 7919 % KEYS) for number in range(count)]


async def create(address: str, order: Order, partitions: int = 0, groups: Sequence[str] = ()) -> None:
    async with qmq.connect(address) as mq:
        lps = 1024 if order is not Order.NONE else 0
        config = SubjectConfig("bench", order=order, logical_partitions=lps, groups=tuple(groups))
        await mq.metadata.create_subject(config, partitions=partitions)


# --- in and out ----------------------------------------------------------------------------------------------------------


async def produce_keyed(address: str, count: int, size: int, mode: str, is_ordered: bool) -> float:
    """Send `count` messages with keys. Returns the monotonic time of the first send, in seconds."""
    async with qmq.connect(address) as mq:
        producer: Any = mq.ordered_producer("bench") if is_ordered else mq.producer("bench")
        bodies, keys = [os.urandom(size) for _ in range(1000)], keys_of(KEYS)
        await producer.send(b"ready", key=b"k")
        await asyncio.sleep(0.3)
        begin = time.monotonic()
        for number in range(count // 1000):
            part = keys[number * 1000 % KEYS :][:1000]
            if mode == "send":
                send = producer.send
                for body, key in zip(bodies, part, strict=True):
                    send(body, key)
            else:
                producer.send_many(bodies, part)
            await (producer.drain() if producer.full else asyncio.sleep(0))
        await producer.flush()
        return begin


async def consume_keyed(address: str, count: int, is_ordered: bool) -> float:
    """Consume all messages in bulk. Returns the time at which the last was decoded."""
    async with qmq.connect(address) as mq:
        make: Any = mq.ordered_consumer if is_ordered else mq.consumer
        consumer, got = make("bench", "g", prefetch=100_000), 0
        while got < count + 1:
            found = await consumer.pull(100_000)
            got += len(found.bodies)
            found.ack_later()
        return time.monotonic()


def throughput(count: int, size: int, mode: str, partitions: int = 0) -> float:
    """Keyed messages per second, from the first send to the last decode; with 0 partitions, on an unordered subject."""
    node = Node()
    try:
        in_loop(create, node.address, Order.STRICT if partitions else Order.NONE, partitions)
        is_ordered = partitions > 0
        begin, end = together(
            (produce_keyed, node.address, count, size, mode, is_ordered), (consume_keyed, node.address, count, is_ordered)
        )
        return float(count / (end - begin))
    finally:
        node.stop()


# --- lanes ---------------------------------------------------------------------------------------------------------------


async def fill_and_seal(address: str, count: int) -> None:
    """A backlog in one partition, which is then closed by a split."""
    await create(address, Order.STRICT, 1)
    async with qmq.connect(address) as mq:
        async with mq.ordered_producer("bench") as producer:
            for start in range(0, count, 1000):
                producer.send_many([b"%d" % number for number in range(start, start + 1000)], keys_of(start + 1000)[start:])
                await producer.drain()
        await mq.metadata.change_route("bench", split=pb.SplitOperation(partition=1))


async def drain(address: str, group: str, names: Sequence[str], begin: float) -> list[float]:
    """The times at which one process's consumers handled each message; ends when no more messages arrive."""
    handled: list[float] = []

    async def handle(_: Any) -> None:
        await asyncio.sleep(HANDLER_S)
        handled.append(time.monotonic())

    async with qmq.connect(address) as mq:
        await asyncio.sleep(max(begin - time.monotonic(), 0))
        members = [mq.ordered_consumer("bench", group, name=name) for name in names]
        running = [asyncio.create_task(member.run(handle, concurrency=1)) for member in members]
        seen, quiet_s = 0, 0
        while quiet_s < (QUIET_S if handled else 5 * QUIET_S):
            await asyncio.sleep(1)
            quiet_s, seen = quiet_s + 1 if len(handled) == seen else 0, len(handled)
        for member in members:
            await member.close()
        await asyncio.gather(*running)
    return handled


def drain_rates(consumers: int, each: int) -> dict[str, float]:
    """Messages per second of several consumers on one sealed partition, with `each` messages per consumer: from the first handled message
    to
    the last, and over the middle half, when all consumers have joined and none is done.
    """
    node = Node()
    try:
        count = each * consumers
        together((fill_and_seal, node.address, count))
        processes = min(consumers, 4)
        names = [[f"c{number:02d}" for number in range(place, consumers, processes)] for place in range(processes)]
        begin = time.monotonic() + 1.5
        parts = together(*[(drain, node.address, "g", part, begin) for part in names])
        handled = sorted(each for part in parts for each in part)
        assert len(handled) == count, f"{len(handled)} of {count} messages were handled"
        return {
            "messages/s": (count - 1) / (handled[-1] - handled[0]),
            "in the middle, messages/s": count // 2 / (handled[count * 3 // 4] - handled[count * 3 // 4 - count // 2]),
        }
    finally:
        node.stop()


# --- changes -------------------------------------------------------------------------------------------------------------


async def changing(address: str, changes: int, groups: Sequence[str]) -> dict[str, float]:
    """Make splits, moves and merges under load. Returns the durations of refused writes and consumer pauses, in milliseconds."""
    await create(address, Order.STRICT, 2, groups)
    async with qmq.connect(address) as mq:
        handled: list[float] = []
        is_over = False

        async def handle(_: Any) -> None:
            handled.append(time.monotonic())

        async def load() -> None:
            async with mq.ordered_producer("bench") as producer:
                keys = keys_of(KEYS)
                number = 0
                while not is_over:
                    for _ in range(20):
                        producer.send(b"x" * 100, keys[number % KEYS])
                        number += 1
                    await asyncio.sleep(0.002)

        members = [mq.ordered_consumer("bench", "g", name=f"c{number}") for number in range(2)]
        running = [asyncio.create_task(member.run(handle, concurrency=64)) for member in members]
        loading = asyncio.create_task(load())
        await asyncio.sleep(1)
        windows, marks = [], []
        for number in range(changes):
            route = (await mq.metadata.describe_route("bench")).route
            marks.append(time.monotonic())
            change = (await mq.metadata.change_route("bench", **_operation(route, number, groups))).change
            windows.append(change.times_ms["published"] - change.times_ms["prepared"])
            await asyncio.sleep(0.3)
        is_over = True
        await loading
        pauses = [_longest_gap(handled, mark, mark + 0.3) for mark in marks]
        for member in members:
            await member.close()
        await asyncio.gather(*running)
        return {
            "refused writes, ms, p50": statistics.median(windows),
            "refused writes, ms, p99": _high(windows),
            "consumer pause, ms, p50": statistics.median(pauses) * 1000,
            "consumer pause, ms, p99": _high(pauses) * 1000,
        }


def _operation(route: pb.OrderedRoute, number: int, groups: Sequence[str]) -> dict[str, Any]:
    parts = route.partitions
    if number % 3 == 0:
        return {"split": pb.SplitOperation(partition=max(parts, key=lambda part: part.lps.end - part.lps.first).number)}
    if number % 3 == 1:
        return {"move": pb.MoveOperation(partition=parts[0].number, broker_group=groups[number // 3 % len(groups)])}
    return {"merge": pb.MergeOperation(partitions=[parts[0].number, parts[1].number])}


def _longest_gap(times: Sequence[float], begin: float, end: float) -> float:
    inside = [begin, *[each for each in times if begin <= each <= end], end]
    return max(b - a for a, b in pairwise(inside))


def _high(values: Sequence[float]) -> float:
    return sorted(values)[int(len(values) * 0.99)]


async def split_over_groups(address: str, seconds: float, groups: Sequence[str]) -> dict[str, float]:
    """One producer's acknowledged messages per second before, during (one second around it) and after a split to another broker group."""
    await create(address, Order.STRICT, 1, groups[:1])
    async with qmq.connect(address) as mq, mq.ordered_producer("bench") as producer:
        stored: list[float] = []
        bodies, keys = [os.urandom(100) for _ in range(1000)], keys_of(KEYS)
        sent: asyncio.Queue[Any] = asyncio.Queue()
        changed: list[float] = []

        async def count_stored() -> None:
            while (tickets := await sent.get()) is not None:
                await tickets
                stored.append(time.monotonic())

        async def split() -> None:
            await asyncio.sleep(seconds)
            operation = pb.SplitOperation(partition=1, broker_groups=list(groups[:2]))
            await mq.metadata.change_route("bench", split=operation)
            changed.append(time.monotonic())

        counting, splitting = asyncio.create_task(count_stored()), asyncio.create_task(split())
        begin, number = time.monotonic(), 0
        while time.monotonic() < begin + 2 * seconds:
            sent.put_nowait(producer.send_many(bodies, keys[number * 1000 % KEYS :][:1000]))
            number += 1
            await (producer.drain() if producer.full else asyncio.sleep(0))
        sent.put_nowait(None)
        await asyncio.gather(counting, splitting)
        middle = changed[0]
        return {
            "before": 1000 * sum(each < middle - 0.5 for each in stored) / (middle - 0.5 - begin),
            "during": 1000 * sum(abs(each - middle) <= 0.5 for each in stored),
            "after": 1000 * sum(each > middle + 0.5 for each in stored) / (begin + 2 * seconds - middle - 0.5),
        }


def of_replicas(work: Any, *words: Any, groups: int = 1) -> Any:
    """Run against `groups` broker groups of one replica each, with separate etcd and metaserver processes."""
    cluster = ReplicaSet(1, groups=groups)
    try:
        return together((work, cluster.address, *words, list(cluster.groups)))[0]
    finally:
        cluster.stop()
