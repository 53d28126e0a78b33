"""A fake cluster under a test's control: metaservers, broker groups and their replicas, in this
process and loop, over real sockets.

A `FakeGroup` is one replicated log: an entry that is stored there is stored on every replica. Its
replicas (`FakeBroker`) speak frames; only the master serves. `fail_over` makes another replica
master. A test scripts faults by `group.on_produce`, or a broker's `handle`.

A cluster with delay groups, on top of `fake_cluster`: they accept delayed batches, and a test sets
the answers of metaservers.

The consuming side of a fake broker group: a test sets the answer to ATTACH and the deliveries, and
sees the verdicts.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from typing import Any, NamedTuple

import grpc
from qmq_ordering.routes import LpRange, PhysicalPartition, Route
from support import eventually

import qmq
from qmq.client.connection.connection import TIMING, ClientTiming
from qmq.errors import (
    NotConnected,
    NotMaster,
    OrderMismatch,
    Outcome,
    OutOfSequence,
    ProducerFenced,
    QmqError,
    RouteChanged,
    UnknownSubject,
)
from qmq.model import begins_session, session_of
from qmq.proto.v1 import control_pb2, delay_pb2, meta_pb2_grpc
from qmq.proto.v1 import meta_pb2 as pb
from qmq.rpc.channel import answering
from qmq.wire import frame as frames
from qmq.wire import frame_payloads as wire
from qmq.wire.batch import ENVELOPE_BYTES, BatchView, Envelope, Kind, encode, place, sent_sizes
from qmq.wire.batch_columns import Columns, parse_header
from qmq.wire.frame import HEADER, HEADER_BYTES, Frame, FrameKind
from qmq.wire.frame_payloads import Range, Settlement

HOST = "127.0.0.1"


class Sent(NamedTuple):
    """A batch that arrived at a broker."""

    producer_id: int
    number: int
    bodies: list[bytes]
    partition: int = 0
    keys: tuple[bytes, ...] = ()
    lps: tuple[int, ...] = ()
    flags: int = 0
    ids: tuple[bytes, ...] = ()
    """Message ids, if the producer gave some."""


class Peer:
    """One client's connection at the broker."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self.is_cut = False

    def answer(self, request: Frame, kind: FrameKind, payload: bytes = b"") -> None:
        if not self._writer.is_closing():
            self._writer.write(frames.frame(kind, request.request_id, payload))

    def refuse(self, request: Frame, failure: QmqError) -> None:
        self.answer(request, FrameKind.ERROR, wire.pack_error(failure))

    def cut(self) -> None:
        """Break the connection; what has arrived and was not read is lost."""
        self.is_cut = True
        self._writer.transport.abort()


Handler = Callable[[Peer, Frame], None]


