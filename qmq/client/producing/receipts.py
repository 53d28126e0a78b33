"""The results of a send: where its messages are stored. No I/O. There is one ticket for each batch,
because a future for each message would cost more than sending it.

A ticket follows its messages through all the batches that they were cut into. It is decided when
every piece is decided: with a receipt if all pieces are stored, otherwise with the first failure.
The failure's outcome is about *all* messages: if some are stored and some are not, it is unknown.

`send_many` of an ordered producer has its receipts in the caller's order, although the messages go
to several partitions.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import NamedTuple

from qmq.errors import Outcome, QmqError
from qmq.model import DelayedId, MessageId
from qmq.process.event_loop import EventLoopTick, TickFuture, not_here


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Receipt:
    """One stored message: message number `index` of its batch. Its values are taken from the
    batch's receipt when they are asked for: making them for each message took a quarter of a
    sender's time.
    """

    batch: BatchReceipt
    index: int

    @property
    def subject(self) -> str:
        """The subject that the message was sent to."""
        return self.batch.subject

    @property
    def partition(self) -> int:
        """Its partition; 0 on an unordered subject."""
        return self.batch.partition

    @property
    def sequence(self) -> int:
        """Its number in its queue (the subject on this broker group), which never changes."""
        return self.batch.base_sequence + self.index

    @property
    def id(self) -> MessageId:
        """The message's id, unique in the cluster."""
        return self.batch.id(self.index)

    @property
    def append_time_ms(self) -> int:
        """When the broker stored it, milliseconds since 1970."""
        return self.batch.append_time_ms

    @property
    def broker_group(self) -> str:
        """The broker group that stores it."""
        return self.batch.broker_group

    @property
    def delayed_id(self) -> str | None:
        """For a delayed message, the id for `Client.delayed` (cancel, move,
        show). None for others.
        """
        return None

    def _values(self) -> tuple[object, ...]:
        return (
            self.subject,
            self.partition,
            self.sequence,
            self.id,
            self.append_time_ms,
            self.broker_group,
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Receipt) and self._values() == other._values()

    def __hash__(self) -> int:
        return hash(self.id)

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {self.id} {self.subject}/{self.partition}/{self.sequence} "
            f"at {self.broker_group}>"
        )


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class DelayedReceipt(Receipt):
    """The receipt of a delayed message. `sequence`, `append_time_ms` and `broker_group` are those
    at its delay group; `id` stays the same.
    """

    batch: DelayedBatchReceipt

    @property
    def due_ms(self) -> int:
        """When the message is due, milliseconds since 1970."""
        return self.batch.due_times_ms[self.index]

    @property
    def delayed_id(self) -> str:
        """The id for `Client.delayed`."""
        return str(DelayedId(self.id, self.due_ms, self.append_time_ms, self.broker_group))

    def _values(self) -> tuple[object, ...]:
        return *Receipt._values(self), self.due_ms


@dataclass(slots=True, unsafe_hash=True)
class BatchReceipt:
    """A stored batch: its messages have consecutive sequences from `base_sequence` on. Do not
    change it.
    """

    # Not frozen: a frozen dataclass sets each field by a function call, which took a tenth of the
    # client's own time for a lone message.

    subject: str
    partition: int
    base_sequence: int
    count: int
    producer_id: int
    batch_sequence: int
    append_time_ms: int
    broker_group: str
    ids: Sequence[bytes] | None = None
    """The messages' ids, if they do not follow from the producer's id: after a resend because their
    partition was fenced.
    """

    def id(self, index: int) -> MessageId:
        """The id of message number `index` of the batch."""
        if self.ids is not None:
            return MessageId.parse(self.ids[index].hex())
        return MessageId(self.producer_id, self.batch_sequence, index)

    def delayed_id(self, index: int) -> str | None:
        """The id of message number `index` for `Client.delayed`; None unless delayed."""
        return None

    def receipt(self, index: int) -> Receipt:
        """The receipt of message number `index` of the batch."""
        return Receipt(self, index)

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Receipt]:
        return map(self.receipt, range(self.count))


@dataclass(slots=True, unsafe_hash=True)
class DelayedBatchReceipt(BatchReceipt):
    """The receipt of delayed messages, stored at the delay group `broker_group`; message number
    `index` is due at `due_times_ms[index]`.
    """

    due_times_ms: Sequence[int] = ()

    def delayed_id(self, index: int) -> str:
        """The id of message number `index` for `Client.delayed`."""
        return str(
            DelayedId(
                self.id(index), self.due_times_ms[index], self.append_time_ms, self.broker_group
            )
        )

    def receipt(self, index: int) -> DelayedReceipt:
        """The receipt of message number `index` of the batch."""
        return DelayedReceipt(self, index)


