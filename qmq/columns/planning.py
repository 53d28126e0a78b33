"""Decides where a micro-batch ends, and plans tasks from offsets. Pure except for queries to the
log.

*Where a micro-batch ends: by order and by amount.*

A partition of an ordered subject is *open* when each partition that was closed for it is open and
finished in the offsets from which the micro-batch starts. A micro-batch reads no messages of a
partition that is not open. So the last message of a source and the first message of a target are in
different micro-batches, which Spark runs one after the other: per key, rows arrive in log order
(docs/SPARK.md, "Order in a stream").

Rules:
* Finished means: sealed, and the offset has reached the command message. A partition closed by a
  fence is not finished until its command message is known.
* A source that is not read (`assign` excludes it) does not hold back its targets.
* The result depends only on topology, offsets and limit, never on the time of the call. A queue
  without progress is left out, so that equal offsets stay equal.

Worked example: partition 1 is split into 2 and 3. Offsets {1: 90}, sealed at 100, all of 2 and 3
waiting. First micro-batch: {1: 100}; second: {1: 100, 2: ..., 3: ...}.

*The tasks: queues are split into pieces, with all data that a task needs.*

Rules:
* A piece belongs to one queue, so a task never mixes partitions.
* A batch read splits queues by size, so that a large queue keeps all cores busy.
* The tasks of a micro-batch follow from its offsets alone: their number, their order, and the
  messages of each. A sink numbers rows by their place in a task, so a micro-batch that is repeated
  with other tasks would lose rows and store others twice. The sizes of a queue's messages, its
  oldest message and the known routes change between two attempts; they are considered once, when
  the end of the micro-batch is decided, and `per_task` in the end offset keeps the result.
* In a stream, a partition of an ordered subject is one piece, so that a task returns its messages
  in order.
* A selection of exact keys on an ordered subject determines logical partitions: other partitions
  and other batches are not read. This does not hold for best-effort order, where a message may be
  in a partition that does not have its key.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from typing import Final, NamedTuple

from qmq_ordering.hashing import logical_partition
from qmq_ordering.routes import LpRange

from qmq.columns.losses import lost_error, lost_ranges
from qmq.columns.model import (
    CommittedLog,
    QueueKey,
    QueuePiece,
    ReadSelection,
    Routes,
    SourceQueue,
    Topology,
)
from qmq.columns.offsets import Offsets


@dataclass(frozen=True, slots=True)
class Limit:
    """How much one micro-batch may read; None: no limit."""

    rows_max: int | None = None
    bytes_max: int | None = None


NO_LIMIT = Limit()


@dataclass(frozen=True, slots=True)
class Minimum:
    """When waiting messages are enough for a micro-batch."""

    rows: int = 0
    delay_ms_max: int = 900_000
    """Fewer messages wait no longer than this."""

    def is_met(self, waiting: int, waited_ms: int) -> bool:
        """`waited_ms`: how long the first of the waiting messages has been known."""
        return waiting >= self.rows or waited_ms >= self.delay_ms_max


NO_MINIMUM = Minimum()


def waiting(topology: Topology, start: Offsets) -> int:
    """The number of messages behind `start`, also those of partitions that are not open yet."""
    return sum(
        max(queue.end - max(start.get(key, 0), queue.start), 0)
        for key, queue in topology.queues.items()
    )


def open_partitions(
    subject: str, routes: Routes, offsets: Offsets, known: Container[QueueKey]
) -> frozenset[int]:
    """The partitions of an ordered subject whose sources have been read completely.

    Sources of sources count, too: an empty source is finished immediately, but its own source may
    not be finished.
    """
    is_open: dict[int, bool] = {}
    is_past: dict[int, bool] = {}
    for number in sorted(routes.partitions):  # A source has a lower number than its targets.
        partition = routes.partitions[number]
        key = QueueKey(subject, number, partition.broker_group)
        is_open[number] = all(is_past.get(source, True) for source in partition.sources)
        is_past[number] = is_open[number] and (
            key not in known or is_finished(key, routes, offsets)
        )
    return frozenset(number for number, opened in is_open.items() if opened)


def is_finished(key: QueueKey, routes: Routes, offsets: Offsets) -> bool:
    """Whether a partition is sealed and has been read to its end."""
    sealed_at = routes.sealed_at.get(key.partition)
    return sealed_at is not None and offsets.get(key, 0) >= sealed_at


def admit(
    topology: Topology, start: Offsets, limit: Limit = NO_LIMIT, until: Offsets | None = None
) -> dict[QueueKey, int]:
    """The end offsets of the micro-batch that starts at `start`. `until`: upper bounds; queues not
    in it are not read.
    """
    opened = {
        subject: open_partitions(subject, routes, start, topology.queues)
        for subject, routes in topology.routes.items()
    }
    waiting: dict[QueueKey, int] = {}
    for key, queue in topology.queues.items():
        end = queue.end if until is None else min(queue.end, until.get(key, 0))
        count = end - start.get(key, 0)
        if count > 0 and (key.subject not in opened or key.partition in opened[key.subject]):
            waiting[key] = count
    return {
        **start,
        **{
            key: start.get(key, 0) + count
            for key, count in share_out(waiting, topology.queues, limit).items()
        },
    }


def share_out(
    waiting: Mapping[QueueKey, int], queues: Mapping[QueueKey, SourceQueue], limit: Limit
) -> dict[QueueKey, int]:
    """The number of messages to read from each queue:
    in proportion to its backlog, at least one.
    """
    part = 1.0
    total = sum(waiting.values())
    if limit.rows_max is not None and total > limit.rows_max:
        part = limit.rows_max / total
    if limit.bytes_max is not None:
        size = sum(count * bytes_per_message(queues[key]) for key, count in waiting.items())
        part = min(part, limit.bytes_max / size) if size > limit.bytes_max else part
    if part >= 1.0:
        return dict(waiting)
    return {key: max(int(count * part), 1) for key, count in waiting.items()}


def bytes_per_message(queue: SourceQueue) -> float:
    """The average size of a stored message of the queue."""
    return queue.stored_bytes / max(queue.end - queue.start, 1)


PIECE_BYTES: Final = 128 << 20
"""Spark's default task size for files.
With half of it, a third of the time is spent on starting tasks.
"""
_WHOLE: Final = 1 << 62


class PlannedRange(NamedTuple):
    """A range of sequences of one queue, not split yet."""

    queue: QueueKey
    first: int
    end: int


class ReadTask(NamedTuple):
    """The task of one Spark partition."""

    piece: QueuePiece
    route_version: int | None
    """The version that opened its partition;
    None for unordered subjects, or if the routes are unknown.
    """


class Plan(NamedTuple):
    """How to split ranges."""

    piece_bytes_max: int = PIECE_BYTES
    pieces_min: int = 1
    keeps_order: bool = False
    """Whether partitions of ordered subjects stay whole."""


PLAN: Final = Plan()


def ranges(
    start: Offsets, end: Offsets, queues: Mapping[QueueKey, SourceQueue], *, skips_lost: bool
) -> list[PlannedRange]:
    """The non-empty ranges between two offsets. Raises MessagesExpired if retention deleted some
    messages, unless these are skipped.
    """
    lost = lost_ranges(start, end, queues)
    if lost and not skips_lost:
        raise lost_error([each._replace(end=min(each.end, end[each.queue])) for each in lost])
    found: list[PlannedRange] = []
    for key, first, last in _between(start, end):
        oldest = queues[key].start if key in queues else first
        if max(first, oldest) < last:
            found.append(PlannedRange(key, max(first, oldest), last))
    return found


def tasks(
    log: CommittedLog,
    topology: Topology,
    wanted: Iterable[PlannedRange],
    plan: Plan,
    selection: ReadSelection,
) -> list[ReadTask]:
    """The tasks for these ranges. Raises as `CommittedLog.pieces`."""
    wanted = [each for each in wanted if may_match(each.queue, topology, selection)]
    bytes_max = _bytes_max(topology, wanted, plan)
    found: list[ReadTask] = []
    for each in wanted:
        is_ordered = each.queue.partition > 0
        limit = _WHOLE if is_ordered and plan.keeps_order else bytes_max
        found += [
            _task(piece, topology, selection)
            for piece in log.pieces(each.queue, each.first, each.end, limit)
        ]
    return found


def _bytes_max(topology: Topology, wanted: Iterable[PlannedRange], plan: Plan) -> int:
    """The bytes per task: fewer than planned if there would be too few tasks."""
    size = sum(
        (each.end - each.first) * bytes_per_message(topology.queues[each.queue])
        for each in wanted
        if each.queue in topology.queues
    )
    return max(min(plan.piece_bytes_max, int(size / plan.pieces_min) + 1), 1)


# --- streams --------------------------------------------------------------------------------------


def per_task(topology: Topology, start: Offsets, end: Offsets, plan: Plan) -> dict[str, int]:
    """The messages per task of each unordered subject with messages between the offsets, by the
    average sizes of its messages now.
    """
    wanted = list(_between(start, end))
    bytes_max = _bytes_max(topology, wanted, plan)
    counts: dict[str, int] = {}
    sizes: dict[str, float] = {}
    for each in wanted:
        if each.queue.partition == 0:
            subject, count = each.queue.subject, each.end - each.first
            counts[subject] = counts.get(subject, 0) + count
            sizes[subject] = sizes.get(subject, 0.0) + count * bytes_per_message(
                topology.queues[each.queue]
            )
    return {
        subject: max(int(count * bytes_max / max(sizes[subject], 1.0)), 1)
        for subject, count in counts.items()
    }


def stream_tasks(
    log: CommittedLog,
    topology: Topology,
    start: Offsets,
    end: Offsets,
    per_task: Mapping[str, int],
    selection: ReadSelection,
    gone: Container[str] = (),
) -> list[ReadTask | None]:
    """The tasks of a micro-batch, by offsets and `per_task` alone; None: a task without rows, which
    keeps its place. `gone`: subjects that do not exist any more. Raises as `CommittedLog.pieces`.
    """
    found: list[ReadTask | None] = []
    for each in _between(start, end):
        key, queue = each.queue, topology.queues.get(each.queue)
        oldest = queue.start if queue is not None else each.first
        may_have_rows = key.subject not in gone and may_match(key, topology, selection)
        for first, last in _cut(each, per_task[key.subject] if key.partition == 0 else _WHOLE):
            kept = log.pieces(key, max(first, oldest), last, _WHOLE) if may_have_rows else []
            found.append(_task(kept[0], topology, selection) if kept else None)
    return found


def are_cut(start: Offsets, end: Offsets, per_task: Mapping[str, int]) -> bool:
    """Whether the end offsets say where to cut the micro-batch. Those that release 0.2 wrote do
    not, for an unordered subject.
    """
    return all(
        each.queue.partition > 0 or each.queue.subject in per_task for each in _between(start, end)
    )


def _between(start: Offsets, end: Offsets) -> Iterator[PlannedRange]:
    """The ranges between two offsets, whether or not their messages are still kept."""
    for key in sorted(end):
        if start.get(key, 0) < end[key]:
            yield PlannedRange(key, start.get(key, 0), end[key])


def _cut(whole: PlannedRange, messages_max: int) -> Iterator[tuple[int, int]]:
    """Cut a range into the fewest parts of nearly the same number of messages,
    at most `messages_max`.
    """
    count = whole.end - whole.first
    parts = ceil(count / messages_max)
    marks = [whole.first + count * each // parts for each in range(parts + 1)]
    return pairwise(marks)


def _task(piece: QueuePiece, topology: Topology, selection: ReadSelection) -> ReadTask:
    routes = topology.routes.get(piece.queue.subject)
    partition = routes.partitions.get(piece.queue.partition) if routes is not None else None
    lps = wanted_lps(piece.queue, topology, selection)
    return ReadTask(
        QueuePiece(piece.queue, piece.first, piece.end, piece.place, lps),
        partition.version if partition is not None else None,
    )


def wanted_lps(key: QueueKey, topology: Topology, selection: ReadSelection) -> tuple[LpRange, ...]:
    """The logical partitions of the wanted keys; empty for no restriction."""
    routes = topology.routes.get(key.subject)
    if routes is None or not routes.is_strict or not selection.keys:
        return ()
    found = sorted({logical_partition(each, routes.logical_partitions) for each in selection.keys})
    return tuple(LpRange(lp, lp + 1) for lp in found)


def may_match(key: QueueKey, topology: Topology, selection: ReadSelection) -> bool:
    """Whether a queue can have one of the selected keys."""
    routes, lps = topology.routes.get(key.subject), wanted_lps(key, topology, selection)
    if not lps or routes is None or key.partition not in routes.partitions:
        return True
    held = routes.partitions[key.partition].lps
    return any(held.overlaps(each) for each in lps)
