"""The messages that an ordered consumer hands out, with their lane and their verdicts: one by one,
or in bulk: consecutive messages of one lane, in its order, with one verdict.

A *run* has the delivered messages of one batch, and the cell by which they are settled (`lane.py`).
`OrderedMessages` holds runs of one lane. Message objects are made only if the application iterates.

Which batches stay decompressed (`DecompressedBatches`): a message that is handed out has its own
body; the rest of its batch stays decompressed for the messages that follow. But one of them may
wait for its key while messages of other batches are handed out: then each of these batches would
stay decompressed.

    batch 1: a b      batch 2: c b      batch 3: d b
    a, c and d are handed out and finished; the messages of b wait
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from operator import itemgetter
from typing import Protocol
from weakref import ref

from qmq_ordering.lanes import Lane
from qmq_ordering.routes import LpRange

from qmq.client.consuming.message import CONTENT, DecodedBatch, StoredMessage, delay_ms, error_text
from qmq.client.consuming.ordered.lane import Cell, LaneCore
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
        """A handler finished, successfully or not.
        Settle soon, or immediately if the request is full.
        """
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

    `attempt` counts from 1 over all consumers. `token` is the fencing token of the lane. It grows
    whenever the lane, or part of it, is granted to a consumer. A handler that stores the token with
    its writes, and refuses a smaller one, is protected from its own earlier attempts. Compare
    tokens of one partition only. `route_version` is the version of the route under which the
    message was read.
    """

    __slots__ = (*CONTENT, "lane", "route_version", "token")

    def __init__(
        self,
        lane: LaneSource,
        batch: DecodedBatch,
        index: int,
        body: bytes,
        attempt: int,
        token: int,
        version: int,
    ) -> None:
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
        return (
            f"<{type(self).__name__} {self.subject}/{self.partition}/{self.sequence} attempt "
            f"{self.attempt}, {len(self.body)} bytes>"
        )


class OrderedMessage(LaneMessage):
    """One message of an ordered subject. No other message of its key is handed out until this one
    is acknowledged, or parked, or has succeeded at another attempt.
    """

    __slots__ = ("_settler", "cell")

    def __init__(
        self,
        settler: LaneSettler,
        lane: LaneSource,
        cell: Cell,
        batch: DecodedBatch,
        index: int,
        token: int,
        version: int,
    ) -> None:
        # Not by super(): a call for each message. Compressed bodies are decompressed when the
        # message is handed out: see `open`.
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
    def batch(self) -> DecodedBatch:
        """The batch that has the message."""
        return self._batch

    @property
    def unreadable(self) -> CorruptBatch | None:
        """Why the body cannot be decompressed; such a message is never handed out."""
        return self._batch.unreadable

    def open(self) -> CorruptBatch | None:
        """Read the body if that was not done yet. Returns why it cannot be decompressed; such a
        message is never handed out.
        """
        bodies = self._batch.readable_bodies
        if bodies is None:
            return self._batch.unreadable
        self.body = bodies[self._index]
        return None

    def again(self) -> OrderedMessage:
        """The same message for another attempt;
        verdicts given through the old object are ignored.
        """
        return OrderedMessage(
            self._settler,
            self.lane,
            self.cell,
            self._batch,
            self._index,
            self.token,
            self.route_version,
        )

    def settle_through(self, wrap: Callable[[LaneSettler], LaneSettler]) -> None:
        """Send the message's verdicts through a wrapper around the settler."""
        self._settler = wrap(self._settler)

    # --- settling ---------------------------------------------------------------------------------

    async def ack(self) -> None:
        """Acknowledge. Does not wait: acknowledgements are sent within milliseconds, together.
        `ack_sync` waits.
        """
        self.ack_later()

    async def ack_sync(self) -> None:
        """Acknowledge, and return when the acknowledgement is committed.

        Raises LaneLost if the lane went to another consumer first: the message may be delivered
        again. Raises NotConnected if no answer came in time (the verdict is sent again and again),
        ClientClosed.
        """
        self.ack_later()
        await self.lane.confirmed(self.cell)

    def ack_later(self) -> None:
        """`ack` for code that is not `async`."""
        if not self.is_settled:
            self.is_settled = True
            self._settler.finish(self)

    def fail(self, delay: timedelta | None = None, error: str | BaseException = "") -> None:
        """The message failed: retry it after `delay` (default: the consumer's retry delays), or
        park its key, by the consumer's policy. `error`, a text or an exception, is logged. Raises
        InvalidArgument.
        """
        pause_ms = None if delay is None else delay_ms(delay)
        text = error_text(error)
        if not self.is_settled:
            if text:
                log.warning("%r failed: %s", self, text)
            self.is_settled = True
            self._settler.fail(self, pause_ms)

    def reject(self, error: str | BaseException = "") -> None:
        """The message failed, and no other attempt will help: its key is parked immediately with
        all later messages of the key, regardless of the consumer's `on_failure`. `qmq dlq` shows
        and replays parked keys. `error` is logged. Raises InvalidArgument.
        """
        text = error_text(error)
        if not self.is_settled:
            log.warning(
                "%r was rejected, and its key is parked: %s", self, text or "no reason given"
            )
            self.is_settled = True
            self._settler.reject(self)

    def release(self) -> None:
        """Give the message back untouched: it is handed out again, before later ones of its key,
        and `attempt` does not grow.
        """
        if not self.is_settled:
            self.is_settled = True
            self._settler.release(self)


