"""Fake lanes under a test's control: broker groups that have ordered partitions, and a metaserver
that assigns lanes, over real sockets.

`FakeLanes` is the replicated state of one consumer group in one broker group: progress, grants,
parked keys. It follows docs/ORDERING.md with plain sets, where the broker has ranges. A test makes
faults by `holds_settled`, `is_mute`, `take_away`, `fail_over`, `cut`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple

from fake_cluster import FakeGroup, FakeMeta, Peer, serving
from qmq_ordering.hashing import logical_partition
from qmq_ordering.lanes import Lane
from qmq_ordering.routes import LpRange

import qmq
from qmq.errors import LaneHeld, LaneLost, LaneNotOpen, MessagesExpired, QmqError, UnknownConsumer
from qmq.proto.v1 import control_pb2 as control
from qmq.proto.v1 import meta_pb2 as pb
from qmq.rpc.channel import answering
from qmq.wire import frame_payloads as wire
from qmq.wire.batch import Kind, encode, place, sent_sizes
from qmq.wire.batch_columns import Columns
from qmq.wire.frame import Frame, FrameKind
from qmq.wire.frame_payloads import LaneSettlement, LaneVerdict, Range

N = 16
WHOLE = LpRange(0, N)


def key_in(lps: LpRange, number: int = 0) -> bytes:
    """The `number`-th key whose logical partition is in a range."""
    found = (
        key
        for each in range(10_000)
        if lps.first <= logical_partition(key := f"k{each}".encode(), N) < lps.end
    )
    return next(key for place_, key in enumerate(found) if place_ == number)


class Stored(NamedTuple):
    key: bytes
    lp: int
    body: bytes


class FakePartition:
    """One queue: batches of messages, and a command message at the end once the queue is sealed."""

    def __init__(self) -> None:
        self.messages: list[Stored] = []
        self.batches: list[tuple[int, int, bytes]] = []
        self.is_sealed = False
        self.start = 0
        """Retention took what is before."""
        self.version = 1
        """Of the frontier, for this partition."""
        self.done: set[int] = set()
        self.failures: dict[int, int] = {}
        self.parked: dict[bytes, list[int]] = {}

    @property
    def length(self) -> int:
        return len(self.messages) + self.is_sealed

    def append(self, messages: Sequence[tuple[bytes, bytes]]) -> None:
        base = len(self.messages)
        stored = [Stored(key, logical_partition(key, N), body) for key, body in messages]
        columns = Columns(
            [each.body for each in stored],
            keys=[each.key for each in stored],
            logical_partitions=[each.lp for each in stored],
        )
        envelope, region = encode(
            b"s", columns, producer_id=1, batch_sequence=base, create_time_ms=1
        )
        total, region_crc = sent_sizes(envelope)
        self.batches.append(
            (base, len(stored), place(Kind.DATA, total, region_crc, base, 1, 1, 1, 0) + region)
        )
        self.messages += stored

    def is_open(self, sequence: int, lps: LpRange) -> bool:
        return (
            sequence < len(self.messages)
            and lps.first <= self.messages[sequence].lp < lps.end
            and sequence not in self.done
        )

    def position(self, lps: LpRange) -> int:
        return next((each for each in range(self.length) if self.is_open(each, lps)), self.length)

    def is_all_done(self, lps: LpRange = WHOLE) -> bool:
        return not any(self.is_open(each, lps) for each in range(len(self.messages)))


class Grant(NamedTuple):
    partition: int
    lps: LpRange
    consumer: str
    token: int


class Session(NamedTuple):
    peer: Peer
    token: int


class Settled(NamedTuple):
    """A LANE_SETTLE that arrived."""

    consumer: str
    partition: int
    settlements: list[LaneSettlement]


class FakeLanes:
    """See the module."""

    def __init__(self, group: FakeGroup) -> None:
        self.group = group
        self.partitions: dict[int, FakePartition] = {}
        self.grants: list[Grant] = []
        self.next_token = 1
        self.attaches: list[wire.LaneAttach] = []
        self.lease_ms_max = 3_600_000
        self.heartbeats = 0
        self.settled: list[Settled] = []
        self.detached: list[Grant] = []
        self.holds_settled = False
        self.held: list[tuple[Peer, Frame]] = []
        self.is_mute = False
        """Settlements are taken, and the connection breaks before they are answered."""
        self._sessions: dict[int, Session] = {}
        self._next_session = 1
        self._pulls: list[tuple[Peer, Frame, wire.LanePull]] = []
        for replica in group.replicas:
            replica.handle |= {
                FrameKind.LANE_ATTACH: self._attach,
                FrameKind.LANE_PULL: self._pull,
                FrameKind.LANE_SETTLE: self._settle,
                FrameKind.HEARTBEAT: self._heartbeat,
                FrameKind.DETACH: self._detach,
            }

    # --- what a test does -------------------------------------------------------------------------

    def partition(self, number: int) -> FakePartition:
        return self.partitions.setdefault(number, FakePartition())

    def append(self, number: int, messages: Iterable[tuple[bytes, bytes]]) -> None:
        self.partition(number).append(list(messages))
        self.wake()

    def seal(self, number: int) -> None:
        self.partition(number).is_sealed = True
        self.wake()

    def wake(self) -> None:
        pulls, self._pulls = self._pulls, []
        for peer, request, pull in pulls:
            self._serve(peer, request, pull)

    def take_away(self, *, consumer: str = "", partition: int = 0) -> None:
        """End the leases: these grants are void, and their consumers learn it only at their next
        request.
        """
        void = [
            each
            for each in self.grants
            if consumer in ("", each.consumer) and partition in (0, each.partition)
        ]
        self.grants = [each for each in self.grants if each not in void]
        self._pulls = [each for each in self._pulls if self._grant(each[2].token) is not None]

    def fail_over(self) -> None:
        """Make the other replica master: sessions are lost, grants stay."""
        old = self.group.master
        self._sessions.clear()
        self._pulls.clear()
        self.group.fail_over(to=self.group.epoch % 2)
        assert old is not None
        for peer in list(old.peers):
            peer.cut()

    def cut(self) -> None:
        """Break all connections."""
        assert self.group.master is not None
        self._pulls.clear()
        for peer in list(self.group.master.peers):
            peer.cut()

    def answer_held(self) -> None:
        self.holds_settled = False
        held, self.held = self.held, []
        for peer, request in held:
            self._settle(peer, request)

    def verdicts(self, verdict: LaneVerdict, number: int = 1) -> list[LaneSettlement]:
        """All verdicts of a kind that arrived and were valid."""
        return [
            one
            for each in self.settled
            if each.partition == number
            for one in each.settlements
            if one.verdict == verdict
        ]

    # --- what a broker does -----------------------------------------------------------------------

    def _grant(self, token: int) -> Grant | None:
        return next((each for each in self.grants if each.token == token), None)

    def _attach(self, peer: Peer, request: Frame) -> None:
        asked = wire.LaneAttach.unpack(request.payload)
        self.attaches.append(asked)
        lps, partition = LpRange(asked.first, asked.end), self.partitions.get(asked.partition)
        overlapping = [
            each
            for each in self.grants
            if each.partition == asked.partition and each.lps.overlaps(lps)
        ]
        if partition is None or partition.version != asked.version:
            return peer.refuse(request, LaneNotOpen("not open here"))
        if any(each.consumer != asked.consumer for each in overlapping):
            return peer.refuse(request, LaneHeld("another consumer has it", retry_after_ms=10))
        kept = next(
            (each for each in overlapping if each.token == asked.token and each.lps == lps), None
        )
        if kept is None:
            self.grants = [each for each in self.grants if each not in overlapping]
            kept = Grant(asked.partition, lps, asked.consumer, self.next_token)
            self.grants.append(kept)
            self.next_token += 1
        number, self._next_session = self._next_session, self._next_session + 1
        self._sessions[number] = Session(peer, kept.token)
        parked = [
            key.hex()
            for key in partition.parked
            if lps.first <= logical_partition(key, N) < lps.end
        ]
        is_resumed = int(kept.token == asked.token)
        answer = wire.LaneAttached(
            number,
            kept.token,
            min(asked.lease_ms, self.lease_ms_max),
            partition.position(lps),
            is_resumed,
            parked,
        )
        peer.answer(request, FrameKind.LANE_ATTACHED, answer.pack())

    def _held_by(self, peer: Peer, number: int, token: int | None = None) -> Grant:
        session = self._sessions.get(number)
        if session is None or session.peer is not peer:
            raise UnknownConsumer("no such session: attach again")
        grant = self._grant(session.token)
        if grant is None or token not in (None, session.token):
            raise LaneLost("the token is void")
        return grant

    def _pull(self, peer: Peer, request: Frame) -> None:
        self._serve(peer, request, wire.unpack_lane_pull(request.payload))

    def _serve(self, peer: Peer, request: Frame, pull: wire.LanePull) -> None:
        try:
            grant = self._held_by(peer, pull.session, pull.token)
            partition = self.partitions[grant.partition]
            if pull.sequence < partition.start:
                raise MessagesExpired("retention took them")
        except QmqError as failure:
            return peer.refuse(request, failure)
        at, wanted = pull.sequence, list[int]()
        while at < partition.length and len(wanted) < pull.messages_max:
            wanted += [at] if partition.is_open(at, grant.lps) else []
            at += 1
        is_end = partition.is_sealed and at == partition.length
        if at == pull.sequence and not is_end:
            self._pulls.append((peer, request, pull))
            return None
        peer.answer(
            request,
            FrameKind.LANE_MESSAGES,
            _delivery(pull.session, partition, wanted, at, is_end=is_end),
        )
        return None

    def _settle(self, peer: Peer, request: Frame) -> None:
        if self.holds_settled:
            self.held.append((peer, request))
            return
        number, token, settlements = wire.unpack_lane_settle(request.payload)
        try:
            grant = self._held_by(peer, number, token)
        except QmqError as failure:
            return peer.refuse(request, failure)
        self.settled.append(Settled(grant.consumer, grant.partition, settlements))
        for each in settlements:
            self._apply(self.partitions[grant.partition], grant.lps, each)
        if self.is_mute:
            self.is_mute = False
            peer.cut()
            return
        peer.answer(request, FrameKind.SETTLED, wire.pack_settled(len(settlements), 0))

    def _apply(self, partition: FakePartition, lps: LpRange, each: LaneSettlement) -> None:
        if each.verdict == LaneVerdict.FAILED:
            partition.failures[each.first] = each.argument
            return
        if each.verdict == LaneVerdict.PARKED and each.first not in partition.done:
            partition.parked.setdefault(partition.messages[each.first].key, []).append(each.first)
        partition.done.update(
            one for one in range(each.first, each.last + 1) if partition.is_open(one, lps)
        )

    def _heartbeat(self, peer: Peer, request: Frame) -> None:
        try:
            self._held_by(peer, wire.unpack_session(request.payload))
        except QmqError as failure:
            return peer.refuse(request, failure)
        self.heartbeats += 1
        peer.answer(request, FrameKind.OK)

    def _detach(self, peer: Peer, request: Frame) -> None:
        try:
            grant = self._held_by(peer, wire.unpack_detach(request.payload)[0])
        except QmqError as failure:
            return peer.refuse(request, failure)
        self.grants.remove(grant)
        self.detached.append(grant)
        peer.answer(request, FrameKind.OK)


def _delivery(
    session: int, partition: FakePartition, wanted: list[int], following: int, *, is_end: bool
) -> bytes:
    """LANE_MESSAGES: whole batches, and a range for each message."""
    ranges: list[Range] = []
    batches: list[bytes] = []
    for base, count, data in partition.batches:
        inside = [each for each in wanted if base <= each < base + count]
        ranges += [
            Range(each, 1, 1 + partition.failures.get(each, 0), len(batches)) for each in inside
        ]
        batches += [data] if inside else []
    head = wire.pack_lane_delivery(
        wire.LaneDelivery(session, following, is_end, ranges, len(batches))
    )
    return head + b"".join(batches)


class Assignments:
    """The assignments known to all metaservers."""

    def __init__(self) -> None:
        self.generation = 0
        self.lanes: dict[str, list[Lane]] = {}
        self.finished: list[Lane] = []
        """Every lane that was reported as finished, once for each report."""
        self.left: list[str] = []
        self.changed = asyncio.Event()
        self.refusal: QmqError | None = None

    def assign(self, **lanes: Sequence[Lane]) -> None:
        """Consumer = its lanes; the others keep theirs."""
        self.lanes |= {consumer: list(each) for consumer, each in lanes.items()}
        self.generation += 1
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()


class LaneMeta(FakeMeta):
    """A metaserver that knows ordered subjects."""

    def __init__(self, groups: Sequence[FakeGroup], assignments: Assignments) -> None:
        super().__init__(groups)
        self.assignments = assignments
        self.synced: list[pb.SyncMemberRequest] = []

    @answering
    async def SyncMember(self, request: pb.SyncMemberRequest) -> pb.SyncMemberResponse:
        known = self.assignments
        self.synced.append(request)
        if known.refusal is not None:
            raise known.refusal
        known.finished += [_lane(each) for each in request.finished]
        if request.leaves:
            known.left.append(request.consumer)
        elif request.generation == known.generation and request.wait_ms:
            try:
                await asyncio.wait_for(known.changed.wait(), request.wait_ms / 1000)
            except TimeoutError:
                pass
        lanes = [
            pb.AssignedLane(
                partition=each.partition,
                lps=control.LpRange(first=each.range.first, end=each.range.end),
                broker_group=each.group,
                version=each.version,
            )
            for each in known.lanes.get(request.consumer, [])
        ]
        return pb.SyncMemberResponse(generation=known.generation, lanes=lanes)


def _lane(each: pb.AssignedLane) -> Lane:
    return Lane(
        each.partition, LpRange(each.lps.first, each.lps.end), each.broker_group, each.version
    )


def lane(partition: int = 1, lps: LpRange = WHOLE, *, group: str = "g0", version: int = 1) -> Lane:
    return Lane(partition, lps, group, version)


class LaneCluster(NamedTuple):
    """A running cluster of fakes with lanes."""

    metas: list[LaneMeta]
    lanes: list[FakeLanes]
    assignments: Assignments
    mq: qmq.Client

    @property
    def broker(self) -> FakeLanes:
        return self.lanes[0]


@asynccontextmanager
async def lane_cluster(groups: int = 1, *, metas: int = 1) -> AsyncIterator[LaneCluster]:
    """Broker groups g0, g1, ... that keep ordered partitions, metaservers, and a client."""
    made = [FakeGroup(f"g{number}") for number in range(groups)]
    lanes = [FakeLanes(group) for group in made]
    assignments = Assignments()
    servers = [LaneMeta(made, assignments) for _ in range(metas)]
    async with serving(made, servers), qmq.connect([meta.address for meta in servers]) as mq:
        yield LaneCluster(servers, lanes, assignments, mq)


@asynccontextmanager
async def one_lane(*messages: tuple[bytes, bytes]) -> AsyncIterator[LaneCluster]:
    """A cluster whose consumer `a` has all of partition 1, which contains these messages."""
    async with lane_cluster() as made:
        made.broker.append(1, messages)
        made.assignments.assign(a=[lane()])
        yield made
