"""A stream: one producer's in-order way to one physical partition. Pure: no socket, no loop, no clock; time comes in as a number.

    waiting ──numbered──▶ flight ──stored──▶ decided
       ▲                    │ refused, unknown: sent again from there on, in order, here
       └─ numbered anew ────┤ (what is behind a batch that will never be there)
                            └ the partition is left: asked about, then handed over, in order

    in    put, answered, connected, disconnected, leave, keep, tick, drop, stalled
    out   next (what to send now), take_decided (what is decided), is_settled and take_left (what to cut anew), wake_at (when to tick)

Rules (docs/ORDERING.md, "Why order holds while writing"):
* A stream has its own producer id, and numbers its batches from 0 without gaps. A broker takes number n only behind n - 1, so whatever
  arrives in whatever order, the partition holds the stream's batches in their order. Up to `WINDOW` are in flight.
* A batch that was given up may be on its way still. What follows begins a new session of the same producer id, in the upper bits of the
  number: when a partition has its first batch, it refuses all of older sessions. So what nobody knew of is stored before that, or never.
* When the first of some is refused, or nobody knows, all from there on are sent again, in order, after a rest; one goes ahead as a probe.
* A batch that is certainly not stored and will not be sent again under its number takes all behind it along: they are not stored either,
  whatever is still on its way. Only then may they get new numbers, in a new session.
* A partition that a newer route does not have is *left*: nothing new is sent there. Batches of unknown fate are asked about by sending them
  again there; the stream is settled when its first undecided batch is certainly not stored, or there is none.
* A left partition that is fenced, and gave no answer that decides anything for `ASK_S`, is given up: what may be stored there is handed
  over as well and keeps its message ids (`unknown="resend"`), or fails (`unknown="fail"`).
* A batch whose time is over fails, and everything behind it: none is skipped and the next one stored.

Worked example: 7, 8 and 9 are in flight when the partition is sealed behind 7. 7 is stored; 8 and 9 are refused: RouteChanged. The new
route lacks the partition; 8 is certainly not stored, so the stream is settled, and 8 and 9 are cut by the new route. Had the answer to 8
been lost, 8 would be sent once more: the sealed partition refuses it, and so settles the fate of 9 too.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Final

from qmq_ordering.route import PhysicalPartition

from qmq.client.ordered.ordered_batch import OrderedBatch
from qmq.client.send_retries import final, is_worth_another_try, rest_s
from qmq.errors import DeadlineExceeded, NotConnected, Outcome, OutOfSequence, QmqError, RouteChanged
from qmq.model import BATCH_NUMBERS, next_session
from qmq.wire.frame_payloads import Produced

WINDOW: Final = 32
"""Half of the broker's window of remembered batches (qmq/log/producers.py)."""
ASK_S: Final = 0.5
"""How long a fenced partition is asked before what it may have is given up."""

Rest = Callable[[int, QmqError], float]
"""(refusals in a row, the last one) -> seconds to keep still."""


