"""Decides what a lane gets next: the messages of its logical partitions that are not done. Pure, except for reading batches.

A lane that covers its whole partition needs only the index for batches of which nothing is done: it gets them whole. For any other
lane or batch the columns of logical partitions are read as vectors, and the lane gets its own runs. Whole batches are sent in any case,
because their checksum is the producer's; ranges say which messages are meant. A pull therefore ends between two batches, so that no batch
is sent twice: it gets a last batch entirely if there is room for more than half of its messages, and otherwise ends before it. It cuts
only a first batch that is at least twice as long as the pull.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt
from qmq_ordering.route import LpRange

from qmq.batch_columns import UNREADABLE, Layout, parse_header
from qmq.broker.pull_results import BatchReader, PulledRange, PullResult
from qmq.errors import LogDamaged, MessagesExpired
from qmq.limits import MIB
from qmq.log.batch_filter import logical_partitions
from qmq.log.consume_log import IndexEntry
from qmq.log.lane_share import LaneShare
from qmq.log.queue import Queue
from qmq.log.store import Store

_READ_BYTES_MAX: Final = 8 * MIB
"""Bytes that one pull may read to find few messages; then others get a turn, and the next pull continues there."""


@dataclass(slots=True)
class LaneRange:
    """The result of a pull: everything of the lane before `next_sequence`. If `is_end`, nothing will follow."""

    next_sequence: int
    is_end: bool = False
    delivery: PullResult = field(default_factory=PullResult)


class LaneResultReader:
    """Reads one lane forward, and remembers its place in the index."""

    def __init__(self, store: Store, queue: Queue, share: LaneShare, lps: LpRange, whole: LpRange) -> None:
        self._store, self._queue, self._share = store, queue, share
        self._lps = lps
        self._is_whole = lps == whole
        self._index = BatchReader(queue)

    def read(self, sequence: int, messages_max: int, bytes_max: int) -> LaneRange:
        """The lane from `sequence` on. Raises MessagesExpired, LogDamaged."""
        queue = self._queue
        found = LaneRange(sequence)
        if sequence < queue.start_sequence:
            if queue.sealed is not None and queue.start_sequence >= queue.sealed.sequence:
                return LaneRange(queue.sealed.sequence + 1, is_end=True)
            raise MessagesExpired(
                f"messages {sequence} to {queue.start_sequence - 1} of {queue.id} were deleted by retention before this group "
                "consumed them; to continue with the oldest remaining message: qmq group reset --to earliest"
            )
        read = 0
        for entry in self._index.entries(sequence):
            if queue.sealed is not None and entry.base_sequence == queue.sealed.sequence:
                found.next_sequence, found.is_end = entry.next_sequence, True
                break
            if found.delivery.messages >= messages_max or found.delivery.bytes >= bytes_max or read >= _READ_BYTES_MAX:
                break
            is_all = self._is_all(entry, found.next_sequence)
            read += 0 if is_all else entry.total_bytes
            try:
                self._take(entry, found, messages_max, is_all=is_all)
            except LogDamaged:
                if not found.delivery.messages:
                    raise
                break  # what comes before the damage is delivered first; the next pull gets the error
            if found.next_sequence < entry.next_sequence:
                break
        return found

    def _is_all(self, entry: IndexEntry, sequence: int) -> bool:
        """Whether all messages of a batch from a sequence on belong to the lane and are not done."""
        if not self._is_whole or self._share.failures:
            return False
        first = max(sequence, entry.base_sequence)
        return all(each.has_none_done(first, entry.next_sequence) for each in self._share.progress)

    def _take(self, entry: IndexEntry, found: LaneRange, messages_max: int, *, is_all: bool) -> None:
        """Add what the pull gets of a batch."""
        first = max(found.next_sequence, entry.base_sequence)
        if is_all:
            taken = _part(entry.next_sequence - first, found.delivery.messages, messages_max)
            if taken:
                found.delivery.add(PulledRange(entry, first, taken, 1))
                found.next_sequence = first + taken
            return
        wanted = np.flatnonzero(self._mask(entry, first)) + entry.base_sequence
        taken = _part(len(wanted), found.delivery.messages, messages_max)
        failed = sorted([at for at in self._share.failures if first <= at < entry.next_sequence])
        for begin, end in _runs(wanted[:taken]):
            for a, b, attempt in self._by_attempt(begin, end, failed):
                found.delivery.add(PulledRange(entry, a, b - a, attempt))
        if taken == len(wanted):
            found.next_sequence = entry.next_sequence
        elif taken:
            found.next_sequence = int(wanted[taken - 1]) + 1

    def _mask(self, entry: IndexEntry, first: int) -> npt.NDArray[np.bool_]:
        """Which messages of a batch, from sequence `first` on, are the lane's and not done."""
        _, region = self._store.read(self._queue, entry)
        try:
            header = parse_header(region)
            lps = logical_partitions(region, Layout.walk(region, header), header.count)
        except UNREADABLE as cause:
            raise LogDamaged(
                f"cannot decide which keys messages {entry.base_sequence} to {entry.next_sequence - 1} of {self._queue.id} "
                f"belong to ({cause}); "
                f"to continue after them: qmq group reset --to {entry.next_sequence}"
            ) from cause
        base = entry.base_sequence
        mask = np.zeros(header.count, np.bool_)
        for part in self._share.progress_of(self._lps):
            own = part.lps.cut(self._lps)
            mine = (lps >= own.first) & (lps < own.end)
            mine[: max(part.done_before - base, 0)] = False
            for begin, end in part.done_in(base, entry.next_sequence):
                mine[max(begin - base, 0) : max(end - base, 0)] = False
            mask |= mine
        mask[: first - base] = False
        return mask

    def _by_attempt(self, begin: int, end: int, failed: list[int]) -> Iterator[tuple[int, int, int]]:
        """A run, cut so that each message that failed before is separate. `failed` are ascending."""
        failures = self._share.failures
        mine = failed[bisect_left(failed, begin) : bisect_left(failed, end)]
        marks = sorted({begin, end, *[mark for at in mine for mark in (at, at + 1)]})
        for a, b in pairwise(marks):
            yield a, b, 1 + failures.get(a, 0)


def _part(count: int, messages: int, messages_max: int) -> int:
    """How many of a batch's `count` messages a pull gets that has `messages` and asked for `messages_max`: all, or none. A batch that is at
    least twice as long as the pull is cut, if it is the first.
    """
    room = messages_max - messages
    if count < 2 * room:
        return count
    return 0 if messages else room


def _runs(sequences: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    """Ascending numbers as [first, end) runs."""
    if not len(sequences):
        return []
    breaks = np.flatnonzero(np.diff(sequences) != 1) + 1
    marks = [0, *breaks.tolist(), len(sequences)]
    return [(int(sequences[a]), int(sequences[b - 1]) + 1) for a, b in pairwise(marks)]
