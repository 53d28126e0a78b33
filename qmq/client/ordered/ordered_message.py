"""The messages that an ordered consumer hands out, with their lane and their verdicts."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol

from qmq_ordering.lane import Lane
from qmq_ordering.route import LpRange

from qmq.client.message import CONTENT, Decoded, StoredMessage, delay_ms, error_text
from qmq.client.ordered.lane_core import Cell, LaneCore
from qmq.errors import CorruptBatch

log = logging.getLogger("qmq.client")


class LaneSource(Protocol):
    """The lane that a message came from."""

    core: LaneCore
    lane: Lane
    subject: str
    broker_group: str
    partition: int

    @property
    def lps(self) -> LpRange:
        """The logical partitions of the lane."""
        ...

    def is_sure(self) -> bool:
        """Whether the lane's lease cannot have ended, as far as this consumer knows."""
        ...

    def worked(self, *, is_urgent: bool) -> None:
        """A handler finished, successfully or not. Settle soon, or immediately if the request is full."""
        ...

    async def confirmed(self, cell: Cell) -> None:
        """Returns when the broker has the verdict. Raises LaneLost, NotConnected, ClientClosed."""
        ...


class LaneSettler(Protocol):
    """Takes verdicts: `LaneInbox`, or a listener's wrapper around it."""

    def finish(self, message: OrderedMessage) -> None:
        """The message was handled."""
        ...

    def fail(self, message: OrderedMessage, pause_ms: int | None) -> None:
        """The message failed."""
        ...

    def reject(self, message: OrderedMessage) -> None:
        """The handler rejected the message: no retry can help."""
        ...

    def release(self, message: OrderedMessage) -> None:
        """The handler gives the message back untouched."""
        ...


class LaneMessage(StoredMessage):
    """One message of an ordered subject, and its place.

    `attempt` counts from 1 over all consumers. `token` is the fencing token of the lane. It grows whenever the lane, or part of it, is
    granted to a consumer. A handler that stores the token with its writes, and refuses a smaller one, is protected from its own earlier
    attempts. Compare tokens of one partition only. `route_version` is the version of the route under which the message was read.
    """

    __slots__ = (*CONTENT, "lane", "route_version", "token")

    def __init__(self, lane: LaneSource, batch: Decoded, index: int, body: bytes, attempt: int, token: int, version: int) -> None:
        self.body = body
        self.attempt = attempt
        self.is_settled = False
        self._batch = batch
        self._index = index
        self.lane = lane
        self.token = token
        self.route_version = version

    @property
    def subject(self) -> str:
        """The subject that the message was sent to."""
        return self.lane.subject

    @property
    def broker_group(self) -> str:
        """The broker group that stores the message."""
        return self.lane.broker_group

    @property
    def partition(self) -> int:
        """The physical partition; `sequence` counts in it."""
        return self.lane.partition

    @property
    def logical_partition(self) -> int:
        """The logical partition of its key, which never changes."""
        return int(self._batch.column("logical_partitions")[self._index])

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.subject}/{self.partition}/{self.sequence} attempt {self.attempt}, {len(self.body)} bytes>"


class OrderedMessage(LaneMessage):
    """One message of an ordered subject. No other message of its key is handed out until this one is acknowledged, or parked, or has
    succeeded at another attempt.
    """

    __slots__ = ("_settler", "cell")

    def __init__(self, settler: LaneSettler, lane: LaneSource, cell: Cell, batch: Decoded, index: int, token: int, version: int) -> None:
        # Not by super(): a call for each message. Compressed bodies are decompressed when the message is handed out: see `open`.
        bodies = batch.decoded if batch.view.header.compression else batch.bodies
        self.body = bodies[index] if bodies is not None else b""
        self.attempt = cell.attempt
        self.is_settled = False
        self._batch = batch
        self._index = index
        self.lane = lane
        self.token = token
        self.route_version = version
        self._settler = settler
        self.cell = cell

    @property
    def batch(self) -> Decoded:
        """The batch that has the message."""
        return self._batch

    @property
    def unreadable(self) -> CorruptBatch | None:
        """Why the body cannot be decompressed; such a message is never handed out."""
        return self._batch.unreadable

    def open(self) -> CorruptBatch | None:
        """Read the body if that was not done yet. Returns why it cannot be decompressed; such a message is never handed out."""
        bodies = self._batch.readable_bodies
        if bodies is None:
            return self._batch.unreadable
        self.body = bodies[self._index]
        return None

    def again(self) -> OrderedMessage:
        """The same message for another attempt; verdicts given through the old object are ignored."""
        return OrderedMessage(self._settler, self.lane, self.cell, self._batch, self._index, self.token, self.route_version)

    def settle_through(self, wrap: Callable[[LaneSettler], LaneSettler]) -> None:
        """Send the message's verdicts through a wrapper around the settler."""
        self._settler = wrap(self._settler)

    # --- settling ------------------------------------------------------------------------------------------------------

    async def ack(self) -> None:
        """Acknowledge. Does not wait: acknowledgements are sent within milliseconds, together. `ack_sync` waits."""
        self.ack_later()

    async def ack_sync(self) -> None:
        """Acknowledge, and return when the acknowledgement is committed.

        Raises LaneLost if the lane went to another consumer first: the message may be delivered again. Raises NotConnected if no answer
        came in time (the verdict is sent again and again), ClientClosed.
        """
        self.ack_later()
        await self.lane.confirmed(self.cell)

    def ack_later(self) -> None:
        """`ack` for code that is not `async`."""
        if not self.is_settled:
            self.is_settled = True
            self._settler.finish(self)

    def fail(self, delay: timedelta | None = None, error: str | BaseException = "") -> None:
        """The message failed: retry it after `delay` (default: the consumer's retry delays), or park its key, by the consumer's policy.
        `error`, a text or an exception, is logged. Raises InvalidArgument.
        """
        pause_ms = None if delay is None else delay_ms(delay)
        text = error_text(error)
        if not self.is_settled:
            if text:
                log.warning("%r failed: %s", self, text)
            self.is_settled = True
            self._settler.fail(self, pause_ms)

    def reject(self, error: str | BaseException = "") -> None:
        """The message failed, and no other attempt will help: its key is parked immediately with all later messages of the key, regardless
        of the consumer's `on_failure`. `qmq dlq` shows and replays parked keys. `error` is logged. Raises InvalidArgument.
        """
        text = error_text(error)
        if not self.is_settled:
            log.warning("%r was rejected, and its key is parked: %s", self, text or "no reason given")
            self.is_settled = True
            self._settler.reject(self)

    def release(self) -> None:
        """Give the message back untouched: it is handed out again, before later ones of its key, and `attempt` does not grow."""
        if not self.is_settled:
            self.is_settled = True
            self._settler.release(self)
