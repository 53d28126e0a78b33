"""The base of `BalancedRows` and `PartitionedRows`: packets in flight to each queue, and pauses after failed lookups. Pure.

A row that an earlier attempt stored must be the same row in this attempt: rows are known by their number in the task, so if Spark repeats
an epoch with other tasks or in another order, a row that is taken for stored would be lost. So each row that is found stored is compared,
and a stored row that this attempt does not have is refused, too.

Spark begins an epoch when the one before is committed, so if rows of later epochs are stored, all rows of this one are. If an attempt has
others, its query continues from an older copy of its checkpoint, and later epochs have stored them: they are refused.

An unreachable metaserver or broker is asked again after growing pauses; after `retry_s` the task fails.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

import numpy as np

from pyspark_qmq.sink.packet_window import PacketWindow
from pyspark_qmq.sink.packets import Load, Packet
from pyspark_qmq.sink.row_prints import Prints
from qmq.delivery.retries import RetryRules, is_worth_another_try
from qmq.errors import InvalidArgument, QmqError

K = TypeVar("K", bound=Hashable)


class RowSender(Generic[K]):
    """The base of a `SubjectCore` that has a `PacketWindow` for each key. `prints_of`: the fingerprints of an attempt's rows."""

    def __init__(self, subject: str, retry_s: float, rules: RetryRules, prints_of: Callable[[Load], Prints]) -> None:
        self.stored = self.found = self.batches = 0
        self._subject, self._retry_s, self._rules, self._prints_of = subject, retry_s, rules, prints_of
        self._passed = 0
        """Rows below this number have come."""
        self._has_later = False
        """Whether rows of later epochs are stored."""
        self._windows: dict[K, PacketWindow] = {}
        self._wants_location = True
        """Whether to ask where the subject is."""
        self._rests_until = 0.0
        self._failures = 0
        self._stuck_since: float | None = None
        self._trouble: QmqError | None = None

    # --- for subclasses -------------------------------------------------------------------------------------------

    def _place(self, now: float) -> None:
        """Pass waiting rows to their queues, if these are known."""
        raise NotImplementedError

    @property
    def _is_waiting(self) -> bool:
        """Whether there are rows without a queue."""
        raise NotImplementedError

    def _unsent(self) -> Iterable[Load]:
        """The rows without a queue."""
        raise NotImplementedError

    # --- rows of earlier attempts ---------------------------------------------------------------------------------

    def _compare(self, load: Load, stored: Prints) -> None:
        """Compare rows with their fingerprints as stored; 0: not stored, or not known."""
        chosen = np.flatnonzero(stored)
        if len(chosen):
            wrong = np.flatnonzero(self._prints_of(load.pick(chosen)) != stored[chosen])
            if len(wrong):
                raise self._misfit(int(load.rows[chosen[wrong[0]]]), "with another content")

    def _misfit(self, row: int, how: str) -> InvalidArgument:
        return InvalidArgument(
            f"an earlier attempt of this epoch stored row {row} of this Spark partition in {self._subject!r} {how}. The plan before the "
            "sink is not deterministic, or an earlier release planned this epoch, so the sink cannot know which rows are stored. Sort the "
            "rows before they are written; to continue, perhaps with this epoch's rows stored twice, choose a new qmq.txnId"
        )

    def _refuse_if_later(self, load: Load) -> None:
        """Refuse rows that are not stored, if later epochs are."""
        if self._has_later:
            raise InvalidArgument(
                f"row {int(load.rows[0])} of this Spark partition is not stored in {self._subject!r}, but rows of later epochs are: the "
                "checkpoint is an older copy, or its epochs ended elsewhere, so later epochs may have stored this row. To continue, put "
                "back the newest checkpoint. Without it, start the query with a new checkpoint and qmq.txnId at the offsets up to which "
                "the rows are stored"
            )

    # --- lookups ---------------------------------------------------------------------------------------

    def _succeeded(self) -> None:
        self._failures, self._stuck_since, self._trouble = 0, None, None

    def failed(self, failure: QmqError, now: float) -> None:
        if not is_worth_another_try(failure):
            raise failure
        self._stuck(failure, now)

    def _stuck(self, failure: QmqError, now: float) -> None:
        self._wants_location = True
        self._failures += 1
        self._rests_until = now + self._rules.rest_s(self._failures, failure)
        self._trouble = failure
        if self._stuck_since is None:
            self._stuck_since = now

    # --- sending -------------------------------------------------------------------------------------------------------

    def next(self, now: float) -> Packet | None:
        self._place(now)
        for window in self._windows.values():
            packet = window.next(now)
            if packet is not None:
                return packet
        return None

    def _answered(self, window: PacketWindow, packet: Packet, attempt: int, failure: QmqError | None, now: float) -> None:
        before = window.stored
        self.stored += window.answered(packet, attempt, failure, now)
        self.batches += window.stored - before

    def broken(self, group: str, failure: QmqError, now: float) -> None:
        for window in self._windows.values():
            if window.to.broker_group == group:
                window.broken(failure, now)

    def check(self, now: float) -> None:
        for window in self._windows.values():
            window.check(now)
        if self._trouble is not None and self._stuck_since is not None and now >= self._stuck_since + self._retry_s:
            raise self._trouble

    def wake_at(self, now: float) -> float:
        at = min([window.wake_at(now) for window in self._windows.values()], default=math.inf)
        return min(at, self._rests_until) if self._is_waiting else at

    @property
    def is_idle(self) -> bool:
        return not self._is_waiting and not any(window.flight for window in self._windows.values())

    @property
    def pending_bytes(self) -> int:
        flying = sum(packet.load.size for window in self._windows.values() for packet in window.flight)
        return flying + sum(load.size for load in self._unsent())