@dataclass(slots=True, unsafe_hash=True)
class CutReceipt(BatchReceipt):
    """Messages that were sent together and stored in different partitions, because a route changed
    in between.

    `receipt(index)` is exact; the fields describe the part of the first message.
    """

    parts: tuple[tuple[Sequence[int], BatchReceipt], ...] = ()
    """Places of messages, and the receipt of their batch."""

    @classmethod
    def join(cls, parts: Sequence[tuple[Sequence[int], BatchReceipt]], count: int) -> CutReceipt:
        """The receipt for parts that together have every place once."""
        ordered = sorted(parts, key=itemgetter(0))
        first = ordered[0][1]
        return cls(
            first.subject,
            first.partition,
            first.base_sequence,
            count,
            first.producer_id,
            first.batch_sequence,
            first.append_time_ms,
            first.broker_group,
            None,
            tuple(ordered),
        )

    def _find(self, index: int) -> tuple[BatchReceipt, int]:
        for places, part in self.parts:
            if index in places:
                return part, places.index(index)
        raise IndexError(f"{index} of {self.count} receipts")

    def id(self, index: int) -> MessageId:
        """The id of message number `index`."""
        part, place = self._find(index)
        return part.id(place)

    def receipt(self, index: int) -> Receipt:
        """The receipt of message number `index`."""
        part, place = self._find(index)
        return part.receipt(place)

    def __iter__(self) -> Iterator[Receipt]:
        found = {
            index: part.receipt(place)
            for places, part in self.parts
            for place, index in enumerate(places)
        }
        return map(found.__getitem__, range(self.count))


class Ticket:
    """An undecided or decided batch. `await` it any number of times for its BatchReceipt; a failed
    batch raises its error.
    """

    __slots__ = ("_error", "_receipt", "_round", "_waiters", "_watchers", "is_awaited", "seen")

    def __init__(self, loop_round: EventLoopTick | None = None) -> None:
        self._round = loop_round
        self._receipt: BatchReceipt | None = None
        self._error: QmqError | None = None
        self._waiters: list[TickFuture] = []
        self._watchers: list[Callable[[], None]] | None = None
        self.seen = False
        self.is_awaited = False
        """Whether a task waits, or is about to wait, for the decision: then the batch does not
        gather messages.
        """

    @property
    def is_done(self) -> bool:
        """Whether the batch is stored or has failed."""
        return self._receipt is not None or self._error is not None

    def __await__(self) -> Generator[object, None, BatchReceipt]:
        self.seen = True
        if self._receipt is None and self._error is None:
            waiter = TickFuture(self._round.loop if self._round is not None else None)
            self._waiters.append(waiter)
            self.is_awaited = True
            try:
                yield waiter  # not `yield from`, which would be one more generator for each message
            except RuntimeError:  # by the task, for an awaitable of another event loop
                raise not_here(waiter.get_loop()) from None
        if self._error is not None:
            raise self._error
        assert self._receipt is not None
        return self._receipt

    @property
    def decided(self) -> BatchReceipt | QmqError | None:
        """The decision; None before there is one. Reading it does not mark an error as seen:
        `flush` raises errors that were not awaited.
        """
        return self._receipt if self._receipt is not None else self._error

    def when_decided(self, watcher: Callable[[], None]) -> None:
        """Call `watcher` when the batch is decided; immediately if it is decided already."""
        if self.is_done:
            watcher()
        elif self._watchers is None:
            self._watchers = [watcher]
        else:
            self._watchers.append(watcher)

    def resolve(self, receipt: BatchReceipt) -> None:
        """The batch is stored."""
        self._receipt = receipt
        self._wake()

    def fail(self, error: QmqError) -> None:
        """The error of a failed batch; `error.outcome` says whether the batch may be stored."""
        self._error = error
        self._wake()

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        if self._round is not None:
            self._round.wake_all(waiters)
        else:
            for waiter in waiters:
                waiter.wake_soon()
        watchers, self._watchers = self._watchers, None
        for watcher in watchers or ():
            watcher()


