"""Tasks that read a table's files: which files, which part of them, which rows. Pure.

* A task has either one partition of an ordered subject, or queues of a subject without order: a task never mixes partitions.
* A file whose bounds say that it has no wanted row is not read.
* Small files are read together, and large ones in parts of whole row groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from typing import Final, NamedTuple

from pyspark_qmq.planning import Plan, PlannedRange
from pyspark_qmq.source_model import Topology

Bounds = tuple[int, int]
"""The lowest and the highest value."""
_TO_THE_LAST: Final = 1 << 62


@dataclass(frozen=True, slots=True)
class LakeFile:
    """A data file, as the table's manifest describes it."""

    location: str
    size_bytes: int
    row_groups: int
    partitions: Bounds
    sequences: Bounds
    """Over all queues of the file."""


class TimeRange(NamedTuple):
    """Rows stored from `start_ms` on and before `end_ms`."""

    start_ms: int | None = None
    end_ms: int | None = None


class FilePart(NamedTuple):
    """Row groups `first` to `end` - 1 of a file. In the last part, `end` is larger than the number of row groups."""

    location: str
    first: int
    end: int
    size_bytes: int = 0
    """The whole file's, as the table's manifest says; 0 if that is not known."""


@dataclass(frozen=True, slots=True)
class LakeTask:
    """What one Spark partition reads. `storage`: PyIceberg's properties of the table's storage."""

    subject: str
    parts: tuple[FilePart, ...]
    wanted: tuple[PlannedRange, ...]
    route_version: int | None
    times: TimeRange
    storage: Mapping[str, str]


def lake_tasks(
    subject: str,
    files: Iterable[LakeFile],
    wanted: Iterable[PlannedRange],
    topology: Topology,
    plan: Plan,
    times: TimeRange,
    storage: Mapping[str, str],
) -> list[LakeTask]:
    """The tasks for these ranges of a subject. Files are read in the order of their sequences."""
    chosen = sorted(files, key=lambda each: (each.sequences, each.location))
    bytes_max = max(min(plan.piece_bytes_max, sum(each.size_bytes for each in chosen) // plan.pieces_min + 1), 1)
    routes = topology.routes.get(subject)
    found: list[LakeTask] = []
    for lot in _lots(wanted):
        number = lot[0].queue.partition
        partition = routes.partitions.get(number) if routes is not None else None
        version = partition.version if partition is not None else None
        packed = _packed([each for each in chosen if _may_have(each, lot)], number > 0, bytes_max)
        found += [LakeTask(subject, tuple(parts), tuple(lot), version, times, storage) for parts in packed]
    return found


def _lots(wanted: Iterable[PlannedRange]) -> list[list[PlannedRange]]:
    """Ranges that one task may read together."""
    found: dict[object, list[PlannedRange]] = {}
    for each in wanted:
        found.setdefault(each.queue if each.queue.partition else 0, []).append(each)
    return list(found.values())


def _may_have(file: LakeFile, lot: Iterable[PlannedRange]) -> bool:
    (lowest, highest), (first, last) = file.partitions, file.sequences
    return any(lowest <= each.queue.partition <= highest and first < each.end and each.first <= last for each in lot)


def _packed(files: Iterable[LakeFile], is_ordered: bool, bytes_max: int) -> list[list[FilePart]]:
    packed: list[list[FilePart]] = []
    room = 0.0
    for file in files:
        share = file.partitions[1] - file.partitions[0] + 1 if is_ordered else 1  # the other partitions' rows are mostly passed over
        for part, size in _parts(file, bytes_max * share):
            if not packed or size / share > room:
                packed.append([])
                room = bytes_max
            packed[-1].append(part)
            room -= size / share
    return packed


def _parts(file: LakeFile, bytes_max: float) -> Sequence[tuple[FilePart, float]]:
    count = max(min(ceil(file.size_bytes / bytes_max), file.row_groups), 1)
    marks = [*(file.row_groups * each // count for each in range(count)), _TO_THE_LAST]
    return [(FilePart(file.location, a, b, file.size_bytes), file.size_bytes / count) for a, b in pairwise(marks)]
