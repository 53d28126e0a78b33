"""The connection of a stream to its partition's broker group."""

from __future__ import annotations

from typing import Protocol

from qmq.client.links import Links
from qmq.client.ordered.ordered_batch import OrderedBatch
from qmq.client.ordered.stream import Stream
from qmq.delivery.master_connection import MasterConnection
from qmq.errors import QmqError
from qmq.wire.frame_payloads import Produced


class StreamConnectionOwner(Protocol):
    """What a stream's connection needs of the producer."""

    subject: str
    kind: int
    """PRODUCE, or one of the frames of other `acks`."""

    def encode(self, stream: Stream, batch: OrderedBatch) -> tuple[bytes, bytes]:
        """The encoded batch. Raises QmqError."""
        ...

    def changed(self, connection: StreamConnection) -> None:
        """Batches were decided, or the stream's state changed: do what is needed, and `pump`."""
        ...

    def gather(self, connection: StreamConnection) -> None:
        """A batch timed out: add the open batch, which must fail with it, behind it."""
        ...

    def give_up(self, failure: QmqError) -> None:
        """Nothing can be sent: the subject is gone, or the client is closed."""
        ...


class StreamConnection(MasterConnection[OrderedBatch]):
    def __init__(self, links: Links, stream: Stream, owner: StreamConnectionOwner) -> None:
        super().__init__(links, owner.subject, stream.partition.group, stream, lambda: owner.changed(self))
        self.kind = owner.kind
        self.stream = stream
        self._owner = owner

    def _encode(self, batch: OrderedBatch) -> tuple[bytes, ...]:
        return self._owner.encode(self.stream, batch)

    def _stored(self, batch: OrderedBatch, produced: Produced, now: float) -> None:
        self.stream.stored(batch, produced, now)

    def _tick(self, now: float) -> None:
        if self.stream.is_late(now):
            self._owner.gather(self)
        super()._tick(now)

    @property
    def _is_needed(self) -> bool:
        stream = self.stream
        return not self.is_closed and not stream.is_settled and bool(stream.flight or (stream.waiting and not stream.is_left))

    async def _gives_up(self, failure: QmqError, failures: int) -> bool:
        self._owner.give_up(failure)
        self._loop.call_soon(self._changed)
        return True
