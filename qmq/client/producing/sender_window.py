"""Where the closed batches of a producer of an unordered subject are: in the producer's pool, or in the in-flight window
(qmq/delivery/window.py) of one of its pipes, which leads to one broker group. Pure.

The pool has the batches that were sent to no broker group, and the outcomes that the producer has not taken yet:

    put ─▶ waiting ──take──▶ a pipe ──stored, failed──▶ decided ──take_decided──▶ the producer
              ▲                │
              └───give_back────┘ certainly not stored: in its place by number

The window of a pipe:

    sent ─▶ on its way ──stored──▶ decided
               │ refused, certainly not stored ──▶ given back: any group may take it
               └ outcome unknown ──▶ sent again, only to this group

Rules of a window:
* A batch whose outcome is unknown stays with its group. The group's replicas remember its number with the log, so sending it again to
  *this* group is harmless; another group could store it twice.
* The group takes batches in any order, so a refusal affects only the refused batch.
* While a batch is to be sent again, no new batch is sent; retries are sent in the order of their numbers.
* A batch that is refused after its timeout fails.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from typing import NamedTuple

from qmq.client.producing.batch import Batch
from qmq.delivery.retries import PRODUCER, RetryRules, final
from qmq.delivery.window import InFlightWindow
from qmq.errors import QmqError
from qmq.wire.frame_payloads import Produced


class DecidedBatch(NamedTuple):
    """The outcome of a batch."""

    batch: Batch
    outcome: Produced | QmqError
    group: str = ""
    """The broker group that stored it."""


class BatchPool:
    """The pipes of one producer share it."""

    def __init__(self) -> None:
        self.waiting: deque[Batch] = deque()
        self._decided: list[DecidedBatch] = []

    def give_back(self, batch: Batch) -> None:
        """The batch is certainly not stored at its group: any pipe may send it, in the order of the numbers."""
        place = bisect_left(self.waiting, batch.sequence, key=lambda each: each.sequence)
        self.waiting.insert(place, batch)

    def stored(self, group: str, batch: Batch, produced: Produced) -> None:
        self._decided.append(DecidedBatch(batch, produced, group))

    def failed(self, batch: Batch, failure: QmqError) -> None:
        self._decided.append(DecidedBatch(batch, failure))

    def expire(self, now: float, trouble: QmqError | None) -> None:
        """Fail the waiting batches that have timed out, with `trouble` as the reason of those that no group refused."""
        while self.waiting and self.waiting[0].until <= now:
            batch = self.waiting.popleft()
            self.failed(batch, final(batch.failure or trouble, batch))

    def give_up(self, failure: QmqError) -> None:
        """Fail the waiting batches: no group can take them."""
        while self.waiting:
            batch = self.waiting.popleft()
            self.failed(batch, final(failure, batch))

    def take_decided(self) -> list[DecidedBatch]:
        """The batches that were decided since the last call."""
        decided, self._decided = self._decided, []
        return decided


class SenderWindow(InFlightWindow[Batch]):
    def __init__(self, window: int, rules: RetryRules = PRODUCER) -> None:
        super().__init__(window, rules)
        self._failed: list[tuple[Batch, QmqError]] = []
        self._given_back: list[Batch] = []

    # --- out -----------------------------------------------------------------------------------------------------------

    @property
    def has_retries(self) -> bool:
        """Whether batches are to be sent again; no new one is sent before them."""
        return self._sent < len(self.flight)

    def send(self, batch: Batch) -> None:
        """Send a new batch; the window must have room."""
        self.flight.append(batch)
        self._depart(batch)

    @property
    def is_sending(self) -> bool:
        """Whether any batch is in flight over the current connection."""
        return self._sent > 0

    @property
    def on_way(self) -> list[Batch]:
        """The unanswered batches sent over the current connection."""
        return self.flight[: self._sent]

    @property
    def retries(self) -> list[Batch]:
        """The batches to be sent again."""
        return self.flight[self._sent :]

    def take_failed(self) -> list[tuple[Batch, QmqError]]:
        """The batches that failed for good since the last call."""
        failed, self._failed = self._failed, []
        return failed

    def take_given_back(self) -> list[Batch]:
        """The batches that are certainly not stored here: any group may take them."""
        given_back, self._given_back = self._given_back, []
        return given_back

    # --- in ------------------------------------------------------------------------------------------------------------

    def refused(self, batch: Batch, attempt: int, failure: QmqError, now: float) -> None:
        super().refused(batch, attempt, failure, now)
        if batch.is_gone or batch in self.on_way:
            return
        if batch.until <= now:
            self._fail(batch, failure)
        elif batch.is_certain:
            self._remove(batch)
            batch.is_gone = False
            self._given_back.append(batch)

    def _hold_back(self, at: int) -> None:
        batch = self.flight.pop(at)
        self._sent -= 1
        insort(self.flight, batch, lo=self._sent, key=_number)

    def _begin_again(self) -> None:
        super()._begin_again()
        self.flight.sort(key=_number)

    def _rest(self, batch: Batch, failure: QmqError, now: float) -> None:
        """Put the batch aside for a retry. Batches that are refused together count as one failure."""
        self.trouble = failure
        if now >= self._rests_until:
            super()._rest(batch, failure, now)

    def _reject(self, batch: Batch, failure: QmqError) -> None:
        self._fail(batch, failure)

    def _fail(self, batch: Batch, failure: QmqError | None) -> None:
        batch.is_uncertain = not batch.is_certain
        self._remove(batch)
        self._failed.append((batch, final(failure, batch)))

    def expire(self, now: float) -> None:
        """Fail batches that were to be sent again and have timed out."""
        for batch in [each for each in self.retries if each.until <= now]:
            self._fail(batch, self.trouble or batch.failure)

    def fail_retries(self, failure: QmqError) -> None:
        """Fail all batches that were to be sent again, because they cannot be sent."""
        for batch in self.retries:
            self._fail(batch, failure)

    def drop(self) -> list[Batch]:
        """Remove all batches: late answers are ignored."""
        dropped, self.flight, self._sent = self.flight, [], 0
        for batch in dropped:
            batch.is_gone = True
        return dropped


def _number(batch: Batch) -> int:
    return batch.sequence
