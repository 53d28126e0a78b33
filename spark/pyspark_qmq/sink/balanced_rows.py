"""Distributes an unordered subject's rows over its broker groups, and all delayed rows over the delay groups. Pure.

It does not use `Balancer` (qmq/delivery/balancer.py), which takes turns: attempts of one task may run concurrently and must choose the same
groups.

Rules:
* Before the first send, every broker group that may have rows of the subject is looked up. A batch's number gives its first row
  (`row_identity.py`), and a batch has consecutive rows of the subject, so numbers and counts tell which rows are stored.
* A batch goes to the broker group that ranks highest for its first row among those that accept messages, so attempts agree without
  communication. A drained broker refuses every attempt, so the batch goes to the next group; a batch with an unknown outcome stays.
* Two attempts' batches with one number have the same rows but different create times. The broker takes the first and refuses the second
  with NumberTaken. A new lookup of the broker group then finds the first.
* Delayed rows of an ordered subject go only to its home (`qmq/client/delay_home.py`), one batch after another.

Not guaranteed: exactly one copy if an operator drains and resumes a broker group, or places the subject on other groups, between the sends
of two attempts that run at the same time, or that ask metaservers of which one is behind.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

import numpy as np

from pyspark_qmq.sink.core_requests import Ask, Locate, Look, LookedUp, Where
from pyspark_qmq.sink.packet_window import WINDOW, PacketWindow
from pyspark_qmq.sink.packets import Load, Packet
from pyspark_qmq.sink.row_identity import RowTarget, RowWriter, rank
from pyspark_qmq.sink.row_prints import Prints, unknown
from pyspark_qmq.sink.row_sender import RowSender
from pyspark_qmq.source_model import Routes
from qmq.client.delay_home import DelayHome
from qmq.delivery.retries import SINK, RetryRules
from qmq.errors import OrderMismatch, QmqError, ReadOnly

CLOSED_S: Final = 1.0
"""How long a broker group that refused because it is drained is skipped."""


class BalancedRows(RowSender[str]):
    """A `SubjectCore`. `home`: the delay group for delayed rows of an ordered subject."""

    def __init__(
        self,
        subject: str,
        writer: RowWriter,
        retry_s: float,
        *,
        is_delayed: bool = False,
        home: DelayHome | None = None,
        rules: RetryRules = SINK,
        prints_of: Callable[[Load], Prints],
    ) -> None:
        super().__init__(subject, retry_s, rules, prints_of)
        self._writer, self._is_delayed, self._home = writer, is_delayed, home
        self._groups: Mapping[str, bool] = {}
        self._looked: set[str] = set()
        self._runs: dict[int, Prints] = {}
        self._owed: set[int] = set()
        """The first rows of runs of earlier attempts. These rows must still come."""
        self._skip = unknown(0)  # The next rows are in a batch that begins before them.
        self._fresh: deque[Load] = deque()
        self._ready: deque[Load] = deque()
        self._closed_until: dict[str, float] = {}
        self._disputed: deque[Load] = deque()
        """Another batch has their number: they are sent only after a new lookup of the broker group."""
        self._disputed_since: dict[int, float] = {}
        """By first row."""

    # --- lookups ---------------------------------------------------------------------------------------

    def asks(self, now: float) -> list[Ask]:
        if now < self._rests_until or not self._is_waiting:
            return []
        if self._wants_location:
            return [Locate(self._subject, self._is_delayed)]
        return [Look(self._target(group)) for group in self._groups if group not in self._looked]

    def _target(self, group: str) -> RowTarget:
        return RowTarget(self._subject, 0, group, self._is_delayed)

    def located(self, where: Where, now: float) -> None:
        if isinstance(where, Routes):
            raise OrderMismatch(f"subject {self._subject!r} is ordered, and was not when the write began")
        self._groups, self._wants_location = where, False
        self._succeeded()
        self._place(now)

    def looked(self, target: RowTarget, found: LookedUp, now: float) -> None:
        self._looked.add(target.broker_group)
        self._has_later |= found.has_later
        self._runs |= found.runs
        self._owed.update(first for first in found.runs if first >= self._passed)
        self._succeeded()
        self._place(now)

    # --- placing rows -------------------------------------------------------------------------------------------------

    def put(self, load: Load) -> None:
        self._fresh.append(load)

    def _place(self, now: float) -> None:
        if self._wants_location or not self._looked.issuperset(self._groups):
            return
        self._place_disputed()
        while self._fresh:
            load = self._fresh.popleft()
            for piece in self._undone(load):
                self._refuse_if_later(piece)
                self._ready.append(piece)
            self._passed = int(load.rows[-1]) + 1
            for first in self._owed:
                if first < self._passed:
                    raise self._misfit(first, "which no longer goes there")
        while self._ready:
            group = self._choose(self._ready[0], now)
            if group is None:
                self._stuck(ReadOnly(f"all broker groups of {self._subject!r} are drained: {', '.join(sorted(self._groups))}"), now)
                return
            load = self._ready.popleft()
            self._window(group).put(load, now, self._writer.number_of(int(load.rows[0])))

    def _place_disputed(self) -> None:
        """Place disputed rows. They precede all new rows, so the groups that these skip do not matter."""
        if self._disputed:
            skip, self._skip = self._skip, unknown(0)
            left = [piece for load in self._disputed for piece in self._undone(load)]
            self._disputed.clear()
            self._skip = skip
            self._ready = _in_order([*left, *self._ready])

    def _undone(self, load: Load) -> Iterator[Load]:
        """The rows of the load that are not stored, in pieces of consecutive rows of the subject."""
        rows, runs = load.rows, [(0, self._skip)]
        self._skip = unknown(0)
        for first in [first for first in self._runs if rows[0] <= first <= rows[-1]]:
            at = int(np.searchsorted(rows, first))
            if rows[at] != first:
                raise self._misfit(first, "which no longer goes there")
            runs.append((at, self._runs.pop(first)))
            self._owed.discard(first)
        keeps, stored = np.ones(len(rows), np.bool_), unknown(len(rows))
        for at, prints in runs:
            here, beyond = prints[: len(rows) - at], prints[len(rows) - at :]
            keeps[at : at + len(here)] = False
            stored[at : at + len(here)] = here
            self._skip = max(self._skip, beyond, key=len)
        self._compare(load, stored)
        self.found += len(rows) - int(keeps.sum())
        chosen = np.flatnonzero(keeps)
        if len(chosen):
            for each in np.split(chosen, np.flatnonzero(np.diff(chosen) > 1) + 1):
                yield load.pick(each)

    def end(self) -> None:
        if self._owed or len(self._skip):
            raise self._misfit(min(self._owed, default=self._passed), "which did not come again")

    def _choose(self, load: Load, now: float) -> str | None:
        open_groups = {group: is_open and self._closed_until.get(group, 0.0) <= now for group, is_open in self._groups.items()}
        if self._home is not None:
            return next((group for group, is_home in self._home.choose(open_groups, now).items() if is_home), None)
        first_row = int(load.rows[0])
        takes = [group for group, is_open in open_groups.items() if is_open]
        return max(takes, key=lambda group: rank(self._writer, first_row, self._target(group)), default=None)

    def _window(self, group: str) -> PacketWindow:
        found = self._windows.get(group)
        if found is None:
            most = WINDOW if self._home is None else 1  # A batch that is refused while the next one is stored would come after it.
            found = self._windows[group] = PacketWindow(self._target(group), self._retry_s, window=most, rules=self._rules)
        return found

    # --- sending -------------------------------------------------------------------------------------------------------

    def answered(self, packet: Packet, attempt: int, failure: QmqError | None, now: float) -> None:
        group = packet.to.broker_group
        window = self._windows[group]
        self._answered(window, packet, attempt, failure, now)
        refused = window.take_refused()
        if refused:
            self._closed_until[group] = now + CLOSED_S
            self._ready = _in_order([*refused, *self._ready])
        for load, cause in window.take_disputed():
            self._dispute(group, load, cause, now)

    def _dispute(self, group: str, load: Load, cause: QmqError, now: float) -> None:
        """Keep the rows for the next lookup. Raises NumberTaken if the number is refused for `retry_s` and no lookup finds it."""
        if now >= self._disputed_since.setdefault(int(load.rows[0]), now) + self._retry_s:
            raise cause
        self._disputed.append(load)
        self._looked.discard(group)
        self._rests_until = max(self._rests_until, now + self._rules.rest_s(1, cause))

    @property
    def _is_waiting(self) -> bool:
        return bool(self._fresh or self._ready or self._disputed)

    def _unsent(self) -> Iterable[Load]:
        return (*self._disputed, *self._fresh, *self._ready)


def _in_order(loads: Iterable[Load]) -> deque[Load]:
    return deque(sorted(loads, key=lambda load: int(load.rows[0])))