class FakeBroker:
    """One replica's data port. `handle` answers each kind of frame."""

    def __init__(self, name: str, group: FakeGroup) -> None:
        self.name = name
        self.group = group
        self.address = ""
        self.peers: list[Peer] = []
        self.is_connected_to = asyncio.Event()
        self.handle: dict[int, Handler] = {
            FrameKind.PRODUCE: self._produce,
            FrameKind.PRODUCE_FAST: self._produce,
            FrameKind.BEGUN: lambda _peer, _request: None,
        }
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen, on the same port as before if it was up once."""
        port = int(self.address.rpartition(":")[2] or 0)
        self._server = await asyncio.start_server(self._serve, HOST, port)
        self.address = f"{HOST}:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        """Stop: connections break, and the port is closed."""
        if self._server is not None:
            self._server.close()
            for peer in self.peers:
                peer.cut()
            self._server = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = Peer(writer)
        self.peers.append(peer)
        self.is_connected_to.set()
        try:
            while not peer.is_cut:
                length, kind, _, _, number, deadline_ms = HEADER.unpack(
                    await reader.readexactly(HEADER_BYTES)
                )
                payload = await reader.readexactly(length - HEADER_BYTES)
                self._receive(peer, Frame(kind, number, deadline_ms, memoryview(payload)))
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            self.peers.remove(peer)
            writer.close()

    def _receive(self, peer: Peer, request: Frame) -> None:
        if request.kind == FrameKind.HELLO:
            welcome = wire.Welcome(1, self.name, self.group.epoch, 1 << 24, 1 << 26)
            peer.answer(request, FrameKind.WELCOME, welcome.pack())
        elif self.group.master is not self and not self.group.is_deaf:
            peer.refuse(request, NotMaster("this replica is not the master"))
        else:
            self.handle[request.kind](peer, request)

    def _produce(self, peer: Peer, request: Frame) -> None:
        sent = parse(request.payload)
        self.group.arrived.append(sent)
        self.group.on_produce(self, peer, request, sent)


def parse(payload: memoryview) -> Sent:
    """The batch of a PRODUCE."""
    total, _ = sent_sizes(payload)
    region = bytes(payload[ENVELOPE_BYTES:total])
    header = parse_header(region)
    view = BatchView(placed(region, 0), region)
    return Sent(
        header.producer_id,
        header.batch_sequence,
        view.bodies(),
        header.partition,
        tuple(view.keys() or ()),
        view.logical_partitions() or (),
        header.flags,
        tuple(view.message_ids() or ()),
    )


def placed(region: bytes, base: int) -> Envelope:
    """The envelope that a master would write."""
    return Envelope(Kind.DATA, ENVELOPE_BYTES + len(region), 0, base, 1, 1, 1, 0)


class FakePartition:
    """A physical partition's log, and the rule by which it takes batches: each producer's numbers
    have no gaps.
    """

    def __init__(self, part: PhysicalPartition) -> None:
        self.part = part
        self.log: list[Sent] = []
        self.is_sealed = False
        self._bases: dict[tuple[int, int], int] = {}

    def take(self, sent: Sent) -> int:
        """The batch's first sequence. Raises RouteChanged, OutOfSequence, ProducerFenced."""
        key = (sent.producer_id, sent.number)
        if key in self._bases:
            return self._bases[key]
        if self.is_sealed:
            raise RouteChanged(f"partition {self.part.number} is sealed")
        newest = max(
            [number for producer_id, number in self._bases if producer_id == sent.producer_id],
            default=-1,
        )
        if session_of(sent.number) < session_of(newest):
            raise ProducerFenced("its sender has given it up")
        if sent.number != newest + 1 and not begins_session(sent.number):
            raise OutOfSequence("an earlier batch is missing here")
        assert sent.lps
        assert all(self.part.range.first <= lp < self.part.range.end for lp in sent.lps)
        self._bases[key] = sum(len(each.bodies) for each in self.log)
        self.log.append(sent)
        return self._bases[key]


class FakeOrder:
    """The ordered subject of a cluster: its route, and what is stored in all its partitions."""

    def __init__(
        self, groups: Sequence[FakeGroup], order: str = "strict", logical_partitions: int = 8
    ) -> None:
        self.order = order
        self.groups = {group.name: group for group in groups}
        self.partitions: dict[int, FakePartition] = {}
        self.fenced: set[int] = set()
        width = logical_partitions // len(groups)
        parts = [
            PhysicalPartition(at + 1, LpRange(at * width, (at + 1) * width), group.name)
            for at, group in enumerate(groups)
        ]
        self.route = Route(1, logical_partitions, len(parts) + 1, tuple(parts))
        for group in groups:
            group.is_ordered = True
        self._open(parts)

    def _open(self, parts: Sequence[PhysicalPartition]) -> None:
        for part in parts:
            if part.number not in self.partitions:
                self.partitions[part.number] = self.groups[part.group].partitions[part.number] = (
                    FakePartition(part)
                )

    def seal(self, *numbers: int) -> None:
        for number in numbers:
            self.partitions[number].is_sealed = True

    def publish(
        self,
        sources: Sequence[int],
        targets: Sequence[tuple[int, int, str]],
        *,
        fenced: bool = False,
    ) -> None:
        """Publish the next route, in which sealed sources are replaced, without notifying
        clients.
        """
        self.seal(*sources)
        route = self.route
        made = [
            PhysicalPartition(route.next_number + at, LpRange(first, end), group)
            for at, (first, end, group) in enumerate(targets)
        ]
        parts = sorted(
            [part for part in route.partitions if part.number not in sources] + made,
            key=lambda part: part.range,
        )
        self._open(made)
        self.route = Route(
            route.version + 1, route.logical_partitions, route.next_number + len(made), tuple(parts)
        )
        self.fenced.update(sources if fenced else ())

    def located(self) -> tuple[pb.SubjectSettings, pb.OrderedRoute]:
        """A metaserver's answer about the subject."""
        parts = [
            pb.OrderedPartition(
                number=part.number,
                lps=control_pb2.LpRange(first=part.range.first, end=part.range.end),
                broker_group=part.group,
            )
            for part in self.route.partitions
        ]
        route = pb.OrderedRoute(
            version=self.route.version,
            logical_partitions=self.route.logical_partitions,
            partitions=parts,
            fenced=sorted(self.fenced),
        )
        return pb.SubjectSettings(
            order=self.order, logical_partitions=self.route.logical_partitions
        ), route

    @property
    def stored(self) -> dict[bytes, list[bytes]]:
        """Per key, what is stored, in the order in which consumers read it: a partition, then its
        successors.
        """
        found: dict[bytes, list[bytes]] = {}
        for number in sorted(self.partitions):
            for sent in self.partitions[number].log:
                for key, body in zip(sent.keys, sent.bodies, strict=True):
                    found.setdefault(key, []).append(body)
        return found


