"""Workload for the fault runs of Spark: flights, ordered by aircraft, while their partitions change; and a reader of the log."""  # noqa: E501

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from random import Random
from typing import Any, NamedTuple

import pyarrow as pa
from flights import flights
from pyspark_qmq.source_schema import COLUMNS, columns_of, default_schema

import qmq
from qmq.columns.model import ALL, Topology
from qmq.columns.planning import Plan, ranges, tasks
from qmq.columns.projector import Projector
from qmq.columns.servers.log import ServerAddress
from qmq.errors import QmqError
from qmq.model import Order, SubjectConfig
from qmq.proto.v1 import meta_pb2 as pb

LOGICAL_PARTITIONS = 1024
ROUND = 2_000
RETRY_S = 0.05


class Row(NamedTuple):
    """One row of the source table; `line` begins with its number, so that no two are equal."""

    number: int
    key: str
    tag: str
    line: str


def source_rows(count: int) -> list[Row]:
    """The first flights of the file."""
    return [
        Row(at, each.tail_number, each.carrier, f"{at},{each.line}")
        for at, each in enumerate(islice(flights(), count))
    ]


async def create(server: str, subject: str, *, partitions: int = 4) -> None:
    """An ordered subject over all broker groups."""
    async with qmq.connect(server) as mq:
        groups = tuple(
            sorted(
                each.broker_group
                for each in (await mq.metadata.cluster()).groups
                if not each.is_delay
            )
        )
        config = SubjectConfig(
            subject, order=Order.STRICT, logical_partitions=LOGICAL_PARTITIONS, groups=groups
        )
        await mq.metadata.create_subject(config, partitions=partitions)


async def publish(
    server: str,
    subject: str,
    rows: Sequence[Row],
    changes: int,
    seed: int,
    done: Callable[[int], None] = lambda _: None,
) -> int:
    """Send all rows in order, with this many changes of the route in between, while messages are under way. Returns the number of changes
    made.
    """  # noqa: E501
    coin = Random(seed)
    async with qmq.connect(server) as mq:
        producer = mq.ordered_producer(subject)
        every = max(len(rows) // (changes + 1), 1)
        under_way: list[asyncio.Task[bool]] = []
        for at in range(0, len(rows), ROUND):
            some = rows[at : at + ROUND]
            producer.send_many(
                [row.line.encode() for row in some],
                [row.key for row in some],
                tags=[(row.tag,) for row in some],
            )
            await producer.drain()
            if at // every > len(under_way):
                await asyncio.gather(*under_way)
                under_way.append(asyncio.create_task(change(mq.metadata, subject, coin)))
            done(at + len(some))
        await producer.flush()
        made = sum(await asyncio.gather(*under_way))
        while made < changes:
            made += await change(mq.metadata, subject, coin)
        return made


async def change(metadata: Any, subject: str, coin: Random) -> bool:
    """Make one split, merge or move, whichever suits the route."""
    while True:
        try:
            described = await metadata.describe_route(subject)
            wanted = chosen(described.route, sorted(described.settings.broker_groups), coin)
            await metadata.change_route(subject, **wanted, from_version=described.route.version)
        except QmqError:
            await asyncio.sleep(RETRY_S)
        else:
            return True


async def change_now_and_then(server: str, subject: str, changes: int, seed: int) -> int:
    """Make this many changes, some seconds apart."""
    coin = Random(seed)
    async with qmq.connect(server) as mq:
        for _ in range(changes):
            await asyncio.sleep(coin.uniform(0.5, 3.0))
            await change(mq.metadata, subject, coin)
    return changes


def chosen(route: pb.OrderedRoute, groups: Sequence[str], coin: Random) -> dict[str, Any]:
    """Choose a change: split if there are few partitions, merge if there are many."""
    parts = sorted(route.partitions, key=lambda part: part.lps.first)
    at = coin.randrange(len(parts))
    kinds = ["split"] if len(parts) < 3 else ["merge"] if len(parts) > 10 else ["split", "merge"]
    kind = coin.choice(kinds + ["move"] * (len(groups) > 1))
    part = parts[at]
    if kind == "split" and part.lps.end - part.lps.first > 1:
        cut = coin.randrange(part.lps.first + 1, part.lps.end)
        return {
            "split": pb.SplitOperation(
                partition=part.number, at=[cut], broker_groups=coin.choices(groups, k=2)
            )
        }
    if kind == "merge" and at + 1 < len(parts):
        return {"merge": pb.MergeOperation(partitions=[part.number, parts[at + 1].number])}
    if len(groups) == 1:
        return chosen(route, groups, coin)
    others = [group for group in groups if group != part.broker_group]
    return {"move": pb.MoveOperation(partition=part.number, broker_group=coin.choice(others))}


def read_log(
    server: str, subject: str, since: Mapping[str, int] | None = None
) -> tuple[pa.Table, Topology]:
    """All columns of a subject, read as an executor reads them, without a JVM. `since`: queue → sequence; only kept messages."""  # noqa: E501
    log = ServerAddress(server, 60_000).open()
    try:
        topology = log.topology([subject])
        start = {
            key: 0 if since is None else max(queue.start, since.get(key.within, 0))
            for key, queue in topology.queues.items()
        }
        end = {key: queue.end for key, queue in topology.queues.items()}
        batches: list[pa.RecordBatch] = []
        for task in tasks(
            log, topology, ranges(start, end, topology.queues, skips_lost=False), Plan(), ALL
        ):
            key = task.piece.queue
            versions = (
                {(key.subject, key.partition): task.route_version}
                if task.route_version is not None
                else {}
            )
            projector = Projector(
                columns_of(default_schema(with_headers=True)), routes=versions, selection=ALL
            )
            batches += projector.convert(log.read(task.piece, ALL, skips_lost=False), task.piece)
        return pa.Table.from_batches(batches) if batches else pa.table(
            {name: [] for name in COLUMNS}
        ), topology
    finally:
        log.close()


def anomalies(found: Sequence[tuple[str, int]], rows: Sequence[Row]) -> list[str]:
    """Errors in rows (line, how often): each line of the source must be there once."""
    counts: dict[str, int] = {}
    for line, count in found:
        counts[line] = counts.get(line, 0) + count
    wrong = [f"missing: {row.line}" for row in rows if row.line not in counts]
    known = {row.line for row in rows}
    wrong += [f"{count} times: {line}" for line, count in counts.items() if count != 1]
    return wrong + [f"not of the source: {line}" for line in counts if line not in known]
