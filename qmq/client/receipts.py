"""What a sender gets back: where its messages went. One ticket a batch, since a future a message would cost more than sending it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter

from qmq.errors import QmqError
from qmq.model import DelayedId, MessageId


@dataclass(frozen=True, slots=True)
class Receipt:
    """One stored message: `sequence` is its number in its queue (the subject on this broker group), for ever; `id` names it everywhere."""

    subject: str
    partition: int
    sequence: int
    id: MessageId
    append_time_ms: int
    broker_group: str

    @property
    def delayed_id(self) -> str | None:
        """Of a delayed message: by which it is cancelled, moved and shown (`Client.delayed`). None of any other."""
        return None


@dataclass(frozen=True, slots=True)
class DelayedReceipt(Receipt):
    """Of a delayed message. `sequence`, `append_time_ms` and `broker_group` are about its delay group; its `id` it keeps."""

    due_ms: int

    @property
    def delayed_id(self) -> str:
        """By which it is cancelled, moved and shown."""
        return str(DelayedId(self.id, self.due_ms, self.append_time_ms, self.broker_group))


@dataclass(frozen=True, slots=True)
class BatchReceipt:
    """A stored batch: its messages have consecutive sequences from `base_sequence` on."""

    subject: str
    partition: int
    base_sequence: int
    count: int
    producer_id: int
    batch_sequence: int
    append_time_ms: int
    broker_group: str
    ids: Sequence[bytes] | None = None
    """The messages' ids, where they do not follow from the producer's: they were sent again after their partition was fenced."""

    def id(self, index: int) -> MessageId:
        """The id of the batch's message number `index`."""
        if self.ids is not None:
            return MessageId.parse(self.ids[index].hex())
        return MessageId(self.producer_id, self.batch_sequence, index)

    def delayed_id(self, index: int) -> str | None:
        """As its receipt has it."""
        return None

    def receipt(self, index: int) -> Receipt:
        """The receipt of the batch's message number `index`."""
        sequence = self.base_sequence + index
        return Receipt(self.subject, self.partition, sequence, self.id(index), self.append_time_ms, self.broker_group)

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Receipt]:
        return map(self.receipt, range(self.count))


@dataclass(frozen=True, slots=True)
class DelayedBatchReceipt(BatchReceipt):
    """Of delayed messages: stored at the delay group `broker_group`, message number `index` to be delivered at `dues[index]`."""

    dues: Sequence[int] = ()

    def delayed_id(self, index: int) -> str:
        """By which message number `index` is cancelled, moved and shown."""
        return str(DelayedId(self.id(index), self.dues[index], self.append_time_ms, self.broker_group))

    def receipt(self, index: int) -> DelayedReceipt:
        """The receipt of the batch's message number `index`."""
        return DelayedReceipt(
            self.subject,
            self.partition,
            self.base_sequence + index,
            self.id(index),
            self.append_time_ms,
            self.broker_group,
            self.dues[index],
        )


@dataclass(frozen=True, slots=True)
class CutReceipt(BatchReceipt):
    """Messages that were sent together and stored apart, since a route changed meanwhile.

    What `receipt(index)` says is exact; the fields are those of the first message's part.
    """

    parts: tuple[tuple[Sequence[int], BatchReceipt], ...] = ()
    """Places of messages, and where those are."""

    @classmethod
    def join(cls, parts: Sequence[tuple[Sequence[int], BatchReceipt]], count: int) -> CutReceipt:
        """Of parts that together have every place once."""
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
        found = {index: part.receipt(place) for places, part in self.parts for place, index in enumerate(places)}
        return map(found.__getitem__, range(self.count))


class Ticket:
    """Stands for a batch on its way. `await` it, as often as you like, for its BatchReceipt; a batch that failed raises its error."""

    __slots__ = ("_error", "_receipt", "_waiters", "_watchers", "seen")

    def __init__(self) -> None:
        self._receipt: BatchReceipt | None = None
        self._error: QmqError | None = None
        self._waiters: list[asyncio.Future[None]] = []
        self._watchers: list[Callable[[], None]] | None = None
        self.seen = False

    @property
    def is_done(self) -> bool:
        """Whether it is decided."""
        return self._receipt is not None or self._error is not None

    def __await__(self) -> Generator[object, None, BatchReceipt]:
        self.seen = True
        if self._receipt is None and self._error is None:
            # One for each who waits: a shared one would need a shield for each, which is two futures and two callbacks.
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            yield from waiter
        if self._error is not None:
            raise self._error
        assert self._receipt is not None
        return self._receipt

    @property
    def decided(self) -> BatchReceipt | QmqError | None:
        """What was decided; None if nothing is yet. To look is not to see: an error that nobody awaits is raised by `flush`."""
        return self._receipt if self._receipt is not None else self._error

    def when_decided(self, watcher: Callable[[], None]) -> None:
        """Call this when it is decided, at once if it is."""
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
        """The batch failed; `error.outcome` says what is known of it."""
        self._error = error
        self._wake()

    def _wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        watchers, self._watchers = self._watchers, None
        for watcher in watchers or ():
            watcher()


class Tickets:
    """Several batches sent together. `await` for their BatchReceipts, in order; the first failure is raised."""

    __slots__ = ("tickets",)

    def __init__(self, tickets: list[Ticket]) -> None:
        self.tickets = tickets
        """One for each batch."""

    def __await__(self) -> Generator[object, None, Receipts]:
        return self._wait().__await__()

    async def _wait(self) -> Receipts:
        return self.collect([await ticket for ticket in self.tickets])

    def collect(self, batches: list[BatchReceipt]) -> Receipts:
        """What they stand for together, given the receipt of each."""
        return Receipts(batches)


class Receipts:
    """Where many messages went: a sequence of Receipt, made when asked for."""

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
