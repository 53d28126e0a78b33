"""Sends messages of an outbox through a client, with their ids and in order, and reports the
outcome of each.

    messages of one subject ──▶ slices (at most 500 messages, 256 KiB)
    ──▶ one slice after another ──▶ sent | failed | not tried

Rules:
* A slice is one batch, or for an ordered subject one for each partition: stored as a whole or not
  at all. The next slice is sent when it is decided, so no message of a key is sent while an earlier
  one is undecided.
* A temporary failure (no broker, no quorum, no answer in time) ends the sending: later slices are
  not tried.
* A message that can never be sent is found by halving its slice, and fails alone. An error of the
  subject (it does not exist, it is ordered) fails all of its messages.
* The outbox has its own producers: other messages of the application never share a batch with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from qmq import limits
from qmq.client.metadata.cache import Ordering, delayed_target, described
from qmq.client.producing.delayed import DelayedProducer
from qmq.client.producing.ordered.producer import OrderedProducer
from qmq.client.producing.producer import Producer
from qmq.client.producing.receipts import Ticket
from qmq.errors import (
    BufferFull,
    CallerError,
    ClientClosed,
    DeadlineExceeded,
    DelayTooLong,
    InvalidArgument,
    MessageTooLarge,
    NeverReached,
    OrderMismatch,
    QmqError,
)
from qmq.sql.outbox_message import OutboxMessage
from qmq.wire.batch import columns_of_copies
from qmq.wire.batch_columns import Columns

SLICE_MESSAGES: Final = 500
SLICE_BYTES: Final = 256 * limits.KIB
_CREATED_SPAN_MS: Final = 1 << 32
"""The largest difference of create times in one batch."""


class OutboxProducers(NamedTuple):
    """The client's producers of each kind, and whether a subject is ordered."""

    producer: Callable[[str], Producer]
    ordered_producer: Callable[[str], OrderedProducer]
    delayed_producer: Callable[[str], DelayedProducer]
    ordering: Callable[[str], Awaitable[Ordering | None]]


@dataclass(slots=True)
class Fates:
    """The outcomes of messages by position. Messages in neither list were not tried."""

    sent: list[int] = field(default_factory=list)
    failed: list[tuple[int, QmqError]] = field(default_factory=list)

    @property
    def is_stopped(self) -> bool:
        """Whether a temporary failure ended the sending."""
        return any(not is_final(error) for _, error in self.failed)


def is_final(error: QmqError) -> bool:
    """Whether sending the message again unchanged will not help."""
    return isinstance(error, CallerError) and not isinstance(
        error, ClientClosed | BufferFull | NeverReached
    )


def slices(messages: Sequence[OutboxMessage], places: Sequence[int]) -> Iterator[list[int]]:
    """Split the messages at these positions into slices, in order: by size, and where create times
    differ too much. Pure.
    """
    batch: list[int] = []
    size = low = high = 0
    for place in places:
        message = messages[place]
        created, added = message.create_time_ms, message.size
        is_apart = max(high, created) - min(low, created) >= _CREATED_SPAN_MS
        if batch and (len(batch) >= SLICE_MESSAGES or size + added > SLICE_BYTES or is_apart):
            yield batch
            batch, size = [], 0
        if not batch:
            low = high = created
        batch.append(place)
        size, low, high = size + added, min(low, created), max(high, created)
    if batch:
        yield batch


def columns_of(messages: Sequence[OutboxMessage]) -> tuple[Columns, int]:
    """The columns of a batch of these messages, and its create time. Pure."""
    columns, first = columns_of_copies(
        [message.body for message in messages],
        [message.key for message in messages],
        [message.tags for message in messages],
        [message.headers for message in messages],
        [message.create_time_ms for message in messages],
        [message.message_id for message in messages],
    )
    if messages[0].due_ms is not None:
        columns.due_times_ms = [message.due_ms or 0 for message in messages]
    return columns, first


