"""The base of `BalancedRows` and `PartitionedRows`: packets in flight to each queue, and pauses after failed lookups. Pure.

An unreachable metaserver or broker is asked again after growing pauses; after `retry_s` the task fails.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

from pyspark_qmq.sink.packet_window import PacketWindow
from pyspark_qmq.sink.packets import Load, Packet
from qmq.delivery.retries import RetryRules, is_worth_another_try
from qmq.errors import QmqError

K = TypeVar("K", bound=Hashable)


class RowSender(Generic[K]):
    """The base of a `SubjectCore` that has a `PacketWindow` for each key."""

    def __init__(self, subject: str, retry_s: float, rules: RetryRules) -> None:
        self.stored = self.found = self.batches = 0
        self._subject, self._retry_s, self._rules = subject, retry_s, rules
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