@dataclass(slots=True, eq=False)
class MessageRun:
    """The messages at `indices` (ascending) of one batch."""

    lane: LaneSource
    cell: Cell
    batch: DecodedBatch
    indices: Sequence[int]
    attempt: int
    token: int
    version: int

    def split(self, count: int) -> MessageRun:
        """Keep the first `count` messages; returns the rest."""
        base, head, tail = self.batch.view.base_sequence, self.indices[:count], self.indices[count:]
        rest = self.lane.core.split(self.cell, base + head[-1], base + tail[0], count)
        self.indices = head
        return MessageRun(self.lane, rest, self.batch, tail, self.attempt, self.token, self.version)

    def message(self, place: int) -> LaneMessage:
        index = self.indices[place]
        return LaneMessage(
            self.lane,
            self.batch,
            index,
            self.batch.bodies[index],
            self.attempt,
            self.token,
            self.version,
        )

    def again(self) -> MessageRun:
        """The same messages for another attempt."""
        return replace(self, attempt=self.cell.attempt)

    def choose(self, column: list[bytes]) -> list[bytes]:
        """The values of these messages in a column of the batch."""
        indices = self.indices
        if isinstance(indices, range):
            return column if len(indices) == len(column) else column[indices.start : indices.stop]
        return list(itemgetter(*indices)(column)) if len(indices) > 1 else [column[indices[0]]]


class OrderedMessages:
    """A sequence of `LaneMessage`, made on access, with bodies and keys as lists. All are of one
    lane, in its order: working through them in order keeps the order of each key. Until they are
    settled, the lane hands out nothing else.

    `finish` is called when they are acknowledged, `fail` when they failed, with the pause in
    milliseconds before they are tried again.
    """

    __slots__ = ("_fail", "_finish", "is_settled", "runs")

    def __init__(
        self,
        runs: list[MessageRun],
        finish: Callable[[OrderedMessages], None],
        fail: Callable[[OrderedMessages, int | None], None],
    ) -> None:
        self._finish, self._fail = finish, fail
        self.runs = runs
        self.is_settled = not runs

    @property
    def partition(self) -> int:
        """The physical partition; 0 if there are no messages."""
        return self.runs[0].lane.partition if self.runs else 0

    @property
    def broker_group(self) -> str:
        """The broker group that stores them; "" if there are no messages."""
        return self.runs[0].lane.broker_group if self.runs else ""

    @property
    def token(self) -> int:
        """The fencing token of their lane, as in `OrderedMessage`; 0 if there are no messages."""
        return self.runs[0].token if self.runs else 0

    @property
    def attempt(self) -> int:
        """The number of the first message's attempt, from 1; 0 if there are no messages."""
        return self.runs[0].attempt if self.runs else 0

    def __len__(self) -> int:
        return sum([len(each.indices) for each in self.runs])

    def __iter__(self) -> Iterator[LaneMessage]:
        for each in self.runs:
            yield from map(each.message, range(len(each.indices)))

    def __getitem__(self, index: int) -> LaneMessage:
        place = index + len(self) if index < 0 else index
        for each in self.runs:
            if 0 <= place < len(each.indices):
                return each.message(place)
            place -= len(each.indices)
        raise IndexError(f"{index} of {len(self)} messages")

    @property
    def bodies(self) -> list[bytes]:
        """All bodies, without making an object for each message: the fast way."""
        if len(self.runs) == 1:
            return self.runs[0].choose(self.runs[0].batch.bodies)
        return [body for each in self.runs for body in each.choose(each.batch.bodies)]

    @property
    def keys(self) -> list[str]:
        """All keys as text. Raises UnicodeDecodeError for a key that is not
        UTF-8: see `keys_bytes`.
        """
        return list(map(bytes.decode, self.keys_bytes))

    @property
    def keys_bytes(self) -> list[bytes]:
        return [
            key
            for each in self.runs
            for key in each.choose(each.batch.column("keys") or [b""] * each.batch.view.count)
        ]

    # --- settling ---------------------------------------------------------------------------------

    async def ack(self) -> None:
        """Acknowledge all. Does not wait; see `OrderedMessage.ack`."""
        self.ack_later()

    async def ack_sync(self) -> None:
        """Acknowledge all, and return when the acknowledgement is committed.
        Raises as `OrderedMessage.ack_sync`.
        """
        self.ack_later()
        for each in self.runs:
            await each.lane.confirmed(each.cell)

    def ack_later(self) -> None:
        """`ack` for code that is not `async`."""
        if not self.is_settled:
            self.is_settled = True
            self._finish(self)

    def fail(self, delay: timedelta | None = None, error: str | BaseException = "") -> None:
        """All failed: retry them after `delay` (default: the consumer's retry delays). Their lane
        waits. `error`, a text or an exception, is logged. Raises InvalidArgument.
        """
        pause_ms = None if delay is None else delay_ms(delay)
        text = error_text(error)
        if not self.is_settled:
            if text:
                log.warning("%r failed: %s", self, text)
            self.is_settled = True
            self._fail(self, pause_ms)

    def __repr__(self) -> str:
        return f"<OrderedMessages: {len(self)} of partition {self.partition}>"


class DecompressedBatches:
    """The batches that were used last stay decompressed, up to `bytes_max` bytes. An older one is
    decompressed again for its next message. A batch whose messages are all finished is forgotten.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._sizes: dict[ref[DecodedBatch], int] = {}
        """The one that was used last is last."""
        self.bytes = 0

    def used(self, batch: DecodedBatch) -> None:
        """A message of the batch was decompressed."""
        key = ref(batch, self._forget)
        size = self._sizes.pop(key, None)
        if size is None:
            size = batch.view.bodies_bytes
            self.bytes += size
        self._sizes[key] = size
        while self.bytes > self._bytes_max and len(self._sizes) > 1:
            oldest = next(iter(self._sizes))
            self._forget(oldest)
            if (older := oldest()) is not None:
                older.decoded = None

    def _forget(self, key: ref[DecodedBatch]) -> None:
        self.bytes -= self._sizes.pop(key, 0)
