"""The consuming side of a fake broker group: a test sets the answer to ATTACH and the deliveries, and sees the verdicts."""

from __future__ import annotations

from dataclasses import replace

from fake_cluster import FakeGroup, Peer, batch
from support import eventually

from qmq.wire import frame_payloads as wire
from qmq.wire.frame import Frame, FrameKind
from qmq.wire.frame_payloads import Range
from qmq.wire.settle_payloads import Settlement


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
