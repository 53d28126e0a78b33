"""Looks up messages in buckets: by place, by message id, and pending ones in the order of due times."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from operator import itemgetter
from typing import Final

import numpy as np
import numpy.typing as npt

from qmq.batch_columns import UNREADABLE
from qmq.delay.append_files import damaged
from qmq.delay.bucket import ROW_BYTES, Bucket
from qmq.delay.dispatch_log import DispatchMark
from qmq.delay.interfaces import DueMessage, Places, SchedulePlace
from qmq.delay.stored_batch import BatchCache
from qmq.errors import CorruptBatch, LogDamaged

log = logging.getLogger("qmq.delay")

_SLICE_ROWS: Final = 65_536
SORTED_MAX: Final = 200_000
"""Messages of one bucket that are sorted at once; a bucket with more is scanned several times."""
_CHUNK: Final = 256
PICKED_MAX: Final = 8
"""If more messages of a batch are wanted together, the whole batch is read."""
_FIRST: Final = itemgetter(0)
_POSITION: Final = itemgetter(1)


def read(bucket_of: Callable[[int], Bucket], cache: BatchCache, places: Places) -> list[DueMessage]:
    found: list[DueMessage | None] = [None] * len(places)
    order = np.lexsort((places.ordinals, places.buckets))  # so that a batch's messages are adjacent
    numbers, ordinals = places.buckets[order].tolist(), places.ordinals[order].tolist()
    wheres = iter(order.tolist())
    for number, same in groupby(zip(numbers, ordinals, strict=True), _FIRST):
        messages = _of_bucket(bucket_of(number), cache, [each for _, each in same])
        for message, where in zip(messages, wheres, strict=False):  # in this order: it is the messages that end
            found[where] = message
    return [each for each in found if each is not None]


def readable(reading: Callable[[Places], list[DueMessage]], places: Places) -> list[DueMessage]:
    """The readable messages. The others are logged."""
    try:
        return reading(places)
    except (LogDamaged, *UNREADABLE) as failure:
        if len(places) == 1:
            log.error("a delayed message cannot be read: %s", failure)
            return []
    middle = len(places) // 2
    return readable(reading, places[:middle]) + readable(reading, places[middle:])


def _of_bucket(bucket: Bucket, cache: BatchCache, ordinals: list[int]) -> Iterator[DueMessage]:
    """Messages of one bucket, in ascending order. One or a few messages of a large checked batch are read singly; otherwise the whole batch
    is read.
    """
    rows = list(bucket.rows_of(ordinals))
    wanted = Counter(map(_POSITION, rows))
    for ordinal, row in zip(ordinals, rows, strict=True):
        message = None
        if wanted[row[1]] <= PICKED_MAX and cache.get(bucket.number, row[1]) is None:
            message = bucket.picked(ordinal, *row, cache)
        yield message or _message(bucket, cache, ordinal, row)


def _message(bucket: Bucket, cache: BatchCache, ordinal: int, row: tuple[int, int, int]) -> DueMessage:
    batch, at = bucket.batch_of(ordinal, cache, row)
    try:
        return batch.message(at, SchedulePlace(bucket.number, ordinal))
    except CorruptBatch as cause:
        raise damaged(bucket.log.name, row[1], cause.message) from cause


def find(bucket: Bucket, cache: BatchCache, append_ms: int, message_id: bytes) -> SchedulePlace | None:
    """The first message with that id among the batches of that append time. Raises LogDamaged."""
    ordinal = bisect_left(range(bucket.count), append_ms, key=bucket.append_ms_of)
    while ordinal < bucket.count:
        batch, _ = bucket.batch_of(ordinal, cache)
        if batch.view.envelope.append_time_ms != append_ms:
            return None
        at = batch.find(message_id)
        if at >= 0:
            return SchedulePlace(bucket.number, batch.view.base_sequence + at)
        ordinal = batch.view.base_sequence + batch.view.count
    return None


def pending(bucket: Bucket, from_ms: int, end_ms: int, flags: int = 0) -> Iterator[Places]:
    """Pending messages with from <= due < end and all of `flags`, ordered by (due, ordinal), a few hundred at a time. Raises LogDamaged."""
    behind, is_more = (from_ms - 1, bucket.count), True
    while is_more:
        due_times_ms, ordinals, is_more = _first_pending(bucket, behind, end_ms, flags)
        for at in range(0, len(due_times_ms), _CHUNK):
            part = slice(at, at + _CHUNK)
            yield Places(due_times_ms[part], np.full(len(due_times_ms[part]), bucket.number, np.int32), ordinals[part])
        if is_more:
            behind = (int(due_times_ms[-1]), int(ordinals[-1]))


def _first_pending(
    bucket: Bucket, behind: tuple[int, int], end_ms: int, flags: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint32], bool]:
    due_times_ms, ordinals, is_more = np.zeros(0, np.int64), np.zeros(0, np.uint32), False
    for first in range(0, bucket.count, _SLICE_ROWS):
        rows = bucket.rows(first, min(first + _SLICE_ROWS, bucket.count))
        due, numbers = rows["due"], np.arange(first, first + len(rows), dtype=np.uint32)
        mask = bucket.marks()[first : first + len(rows)] == DispatchMark.PENDING
        if flags:
            mask &= rows["flags"] & flags == flags
        mask &= (due < end_ms) & ((due > behind[0]) | ((due == behind[0]) & (numbers > behind[1])))
        due_times_ms, ordinals = np.concatenate((due_times_ms, due[mask])), np.concatenate((ordinals, numbers[mask]))
        if len(due_times_ms) > 2 * SORTED_MAX or first + _SLICE_ROWS >= bucket.count:
            order = np.lexsort((ordinals, due_times_ms))
            is_more |= len(order) > SORTED_MAX
            due_times_ms, ordinals = due_times_ms[order[:SORTED_MAX]], ordinals[order[:SORTED_MAX]]
    return due_times_ms, ordinals, is_more


def check(bucket: Bucket, cache: BatchCache, planned: Iterable[bytes], bucket_ms: int, closed_before: int) -> None:
    """The invariant of a bucket: its index agrees with its log, its states with its dispatch log and the open plans."""
    position, append_ms = 0, 0
    rows = bucket.rows(0, bucket.count)
    ordinal = 0
    while position < bucket.log.end:
        view = bucket.batch(position, cache).view
        assert view.base_sequence == ordinal
        assert view.envelope.append_time_ms >= append_ms
        these = rows[ordinal : ordinal + view.count]
        assert tuple(these["due"].tolist()) == view.due_times_ms()
        assert these["position8"].tolist() == [position // 8] * view.count
        assert these["place"].tolist() == list(range(view.count))
        assert these["flags"].tolist() == [view.header.flags & 0xFFFF] * view.count
        append_ms, ordinal = view.envelope.append_time_ms, ordinal + view.count
        position += view.envelope.total_bytes
    assert ordinal == bucket.count == len(rows)
    assert bucket.idx.end == bucket.count * ROW_BYTES
    natural = rows["due"] // bucket_ms
    assert np.all((natural == bucket.number) | ((natural < bucket.number) & (bucket.number == closed_before)))
    if bucket.has_marks:
        known = bucket.marks().tolist()
        bucket.load_marks(planned)
        assert known == bucket.marks().tolist()
        assert bucket.settled == sum(mark not in (DispatchMark.PENDING, DispatchMark.PLANNED) for mark in known)
