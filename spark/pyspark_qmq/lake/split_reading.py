"""Which messages a read takes from the lake, and which from the log. Pure.

A table has sequences `first` to `end` - 1 of a queue: it is complete from `first` on, and `end` is its position. The log has the
messages that retention has left. A read takes what the table has from the table, and the rest from the log:

    table              |first ─────────────── end|
    log                               |start ──────────────── end|
    read      |start ── log ──|── lake ──────────|──── log ──|end

Each message is in one of the ranges, or the read fails and names it. Rows of the table below `first` are not read, because messages
between them and `first` are missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from pyspark_qmq import read_ranges
from pyspark_qmq.offsets import Offsets
from pyspark_qmq.planning import PlannedRange
from pyspark_qmq.read_options import ReadOptions
from pyspark_qmq.source_model import QueueKey, SourceQueue, Topology
from qmq.errors import InvalidArgument, MessagesExpired


@dataclass(frozen=True, slots=True)
class LakeExtent:
    """Sequences `first` to `end` - 1 of a queue, all of which a table has."""

    first: int
    end: int


Extents = Mapping[QueueKey, LakeExtent]
_NONE: Final = LakeExtent(0, 0)


class SplitRanges(NamedTuple):
    lake: list[PlannedRange]
    log: list[PlannedRange]


def extents(complete_from: Offsets, positions: Offsets) -> dict[QueueKey, LakeExtent]:
    """What a table has. Queues without messages in the table are left out."""
    found = {key: LakeExtent(complete_from.get(key, 0), end) for key, end in positions.items()}
    return {key: each for key, each in found.items() if each.first < each.end}


def joined(log: Topology, held: Extents, *, may_lag: bool) -> Topology:
    """The queues of table and log together. `may_lag`: the log's ends may be a little old.

    Raises InvalidArgument if a table has messages beyond the log's end.
    """
    queues = dict(log.queues)
    for key, each in held.items():
        known = queues.get(key)
        if known is None:  # its broker group is gone
            queues[key] = SourceQueue(key, each.first, each.end)
            continue
        if each.end > known.end and not may_lag:
            raise InvalidArgument(
                f"the table of {key.subject!r} has messages up to {each.end - 1} of {key}, and the log ends at {known.end}: the table "
                "belongs to another cluster; give option qmq.lakeNamespace with the tables of this one"
            )
        start, end = min(each.first, known.start), max(each.end, known.end)
        queues[key] = SourceQueue(key, start, end, known.stored_bytes, known.last_append_ms, known.is_sealed)
    return Topology(queues, log.routes)


def edges(
    asked: ReadOptions, whole: Topology, log: Topology, find_time: read_ranges.FindTime
) -> tuple[dict[QueueKey, int], dict[QueueKey, int]]:
    """Where a batch read starts and ends. The log cannot find the sequence of a time before its oldest message. A read from such a time
    starts at the table's oldest message, and compares the rows with the time.

    Args:
        whole: the result of `joined`.

    Raises InvalidArgument.
    """

    def found(key: QueueKey, time_ms: int, otherwise: int) -> int:
        if key not in log.queues:
            return otherwise
        at = find_time(key, time_ms)
        return at if at > log.queues[key].start else otherwise

    def first(key: QueueKey, time_ms: int) -> int:
        return found(key, time_ms, whole.queues[key].start)

    def last(key: QueueKey, time_ms: int) -> int:
        return found(key, time_ms, log.queues[key].start if key in log.queues else whole.queues[key].end)

    return read_ranges.edges(asked, whole, first, last)


def split(start: Offsets, end: Offsets, log: Mapping[QueueKey, SourceQueue], held: Extents, *, skips_lost: bool) -> SplitRanges:
    """The ranges between two offsets. Raises MessagesExpired if messages are neither in the table nor in the log, unless `skips_lost`."""
    found = SplitRanges([], [])
    for key in sorted(end):
        first, last = start.get(key, 0), end[key]
        if first >= last:
            continue
        has = held.get(key, _NONE)
        lake = PlannedRange(key, max(first, has.first), min(last, has.end))
        if lake.first < lake.end:
            found.lake.append(lake)
            rest = [(first, lake.first), (lake.end, last)]
        else:
            rest = [(first, last)]
        oldest = log[key].start if key in log else last
        for begin, until in rest:
            if begin < min(until, oldest) and not skips_lost:
                raise _lost(key, begin, min(until, oldest), has)
            if max(begin, oldest) < until:
                found.log.append(PlannedRange(key, max(begin, oldest), until))
    return found


def _lost(key: QueueKey, first: int, end: int, has: LakeExtent) -> MessagesExpired:
    lake = f"which has {has.first} to {has.end - 1}" if has.end else "which has none of this queue"
    return MessagesExpired(
        f"messages {first} to {end - 1} of {key} were deleted by retention, and are not in the lake either, {lake}; to continue with the "
        "remaining messages: option failOnDataLoss=false; to lose none: make the retention longer than the lag of `qmq lake follow`"
    )
