"""Distributes rows over queues: `BalancedRows` for an unordered subject and all delayed rows,
`PartitionedRows` for an ordered subject. Pure.

Their base has the packets in flight to each queue, and pauses after failed lookups.

A row that an earlier attempt stored must be the same row in this attempt: rows are known by their
number in the task, so if Spark repeats an epoch with other tasks or in another order, a row that is
taken for stored would be lost. So each row that is found stored is compared, and a stored row that
this attempt does not have is refused, too.

Spark begins an epoch when the one before is committed, so if rows of later epochs are stored, by
any Spark partition (`left_over.py`), all rows of this one are. If an attempt has others, its query
continues from an older copy of its checkpoint, and later epochs have stored them: they are refused.

An unreachable metaserver or broker is asked again after growing pauses; after `retry_s` the task
fails.

`BalancedRows` distributes an unordered subject's rows over its broker groups, and all delayed rows
over the delay groups. It does not use `Balancer` (qmq/delivery/balancer.py), which takes turns:
attempts of one task may run concurrently and must choose the same groups.

Rules:
* Before the first send, every broker group that may have rows of the subject is looked up. A
  batch's number gives its first row (`row_identity.py`), and a batch has consecutive rows of the
  subject, so numbers and counts tell which rows are stored.
* A batch goes to the broker group that ranks highest for its first row among those that accept
  messages, so attempts agree without communication. A drained broker refuses every attempt, so the
  batch goes to the next group; a batch with an unknown outcome stays.
* Two attempts' batches with one number have the same rows but different create times. The broker
  takes the first and refuses the second with NumberTaken. A new lookup of the broker group then
  finds the first.
* Delayed rows of an ordered subject go only to its home (`qmq/client/producing/delayed.py`), one
  batch after another.

Not guaranteed: exactly one copy if an operator drains and resumes a broker group, or places the
subject on other groups, between the sends of two attempts that run at the same time, or that ask
metaservers of which one is behind.

`PartitionedRows` distributes an ordered subject's rows over its partitions, across splits, merges
and moves. It does not use `Partitioner` (qmq/delivery/partitioner.py): attempts of one task may run
at the same time, so all of them must make the same batches.

    put ──▶ waiting ──cut by the newest route──▶ windows, one for each partition ──▶ stored
               ▲                                     │ the partition is closed
               └──── all that is not in it ──────────┘

Rules:
* Each partition is looked up before the first send to it, including partitions that the history
  gains later, because an attempt that was taken for dead may have stored more rows. For a closed
  partition, only an answer given after it was sealed counts.
* A refusal only triggers a lookup, and the sealed partition itself tells which rows it has. This
  holds even if all sends were answered, because an attempt that was taken for dead may have stored
  more rows than this one.
* No rows are cut into batches while a closed partition has not been looked up, because a merge has
  several sources. Then all rows that are not stored are cut by chunks, in order, by the newest
  route. So every attempt sends the same rows as the same batches in the same order to the same
  partition. There, numbers have no gaps: the broker keeps the first of two equal batches, and the
  rows of a key stay in order.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Final, Generic, TypeAlias, TypeVar

import numpy as np

from pyspark_qmq.sink.packets import WINDOW, Done, Load, Packet, PacketWindow
from pyspark_qmq.sink.requests import Ask, Locate, Look, LookedUp, Prints, Where, unknown
from pyspark_qmq.sink.row_identity import Rows, RowTarget, RowWriter, rank
from qmq.client.producing.delayed import DelayHome
from qmq.columns.model import RoutePartition, Routes
from qmq.delivery.retries import ORDERED_SINK, SINK, RetryRules, is_worth_another_try
from qmq.errors import InvalidArgument, OrderMismatch, QmqError, ReadOnly

K = TypeVar("K", bound=Hashable)


class RowSender(Generic[K]):
    """The rows of one subject on their way to its queues: a `PacketWindow` for each key.
    `prints_of`: the fingerprints of an attempt's rows. `now` is in seconds.

    in    put, located, looked, failed, answered, broken
    out   asks (requests to carry out and answer), next (batches to send), check (raises when the
          time is up), wake_at
    """

    def __init__(
        self,
        subject: str,
        retry_s: float,
        rules: RetryRules,
        prints_of: Callable[[Load], Prints],
        *,
        has_later: bool,
    ) -> None:
        self.stored = self.found = self.batches = 0
        """Rows stored since the lookup, by this attempt or another one; rows that the lookup found;
        and batches.
        """
        self._subject, self._retry_s, self._rules, self._prints_of = (
            subject,
            retry_s,
            rules,
            prints_of,
        )
        self._passed = 0
        """Rows below this number have come."""
        self._has_later = has_later
        """Whether rows of later epochs are stored."""
        self._windows: dict[K, PacketWindow] = {}
        self._wants_location = True
        """Whether to ask where the subject is."""
        self._backoff_until = 0.0
        self._failures = 0
        self._stuck_since: float | None = None
        self._trouble: QmqError | None = None

    # --- what each kind of subject does -----------------------------------------------------------

    def put(self, load: Load) -> None:
        """Add rows after all others."""
        raise NotImplementedError

    def asks(self, now: float) -> list[Ask]:
        """The open questions."""
        raise NotImplementedError

    def located(self, where: Where, now: float) -> None:
        """The answer to a `Locate`. Raises OrderMismatch."""
        raise NotImplementedError

    def looked(self, target: RowTarget, found: LookedUp, now: float) -> None:
        """The answer to a `Look`. Raises InvalidArgument if the rows differ from those of an
        earlier attempt.
        """
        raise NotImplementedError

    def answered(self, packet: Packet, attempt: int, failure: QmqError | None, now: float) -> None:
        """The outcome of a send; None: stored. Raises the failure if a retry cannot help."""
        raise NotImplementedError

    def end(self) -> None:
        """There are no more rows, and all are stored. Raises InvalidArgument if an earlier attempt
        stored rows that did not come.
        """
        raise NotImplementedError

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

    # --- rows of earlier attempts -----------------------------------------------------------------

    def _compare(self, load: Load, stored: Prints) -> None:
        """Compare rows with their fingerprints as stored; 0: not stored, or not known."""
        chosen = np.flatnonzero(stored)
        if len(chosen):
            wrong = np.flatnonzero(self._prints_of(load.pick(chosen)) != stored[chosen])
            if len(wrong):
                raise self._misfit(int(load.rows[chosen[wrong[0]]]), "with another content")

    def _misfit(self, row: int, how: str) -> InvalidArgument:
        return InvalidArgument(
            f"an earlier attempt of this epoch stored row {row} of this Spark partition "
            f"in {self._subject!r} {how}. The plan before the sink is not deterministic, "
            "or an earlier release planned this epoch, "
            "so the sink cannot know which rows are stored. Sort the rows before they are written; "
            "to continue, perhaps with this epoch's rows stored twice, choose a new qmq.txnId"
        )

    def _refuse_if_later(self, load: Load) -> None:
        """Refuse rows that are not stored, if later epochs are."""
        if self._has_later:
            raise InvalidArgument(
                f"row {int(load.rows[0])} of this Spark partition is not stored in "
                f"{self._subject!r}, but rows of later epochs are: the checkpoint is an older "
                "copy, or its epochs ended elsewhere, so later epochs may have stored this row. "
                "To continue, put back the newest checkpoint. Without it, start the query with a "
                "new checkpoint and qmq.txnId at the offsets up to which the rows are stored"
            )

    # --- lookups ----------------------------------------------------------------------------------

    def _succeeded(self) -> None:
        self._failures, self._stuck_since, self._trouble = 0, None, None

    def failed(self, failure: QmqError, now: float) -> None:
        """A question could not be answered. Raises the failure if a retry cannot help."""
        if not is_worth_another_try(failure):
            raise failure
        self._stuck(failure, now)

    def _stuck(self, failure: QmqError, now: float) -> None:
        self._wants_location = True
        self._failures += 1
        self._backoff_until = now + self._rules.backoff_s(self._failures, failure)
        self._trouble = failure
        if self._stuck_since is None:
            self._stuck_since = now

    # --- sending ----------------------------------------------------------------------------------

    def next(self, now: float) -> Packet | None:
        """The next packet to send, which then counts as sent; None if there is none. Raises
        InvalidArgument if rows differ from those of an earlier attempt.
        """
        self._place(now)
        for window in self._windows.values():
            packet = window.next(now)
            if packet is not None:
                return packet
        return None

    def _answered(
        self,
        window: PacketWindow,
        packet: Packet,
        attempt: int,
        failure: QmqError | None,
        now: float,
    ) -> None:
        before = window.stored
        self.stored += window.answered(packet, attempt, failure, now)
        self.batches += window.stored - before

    def broken(self, group: str, failure: QmqError, now: float) -> None:
        """The connection to a broker group was lost or could not be made."""
        for window in self._windows.values():
            if window.to.broker_group == group:
                window.broken(failure, now)

    def check(self, now: float) -> None:
        """Raise a failure that has lasted too long."""
        for window in self._windows.values():
            window.check(now)
        if (
            self._trouble is not None
            and self._stuck_since is not None
            and now >= self._stuck_since + self._retry_s
        ):
            raise self._trouble

    def wake_at(self, now: float) -> float:
        """The latest time of the next call if no event occurs before."""
        at = min([window.wake_at(now) for window in self._windows.values()], default=math.inf)
        return min(at, self._backoff_until) if self._is_waiting else at

    @property
    def is_idle(self) -> bool:
        """Whether all rows are stored."""
        return not self._is_waiting and not any(window.flight for window in self._windows.values())

    @property
    def pending_bytes(self) -> int:
        """The approximate bytes of rows that are not stored."""
        flying = sum(
            packet.load.size for window in self._windows.values() for packet in window.flight
        )
        return flying + sum(load.size for load in self._unsent())


CLOSED_S: Final = 1.0
"""How long a broker group that refused because it is drained is skipped."""


class BalancedRows(RowSender[str]):
    """The rows of an unordered subject, or delayed rows. `home`: the delay group for delayed rows
    of an ordered subject.
    """

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
        has_later: bool = False,
    ) -> None:
        super().__init__(subject, retry_s, rules, prints_of, has_later=has_later)
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
        """Another batch has their number: they are sent only after a new lookup
        of the broker group.
        """
        self._disputed_since: dict[int, float] = {}
        """By first row."""

    # --- lookups ----------------------------------------------------------------------------------

    def asks(self, now: float) -> list[Ask]:
        if now < self._backoff_until or not self._is_waiting:
            return []
        if self._wants_location:
            return [Locate(self._subject, self._is_delayed)]
        return [Look(self._target(group)) for group in self._groups if group not in self._looked]

    def _target(self, group: str) -> RowTarget:
        return RowTarget(self._subject, 0, group, self._is_delayed)

    def located(self, where: Where, now: float) -> None:
        if isinstance(where, Routes):
            raise OrderMismatch(
                f"subject {self._subject!r} is ordered, and was not when the write began"
            )
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

    # --- placing rows -----------------------------------------------------------------------------

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
                self._stuck(
                    ReadOnly(
                        f"all broker groups of {self._subject!r} are drained: "
                        f"{', '.join(sorted(self._groups))}"
                    ),
                    now,
                )
                return
            load = self._ready.popleft()
            self._window(group).put(load, now, self._writer.number_of(int(load.rows[0])))

    def _place_disputed(self) -> None:
        """Place disputed rows. They precede all new rows,
        so the groups that these skip do not matter.
        """
        if self._disputed:
            skip, self._skip = self._skip, unknown(0)
            left = [piece for load in self._disputed for piece in self._undone(load)]
            self._disputed.clear()
            self._skip = skip
            self._ready = _in_order([*left, *self._ready])

    def _undone(self, load: Load) -> Iterator[Load]:
        """The rows of the load that are not stored,
        in pieces of consecutive rows of the subject.
        """
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
        open_groups = {
            group: is_open and self._closed_until.get(group, 0.0) <= now
            for group, is_open in self._groups.items()
        }
        if self._home is not None:
            return next(
                (
                    group
                    for group, is_home in self._home.choose(open_groups, now).items()
                    if is_home
                ),
                None,
            )
        first_row = int(load.rows[0])
        takes = [group for group, is_open in open_groups.items() if is_open]
        return max(
            takes,
            key=lambda group: rank(self._writer, first_row, self._target(group)),
            default=None,
        )

    def _window(self, group: str) -> PacketWindow:
        found = self._windows.get(group)
        if found is None:
            most = (
                WINDOW if self._home is None else 1
            )  # A batch that is refused while the next one is stored would come after it.
            found = self._windows[group] = PacketWindow(
                self._target(group), self._retry_s, window=most, rules=self._rules
            )
        return found

    # --- sending ----------------------------------------------------------------------------------

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
        """Keep the rows for the next lookup. Raises NumberTaken if the number is refused for
        `retry_s` and no lookup finds it.
        """
        if now >= self._disputed_since.setdefault(int(load.rows[0]), now) + self._retry_s:
            raise cause
        self._disputed.append(load)
        self._looked.discard(group)
        self._backoff_until = max(self._backoff_until, now + self._rules.backoff_s(1, cause))

    @property
    def _is_waiting(self) -> bool:
        return bool(self._fresh or self._ready or self._disputed)

    def _unsent(self) -> Iterable[Load]:
        return (*self._disputed, *self._fresh, *self._ready)


def _in_order(loads: Iterable[Load]) -> deque[Load]:
    return deque(sorted(loads, key=lambda load: int(load.rows[0])))


class PartitionedRows(RowSender[int]):
    """The rows of an ordered subject.

    `may_skip` tells that a closed partition cannot have rows of this epoch, because it was closed
    before the epoch began.
    """

    def __init__(
        self,
        subject: str,
        retry_s: float,
        *,
        may_skip: Callable[[RowTarget], bool] = lambda _: False,
        rules: RetryRules = ORDERED_SINK,
        prints_of: Callable[[Load], Prints],
        has_later: bool = False,
    ) -> None:
        super().__init__(subject, retry_s, rules, prints_of, has_later=has_later)
        self._may_skip = may_skip
        self._open: dict[int, RoutePartition] = {}
        self._closed: dict[int, RoutePartition] = {}
        self._ends = np.empty(0, np.int64)
        self._numbers = np.empty(0, np.int64)
        self._version = 0
        self._looked: dict[int, int] = {}
        """Partitions that were looked up, with their next numbers."""
        self._known: dict[int, int] = {}
        """For partitions that were closed during the attempt:
        batches below this number are known.
        """
        self._done = Done()
        self._owed: Rows = np.empty(0, np.int64)
        """Rows of earlier attempts that must still come, ascending."""
        self._owed_ids: set[bytes] = set()
        self._waiting: deque[Load] = deque()
        self._left: list[Load] = []
        """Rows sent to partitions that are now closed; they may be stored."""

    # --- lookups ----------------------------------------------------------------------------------

    def asks(self, now: float) -> list[Ask]:
        if now < self._backoff_until or self.is_idle:
            return []
        if self._wants_location:
            return [Locate(self._subject)]
        closed = [
            Look(self._target(part), is_final=True, from_number=self._known.get(part.number, 0))
            for part in self._closed.values()
            if part.number not in self._looked
        ]
        new = [
            Look(self._target(part))
            for part in self._open.values()
            if part.number not in self._looked
        ]
        return [
            *closed,
            *new,
            *[Look(window.to) for window in self._windows.values() if window.wants_look],
        ]

    def _target(self, part: RoutePartition) -> RowTarget:
        return RowTarget(self._subject, part.number, part.broker_group)

    def located(self, where: Where, now: float) -> None:
        if not isinstance(where, Routes):
            raise OrderMismatch(
                f"subject {self._subject!r} is not ordered, and was when the write began"
            )
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
        self._open = {
            number: part for number, part in routes.partitions.items() if number not in sources
        }
        self._closed = {
            number: part
            for number, part in closed.items()
            if not self._may_skip(self._target(part))
        }
        tiles = sorted(self._open.values(), key=lambda part: part.lps.first)
        self._ends = np.array([part.lps.end for part in tiles])
        self._numbers = np.array([part.number for part in tiles])

    def _leave(self, number: int) -> None:
        """Leave a closed partition. It may have more rows than were known while it was open,
        including those sent without an answer.
        """
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

    # --- placing rows -----------------------------------------------------------------------------

    def put(self, load: Load) -> None:
        self._waiting.append(load)

    def _place(self, now: float) -> None:
        if (
            self._wants_location
            or not self._open
            or not self._looked.keys() >= self._open.keys() | self._closed.keys()
        ):
            return
        if self._left:
            self._waiting = deque(
                sorted([*_joined(self._left), *self._waiting], key=attrgetter("number"))
            )
            self._left = []
        while self._waiting:
            self._cut_one(self._waiting.popleft(), now)

    def _cut_one(self, load: Load, now: float) -> None:
        self._compare_with_earlier(load)
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

    def _compare_with_earlier(self, load: Load) -> None:
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
            raise self._misfit(
                self._passed,
                f"with the message id {min(self._owed_ids).hex()}, which did not come again",
            )

    def _window(self, number: int) -> PacketWindow:
        found = self._windows.get(number)
        if found is None:
            to = self._target(self._open[number])
            found = self._windows[number] = PacketWindow(
                to, self._retry_s, number=self._looked[number], rules=self._rules
            )
        return found

    # --- sending ----------------------------------------------------------------------------------

    def answered(self, packet: Packet, attempt: int, failure: QmqError | None, now: float) -> None:
        window = self._windows.get(packet.to.partition)
        if window is None:
            return
        self._answered(window, packet, attempt, failure, now)
        self._wants_location |= window.wants_route
        self._place(now)

    def wake_at(self, now: float) -> float:
        at = super().wake_at(now)
        return min(at, self._backoff_until) if self._wants_location else at

    @property
    def _is_waiting(self) -> bool:
        return bool(self._waiting or self._left)

    def _unsent(self) -> Iterable[Load]:
        return (*self._waiting, *self._left)


SubjectCore: TypeAlias = BalancedRows | PartitionedRows


def _joined(loads: list[Load]) -> list[Load]:
    """Join the pieces of each chunk into one load,
    so that it is cut as if it had never been split.
    """
    by_chunk: dict[int, list[Load]] = {}
    for load in loads:
        by_chunk.setdefault(load.number, []).append(load)
    return [pieces[0] if len(pieces) == 1 else Load.join(pieces) for pieces in by_chunk.values()]