class FakeGroup:
    """A broker group: replicas over one log, deduplicating as brokers do."""

    def __init__(self, name: str, replicas: int = 2) -> None:
        self.name = name
        self.epoch = 1
        self.is_writable = True
        self.is_deaf = False
        """Whether slaves serve too: for a master that does not know that it was deposed."""
        self.replicas = [FakeBroker(f"{name}-{number}", self) for number in range(replicas)]
        self.master: FakeBroker | None = self.replicas[0]
        self.arrived: list[Sent] = []
        self.stored: dict[tuple[int, int], tuple[int, list[bytes]]] = {}
        self.next_sequence = 0
        self.partitions: dict[int, FakePartition] = {}
        """Of the ordered subject, if there is one: those that this group knows."""
        self.is_ordered = False
        self.on_produce: Callable[[FakeBroker, Peer, Frame, Sent], None] = self.serve

    @property
    def bodies(self) -> list[bytes]:
        """All stored bodies, in order."""
        return [body for _, bodies in sorted(self.stored.values()) for body in bodies]

    def store(self, sent: Sent) -> int:
        """Store a batch once; its first sequence. Raises what an ordered partition refuses with."""
        if sent.partition:
            if sent.partition not in self.partitions:
                raise RouteChanged(f"partition {sent.partition} is not known here")
            return self.partitions[sent.partition].take(sent)
        if self.is_ordered:
            raise OrderMismatch("the subject is ordered: send to it with Client.ordered_producer")
        key = (sent.producer_id, sent.number)
        if key not in self.stored:
            self.stored[key] = (self.next_sequence, sent.bodies)
            self.next_sequence += len(sent.bodies)
        return self.stored[key][0]

    def serve(self, _: FakeBroker, peer: Peer, request: Frame, sent: Sent) -> None:
        """Store and answer."""
        try:
            base = self.store(sent)
        except QmqError as failure:
            peer.refuse(request, failure)
        else:
            peer.answer(request, FrameKind.PRODUCED, wire.pack_produced([wire.Produced(base, 1)]))

    def store_silently(self, _: FakeBroker, _peer: Peer, _request: Frame, sent: Sent) -> None:
        """Store, never answer."""
        with suppress(QmqError):
            self.store(sent)

    def refuse(self, failure: QmqError) -> None:
        """Answer everything with an error from now on."""
        self.on_produce = lambda _, peer, request, sent: peer.refuse(request, failure)

    def fail_over(self, to: int = 1) -> None:
        """Make another replica master, without notifying clients."""
        self.epoch += 1
        self.master = self.replicas[to]


