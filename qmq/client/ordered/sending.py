"""What carries a stream out: see `Carrier`. It decides nothing about batches: `Stream` does."""

from __future__ import annotations

from typing import Protocol

from qmq.client.carrier import ANSWER_S, Carrier
from qmq.client.connection import Connection
from qmq.client.links import Links
from qmq.client.ordered.ordered_batch import OrderedBatch
from qmq.client.ordered.stream import Stream
from qmq.errors import PeerError, QmqError, Unavailable
from qmq.wire import frame_payloads as wire
from qmq.wire.frame import Frame


class Owner(Protocol):
    """Whose streams these are: the producer."""

    subject: str
    kind: int
    """PRODUCE, or one of the frames of other `acks`."""

    def encode(self, stream: Stream, batch: OrderedBatch) -> tuple[bytes, bytes]:
        """The batch as it travels. Raises QmqError."""
        ...

    def changed(self, sending: Sending) -> None:
        """Something was decided, became possible or impossible: look what is to be done, and `pump`."""
        ...

    def gather(self, sending: Sending) -> None:
        """Some batch is out of time: put what is to fail with it behind it."""
        ...

    def give_up(self, failure: QmqError) -> None:
        """Nothing can be sent anywhere: the subject is gone, or the client is closed."""
        ...


class Sending(Carrier):
    def __init__(self, links: Links, stream: Stream, owner: Owner) -> None:
        super().__init__(links, owner.subject, stream.partition.group, stream, lambda: owner.changed(self))
        self.stream = stream
        self._owner = owner

    # --- out and back --------------------------------------------------------------------------------------------------

    def _send(self, connection: Connection, now: float) -> None:
        while (batch := self.stream.next(now, self._room_bytes - connection.produce_bytes)) is not None:
            self._transmit(connection, batch)

    def _transmit(self, connection: Connection, batch: OrderedBatch) -> None:
        attempt = batch.attempts
        try:
            if batch.encoded is None:
                batch.encoded = self._owner.encode(self.stream, batch)
        except QmqError as failure:
            self._loop.call_soon(self._answered, connection, batch, attempt, failure)
            return
        left_s = min(max(batch.until - self._loop.time(), 0.1), ANSWER_S)
        self._request(
            connection, self._owner.kind, batch.encoded, left_s, lambda answer: self._answered(connection, batch, attempt, answer)
        )

    def flush(self) -> None:
        """Write now, not at the end of the next round of the event loop."""
        if self.connection is not None:
            self.connection.stream.flush()

    def _answered(self, connection: Connection, batch: OrderedBatch, attempt: int, answer: Frame | QmqError) -> None:
        result = answer if isinstance(answer, QmqError) else wire.unpack_one_produced(answer.payload)
        self.stream.answered(batch, attempt, result, self._loop.time())
        if self.is_closed:
            return
        self._heard(connection, result)
        self._owner.changed(self)

    def _tick(self, now: float) -> None:
        if self.stream.is_late(now):
            self._owner.gather(self)
        self.stream.tick(now)

    # --- finding the master --------------------------------------------------------------------------------------------

    @property
    def _is_needed(self) -> bool:
        stream = self.stream
        return not self.is_closed and not stream.is_settled and bool(stream.flight or (stream.waiting and not stream.is_left))

    def reach(self, *, ahead: bool = False) -> None:
        """Find the master and connect, again and again while there is something for it; `ahead`: once, to be ready soon."""
        if self._reaching is None and self.connection is None and not self.is_closed and (ahead or self._is_needed):
            self._reaching = self._loop.create_task(self._reach(ahead))

    async def _reach(self, ahead: bool) -> None:
        try:
            while (ahead or self._is_needed) and self.connection is None:
                ahead = False
                try:
                    self._use(*await self._links.reach(self._owner.subject, self.group))
                except (Unavailable, PeerError) as failure:
                    self.stream.disconnected(failure)
                    self._owner.changed(self)
        except QmqError as failure:
            self._owner.give_up(failure)
        finally:
            self._reaching = None
        self._changed()