class Sender:
    """Sends through a client. `find_s` is how long locating a subject may take."""

    def __init__(self, producers: OutboxProducers, find_s: float) -> None:
        self._producers, self._find_s = producers, find_s
        self._ways: dict[tuple[str, bool], Producer | OrderedProducer] = {}

    async def is_ordered(self, subject: str) -> bool:
        """Whether the subject keeps the order of its keys.
        Raises UnknownSubject, DeadlineExceeded, ClientClosed.
        """
        return isinstance(await self._way(subject, False), OrderedProducer)

    async def send(self, subject: str, messages: Sequence[OutboxMessage]) -> Fates:
        """Send messages of one subject, in order, and wait until each is decided."""
        fates = Fates()
        now = [place for place, message in enumerate(messages) if message.due_ms is None]
        later = [place for place, message in enumerate(messages) if message.due_ms is not None]
        for places, is_delayed in ((now, False), (later, True)):
            for piece in slices(messages, places):
                if not fates.is_stopped:
                    await self._send(subject, is_delayed, messages, piece, fates)
        return fates

    async def _send(
        self,
        subject: str,
        is_delayed: bool,
        messages: Sequence[OutboxMessage],
        places: list[int],
        fates: Fates,
    ) -> None:
        """Send a slice, or a part of one that failed."""
        try:
            way = await self._way(subject, is_delayed)
            chunks = self._put(way, [messages[place] for place in places])
        except QmqError as error:
            await self._failed(subject, is_delayed, messages, places, fates, error)
            return
        for ticket, indices in chunks:
            chosen = [places[index] for index in indices]
            try:
                await ticket
                fates.sent += chosen
            except QmqError as error:
                await self._failed(subject, is_delayed, messages, chosen, fates, error)

    async def _failed(
        self,
        subject: str,
        is_delayed: bool,
        messages: Sequence[OutboxMessage],
        places: list[int],
        fates: Fates,
        error: QmqError,
    ) -> None:
        """A whole batch failed. One of its messages may be the cause."""
        if len(places) > 1 and isinstance(error, InvalidArgument | MessageTooLarge | DelayTooLong):
            middle = len(places) // 2
            for half in (places[:middle], places[middle:]):
                if not fates.is_stopped:
                    await self._send(subject, is_delayed, messages, half, fates)
        else:
            fates.failed += [(place, error) for place in places]
            if isinstance(error, OrderMismatch):
                self._ways.pop(
                    (subject, is_delayed), None
                )  # the subject has changed since its producer was made

    def _put(
        self, way: Producer | OrderedProducer, messages: Sequence[OutboxMessage]
    ) -> Sequence[tuple[Ticket, Sequence[int]]]:
        columns, create_time_ms = columns_of(messages)
        if isinstance(way, OrderedProducer):
            return [
                (chunk.ticket, chunk.indices)
                for chunk in way.put(columns, create_time_ms=create_time_ms)
            ]
        tickets = way.put(columns, create_time_ms=create_time_ms).tickets
        assert len(tickets) == 1, "a slice is smaller than a batch"
        return [(tickets[0], range(len(messages)))]

    async def _way(self, subject: str, is_delayed: bool) -> Producer | OrderedProducer:
        """The producer for a subject. A failed lookup is not cached."""
        way = self._ways.get((subject, is_delayed))
        if way is None:
            ordering = await self._ordering(delayed_target(subject) if is_delayed else subject)
            way = self._ways.get((subject, is_delayed))
            if way is None:
                way = self._ways[subject, is_delayed] = self._make(
                    subject, is_delayed, ordering is not None
                )
        return way

    async def _ordering(self, target: str) -> Ordering | None:
        try:
            async with asyncio.timeout(self._find_s):
                return await self._producers.ordering(target)
        except TimeoutError:
            raise DeadlineExceeded(
                f"subject {described(target)} could not be located in {self._find_s:g} s"
            ) from None

    def _make(self, subject: str, is_delayed: bool, is_ordered: bool) -> Producer | OrderedProducer:
        if is_delayed:
            return self._producers.delayed_producer(subject)
        return (
            self._producers.ordered_producer(subject)
            if is_ordered
            else self._producers.producer(subject)
        )
