"""The connection of a stream to its partition's broker group."""

from __future__ import annotations

from collections.abc import Callable

from qmq.client.connection import Connection
from qmq.client.links import Links
from qmq.client.ordered.group_load import GroupLoad
from qmq.client.ordered.ordered_batch import OrderedBatch
from qmq.client.ordered.stream import Stream
from qmq.delivery.master_connection import MasterConnection
from qmq.errors import QmqError
from qmq.wire.frame import Frame
from qmq.wire.frame_payloads import Produced

Encode = Callable[[Stream, OrderedBatch], tuple[bytes, bytes]]
"""Returns the encoded batch. Raises QmqError."""


class StreamConnection(MasterConnection[OrderedBatch]):
    """`kind` is PRODUCE, or one of the frames of other `acks`.

    changed    batches were decided, or the stream's state changed: do what is needed, and `pump`
    gather     a batch timed out: add the open batch, which must fail with it, behind it
    give_up    nothing can be sent: the subject is deleted, or the client is closed
    """

    def __init__(
        self,
        links: Links,
        subject: str,
        kind: int,
        stream: Stream,
        load: GroupLoad,
        encode: Encode,
        changed: Callable[[StreamConnection], None],
        gather: Callable[[StreamConnection], None],
        give_up: Callable[[QmqError], None],
    ) -> None:
        super().__init__(links, subject, stream.partition.group, stream, lambda: changed(self))
        self.kind = kind
        self.stream = stream
        self.load = load
        self._encode_batch = encode
        self._gather = gather
        self._give_up = give_up

    def _encode(self, batch: OrderedBatch) -> tuple[bytes, ...]:
        return self._encode_batch(self.stream, batch)

    def _transmit(self, connection: Connection, batch: OrderedBatch) -> None:
        self.load.sent(batch.count, batch.size)
        super()._transmit(connection, batch)

    def _answered(self, connection: Connection, batch: OrderedBatch, attempt: int, answer: Frame | QmqError) -> None:
        self.load.answered(batch.count, batch.size)
        super()._answered(connection, batch, attempt, answer)

    def _stored(self, batch: OrderedBatch, produced: Produced, now: float) -> None:
        self.stream.stored(batch, produced, now)

    def _tick(self, now: float) -> None:
        if self.stream.is_late(now):
            self._gather(self)
        super()._tick(now)

    @property
    def _is_needed(self) -> bool:
        stream = self.stream
        return not self.is_closed and not stream.is_settled and bool(stream.flight or (stream.waiting and not stream.is_left))

    async def _gives_up(self, failure: QmqError, failures: int) -> bool:
        self._give_up(failure)
        self._loop.call_soon(self._changed)
        return True
