"""An ordered subject on a node in this process, written into the coordination store, and a client
that speaks to its broker in frames.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from qmq_coordination.coordination_store import Put
from qmq_coordination.ordered_records import group_record_key, latest_key, route_key
from qmq_coordination.subjects import encode_subject, subject_key
from qmq_ordering.hashing import logical_partition
from qmq_ordering.lanes import Frontier, FrontierPiece, GroupRecord
from qmq_ordering.routes import LpRange, PhysicalPartition, Route
from support import node_config, running

from qmq.client.connection.connection import Connection, connect
from qmq.model import Fencing, Order, SubjectConfig
from qmq.node.dev_node import Node
from qmq.wire import frame_payloads as wire
from qmq.wire.batch import BatchView, encode
from qmq.wire.batch_columns import Columns
from qmq.wire.frame import FrameKind
from qmq.wire.frame_payloads import (
    LaneAttached,
    LaneDelivery,
    LanePull,
    LaneSettlement,
    LaneVerdict,
    Produced,
)

SUBJECT, COUNT = "orders", 16
WHOLE = LpRange(0, COUNT)


class Mute:
    """A silent connection."""

    is_writable = True
    client = ""

    def send(self, *_buffers: bytes) -> None:
        return

    def delivered(self, _subject: str, _messages: int, _size: int) -> None:
        return


class Got(NamedTuple):
    """A message of a lane."""

    sequence: int
    key: bytes
    body: bytes
    attempt: int


class World:
    """The node, and one connection to its broker."""

    def __init__(self, node: Node, connection: Connection) -> None:
        self.node = node
        self.connection = connection

    async def another(self) -> World:
        """A second connection."""
        return World(self.node, await connect(self.node.data_address, "test"))

    async def put_route(
        self, route: Route, *, order: Order = Order.STRICT, fencing: Fencing = Fencing.LEASE
    ) -> None:
        config = SubjectConfig(
            SUBJECT,
            order=order,
            logical_partitions=COUNT,
            fencing=fencing,
            groups=(self.node.config.broker.name,),
        )
        puts = [
            Put(subject_key(SUBJECT), encode_subject(config)),
            Put(route_key(SUBJECT, route.version), route.encode()),
            Put(latest_key(SUBJECT), str(route.version).encode()),
        ]
        await self.node.coordination.txn([], puts)
        await self.node.view.refresh()

    async def put_group(self, group: str = "g", version: int = 1) -> None:
        record = GroupRecord(Frontier((FrontierPiece(WHOLE, version),)))
        await self.node.coordination.put(group_record_key(SUBJECT, group), record.encode())
        await self.node.view.refresh()

    def part(self, number: int, first: int = 0, end: int = COUNT) -> PhysicalPartition:
        return PhysicalPartition(number, LpRange(first, end), self.node.config.broker.name)

    # --- frames -----------------------------------------------------------------------------------

    async def produce(
        self,
        keys: Sequence[bytes],
        *,
        producer: int = 7,
        number: int = 0,
        partition: int = 1,
        lps: Iterable[int] | None = None,
    ) -> Produced:
        bodies = [b"%s/%d/%d" % (key, number, at) for at, key in enumerate(keys)]
        stamped = list(lps) if lps is not None else [logical_partition(key, COUNT) for key in keys]
        columns = Columns(bodies, keys=list(keys), logical_partitions=stamped)
        buffers = encode(
            SUBJECT.encode(),
            columns,
            producer_id=producer,
            batch_sequence=number,
            create_time_ms=1,
            partition=partition,
        )
        answer = await self.connection.call(FrameKind.PRODUCE, b"".join(buffers), timeout_s=10)
        return wire.unpack_produced(answer.payload)[0]

    async def attach(
        self,
        lps: LpRange = WHOLE,
        *,
        consumer: str = "c1",
        group: str = "g",
        partition: int = 1,
        version: int = 1,
        token: int = 0,
        incarnation: str = "life",
        lease_ms: int = 30_000,
    ) -> LaneAttached:
        request = wire.LaneAttach(
            SUBJECT,
            partition,
            group,
            consumer,
            incarnation,
            lps.first,
            lps.end,
            version,
            token,
            lease_ms,
        )
        answer = await self.connection.call(FrameKind.LANE_ATTACH, request.pack(), timeout_s=10)
        return LaneAttached.unpack(answer.payload)

    async def pull(
        self,
        lane: LaneAttached,
        sequence: int | None = None,
        *,
        messages_max: int = 1000,
        wait_ms: int = 0,
        token: int | None = None,
    ) -> tuple[LaneDelivery, list[Got]]:
        begin = lane.position if sequence is None else sequence
        request = LanePull(
            lane.session,
            lane.token if token is None else token,
            begin,
            messages_max,
            1 << 20,
            wait_ms,
        )
        answer = await self.connection.call(
            FrameKind.LANE_PULL, wire.pack_lane_pull(request), timeout_s=10
        )
        delivery, at = wire.unpack_lane_delivery(answer.payload)
        views: list[BatchView] = []
        for _ in range(delivery.batches):
            views.append(BatchView.parse(answer.payload, at))
            at += views[-1].envelope.total_bytes
        return delivery, [
            got for each in delivery.ranges for got in _messages(views[each.batch], each)
        ]

    async def settle(
        self, lane: LaneAttached, *spans: tuple[int, int], token: int | None = None
    ) -> None:
        await self.verdicts(
            lane,
            [LaneSettlement(first, last, LaneVerdict.DONE, 0) for first, last in spans],
            token=token,
        )

    async def verdicts(
        self, lane: LaneAttached, settlements: list[LaneSettlement], *, token: int | None = None
    ) -> None:
        payload = wire.pack_lane_settle(
            lane.session, lane.token if token is None else token, settlements
        )
        await self.connection.call(FrameKind.LANE_SETTLE, payload, timeout_s=10, deadline_ms=10_000)

    async def detach(self, lane: LaneAttached) -> None:
        await self.connection.call(FrameKind.DETACH, wire.pack_detach(lane.session), timeout_s=10)


def _messages(view: BatchView, part: wire.Range) -> list[Got]:
    keys, bodies = view.keys() or [], view.bodies()
    offset = part.first_sequence - view.base_sequence
    return [
        Got(view.base_sequence + at, keys[at], bodies[at], part.attempt)
        for at in range(offset, offset + part.count)
    ]


@asynccontextmanager
async def world(tmp_path: Path, *parts: tuple[int, int, int]) -> AsyncIterator[World]:
    """A node with the ordered subject; `parts` are (number, first, end), one partition of
    everything unless given.
    """
    async with running(node_config(tmp_path)) as node:
        found = World(node, await connect(node.data_address, "test"))
        placed = tuple(found.part(*each) for each in parts) or (found.part(1),)
        await found.put_route(Route(1, COUNT, 1 + max(part.number for part in placed), placed))
        await found.put_group()
        yield found
        found.connection.close()
        await found.connection.wait_closed()
