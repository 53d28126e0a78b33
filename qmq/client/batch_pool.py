"""A producer's closed batches that are at no broker group, and the outcomes that the producer has not taken yet. Pure.

put ─▶ waiting ──take──▶ a pipe ──stored, failed──▶ decided ──take_decided──▶ the producer
          ▲                │
          └───give_back────┘ certainly not stored: in its place by number
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from typing import NamedTuple

from qmq.client.open_batch import Batch
from qmq.delivery.retries import final
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