class FakeMeta(meta_pb2_grpc.MetaServicer):
    """A metaserver. A test may replace `answer` to make it lag or fail; `can_push` is whether it
    has Watch.
    """

    def __init__(self, groups: Sequence[FakeGroup], *, can_push: bool = False) -> None:
        self.groups = list(groups)
        self.can_push = can_push
        self.located: list[str] = []
        self.answer: Callable[[str], list[pb.QueueRoute]] = lambda _: [
            route(each) for each in self.groups
        ]
        self.order: FakeOrder | None = None
        self.watchers: list[asyncio.Queue[pb.WatchResponse | None]] = []
        self.is_watched = asyncio.Event()
        """Set when a client has asked for changes, also where `can_push` is false."""
        self.address = ""
        self.server: grpc.aio.Server | None = None

    @answering
    async def Locate(self, request: pb.LocateRequest) -> pb.LocateResponse:
        self.located.append(request.subject)
        if request.subject == "none":
            raise UnknownSubject("there is no subject 'none'")
        settings, ordered = self.order.located() if self.order is not None else (None, None)
        return pb.LocateResponse(
            routes=self.answer(request.subject), settings=settings, route=ordered
        )

    async def Watch(
        self, request: pb.WatchRequest, context: Any
    ) -> AsyncIterator[pb.WatchResponse]:
        self.is_watched.set()
        if not self.can_push:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "no such call")
        queue: asyncio.Queue[pb.WatchResponse | None] = asyncio.Queue()
        self.watchers.append(queue)
        while (found := await queue.get()) is not None:
            yield found

    def push(self, *, subjects: Sequence[str] = (), groups: Sequence[str] = ()) -> None:
        """Notify all watchers."""
        for queue in self.watchers:
            queue.put_nowait(pb.WatchResponse(subjects=subjects, broker_groups=groups))

    def end_streams(self) -> None:
        """End all streams, as a restarting metaserver does."""
        watchers, self.watchers = self.watchers, []
        self.is_watched.clear()
        for queue in watchers:
            queue.put_nowait(None)

    async def start(self) -> None:
        self.server = grpc.aio.server()
        meta_pb2_grpc.add_MetaServicer_to_server(self, self.server)
        self.address = f"{HOST}:{self.server.add_insecure_port(f'{HOST}:0')}"
        await self.server.start()


def route(group: FakeGroup) -> pb.QueueRoute:
    """A metaserver's answer about a group that hosts the subject."""
    address = group.master.address if group.master is not None else ""
    return pb.QueueRoute(
        broker_group=group.name,
        data_address=address,
        epoch=group.epoch,
        is_writable=group.is_writable,
    )


class Cluster(NamedTuple):
    """A running cluster of fakes."""

    metas: list[FakeMeta]
    groups: list[FakeGroup]
    mq: qmq.Client

    @property
    def meta(self) -> FakeMeta:
        return self.metas[0]

    @property
    def bodies(self) -> list[bytes]:
        return [body for group in self.groups for body in group.bodies]


@asynccontextmanager
async def cluster(
    groups: int = 2, *, metas: int = 1, can_push: bool = False, timing: ClientTiming = TIMING
) -> AsyncIterator[Cluster]:
    """A cluster with a client."""
    made = [FakeGroup(f"g{number}") for number in range(groups)]
    servers = [FakeMeta(made, can_push=can_push) for _ in range(metas)]
    async with (
        serving(made, servers),
        qmq.Client([meta.address for meta in servers], timing=timing) as mq,
    ):
        yield Cluster(servers, made, mq)


@asynccontextmanager
async def serving(groups: Sequence[FakeGroup], metas: Sequence[FakeMeta]) -> AsyncIterator[None]:
    """The servers run until the end of the block."""
    async with AsyncExitStack() as stack:
        for group in groups:
            for replica in group.replicas:
                await replica.start()
                stack.push_async_callback(replica.stop)
        for meta in metas:
            await meta.start()
            assert meta.server is not None
            stack.push_async_callback(meta.server.stop, None)
            stack.callback(meta.end_streams)
        yield


@asynccontextmanager
async def ordered_cluster(
    groups: int = 2,
    *,
    metas: int = 1,
    can_push: bool = False,
    order: str = "strict",
    timing: ClientTiming = TIMING,
) -> AsyncIterator[tuple[Cluster, FakeOrder]]:
    """A cluster whose one subject is ordered, with a partition on each broker group."""
    async with cluster(groups, metas=metas, can_push=can_push, timing=timing) as it:
        made = FakeOrder(it.groups, order)
        for meta in it.metas:
            meta.order = made
        yield it, made


def batch(bodies: list[bytes], base: int, subject: str = "s") -> bytes:
    """A stored batch, as a delivery contains it."""
    envelope, region = encode(
        subject.encode(), Columns(bodies), producer_id=1, batch_sequence=base, create_time_ms=1
    )
    total, region_crc = sent_sizes(envelope)
    return place(Kind.DATA, total, region_crc, base, 1, 1, 1, 0) + region


UNKNOWN = Outcome.UNKNOWN
NOT_STORED = Outcome.NOT_STORED


APPEND_MS = 1_900_000_000_000


class Kept(NamedTuple):
    """A delayed message as received."""

    subject: str
    body: bytes
    due_ms: int
    flags: int
    key: bytes
    tags: tuple[str, ...]
    headers: dict[str, bytes]