class Stream:
    """`new_id` gives a producer id that nobody had before."""

    def __init__(
        self, partition: PhysicalPartition, new_id: Callable[[], int], *, unknown: str = "resend", rest: Rest = rest_s, ask_s: float = ASK_S
    ) -> None:
        self.partition = partition
        self.flight: list[OrderedBatch] = []
        self.waiting: deque[OrderedBatch] = deque()
        self.is_connected = False
        self.is_stalled = False
        self.is_left = False
        self.is_fenced = False
        self.wants_route = False
        """Whether the partition refused as if it were sealed, and no newer route is known yet."""
        self.trouble: QmqError | None = None
        """Why its broker group cannot be used just now; None if it can, or was not tried."""
        self._new_id = new_id
        self._rest_s, self._ask_s = rest, ask_s
        self._is_resending = unknown == "resend"
        self._producer_id = 0
        self._next_number = 0
        self._is_renumbering = True
        self._sent = 0  # flight[:_sent] are on their way over the connection in use; the others are to be sent (again)
        self._run = 0  # each refusal begins a new run of sending; only answers of the present run say that all is well
        self._window = WINDOW
        self._refusals = 0
        self._rests_until = 0.0
        self._quiet_since = 0.0
        self._earliest_until = math.inf
        self._is_given_up = False
        self._decided: list[tuple[OrderedBatch, Produced | QmqError]] = []

    # --- out -----------------------------------------------------------------------------------------------------------

    def next(self, now: float, room: int = 1 << 40) -> OrderedBatch | None:
        """The batch to send now, over the connection in use, if there is one: it counts as sent. Ask until there is none.

        `room`: bytes that may leave; one batch may always be on its way.
        """
        if not self.is_connected or now < self._rests_until or self._sent >= self._window or self.is_settled:
            return None
        if self._sent < len(self.flight):
            batch = self.flight[self._sent]
            if self.is_left and batch.is_certain:
                return None
        elif self.waiting and not self.is_left and not (self._is_renumbering and self.flight):
            batch = self.waiting[0]
        else:
            return None
        if self._sent and batch.size > room:
            return None
        if self._sent == len(self.flight):
            self._admit(self.waiting.popleft())
        self._sent += 1
        batch.attempts += 1
        batch.unanswered += 1
        batch.run = self._run
        if self.is_left and not batch.first_question:
            batch.first_question = batch.attempts
        return batch

    def _admit(self, batch: OrderedBatch) -> None:
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
        """What was decided since, each batch once: where it is stored, or why it failed."""
        decided, self._decided = self._decided, []
        return decided

    @property
    def is_idle(self) -> bool:
        """Whether nothing is on its way or waits for it: there is no reason to gather more."""
        return not self.flight and not self.waiting

    @property
    def is_settled(self) -> bool:
        """Whether the partition is left and the fate of every batch that was sent there is known (or given up)."""
        return self.is_left and (not self.flight or self.flight[0].is_certain or self._is_given_up)

    def take_left(self) -> list[OrderedBatch]:
        """Of a settled stream: what is to be cut anew, in order."""
        left, is_out = list[OrderedBatch](), False
        for batch in self.flight:
            is_out = is_out or batch.is_certain
            left.append(batch.anew(keep_ids=not is_out))
        left += self.waiting
        self.flight.clear()
        self.waiting.clear()
        self._sent = 0
        return left

    def wake_at(self, now: float) -> float:
        """When `tick` and `next` are to be called at the latest; infinity if only events can change anything."""
        at = self._earliest_until if self.flight or self.waiting else math.inf
        if self._is_asking_fenced:
            at = min(at, self._quiet_since + self._ask_s)
        if self._rests_until > now and (self._sent < len(self.flight) or self.waiting):
            at = min(at, self._rests_until)
        return at

    # --- in: batches and answers ---------------------------------------------------------------------------------------

    def put(self, batch: OrderedBatch) -> None:
        """One more, behind all others."""
        self.waiting.append(batch)
        self._earliest_until = min(self._earliest_until, batch.until)

    def answered(self, batch: OrderedBatch, attempt: int, answer: Produced | QmqError, now: float) -> None:
        """What became of a try; each try is answered once, in any order, also long after another connection is in use."""
        batch.unanswered -= 1
        if batch.is_gone:
            return
        if isinstance(answer, QmqError):
            self._refused(batch, attempt, answer, now)
        else:
            self._stored(batch, answer, now)

    def _stored(self, batch: OrderedBatch, produced: Produced, now: float) -> None:
        at = self.flight.index(batch)
        del self.flight[at]
        self._sent -= at < self._sent
        self._decide(batch, produced)
        self._quiet_since = now
        if batch.run == self._run:
            self._window, self._refusals = WINDOW, 0
            self.trouble, self.is_stalled, self.wants_route = None, False, False

    def _refused(self, batch: OrderedBatch, attempt: int, failure: QmqError, now: float) -> None:
        batch.failure = failure
        if failure.outcome is not Outcome.NOT_STORED:
            batch.is_uncertain = True
        elif isinstance(failure, RouteChanged) and 0 < batch.first_question <= attempt:
            batch.is_out, self._quiet_since = True, now
        at = self.flight.index(batch)
        if attempt != batch.attempts or at >= self._sent:
            return
        self._sent = at
        self._run += 1
        if is_worth_another_try(failure):
            self._rest(batch, failure, now)
        else:
            self._reject(at, failure)

    def _rest(self, batch: OrderedBatch, failure: QmqError, now: float) -> None:
        if isinstance(failure, RouteChanged):
            self.wants_route = not self.is_left
        elif isinstance(failure, OutOfSequence):
            # With every batch before it stored, nothing is missing: the broker has forgotten the producer.
            if batch is self.flight[0] and batch.is_certain and not self.is_left:
                self._renumber(0)
        else:
            self.trouble = failure
        self._window = 1
        self._refusals += 1
        self._rests_until = now + self._rest_s(self._refusals, failure)

    def _reject(self, at: int, failure: QmqError) -> None:
        """The batch itself is at fault."""
        batch = self.flight[at]
        is_certain = batch.is_certain
        batch.is_uncertain = not is_certain or batch.may_be_elsewhere
        del self.flight[at]
        self._decide(batch, final(failure, batch))
        if is_certain:
            self._renumber(at)

    def _renumber(self, at: int) -> None:
        """What is behind a batch that will never be there is not there either: it gets new numbers when everything before it is decided."""
        self.waiting.extendleft([batch.anew() for batch in reversed(self.flight[at:])])
        del self.flight[at:]
        self._sent = min(self._sent, at)
        self._is_renumbering = True

    def _decide(self, batch: OrderedBatch, result: Produced | QmqError) -> None:
        batch.is_gone = True
        self._decided.append((batch, result))

    # --- in: connections and routes ------------------------------------------------------------------------------------

    def connected(self) -> None:
        """A connection to the group's master stands: what is undecided is sent again over it, in order."""
        self.is_connected, self.is_stalled = True, False
        self._rests_until = 0.0
        if not self._refusals:
            self.trouble = None
        self._begin_again()

    def disconnected(self, cause: QmqError) -> None:
        """The connection is left or lost, or none could be had; tries that it owes an answer stay unanswered until somebody says more."""
        self.is_connected = False
        self.trouble = cause
        self._begin_again()

    def _begin_again(self) -> None:
        self._sent = 0
        self._run += 1

    def stalled(self) -> None:
        """Nothing was answered for a while, although batches are on their way."""
        self.is_stalled = True

    def leave(self, now: float, *, is_fenced: bool) -> None:
        """A newer route does not have the partition."""
        if not self.is_left:
            self.is_left, self.wants_route = True, False
            self._window, self._refusals, self._rests_until = WINDOW, 0, 0.0
        if is_fenced and not self.is_fenced:
            self._quiet_since = now
        self.is_fenced = is_fenced

    def keep(self) -> None:
        """A newer route still has the partition: what it refused as changed was not known there yet."""
        self.wants_route = False

    # --- in: time ------------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Fail what is out of time, give up what was asked for long enough."""
        if self._earliest_until <= now:
            self._expire(now)
        if self._is_asking_fenced and now >= self._quiet_since + self._ask_s:
            self._give_up()

    @property
    def _is_asking_fenced(self) -> bool:
        return self.is_left and self.is_fenced and not self.is_settled

    def is_late(self, now: float) -> bool:
        """Whether the time of some batch is over: what is to fail with it must be `put` before `tick`."""
        return self._earliest_until <= now and any(batch.until <= now for batch in chain(self.flight, self.waiting))

    def _give_up(self) -> None:
        self._is_given_up = self._is_resending
        while not self.is_settled:
            batch = self.flight.pop(0)
            batch.is_uncertain = True
            text = f"partition {self.partition.number} was fenced before it answered: nobody knows yet whether it stored the messages"
            self._decide(batch, NotConnected(text, outcome=Outcome.UNKNOWN))
        self._sent = 0

    def _expire(self, now: float) -> None:
        late = next((at for at, batch in enumerate(chain(self.flight, self.waiting)) if batch.until <= now), None)
        if late is not None:
            first = [*self.flight, *self.waiting][late]
            self._drop_from(late, lambda batch: self._too_late(batch, first))
        self._earliest_until = min([batch.until for batch in chain(self.flight, self.waiting)], default=math.inf)

    def _too_late(self, batch: OrderedBatch, first: OrderedBatch) -> QmqError:
        if batch is first:
            return final(self._reason(batch), batch)
        text = f"partition {self.partition.number} did not store an earlier message in time, and none overtakes it; {self._reason(first)}"
        return DeadlineExceeded(text, outcome=Outcome.UNKNOWN if batch.is_uncertain else Outcome.NOT_STORED)

    def _reason(self, batch: OrderedBatch) -> QmqError:
        return self.trouble or batch.failure or RouteChanged(f"partition {self.partition.number} has not settled what is before it")

    def drop(self, failure_of: Callable[[OrderedBatch], QmqError]) -> None:
        """All fails: there is no way, or the producer ends. `is_uncertain` says of each batch whether it may be stored."""
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

    # --- best-effort order ---------------------------------------------------------------------------------------------

    def is_troubled(self, now: float) -> bool:
        """Whether its broker group cannot take a batch just now."""
        return self.is_stalled or (self.trouble is not None and (not self.is_connected or now < self._rests_until or bool(self.flight)))

    @property
    def is_healthy(self) -> bool:
        """Whether it may take another partition's batches."""
        return self.is_connected and not self.is_left and not self.is_stalled and not self.wants_route and self.trouble is None

    @property
    def has_release(self) -> bool:
        """Whether `release` would give anything."""
        return bool(self.waiting) or (bool(self.flight) and self.flight[0].is_certain and not self.is_left)

    def release(self) -> Iterable[OrderedBatch]:
        """Of a troubled stream with best-effort order: what any other may have. What may be stored here stays."""
        if self.flight and self.flight[0].is_certain and not self.is_left:
            self._renumber(0)
        released, self.waiting = self.waiting, deque()
        return released
