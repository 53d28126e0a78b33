"""A pipe sends one producer's batches to one broker group, through changes of the group's master.

`PipeWindow` decides about batches. The pipe owns the connection, and puts decided batches into the pool.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, Protocol

from qmq.client.connection import Connection
from qmq.client.links import Links
from qmq.client.open_batch import Batch
from qmq.client.pipe_window import BatchPool, PipeWindow
from qmq.delivery.master_connection import MasterConnection
from qmq.errors import QmqError
from qmq.wire.frame_payloads import Produced

INFLIGHT_BATCHES_MAX: Final = 32
"""Half of the batches that a broker remembers for each producer (qmq/log/producers.py), so that it always recognises a retry."""


class BatchDestination(Protocol):
    """The destination and the encoding of a producer's batches: the difference between the kinds of producers."""

    target: str
    """The target under which the locator knows the subject (route_book.py)."""
    kind: int
    """PRODUCE, or one of the frames of other `acks`."""

    @property
    def inflight_max(self) -> int:
        """How many batches may be in flight to one broker group."""
        ...

    def usable(self, groups: Mapping[str, bool]) -> Mapping[str, bool]:
        """Choose the groups to use among the broker groups (and whether each is writable)."""
        ...

    def encode(self, batch: Batch) -> tuple[bytes, bytes]:
        """The encoded batch. Raises QmqError."""
        ...


class Pipe(MasterConnection[Batch]):
    """`answered` is called after each answer, `changed` after every other change."""

    def __init__(
        self,
        links: Links,
        destination: BatchDestination,
        group: str,
        pool: BatchPool,
        *,
        answered: Callable[[], None],
        changed: Callable[[], None],
    ) -> None:
        self.window = PipeWindow(destination.inflight_max)
        super().__init__(links, destination.target, group, self.window, self.pump)
        self.kind = destination.kind
        self.is_writable = True
        self._destination = destination
        self._pool = pool
        self._after_answers = answered
        self._after_change = changed

    @property
    def is_stalled(self) -> bool:
        """Whether the group has not answered for a while: then it gets no new batches if there is another group."""
        return self.window.is_stalled

    # --- the way out ---------------------------------------------------------------------------------------------------

    def has_room(self, size: int) -> bool:
        """Whether a new batch of `size` bytes can be sent now."""
        connection, window = self.connection, self.window
        return (
            connection is not None
            and not window.has_retries
            and window.has_room(size, self._loop.time(), self._room_bytes - connection.produce_bytes)
            and connection.is_open
            and connection.stream.is_writable
        )

    def transmit(self, batch: Batch) -> None:
        """Send a batch; there must be room."""
        assert self.connection is not None
        self.window.send(batch)
        self._transmit(self.connection, batch)

    def pump(self) -> None:
        """Send batches to be sent again, then new ones."""
        super().pump()
        self._after_change()

    def _encode(self, batch: Batch) -> tuple[bytes, ...]:
        return self._destination.encode(batch)

    # --- the way back --------------------------------------------------------------------------------------------------

    def _stored(self, batch: Batch, produced: Produced, now: float) -> None:
        if self.window.acknowledged(batch, now):
            self._pool.stored(self.group, batch, produced)

    def _refused(self, connection: Connection, failure: QmqError) -> None:
        super()._refused(connection, failure)
        self._report()

    def _report(self) -> None:
        for batch, failure in self.window.take_failed():
            self._pool.failed(batch, failure)
        for batch in self.window.take_given_back():
            self._pool.give_back(batch)

    def _after_answer(self) -> None:
        if self.window.has_retries:
            super().pump()
        self._after_answers()

    @property
    def _is_needed(self) -> bool:
        return not self.is_closed and bool(self.window.flight or (self.is_writable and self._pool.waiting))

    async def _gives_up(self, failure: QmqError, failures: int) -> bool:
        self.window.disconnected(failure)
        self.window.fail_retries(failure)
        self._report()
        self._pool.give_up(failure)
        self._loop.call_soon(self._changed)
        return True

    # --- the end -------------------------------------------------------------------------------------------------------

    def expire(self, now: float) -> None:
        """Fail batches that were to be sent again and have timed out."""
        self.window.expire(now)
        self._report()

    def abort(self, fail: Callable[[Batch, bool], None]) -> None:
        """End now: `fail` is called for each batch, with whether its answer is still outstanding."""
        self.close()
        for batch in self.window.drop():
            fail(batch, batch.unanswered > 0)
