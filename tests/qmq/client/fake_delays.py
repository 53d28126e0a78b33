"""A cluster with delay groups, on top of `fake_cluster`: they accept delayed batches, and a test sets the answers of metaservers.

The consuming side of a fake broker group: a test sets the answer to ATTACH and the deliveries, and sees the verdicts.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any, NamedTuple

from fake_cluster import FakeBroker, FakeGroup, FakeMeta, FakeOrder, Peer, Sent, batch, placed, route
from support import eventually

import qmq
from qmq.client.connection.connection import TIMING, ClientTiming
from qmq.errors import NotConnected, QmqError, UnknownSubject
from qmq.proto.v1 import delay_pb2
from qmq.proto.v1 import meta_pb2 as pb
from qmq.rpc.channel import answering
from qmq.wire import frame_payloads as wire
from qmq.wire.batch import ENVELOPE_BYTES, BatchView, sent_sizes
from qmq.wire.frame import Frame, FrameKind
from qmq.wire.frame_payloads import Range
from qmq.wire.settle_payloads import Settlement

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
    """A delay group that stores messages with their due times. `next_append_ms` is the append time of the next batch."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.kept: list[Kept] = []
        self.regions: list[bytes] = []
        self.next_append_ms = APPEND_MS

    def serve(self, _: FakeBroker, peer: Peer, request: Frame, sent: Sent) -> None:
        """Store once, and answer."""
        base = self.keep(request, sent)
        peer.answer(request, FrameKind.PRODUCED, wire.pack_produced([wire.Produced(base, self.next_append_ms)]))

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
        view.bodies(), due_times_ms, view.keys() or [b""] * count, view.tags() or [()] * count, view.headers() or [{}] * count, strict=True
    )
    return [Kept(view.subject, body, due, view.header.flags, key, tags, headers) for body, due, key, tags, headers in columns]


class FakeDelayMeta(FakeMeta):
    """A metaserver that knows delay groups. `answers` has, by the call's name, what each further call gets; the last one stays."""

    def __init__(self, groups: Sequence[FakeGroup], delays: Sequence[FakeDelayGroup], *, can_push: bool) -> None:
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
        routes = [route(each) for each in (self.delays if request.delayed else self.groups) if each.master is not None]
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
    return delay_pb2.DelayedMessage(**{"id": id, "subject": "s", "message_id": id[:32], "state": "pending", "group": "d0", **fields})


class FakeQueue:
    """The queue of one broker group. `frames` has all received frames except heartbeats, by kind and in order."""

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
        ranges = [Range(first + at, 1, attempt, 0) for at, attempt in enumerate(attempts)] or [Range(first, len(bodies), 1, 0)]
        peer.answer(request, FrameKind.MESSAGES, wire.pack_delivery(1, pull, ranges, 1) + batch(bodies, first))

    def resume(self) -> None:
        """The next consumer that attaches still holds its deliveries."""
        self.attached = wire.Attached(1, 30_000, self.next, 1, self.attached.attempts_max)
