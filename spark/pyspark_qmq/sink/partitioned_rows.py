"""Distributes an ordered subject's rows over its partitions, across splits, merges and moves. Pure.

This module does not use `Partitioner` (qmq/delivery/partitioner.py): attempts of one task may run at the same time, so all of them must
make the same batches.

    put ──▶ waiting ──cut by the newest route──▶ windows, one for each partition ──▶ stored
               ▲                                     │ the partition is closed
               └──── all that is not in it ──────────┘

Rules:
* Each partition is looked up before the first send to it, including partitions that the history gains later, because an attempt
  that was taken for dead may have stored more rows. For a closed partition, only an answer given after it was sealed counts.
* A refusal only triggers a lookup, and the sealed partition itself tells which rows it has. This holds even if all sends were answered,
  because an attempt that was taken for dead may have stored more rows than this one.
* No rows are cut into batches while a closed partition has not been looked up, because a merge has several sources. Then all rows that are
  not stored are cut by chunks, in order, by the newest route. So every attempt sends the same rows as the same batches in the same order to
  the same partition. There, numbers have no gaps: the broker keeps the first of two equal batches, and the rows of a key stay in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from operator import attrgetter

import numpy as np

from pyspark_qmq.sink.core_requests import Ask, Locate, Look, LookedUp, Where
from pyspark_qmq.sink.packet_window import PacketWindow
from pyspark_qmq.sink.packets import Done, Load, Packet
from pyspark_qmq.sink.row_identity import Rows, RowTarget
from pyspark_qmq.sink.row_prints import Prints
from pyspark_qmq.sink.row_sender import RowSender
from pyspark_qmq.source_model import RoutePartition, Routes
from qmq.delivery.retries import ORDERED_SINK, RetryRules
from qmq.errors import OrderMismatch, QmqError


class PartitionedRows(RowSender[int]):
    """A `SubjectCore`.

    `may_skip` tells that a closed partition cannot have rows of this epoch, because it was closed before the epoch began.
    """

    def __init__(
        self,
        subject: str,
        retry_s: float,
        *,
        may_skip: Callable[[RowTarget], bool] = lambda _: False,
        rules: RetryRules = ORDERED_SINK,
        prints_of: Callable[[Load], Prints],
    ) -> None:
        super().__init__(subject, retry_s, rules, prints_of)
        self._may_skip = may_skip
        self._open: dict[int, RoutePartition] = {}
        self._closed: dict[int, RoutePartition] = {}
        self._ends = np.empty(0, np.int64)
        self._numbers = np.empty(0, np.int64)
        self._version = 0
        self._looked: dict[int, int] = {}
        """Partitions that were looked up, with their next numbers."""
        self._known: dict[int, int] = {}
        """For partitions that were closed during the attempt: batches below this number are known."""
        self._done = Done()
        self._owed: Rows = np.empty(0, np.int64)
        """Rows of earlier attempts that must still come, ascending."""
        self._owed_ids: set[bytes] = set()
        self._waiting: deque[Load] = deque()
        self._left: list[Load] = []
        """Rows sent to partitions that are now closed; they may be stored."""

    # --- lookups ---------------------------------------------------------------------------------------

    def asks(self, now: float) -> list[Ask]:
        if now < self._rests_until or self.is_idle:
            return []
        if self._wants_location:
            return [Locate(self._subject)]
        closed = [
            Look(self._target(part), is_final=True, from_number=self._known.get(part.number, 0))
            for part in self._closed.values()
            if part.number not in self._looked
        ]
        new = [Look(self._target(part)) for part in self._open.values() if part.number not in self._looked]
        return [*closed, *new, *[Look(window.to) for window in self._windows.values() if window.wants_look]]

    def _target(self, part: RoutePartition) -> RowTarget:
        return RowTarget(self._subject, part.number, part.broker_group)

    def located(self, where: Where, now: float) -> None:
        if not isinstance(where, Routes):
            raise OrderMismatch(f"subject {self._subject!r} is not ordered, and was when the write began")
        self._succeeded()
        self._wants_location = False
        if where.version >= self._version:
            self._learn(where)
        for window in self._windows.values():
            window.keep()
        self._place(now)

    def _learn(self, routes: Routes) -> None:
        sources = {source for part in routes.partitions.values() for source in part.sources}
        closed = {number: part for number, part in routes.partitions.items() if number in sources}
        for number in closed.keys() & self._open.keys():
            self._leave(number)
        self._version = routes.version
        self._open = {number: part for number, part in routes.partitions.items() if number not in sources}
        self._closed = {number: part for number, part in closed.items() if not self._may_skip(self._target(part))}
        tiles = sorted(self._open.values(), key=lambda part: part.lps.first)
        self._ends = np.array([part.lps.end for part in tiles])
        self._numbers = np.array([part.number for part in tiles])

    def _leave(self, number: int) -> None:
        """Leave a closed partition. It may have more rows than were known while it was open, including those sent without an answer."""
        known = self._looked.pop(number, 0)
        window = self._windows.pop(number, None)
        if window is not None:
            known = window.flight[0].number if window.flight else window.number
            self._left += window.take()
        self._known[number] = known

    def looked(self, target: RowTarget, found: LookedUp, now: float) -> None:
        self._succeeded()
        self._looked[target.partition] = found.number
        self._has_later |= found.has_later
        self._done.add(found.rows, found.prints, found.ids)
        self._owed = np.union1d(self._owed, found.rows[found.rows >= self._passed])
        if not self._passed:
            self._owed_ids |= found.ids
        window = self._windows.get(target.partition)
        if window is not None and window.wants_look:
            for packet in window.flight:
                self._compare(packet.load, self._done.prints(packet.load))
            self.found += window.looked(found.number, self._done, now)
        self._place(now)

    # --- placing rows -------------------------------------------------------------------------------------------------

    def put(self, load: Load) -> None:
        self._waiting.append(load)

    def _place(self, now: float) -> None:
        if self._wants_location or not self._open or not self._looked.keys() >= self._open.keys() | self._closed.keys():
            return
        if self._left:
            self._waiting = deque(sorted([*_joined(self._left), *self._waiting], key=attrgetter("number")))
            self._left = []
        while self._waiting:
            self._cut_one(self._waiting.popleft(), now)

    def _cut_one(self, load: Load, now: float) -> None:
        self._come(load)
        rest = self._done.left(load)
        self.found += len(load.rows) - (0 if rest is None else len(rest.rows))
        if rest is None:
            return
        self._refuse_if_later(rest)
        assert rest.lps is not None
        tiles = np.searchsorted(self._ends, rest.lps, "right")
        for tile in np.unique(tiles).tolist():
            piece = rest.pick(np.flatnonzero(tiles == tile))
            self._window(int(self._numbers[tile])).put(piece, now)

    def _come(self, load: Load) -> None:
        """Compare rows with those of earlier attempts."""
        self._compare(load, self._done.prints(load))
        if self._owed_ids and load.ids is not None:
            self._owed_ids -= {each.tobytes() for each in load.ids}
        self._passed = max(self._passed, int(load.rows[-1]) + 1)
        due, self._owed = np.split(self._owed, [np.searchsorted(self._owed, self._passed)])
        missing = np.setdiff1d(due, load.rows)
        if len(missing):
            raise self._misfit(int(missing[0]), "which no longer goes there")

    def end(self) -> None:
        if len(self._owed):
            raise self._misfit(int(self._owed[0]), "which did not come again")
        if self._owed_ids:
            raise self._misfit(self._passed, f"with the message id {min(self._owed_ids).hex()}, which did not come again")

    def _window(self, number: int) -> PacketWindow:
        found = self._windows.get(number)
        if found is None:
            to = self._target(self._open[number])
            found = self._windows[number] = PacketWindow(to, self._retry_s, number=self._looked[number], rules=self._rules)
        return found

    # --- sending -------------------------------------------------------------------------------------------------------

    def answered(self, packet: Packet, attempt: int, failure: QmqError | None, now: float) -> None:
        window = self._windows.get(packet.to.partition)
        if window is None:
            return
        self._answered(window, packet, attempt, failure, now)
        self._wants_location |= window.wants_route
        self._place(now)

    def wake_at(self, now: float) -> float:
        at = super().wake_at(now)
        return min(at, self._rests_until) if self._wants_location else at

    @property
    def _is_waiting(self) -> bool:
        return bool(self._waiting or self._left)

    def _unsent(self) -> Iterable[Load]:
        return (*self._waiting, *self._left)


def _joined(loads: list[Load]) -> list[Load]:
    """Join the pieces of each chunk into one load, so that it is cut as if it had never been split."""
    by_chunk: dict[int, list[Load]] = {}
    for load in loads:
        by_chunk.setdefault(load.number, []).append(load)
    return [pieces[0] if len(pieces) == 1 else Load.join(pieces) for pieces in by_chunk.values()]
