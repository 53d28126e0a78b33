"""Sets of sequence ranges by queue: what an archive has, and what it lacks of a micro-batch. Pure.

A range is (first, end) with an exclusive end. The ranges of a queue are ascending, not empty and not adjacent, so equal sets are equal
values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pyspark_qmq.offsets import Offsets
from pyspark_qmq.source_model import QueueKey

Range = tuple[int, int]
Ranges = Mapping[QueueKey, tuple[Range, ...]]


def joined(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """The union of the ranges, in normal form."""
    found: list[Range] = []
    for first, end in sorted(each for each in ranges if each[0] < each[1]):
        if found and first <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((first, end))
    return tuple(found)


def without(ranges: Iterable[Range], taken: Iterable[Range]) -> tuple[Range, ...]:
    """The sequences of `ranges` that are not in `taken`."""
    rest = list(joined(ranges))
    for low, high in joined(taken):
        rest = [piece for first, end in rest for piece in ((first, min(end, low)), (max(first, high), end)) if piece[0] < piece[1]]
    return tuple(rest)


def add(ranges: Ranges, more: Ranges) -> dict[QueueKey, tuple[Range, ...]]:
    return {key: joined((*ranges.get(key, ()), *more.get(key, ()))) for key in sorted({*ranges, *more})}


def subtract(ranges: Ranges, taken: Ranges) -> dict[QueueKey, tuple[Range, ...]]:
    """`ranges` minus the other ranges. Queues without remaining sequences are left out."""
    left = {key: without(ranges[key], taken.get(key, ())) for key in sorted(ranges)}
    return {key: rest for key, rest in left.items() if rest}


def overlap(ranges: Ranges, others: Ranges) -> dict[QueueKey, tuple[Range, ...]]:
    return subtract(ranges, subtract(ranges, others))


def between(start: Offsets, end: Offsets) -> dict[QueueKey, tuple[Range, ...]]:
    """The ranges between two sets of offsets. A queue missing from `start` begins at 0, as in a stream."""
    return {key: ((start.get(key, 0), end[key]),) for key in sorted(end) if start.get(key, 0) < end[key]}


def ends(ranges: Ranges) -> dict[QueueKey, int]:
    """The end of each queue's ranges."""
    return {key: found[-1][1] for key, found in ranges.items() if found}


def count(ranges: Ranges) -> int:
    """The number of sequences."""
    return sum(end - first for found in ranges.values() for first, end in found)


def to_json(ranges: Ranges) -> dict[str, dict[str, list[list[int]]]]:
    """Subject → queue → list of [first, end]."""
    found: dict[str, dict[str, list[list[int]]]] = {}
    for key in sorted(ranges):
        found.setdefault(key.subject, {})[key.within] = [list(each) for each in ranges[key]]
    return found


def of_json(found: Mapping[str, Mapping[str, Iterable[Iterable[int]]]]) -> dict[QueueKey, tuple[Range, ...]]:
    """The inverse. Raises InvalidArgument, ValueError."""
    read: dict[QueueKey, tuple[Range, ...]] = {}
    for subject, queues in found.items():
        for within, pairs in queues.items():
            read[QueueKey.parse(subject, within)] = joined((int(first), int(end)) for first, end in pairs)
    return read
