"""The unacknowledged bytes of a consumer, as stored in the log: a limit besides that on messages. Pure, except for reading the index.

A message counts for its part of its batch. Counting goes over all ranges that the consumer holds, so it is not done for every pull: the
last count plus everything handed out since is an upper bound. Only when the bound reaches the limit is there another count; if that finds
the consumer at its limit, the next one waits until a part is settled. So a consumer far from the limit costs one addition for each pull,
and one at its limit a count for every 64th part that it settles.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from qmq import limits
from qmq.log.consume_log import ConsumeLog
from qmq.log.share import HeldMessages, ShareHolder

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