class FakeDelayGroup(FakeGroup):
    """A delay group that stores messages with their due times. `next_append_ms` is the append time
    of the next batch.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.kept: list[Kept] = []
        self.regions: list[bytes] = []
        self.next_append_ms = APPEND_MS

    def serve(self, _: FakeBroker, peer: Peer, request: Frame, sent: Sent) -> None:
        """Store once, and answer."""
        base = self.keep(request, sent)
        peer.answer(
            request,
            FrameKind.PRODUCED,
            wire.pack_produced([wire.Produced(base, self.next_append_ms)]),
        )

    def keep(self, request: Frame, sent: Sent) -> int:
        """Store a batch once; its first sequence."""
        is_new = (sent.producer_id, sent.number) not in self.stored
        base = self.store(sent)
        total, _ = sent_sizes(request.payload)
        region = bytes(request.payload[ENVELOPE_BYTES:total])
        self.regions.append(region)
        if is_new:
            self.kept += read(region)
        return base


def read(region: bytes) -> list[Kept]:
    """The messages of a delayed batch."""
    view = BatchView(placed(region, 0), region)
    due_times_ms = view.due_times_ms()
    assert due_times_ms is not None
    count = view.count
    columns = zip(
        view.bodies(),
        due_times_ms,
        view.keys() or [b""] * count,
        view.tags() or [()] * count,
        view.headers() or [{}] * count,
        strict=True,
    )
    return [
        Kept(view.subject, body, due, view.header.flags, key, tags, headers)
        for body, due, key, tags, headers in columns
    ]


class FakeDelayMeta(FakeMeta):
    """A metaserver that knows delay groups. `answers` has, by the call's name, what each further
    call gets; the last one stays.
    """

    def __init__(
        self, groups: Sequence[FakeGroup], delays: Sequence[FakeDelayGroup], *, can_push: bool
    ) -> None:
        super().__init__(groups, can_push=can_push)
        self.delays = list(delays)
        self.asked_delayed: list[str] = []
        self.answers: dict[str, list[Any]] = {}
        self.asked: list[tuple[str, Any]] = []

    @answering
    async def Locate(self, request: pb.LocateRequest) -> pb.LocateResponse:
        (self.asked_delayed if request.delayed else self.located).append(request.subject)
        if request.subject == "none":
            raise UnknownSubject("there is no subject 'none'")
        settings, ordered = self.order.located() if self.order is not None else (None, None)
        routes = [
            route(each)
            for each in (self.delays if request.delayed else self.groups)
            if each.master is not None
        ]
        if not routes:
            raise NotConnected("there is no delay group: start `qmq delay`")
        return pb.LocateResponse(routes=routes, settings=settings, route=ordered)

    def requests(self, call: str) -> list[Any]:
        """The requests of one kind of call."""
        return [request for name, request in self.asked if name == call]

    async def _answer(self, call: str, request: Any, context: Any) -> Any:
        # A copy: the client may continue with the same object in this process.
        copy = type(request)()
        copy.CopyFrom(request)
        self.asked.append((call, copy))
        answers = self.answers[call]
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if callable(answer):
            answer = answer(request)
        if isinstance(answer, QmqError):
            raise answer
        if isinstance(answer, tuple):
            await context.abort(*answer)
        return answer


def _call(name: str) -> Callable[..., Any]:
    async def answered(self: FakeDelayMeta, request: Any, context: Any) -> Any:
        async def ask(_: object, given: Any) -> Any:
            return await self._answer(name, given, context)

        return await answering(ask)(self, request, context)

    return answered


for _name in ("CancelDelayed", "MoveDelayed", "ShowDelayed", "ListDelayed", "DescribeDelays"):
    setattr(FakeDelayMeta, _name, _call(_name))


class DelayCluster(NamedTuple):
    """A running cluster of fakes with delay groups."""

    meta: FakeDelayMeta
    groups: list[FakeGroup]
    delays: list[FakeDelayGroup]
    mq: qmq.Client

    @property
    def kept(self) -> list[Kept]:
        """The messages of all delay groups."""
        return [each for delay in self.delays for each in delay.kept]

    def named(self, group: str) -> FakeDelayGroup:
        """The delay group of that name."""
        return next(each for each in self.delays if each.name == group)


@asynccontextmanager
async def delay_cluster(
    delays: int = 1, *, can_push: bool = False, ordered: bool = False, timing: ClientTiming = TIMING
) -> AsyncIterator[DelayCluster]:
    """One broker group, some delay groups, a metaserver and a client."""
    groups = [FakeGroup("g0")]
    made = [FakeDelayGroup(f"d{number}") for number in range(delays)]
    meta = FakeDelayMeta(groups, made, can_push=can_push)
    if ordered:
        meta.order = FakeOrder(groups)
    async with AsyncExitStack() as stack:
        for group in [*groups, *made]:
            for replica in group.replicas:
                await replica.start()
                stack.push_async_callback(replica.stop)
        await meta.start()
        assert meta.server is not None
        stack.push_async_callback(meta.server.stop, None)
        stack.callback(meta.end_streams)
        mq = await stack.enter_async_context(qmq.Client(meta.address, timing=timing))
        yield DelayCluster(meta, groups, made, mq)


def message(id: str, **fields: Any) -> delay_pb2.DelayedMessage:
    """A message in a delay group's answer."""
    return delay_pb2.DelayedMessage(
        **{
            "id": id,
            "subject": "s",
            "message_id": id[:32],
            "state": "pending",
            "group": "d0",
            **fields,
        }
    )


