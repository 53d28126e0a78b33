"""What consumers get again, and how many bytes one may hold. Pure, except for reading the index.

The master decides about failed messages, and about messages of lost consumers, by the group's settings (`decide`):

    NACK, attempt < attempts_max       requeued after its own delay, or the group's for this attempt
    NACK, attempt = attempts_max       dead
    lost, on its first attempt         requeued immediately: it is not known which messages had been begun
    lost, later, begun                 as NACK, with the group's delay
    lost, later, never begun           released: the attempt stays the same

The attempt of a directed message includes earlier failures: copies of long retries carry their number (`failures_in`). All other verdicts
pass unchanged, even on messages that the consumer does not hold: the share ignores those.

A consumer's unacknowledged bytes, as stored in the log, are limited besides its messages (`UnackedBytes`). A message counts for its part of
its batch. Counting goes over all ranges that the consumer holds, so it is not done for every pull: the last count plus everything handed
out since is an upper bound. Only when the bound reaches the limit is there another count; if that finds the consumer at its limit, the next
one waits until a part is settled. So a consumer far from the limit costs one addition for each pull, and one at its limit a count for every
64th part that it settles.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from qmq import limits
from qmq.broker.dispatch.pull import BatchReader
from qmq.errors import LogDamaged
from qmq.log.consume_log import ConsumeLog, IndexEntry
from qmq.log.group_state import HeldMessages, ShareHolder
from qmq.log.queue import Queue
from qmq.log.store import Store
from qmq.model import GroupSettings
from qmq.rpc.channel import LOOK_INSIDE, failures
from qmq.wire.batch import BatchView
from qmq.wire.batch_columns import UNREADABLE
from qmq.wire.settle_payloads import BY_GROUP_MS, Settlement, Verdict

Failures = Callable[[int, int], Sequence[tuple[int, int]]]
"""(first sequence, count) -> [(count, failures before they were sent again)]: together all of them, in order."""

RANGES_MIN: Final = 64
_pull_of: Final = attrgetter("pull")
_LOST_TEXT: Final = "its consumer was lost while it worked on it"


class Decided(NamedTuple):
    """Settlements in the form of the action log."""

    settlements: tuple[tuple[int, int, int, int], ...]
    errors: tuple[tuple[int, str], ...] = ()
    """(number of the settlement, error text), for dead messages."""


def decide(
    held: Sequence[HeldMessages], asked: Iterable[Settlement], settings: GroupSettings, failures: Failures, *, can_die: bool = True
) -> Decided:
    """The decisions for a consumer's verdicts. Where messages cannot die, a rejection counts as one more failure."""
    found: list[Settlement] = []
    for given in asked:
        each = given if can_die or given.verdict != Verdict.DEAD else given._replace(verdict=Verdict.NACK, delay_ms=BY_GROUP_MS)
        if each.verdict == Verdict.NACK:
            found += _failed(held, each, settings, failures) or (each._replace(delay_ms=0),)
        else:
            found.append(each)
    return _joined(found)


def put_back(held: Sequence[HeldMessages], was_begun: Callable[[int], bool], settings: GroupSettings, failures: Failures) -> Decided:
    """The decisions for the messages of a lost consumer; `was_begun` tells for a pull sequence."""
    found: list[Settlement] = []
    for item in held:
        if item.attempt == 1:
            found.append(Settlement(item.pull, item.pull + item.count - 1, Verdict.NACK, 0))
            continue
        for first, last, is_begun in _runs(item, was_begun):
            if is_begun:
                nack = Settlement(first, last, Verdict.NACK, BY_GROUP_MS, _LOST_TEXT)
                found += _failed([item], nack, settings, failures)
            else:
                found.append(Settlement(first, last, Verdict.RELEASE, 0))
    return _joined(found)


def _runs(item: HeldMessages, was_begun: Callable[[int], bool]) -> Iterator[tuple[int, int, bool]]:
    """Ranges of pull sequences with the same attempt, reason and time of the next delivery."""
    first, end = item.pull, item.pull + item.count
    is_begun = was_begun(first)
    for pull in range(first + 1, end):
        if was_begun(pull) != is_begun:
            yield first, pull - 1, is_begun
            first, is_begun = pull, not is_begun
    yield first, end - 1, is_begun


def _failed(held: Sequence[HeldMessages], nack: Settlement, settings: GroupSettings, failures: Failures) -> list[Settlement]:
    """A NACK, cut where attempts differ."""
    found: list[Settlement] = []
    begin = max(bisect_right(held, nack.first, key=_pull_of) - 1, 0)
    for at in range(begin, len(held)):  # not a slice: slicing for each of many NACKs is quadratic
        item = held[at]
        if item.pull > nack.last:
            break
        low, high = max(nack.first, item.pull), min(nack.last, item.pull + item.count - 1)
        if low > high:
            continue
        for count, failed in failures(item.first + low - item.pull, high - low + 1):
            attempt = item.attempt + failed
            is_dead = 0 < settings.attempts_max <= attempt
            delay_ms = settings.delay_ms(attempt) if nack.delay_ms == BY_GROUP_MS else min(nack.delay_ms, limits.REQUEUE_MS_MAX)
            verdict = (Verdict.DEAD, 0) if is_dead else (Verdict.NACK, delay_ms)
            found.append(Settlement(low, low + count - 1, *verdict, nack.error))
            low += count
    return found


