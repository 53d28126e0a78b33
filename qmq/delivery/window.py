"""The in-flight window: numbered batches on their way to one destination (a broker group or a
partition), sent again until the outcome of each is known. Pure: the caller passes the time.

    flight   [ on their way over the connection in use | to be sent, or to be sent again ]
                       │                       ▲
                       ├─ stored: out          │
                       └─ refused, or outcome unknown: this batch and all after it, in order, after
                          a pause

Rules that every window keeps:
* Batches leave in order, and at most `window` are on their way. One may always be, however large it
  is.
* A refusal begins a new *run* of sending: the window pauses, then sends one batch as a probe. Only
  an answer to a batch of the current run ends the pauses.
* A lost connection begins a new run too. All undecided batches are sent again over the next
  connection, in order; answers to earlier tries still count when they arrive.
* A partition that a newer route does not have is *left*: no new batch is sent there. Batches of
  unknown outcome are sent again, to learn their outcome. The window is settled when its first
  undecided batch is certainly not stored, or there is none.
* A left partition that is *fenced*, and gave no deciding answer for `ask_s`, is given up.

Subclasses differ in what they add to a flight, and in the meaning of a final refusal: each
overrides the hooks in the section "what a kind of window says".
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from qmq.delivery.retries import RetryRules
from qmq.errors import (
    DeadlineExceeded,
    Outcome,
    OutOfSequence,
    QmqError,
    RouteChanged,
    Unavailable,
)

ASK_S: Final = 0.5
"""How long a fenced partition is asked before the sender gives up the batches that
may be stored there.
"""
UNLIMITED: Final = 1 << 40


@dataclass(slots=True, eq=False, kw_only=True)
class InFlightBatch:
    """The state of one batch in flight, for all senders.

    A batch is *certainly not stored* when every try was answered by a refusal. A try without an
    answer, or with an unknown outcome, makes the batch uncertain: then only its destination can
    decide.
    """

    size: int
    """The approximate bytes of the messages."""
    until: float = math.inf
    """When the batch times out, by the clock of its window."""
    attempts: int = 0
    unanswered: int = 0
    """Tries whose answer may still come."""
    is_uncertain: bool = False
    """Whether the outcome of any try is unknown."""
    is_out: bool = False
    """Whether a sealed partition answered that the batch is not stored there: then earlier tries do
    not matter.
    """
    first_question: int = 0
    """The first attempt after the window learned that the partition is no longer in
    the route; 0: none.
    """
    run: int = 0
    """The run of sending in which the batch was sent last."""
    is_gone: bool = False
    """Whether the batch is decided, or its messages are in another batch:
    late answers are ignored.
    """
    failure: QmqError | None = None
    """The error of the last try."""
    encoded: tuple[bytes, ...] | None = None
    """The encoded batch, kept so that a retry sends the same bytes."""

    @property
    def is_certain(self) -> bool:
        """Whether the batch is certainly not stored, and no earlier try can change that."""
        return self.is_out or not (self.unanswered or self.is_uncertain)


def final(failure: QmqError | None, batch: InFlightBatch) -> QmqError:
    """The error of a batch that failed. If a try is unanswered, the outcome is unknown, for any
    last refusal, and the text says so.
    """
    outcome = Outcome.UNKNOWN if batch.is_uncertain else Outcome.NOT_STORED
    if failure is None or isinstance(failure, Unavailable):
        last = failure or "no broker group took or refused them"
        text = (
            "it is not known whether the messages are stored: no answer in time"
            if batch.is_uncertain
            else "not stored in time"
        )
        error = DeadlineExceeded(
            f"{text} after {batch.attempts} tries; the last: {last}", outcome=outcome
        )
        error.__cause__ = failure
        return error
    if batch.is_uncertain and failure.outcome is Outcome.NOT_STORED:
        text = (
            "it is not known whether an earlier try stored the messages; the last was refused: "
            f"{failure.message}"
        )
        code, failure = failure.code, type(failure)(text, outcome=outcome)
        failure.code = code
    return failure


B = TypeVar("B", bound=InFlightBatch)


class InFlightWindow(Generic[B]):
    """Batches on their way to one destination;
    at most `window` of them are unanswered at a time.
    """

    def __init__(self, window: int, rules: RetryRules, ask_s: float = ASK_S) -> None:
        self.flight: list[B] = []
        self.is_connected = False
        self.is_stalled = False
        self.is_left = False
        self.is_fenced = False
        self.wants_route = False
        """Whether the partition refused as if it were sealed, and no newer route is known yet."""
        self.trouble: QmqError | None = None
        """Why the destination cannot be used now; None if it can be used, or was not tried."""
        self._rules, self._ask_s = rules, ask_s
        self._sent = 0  # flight[:_sent] were sent over the current connection
        self._run = 0
        self._window = self._window_max = window
        self._refusals = 0
        self._backoff_until = 0.0
        self._quiet_since = 0.0
        self._is_given_up = False

    # --- what a kind of window says ---------------------------------------------------------------

    def _may_send(self, batch: B) -> bool:
        """Whether the first unsent batch may be sent now."""
        return not (self.is_left and batch.is_certain)

    def _hold_back(self, at: int) -> None:
        """A batch that was sent is refused: choose the batches that are sent again."""
        self._sent = at

    def _reject(self, batch: B, failure: QmqError) -> None:
        """The batch itself is at fault: remove the batch, and those that depend on it."""
        raise NotImplementedError

    def _forgotten(self, batch: B) -> None:
        """The first batch of the flight was refused as out of sequence: the broker has forgotten
        the producer.
        """

    def _give_up(self) -> None:
        """The partition is fenced and was asked for long enough: give up its batches."""
        self._is_given_up = True

    # --- out --------------------------------------------------------------------------------------

    def has_room(self, size: int, now: float, room: int = UNLIMITED) -> bool:
        """Whether another batch of `size` bytes may be sent now. `room` is the allowed number of
        bytes; one batch is always allowed.
        """
        sent = self._sent
        return (
            self.is_connected
            and sent < self._window
            and now >= self._backoff_until
            and (not sent or size <= room)
        )

    def next(self, now: float, room: int = UNLIMITED) -> B | None:
        """The next batch to send over the current connection, which counts as sent from now on;
        None if there is none.
        """
        if self._sent == len(self.flight) or self.is_settled:
            return None
        batch = self.flight[self._sent]
        if not self.has_room(batch.size, now, room) or not self._may_send(batch):
            return None
        self._depart(batch)
        return batch

    def _depart(self, batch: B) -> None:
        """Mark the first unsent batch as sent."""
        self._sent += 1
        batch.attempts += 1
        batch.unanswered += 1
        batch.run = self._run
        if self.is_left and not batch.first_question:
            batch.first_question = batch.attempts

    @property
    def is_settled(self) -> bool:
        """Whether the partition is left, and the outcome of every batch that was sent there is
        known or given up.
        """
        return self.is_left and (not self.flight or self.flight[0].is_certain or self._is_given_up)

    def wake_at(self, now: float) -> float:
        """When `tick` and `next` must be called at the latest;
        infinity if only an event can change anything.
        """
        at = self._quiet_since + self._ask_s if self._is_asking_fenced else math.inf
        return min(at, self._backoff_until) if self._backoff_until > now else at

    # --- in: answers ------------------------------------------------------------------------------

    def acknowledged(self, batch: B, now: float) -> bool:
        """A try was answered: the batch is stored. False if the batch was decided before. Each try
        is answered once, in any order, perhaps long after the connection was replaced.
        """
        batch.unanswered -= 1
        if batch.is_gone:
            return False
        self._remove(batch)
        self._quiet_since = now
        if batch.run == self._run:
            self._window, self._refusals = self._window_max, 0
            self.trouble, self.is_stalled, self.wants_route = None, False, False
        return True

    def refused(self, batch: B, attempt: int, failure: QmqError, now: float) -> None:
        """A try was refused, or its outcome is unknown."""
        batch.unanswered -= 1
        if batch.is_gone:
            return
        batch.failure = failure
        if failure.outcome is not Outcome.NOT_STORED:
            batch.is_uncertain = True
        elif isinstance(failure, RouteChanged) and 0 < batch.first_question <= attempt:
            batch.is_out, self._quiet_since = True, now
        at = self.flight.index(batch)
        if attempt == batch.attempts and at < self._sent:
            self._hold_back(at)
            self._run += 1
            if self._rules.is_retried(failure, batch.is_certain):
                self._retry_later(batch, failure, now)
            else:
                self._reject(batch, failure)

    def _retry_later(self, batch: B, failure: QmqError, now: float) -> None:
        if isinstance(failure, RouteChanged):
            self.wants_route = not self.is_left
        elif not isinstance(failure, OutOfSequence):
            self.trouble = failure
        elif batch is self.flight[0] and not self.is_left:
            self._forgotten(batch)
        self._back_off(failure, now)

    def _back_off(self, failure: QmqError, now: float) -> None:
        """Pause, then let one batch go ahead as a probe."""
        self._window = 1
        self._refusals += 1
        self._backoff_until = now + self._rules.backoff_s(self._refusals, failure)

    def _remove(self, batch: B) -> None:
        """Remove a decided batch."""
        at = self.flight.index(batch)
        del self.flight[at]
        self._sent -= at < self._sent
        self.is_stalled = self.is_stalled and bool(self.flight)
        batch.is_gone = True

    # --- in: connections and routes ---------------------------------------------------------------

    def connected(self) -> None:
        """A connection to the group's master is open:
        undecided batches are sent again over it, in order.
        """
        self.is_connected, self.is_stalled = True, False
        self._backoff_until = 0.0
        if not self._refusals:
            self.trouble = None
        self._begin_again()

    def disconnected(self, cause: QmqError) -> None:
        """The connection is closed or lost, or none could be opened. Its unanswered tries stay
        unanswered until a later answer decides.
        """
        self.is_connected = False
        self.trouble = cause
        self._begin_again()

    def _begin_again(self) -> None:
        self._sent = 0
        self._run += 1

    def stalled(self) -> None:
        """The group answered nothing for a while, although batches are on their way."""
        self.is_stalled = True

    def leave(self, now: float, *, is_fenced: bool) -> None:
        """A newer route does not have the partition."""
        if not self.is_left:
            self.is_left, self.wants_route = True, False
            self._window, self._refusals, self._backoff_until = self._window_max, 0, 0.0
        if is_fenced and not self.is_fenced:
            self._quiet_since = now
        self.is_fenced = is_fenced

    def keep(self) -> None:
        """A newer route still has the partition: a broker that refused a batch as rerouted did not
        know the route yet.
        """
        self.wants_route = False

    # --- in: time ---------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Give up batches that were asked for long enough."""
        if self._is_asking_fenced and now >= self._quiet_since + self._ask_s:
            self._give_up()

    @property
    def _is_asking_fenced(self) -> bool:
        return self.is_left and self.is_fenced and not self._is_given_up and not self.is_settled
