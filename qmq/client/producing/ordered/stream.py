"""The pure cores of an ordered producer: streams, and the partitioner that cuts batches for them.

A stream sends one producer's batches to one physical partition in order: an in-flight window
(qmq/delivery/window.py) with numbered batches.

    waiting ──numbered──▶ flight ──stored──▶ decided
       ▲                    │ refused, unknown: sent again from there on, in order, here
       └─ renumbered ──────┤ (batches behind one that will never be stored)
                            └ the partition is left: asked about, then handed over, in order

Rules (docs/ORDERING.md, "Why order holds while writing"):
* A stream has its own producer id, and numbers its batches from 0 without gaps. A broker takes
  number n only after n - 1, so the partition holds the stream's batches in order, for any order of
  arrival.
* A batch that was given up may still arrive. Later batches begin a new session of the same producer
  id, in the upper bits of the number: once a partition has the first batch of a session, it refuses
  all older sessions. So a batch with unknown outcome is stored before that, or never.
* If a batch is certainly not stored and will not be sent again under its number, no batch behind it
  is stored either. Only then may these batches get new numbers, in a new session.
* When a fenced partition is given up, batches that may be stored there are handed over with their
  message ids (`unknown="resend"`), or fail (`unknown="fail"`).
* A batch that times out fails with all batches behind it: none is stored after one that was
  skipped.

Worked example: 7, 8 and 9 are in flight when the partition is sealed behind 7. 7 is stored; 8 and 9
are refused: RouteChanged. The new route lacks the partition; 8 is certainly not stored, so the
stream is settled, and 8 and 9 are cut by the new route. Had the answer to 8 been lost, 8 would be
sent once more: the sealed partition refuses it, and so settles the fate of 9 too.

The partitioner cuts the batches of settled streams by the newest route
(`qmq/delivery/partitioner.py`). With best-effort order (`bend`), batches that wait for a broker
group in trouble go to a healthy partition: they get a logical partition of that one's range, and
are marked *bent*. If they are cut again, they go where their keys belong.

    claim (what one ticket stands for)  1 ── n  batch  n ── 1  stream (one partition)

Worked example of a cut: 1,000 messages left together for partition 2, which is split into 3 and 4
before it took them. The batch is cut by the logical partitions of its messages, in two of, say, 480
and 520; both belong to the claim of the first, and `places` says which of the claim's messages they
hold.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import Final, TypeVar

from qmq_ordering.routes import PhysicalPartition

from qmq.client.producing.receipts import SplitTicket
from qmq.delivery.partitioner import Partitioner
from qmq.delivery.retries import PRODUCER, RetryRules
from qmq.delivery.window import ASK_S, UNLIMITED, InFlightBatch, InFlightWindow, final
from qmq.errors import DeadlineExceeded, NotConnected, Outcome, QmqError, RouteChanged
from qmq.model import BATCH_NUMBERS, next_session
from qmq.wire.batch_columns import Columns
from qmq.wire.frame_payloads import Produced

_T = TypeVar("_T")
_O = TypeVar("_O")


@dataclass(slots=True, eq=False)
class OrderedBatch(InFlightBatch):
    """A batch for one partition. Its columns have keys and logical partitions, and ids if copies of
    its messages may be stored elsewhere.
    """

    columns: Columns
    create_time_ms: int
    claim: SplitTicket
    places: Sequence[int]
    """The places of these messages among the claim's."""
    is_bent: bool = False
    """Best-effort order: the batch goes to a partition that is not the one of its keys."""

    producer_id: int = 0
    number: int = -1
    """Its number in its stream; -1 if it was never sent."""

    @property
    def count(self) -> int:
        return len(self.columns.bodies)

    @property
    def may_be_elsewhere(self) -> bool:
        """Whether a copy may be stored in a partition that was fenced: then the outcome of its
        messages is never "not stored".
        """
        return self.columns.message_ids is not None

    def unsent_copy(self, *, keep_ids: bool = False) -> OrderedBatch:
        """The same messages as an unsent batch. With `keep_ids` they keep their ids, because they
        may be stored already.
        """
        self.is_gone = True
        columns = self.columns
        if keep_ids and columns.message_ids is None:
            columns.message_ids = message_ids(self.producer_id, self.number, self.count)
        return OrderedBatch(
            columns,
            self.create_time_ms,
            self.claim,
            self.places,
            self.is_bent,
            size=self.size,
            until=self.until,
            failure=self.failure,
        )