def _joined(found: Iterable[Settlement]) -> Decided:
    """The fewest equivalent ranges. Error texts are kept for dead messages only."""
    parts: list[Settlement] = []
    for each in found:
        kept = each if each.verdict == Verdict.DEAD else each._replace(error="")
        last = parts[-1] if parts else None
        if last is not None and last.last + 1 == kept.first and last[2:] == kept[2:]:
            parts[-1] = last._replace(last=kept.last)
        else:
            parts.append(kept)
    settlements = tuple([(each.first, each.last, int(each.verdict), each.delay_ms) for each in parts])
    return Decided(settlements, tuple([(at, each.error) for at, each in enumerate(parts) if each.error]))


class Begun:
    """The pull sequences that one consumer has begun to work on, among those that failed before. In the master's memory only."""

    __slots__ = ("_look_at", "_ranges")

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []
        self._look_at = RANGES_MIN

    def add(self, first: int, last: int) -> None:
        """Both ends included."""
        if self._ranges and self._ranges[-1][0] <= first <= self._ranges[-1][1] + 1:
            self._ranges[-1] = self._ranges[-1][0], max(last, self._ranges[-1][1])
        else:
            self._ranges.append((first, last))

    def __contains__(self, pull: int) -> bool:
        return any(first <= pull <= last for first, last in self._ranges)

    def forget(self, held: Sequence[HeldMessages]) -> None:
        """Keep ranges that touch a held message; done only when the list has doubled."""
        if len(self._ranges) >= self._look_at:
            self._ranges = [each for each in self._ranges if _touches(held, *each)]
            self._look_at = max(2 * len(self._ranges), RANGES_MIN)


def _touches(held: Sequence[HeldMessages], first: int, last: int) -> bool:
    at = bisect_right(held, last, key=_pull_of) - 1
    return at >= 0 and held[at].pull + held[at].count > first


def failures_in(store: Store, queue: Queue, reader: BatchReader) -> Failures:
    """Returns a function that returns the failures for a range of the queue. Unreadable messages count as never failed: a damaged copy must
    not stop the caller.
    """

    def failures_of(sequence: int, count: int) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        end = sequence + count
        while sequence < end:
            number = reader.number_of(sequence)
            entry = reader.entry(number) if number < queue.index.count else None
            last = min(entry.next_sequence, end) if entry is not None else end
            own = _failures_inside(store, queue, entry) if entry is not None and entry.tag_bloom == LOOK_INSIDE else []
            if own and entry is not None and entry.base_sequence <= sequence:
                found += [(1, each) for each in own[sequence - entry.base_sequence : last - entry.base_sequence]]
            else:
                found.append((last - sequence, 0))
            sequence = last
        return found

    return failures_of


def _failures_inside(store: Store, queue: Queue, entry: IndexEntry) -> list[int]:
    """The failures of each message of a batch that may be directed; empty if it is not."""
    try:
        view = BatchView.parse(b"".join(store.read(queue, entry)))
        return [failures(each) for each in view.headers() or [{}] * view.count] if view.header.is_directed else []
    except (LogDamaged, *UNREADABLE):
        return []


_PART: Final = 64
_ENTRIES: Final = 4096


class UnackedBytes:
    """The bytes of one session of a consumer."""

    __slots__ = ("_bytes", "_limit", "_look_at")

    def __init__(self, bytes_max: int = limits.CONSUMER_UNACKED_BYTES_MAX) -> None:
        self._limit = bytes_max
        self._bytes = bytes_max
        """An upper bound. What was handed out before this session is not known yet."""
        self._look_at = limits.CONSUMER_UNACKED_MAX
        """Count again when it holds no more messages than this."""

    def room(self, holder: ShareHolder, index: ConsumeLog) -> int:
        """The number of bytes that may be delivered now; 0 or less: none. Raises LogDamaged."""
        if not holder.unacked:
            self._bytes, self._look_at = 0, limits.CONSUMER_UNACKED_MAX
        elif self._bytes >= self._limit and holder.unacked <= self._look_at:
            self._bytes = bytes_of(index, holder.held)
            is_full = self._bytes >= self._limit
            self._look_at = holder.unacked - max(holder.unacked // _PART, 1) if is_full else limits.CONSUMER_UNACKED_MAX
        return self._limit - self._bytes

    def handed(self, size: int) -> None:
        """Batches of `size` bytes were delivered."""
        self._bytes += size


def bytes_of(index: ConsumeLog, held: Sequence[HeldMessages]) -> int:
    """The bytes of the messages in these ranges, each its part of its batch. Deleted messages count as 0. Raises LogDamaged."""
    marks = np.array([[each.first, each.first + each.count] for each in held], np.int64).reshape(-1, 2)
    order = np.unique(marks)
    before = np.zeros(len(order))
    at = 0
    while at < len(order):
        at += _count_before(index, order, before, at)
    places = np.searchsorted(order, marks)
    return round(float((before[places[:, 1]] - before[places[:, 0]]).sum()))


def _count_before(index: ConsumeLog, order: npt.NDArray[np.int64], before: npt.NDArray[np.float64], at: int) -> int:
    """Fill in, from `at` on, how many bytes of the queue lie before each sequence, as far as one read of the index reaches. Returns the
    number of filled places.
    """
    if index.count <= index.first:
        return len(order) - at
    number = index.find_sequence(int(order[at]))
    table = index.table(number, _ENTRIES)
    bases = table["base_sequence"].astype(np.int64)
    is_last = number + len(table) >= index.count
    known = len(order) - at if is_last else max(int(np.searchsorted(order[at:], bases[-1])), 1)
    wanted = order[at : at + known]
    rows = np.clip(np.searchsorted(bases, wanted, side="right") - 1, 0, None)
    parts = np.clip((wanted - bases[rows]) / table["count"][rows], 0, 1)
    before[at : at + known] = table["cumulative_bytes"][rows] + parts * table["total_bytes"][rows]
    return known