class FakeQueue:
    """The queue of one broker group. `frames` has all received frames except heartbeats, by kind
    and in order.
    """

    def __init__(self, group: FakeGroup, *, attempts_max: int = 0) -> None:
        self.group = group
        self.attached = wire.Attached(1, 30_000, 0, 0, attempts_max)
        self.attaches: list[wire.Attach] = []
        self.pulls: list[tuple[Peer, Frame]] = []
        self.settles: list[tuple[int, list[Settlement]]] = []
        self.begun: list[tuple[int, int, int]] = []
        self.detached = 0
        self.frames: list[int] = []
        self.is_silent = False
        """Whether SETTLE arrives and is not answered."""
        self.next = 0
        for replica in group.replicas:
            replica.handle |= {
                FrameKind.ATTACH: self._attach,
                FrameKind.PULL: self._pull,
                FrameKind.SETTLE: self._settle,
                FrameKind.BEGUN: self._begun,
                FrameKind.DETACH: self._detach,
                FrameKind.HEARTBEAT: lambda peer, request: peer.answer(request, FrameKind.OK),
            }

    @property
    def settled(self) -> list[Settlement]:
        return [each for _, settlements in self.settles for each in settlements]

    def _attach(self, peer: Peer, request: Frame) -> None:
        self.frames.append(request.kind)
        self.pulls.clear()
        asked = wire.Attach.unpack(request.payload)
        self.attaches.append(asked)
        granted = replace(self.attached, lease_ms=min(asked.lease_ms, self.attached.lease_ms))
        peer.answer(request, FrameKind.ATTACHED, granted.pack())

    def _pull(self, peer: Peer, request: Frame) -> None:
        self.frames.append(request.kind)
        self.pulls.append((peer, request))

    def _settle(self, peer: Peer, request: Frame) -> None:
        self.frames.append(request.kind)
        self.settles.append(wire.unpack_settle(request.payload))
        if not self.is_silent:
            peer.answer(request, FrameKind.SETTLED, wire.pack_settled(0, 0))

    def _begun(self, _: Peer, request: Frame) -> None:
        self.frames.append(request.kind)
        self.begun.append(wire.unpack_begun(request.payload))

    def _detach(self, peer: Peer, request: Frame) -> None:
        self.frames.append(request.kind)
        self.pulls.clear()
        self.detached += 1
        peer.answer(request, FrameKind.OK)

    async def pull(self) -> wire.Pull:
        """The pull that waits."""
        await eventually(lambda: bool(self.pulls))
        return wire.unpack_pull(self.pulls[0][1].payload)

    async def deliver(self, bodies: list[bytes], *attempts: int, base: int | None = None) -> None:
        """Answer the pull that waits with new messages; with `attempts`, one message of each."""
        await eventually(lambda: bool(self.pulls))
        peer, request = self.pulls.pop(0)
        pull, first = self.next, self.next if base is None else base
        self.next += len(bodies)
        ranges = [Range(first + at, 1, attempt, 0) for at, attempt in enumerate(attempts)] or [
            Range(first, len(bodies), 1, 0)
        ]
        peer.answer(
            request,
            FrameKind.MESSAGES,
            wire.pack_delivery(1, pull, ranges, 1) + batch(bodies, first),
        )

    def resume(self) -> None:
        """The next consumer that attaches still holds its deliveries."""
        self.attached = wire.Attached(1, 30_000, self.next, 1, self.attached.attempts_max)