def message_ids(producer_id: int, number: int, count: int) -> list[bytes]:
    """The ids of a batch's messages for the message-id column (`MessageId.to_bytes`)."""
    head = producer_id.to_bytes(8, "big") + number.to_bytes(6, "big")
    return [head + index.to_bytes(2, "big") for index in range(count)]


def cut(batch: OrderedBatch, owner_of: Callable[[int], _O]) -> list[tuple[_O, OrderedBatch]]:
    """Cut the batch by the owners of its logical partitions;
    each piece keeps the order of its messages.
    """
    lps = batch.columns.logical_partitions
    assert lps is not None
    indices: dict[_O, list[int]] = {}
    for index, lp in enumerate(lps):
        indices.setdefault(owner_of(lp), []).append(index)
    if len(indices) == 1:
        return [(next(iter(indices)), batch)]
    batch.claim.pieces += len(indices) - 1
    batch.is_gone = True
    return [(owner, _piece(batch, chosen)) for owner, chosen in indices.items()]


def _piece(batch: OrderedBatch, chosen: list[int]) -> OrderedBatch:
    size = max(batch.size * len(chosen) // batch.count, 1)
    return OrderedBatch(
        pick(batch.columns, chosen),
        batch.create_time_ms,
        batch.claim,
        choose(batch.places, chosen),
        size=size,
        until=batch.until,
        failure=batch.failure,
    )


def pick(columns: Columns, chosen: list[int]) -> Columns:
    """The columns of some of the messages."""
    return Columns(
        choose(columns.bodies, chosen),
        columns.keys and choose(columns.keys, chosen),
        columns.tags and choose(columns.tags, chosen),
        columns.headers and choose(columns.headers, chosen),
        columns.create_deltas and choose(columns.create_deltas, chosen),
        columns.message_ids and choose(columns.message_ids, chosen),
        columns.logical_partitions and choose(columns.logical_partitions, chosen),
    )


def choose(items: Sequence[_T], chosen: Sequence[int]) -> list[_T]:
    return (
        list(itemgetter(*chosen)(items)) if len(chosen) > 1 else [items[index] for index in chosen]
    )


WINDOW: Final = 32
"""Half of the batches that a broker remembers for each producer (qmq/log/queue.py)."""


class Stream(InFlightWindow[OrderedBatch]):
    """`new_id` returns a new producer id."""

    def __init__(
        self,
        partition: PhysicalPartition,
        new_id: Callable[[], int],
        *,
        unknown: str = "resend",
        rules: RetryRules = PRODUCER,
        ask_s: float = ASK_S,
    ) -> None:
        super().__init__(WINDOW, rules, ask_s)
        self.partition = partition
        self.waiting: deque[OrderedBatch] = deque()
        self._new_id = new_id
        self._is_resending = unknown == "resend"
        self._producer_id = 0
        self._next_number = 0
        self._is_renumbering = True
        self._earliest_until = math.inf
        self._decided: list[tuple[OrderedBatch, Produced | QmqError]] = []

    # --- out --------------------------------------------------------------------------------------

    def next(self, now: float, room: int = UNLIMITED) -> OrderedBatch | None:
        """The next batch to send. A batch gets its number when it is sent for the first time."""
        if (
            self.waiting
            and self._sent == len(self.flight)
            and self._may_number()
            and self.has_room(self.waiting[0].size, now, room)
        ):
            self._number(self.waiting.popleft())
        return super().next(now, room)

    def _may_number(self) -> bool:
        return not self.is_left and not (self._is_renumbering and self.flight)

    def _number(self, batch: OrderedBatch) -> None:
        if self._is_renumbering:
            self._begin_session()
        batch.producer_id, batch.number = self._producer_id, self._next_number
        self._next_number += 1
        self.flight.append(batch)

    def _begin_session(self) -> None:
        self._is_renumbering = False
        number = next_session(self._next_number - 1)
        if not self._producer_id or number >= BATCH_NUMBERS:
            self._producer_id, number = self._new_id(), 0
        self._next_number = number

    def take_decided(self) -> list[tuple[OrderedBatch, Produced | QmqError]]:
        """The batches decided since the last call: where each is stored, or why it failed."""
        decided, self._decided = self._decided, []
        return decided

    @property
    def is_idle(self) -> bool:
        """Whether no batch is in flight or waiting: the open batch need not gather more."""
        return not self.flight and not self.waiting

    def take_left(self) -> list[OrderedBatch]:
        """The batches of a settled stream, to be cut by a new route, in order."""
        left, is_out = list[OrderedBatch](), False
        for batch in self.flight:
            is_out = is_out or batch.is_certain
            left.append(batch.unsent_copy(keep_ids=not is_out))
        left += self.waiting
        self.flight.clear()
        self.waiting.clear()
        self._sent = 0
        return left

    def wake_at(self, now: float) -> float:
        at = super().wake_at(now)
        return min(at, self._earliest_until) if self.flight or self.waiting else at

    # --- in: batches and answers ------------------------------------------------------------------

    def put(self, batch: OrderedBatch) -> None:
        """Add a batch behind all others."""
        self.waiting.append(batch)
        self._earliest_until = min(self._earliest_until, batch.until)

    def stored(self, batch: OrderedBatch, produced: Produced, now: float) -> None:
        """The answer to a batch: where it is stored."""
        if self.acknowledged(batch, now):
            self._decided.append((batch, produced))

    def _forgotten(self, batch: OrderedBatch) -> None:
        if batch.is_certain:
            self._renumber(0)

    def _reject(self, batch: OrderedBatch, failure: QmqError) -> None:
        at, is_certain = self.flight.index(batch), batch.is_certain
        batch.is_uncertain = not is_certain or batch.may_be_elsewhere
        del self.flight[at]
        self._decide(batch, final(failure, batch))
        if is_certain:
            self._renumber(at)

    def _renumber(self, at: int) -> None:
        """Batches behind one that will never be stored are not stored either: they get new numbers
        when all batches before them are decided.
        """
        self.waiting.extendleft([batch.unsent_copy() for batch in reversed(self.flight[at:])])
        del self.flight[at:]
        self._sent = min(self._sent, at)
        self._is_renumbering = True

    def _decide(self, batch: OrderedBatch, result: Produced | QmqError) -> None:
        batch.is_gone = True
        self._decided.append((batch, result))

    # --- in: time ---------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Fail batches that timed out; give up a fenced partition after long enough."""
        if self._earliest_until <= now:
            self._expire(now)
        super().tick(now)

    def is_late(self, now: float) -> bool:
        """Whether some batch timed out: messages that must fail with it must be
        `put` before `tick`.
        """
        return self._earliest_until <= now and any(
            batch.until <= now for batch in chain(self.flight, self.waiting)
        )

    def _give_up(self) -> None:
        self._is_given_up = self._is_resending
        while not self.is_settled:
            batch = self.flight.pop(0)
            batch.is_uncertain = True
            text = (
                f"partition {self.partition.number} was fenced before it answered: it is not "
                "known yet whether it stored the messages"
            )
            self._decide(batch, NotConnected(text, outcome=Outcome.UNKNOWN))
        self._sent = 0

    def _expire(self, now: float) -> None:
        late = next(
            (at for at, batch in enumerate(chain(self.flight, self.waiting)) if batch.until <= now),
            None,
        )
        if late is not None:
            first = [*self.flight, *self.waiting][late]
            self._drop_from(late, lambda batch: self._too_late(batch, first))
        self._earliest_until = min(
            [batch.until for batch in chain(self.flight, self.waiting)], default=math.inf
        )

    def _too_late(self, batch: OrderedBatch, first: OrderedBatch) -> QmqError:
        if batch is first:
            return final(self._reason(batch), batch)
        said = (
            "it is not known whether the messages are stored"
            if batch.is_uncertain
            else "not stored"
        )
        text = (
            f"{said}: partition {self.partition.number} confirmed no earlier message in time, "
            f"and none overtakes it; {self._reason(first)}"
        )
        return DeadlineExceeded(
            text, outcome=Outcome.UNKNOWN if batch.is_uncertain else Outcome.NOT_STORED
        )

    def _reason(self, batch: OrderedBatch) -> QmqError:
        return (
            self.trouble
            or batch.failure
            or RouteChanged(
                f"earlier messages to partition {self.partition.number} are not settled yet"
            )
        )

    def drop(self, failure_of: Callable[[OrderedBatch], QmqError]) -> None:
        """Fail all batches, because they cannot be sent or the producer ends. `is_uncertain` says
        for each whether it may be stored.
        """
        self._drop_from(0, failure_of)

    def _drop_from(self, at: int, failure_of: Callable[[OrderedBatch], QmqError]) -> None:
        numbered, skipped = self.flight[at:], max(at - len(self.flight), 0)
        kept, dropped = list(self.waiting)[:skipped], list(self.waiting)[skipped:]
        del self.flight[at:]
        self.waiting = deque(kept)
        self._sent = min(self._sent, at)
        self._is_renumbering |= bool(numbered)
        is_out = False
        for batch in numbered:
            is_out = is_out or batch.is_certain
            batch.is_uncertain = not is_out or batch.may_be_elsewhere
        for batch in dropped:
            batch.is_uncertain = batch.may_be_elsewhere
        for batch in chain(numbered, dropped):
            self._decide(batch, failure_of(batch))

    # --- best-effort order ------------------------------------------------------------------------

    def is_troubled(self, now: float) -> bool:
        """Whether its broker group cannot take batches at the moment."""
        return self.is_stalled or (
            self.trouble is not None
            and (not self.is_connected or now < self._backoff_until or bool(self.flight))
        )

    @property
    def is_healthy(self) -> bool:
        """Whether it may take another partition's batches."""
        return (
            self.is_connected
            and not self.is_left
            and not self.is_stalled
            and not self.wants_route
            and self.trouble is None
        )

    @property
    def has_release(self) -> bool:
        """Whether `release` would return any batch."""
        return bool(self.waiting) or (
            bool(self.flight) and self.flight[0].is_certain and not self.is_left
        )

    def release(self) -> Iterable[OrderedBatch]:
        """The batches of a troubled stream that any partition may take (best-effort order). Batches
        that may be stored here stay.
        """
        if self.flight and self.flight[0].is_certain and not self.is_left:
            self._renumber(0)
        released, self.waiting = self.waiting, deque()
        return released


class StreamPartitioner(Partitioner[Stream]):
    def __init__(self, make: Callable[[PhysicalPartition], Stream]) -> None:
        super().__init__(make)
        self.bent = 0
        """Messages that went to another partition than their own."""

    def settle(self) -> list[Stream]:
        """Take the batches of settled streams, and remove these streams. Returns them."""
        settled = super().settle()
        for stream in settled:
            self.put_cut(stream.take_left())
        return settled

    def put_cut(self, batches: Iterable[OrderedBatch]) -> None:
        """Cut batches by the newest usable route, and add each piece to its stream."""
        for batch in batches:
            batch.is_bent = False
            for stream, piece in cut(batch, self.by_lp.__getitem__):
                stream.put(piece)

    def bend(self, now: float) -> list[Stream]:
        """Move batches from troubled streams to healthy ones.
        Returns the troubled streams that had any.
        """
        streams = self.partitions.values()
        healthy = [stream for stream in streams if stream.is_healthy]
        giving = [
            stream
            for stream in streams
            if healthy and stream.has_release and stream.is_troubled(now)
        ]
        for stream in giving:
            for batch in stream.release():
                self.bent += 0 if batch.is_bent else batch.count
                batch.is_bent = True
                min(healthy, key=_load).put(batch)
        return giving


def _load(stream: Stream) -> int:
    return len(stream.flight) + len(stream.waiting)