class Tickets:
    """Several batches sent together. `await` it for their BatchReceipts, in order;
    raises the first failure.
    """

    __slots__ = ("tickets",)

    def __init__(self, tickets: list[Ticket]) -> None:
        self.tickets = tickets
        """One ticket for each batch."""

    def __await__(self) -> Generator[object, None, Receipts]:
        return self._wait().__await__()

    async def _wait(self) -> Receipts:
        for ticket in self.tickets:
            ticket.is_awaited = True
        return self.collect([await ticket for ticket in self.tickets])

    def collect(self, batches: list[BatchReceipt]) -> Receipts:
        """The result for the messages, given the receipt of each batch."""
        return Receipts(batches)


class Receipts:
    """The receipts of many messages: a sequence whose items are made on access."""

    __slots__ = ("batches",)

    def __init__(self, batches: list[BatchReceipt]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return sum(map(len, self.batches))

    def __iter__(self) -> Iterator[Receipt]:
        return chain.from_iterable(self.batches)

    def __getitem__(self, index: int) -> Receipt:
        place = index + len(self) if index < 0 else index
        for batch in self.batches:
            if 0 <= place < batch.count:
                return batch.receipt(place)
            place -= batch.count
        raise IndexError(f"{index} of {len(self)} receipts")


class SplitTicket:
    """The outcome of one ticket; `pieces` are the undecided batches."""

    __slots__ = ("_failures", "_stored", "count", "pieces", "size", "ticket")

    def __init__(self, ticket: Ticket, count: int, size: int) -> None:
        self.ticket = ticket
        self.count = count
        self.size = size
        self.pieces = 1
        self._stored: list[tuple[Sequence[int], BatchReceipt]] = []
        self._failures: list[QmqError] = []

    def stored(self, places: Sequence[int], receipt: BatchReceipt) -> None:
        """A piece is stored."""
        self._stored.append((places, receipt))
        self._decided()

    def failed(self, failure: QmqError) -> None:
        self._failures.append(failure)
        self._decided()

    @property
    def failure(self) -> QmqError | None:
        """Why the ticket failed; None if it did not fail, or is not decided."""
        return self._failures[0] if self._failures and not self.pieces else None

    def _decided(self) -> None:
        self.pieces -= 1
        if self.pieces:
            return
        if self._failures:
            self.ticket.fail(self._summed())
        elif len(self._stored) == 1:
            self.ticket.resolve(self._stored[0][1])
        else:
            self.ticket.resolve(CutReceipt.join(self._stored, self.count))

    def _summed(self) -> QmqError:
        first = self._failures[0]
        outcomes = {each.outcome for each in self._failures}
        if not self._stored and len(outcomes) == 1:
            return first
        stored = sum([receipt.count for _, receipt in self._stored])
        text = f"{first.message} (of the {self.count} messages sent together {stored} are stored)"
        summed = type(first)(text, outcome=Outcome.UNKNOWN)
        summed.code, summed.retry_after_ms, summed.__cause__ = (
            first.code,
            first.retry_after_ms,
            first,
        )
        self._failures[0] = summed
        return summed


class TicketChunk(NamedTuple):
    """Messages of one call in one batch: the ticket's message `place` is the call's message
    `indices[0]`, and so on.
    """

    ticket: Ticket
    place: int
    indices: Sequence[int]


class SpreadTickets(Tickets):
    """`await` it for the receipts in the order of the messages; raises the first failure."""

    __slots__ = ("_chunks",)

    def __init__(self, chunks: list[TicketChunk]) -> None:
        super().__init__([chunk.ticket for chunk in chunks])
        self._chunks = chunks

    def collect(self, batches: list[BatchReceipt]) -> Receipts:
        return SpreadReceipts(batches, self._chunks)


class SpreadReceipts(Receipts):
    """Where many messages are stored. `batches` may hold other messages, too."""

    __slots__ = ("_chunks", "_where")

    def __init__(self, batches: list[BatchReceipt], chunks: list[TicketChunk]) -> None:
        super().__init__(batches)
        self._chunks = chunks
        self._where: list[tuple[BatchReceipt, int]] | None = None

    def _find(self) -> list[tuple[BatchReceipt, int]]:
        if self._where is None:
            found = {
                index: (batch, chunk.place + step)
                for batch, chunk in zip(self.batches, self._chunks, strict=True)
                for step, index in enumerate(chunk.indices)
            }
            self._where = [found[index] for index in range(len(found))]
        return self._where

    def __len__(self) -> int:
        return sum([len(chunk.indices) for chunk in self._chunks])

    def __iter__(self) -> Iterator[Receipt]:
        return (batch.receipt(place) for batch, place in self._find())

    def __getitem__(self, index: int) -> Receipt:
        batch, place = self._find()[index]
        return batch.receipt(place)
