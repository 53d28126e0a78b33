"""From offsets to tasks: which queues, cut into which pieces, with what each task must know. Pure but for the log that it asks.

Rules:
* A piece is of one queue: no task ever mixes partitions.
* In a stream a partition of an ordered subject is one piece, so that a task gives its messages in their order. Everything else is cut by
  size, so that a big queue keeps all cores busy.
* Exact keys of an ordered subject are its logical partitions: partitions that hold none of them are not read, and of the others only
  batches that do. Not where order is best-effort: there a message may lie where its key does not belong.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from qmq_ordering.hashing import logical_partition
from qmq_ordering.route import LpRange

from pyspark_qmq.admission import bytes_per_message
from pyspark_qmq.committed_log import CommittedLog
from pyspark_qmq.offsets import Offsets
from pyspark_qmq.source_model import QueueKey, QueuePiece, ReadSelection, SourceQueue, Topology
from qmq.errors import MessagesExpired

PIECE_BYTES: Final = 128 << 20
"""As much as Spark gives a task of a file by default: with half of it a third of the time goes into starting tasks."""
_WHOLE: Final = 1 << 62


class PlannedRange(NamedTuple):
    """Sequences of one queue, still whole."""

    queue: QueueKey
    first: int
    end: int


class ReadTask(NamedTuple):
    """What one Spark partition reads."""

    piece: QueuePiece
    route_version: int | None
    """The version that opened its partition; None where order is not kept, or routes are not known."""


class Plan(NamedTuple):
    """How to cut."""

    piece_bytes_max: int = PIECE_BYTES
    pieces_min: int = 1
    keeps_order: bool = False
    """Whether partitions of ordered subjects stay whole."""


PLAN: Final = Plan()


def ranges(start: Offsets, end: Offsets, queues: Mapping[QueueKey, SourceQueue], *, skips_lost: bool) -> list[PlannedRange]:
    """What lies between two offsets, without what is empty. Raises MessagesExpired if retention took some of it, unless that is skipped."""
    found: list[PlannedRange] = []
    for key in sorted(end):
        first, last = start.get(key, 0), end[key]
        oldest = queues[key].start if key in queues else first
        if first >= last:
            continue
        if first < oldest and not skips_lost:
            raise lost(key, first, oldest)
        if max(first, oldest) < last:
            found.append(PlannedRange(key, max(first, oldest), last))
    return found


def lost(key: QueueKey, needed: int, oldest: int) -> MessagesExpired:
    """The error that says what retention took."""
    return MessagesExpired(
        f"messages {needed} to {oldest - 1} of {key} were deleted by retention (the oldest kept is {oldest}); to continue with the "
        "remaining messages: option failOnDataLoss=false; to keep them longer: the subject's retention"
    )


def tasks(log: CommittedLog, topology: Topology, wanted: Iterable[PlannedRange], plan: Plan, selection: ReadSelection) -> list[ReadTask]:
    """The tasks for these ranges. Raises as `CommittedLog.pieces`."""
    wanted = [each for each in wanted if _may_match(each.queue, topology, selection)]
    size = sum((each.end - each.first) * bytes_per_message(topology.queues[each.queue]) for each in wanted if each.queue in topology.queues)
    bytes_max = max(min(plan.piece_bytes_max, int(size / plan.pieces_min) + 1), 1)
    found: list[ReadTask] = []
    for each in wanted:
        is_ordered = each.queue.partition > 0
        limit = _WHOLE if is_ordered and plan.keeps_order else bytes_max
        found += [_task(piece, topology, selection) for piece in log.pieces(each.queue, each.first, each.end, limit)]
    return found


def _task(piece: QueuePiece, topology: Topology, selection: ReadSelection) -> ReadTask:
    routes = topology.routes.get(piece.queue.subject)
    partition = routes.partitions.get(piece.queue.partition) if routes is not None else None
    lps = wanted_lps(piece.queue, topology, selection)
    return ReadTask(QueuePiece(piece.queue, piece.first, piece.end, piece.place, lps), partition.version if partition is not None else None)


def wanted_lps(key: QueueKey, topology: Topology, selection: ReadSelection) -> tuple[LpRange, ...]:
    """Logical partitions in which the wanted keys are; empty if nothing follows from the keys."""
    routes = topology.routes.get(key.subject)
    if routes is None or not routes.is_strict or not selection.keys:
        return ()
    found = sorted({logical_partition(each, routes.logical_partitions) for each in selection.keys})
    return tuple(LpRange(lp, lp + 1) for lp in found)


def _may_match(key: QueueKey, topology: Topology, selection: ReadSelection) -> bool:
    routes, lps = topology.routes.get(key.subject), wanted_lps(key, topology, selection)
    if not lps or routes is None or key.partition not in routes.partitions:
        return True
    held = routes.partitions[key.partition].lps
    return any(held.overlaps(each) for each in lps)
