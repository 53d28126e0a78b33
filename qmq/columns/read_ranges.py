"""The ranges to read: the chosen queues as they are now, where a read starts and ends, and the rows of one task. Independent of Spark."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import TYPE_CHECKING

from qmq.columns import offsets
from qmq.columns.committed_log import CommittedLog, LogAddress
from qmq.columns.log_opening import log_at
from qmq.columns.model import QueueKey, ReadSelection, SourceQueue, Topology
from qmq.columns.options import Choice, ReadOptions
from qmq.columns.planning import ReadTask
from qmq.errors import InvalidArgument

if TYPE_CHECKING:
    import pyarrow as pa

    from qmq.columns.projector import ColumnNames

FindTime = Callable[[QueueKey, int], int]
"""The first sequence of a queue that was stored at or after a time, in ms."""


def look(log: CommittedLog, choice: Choice) -> Topology:
    """The committed part of the selected queues. Raises UnknownSubject, InvalidArgument, NotConnected, LogDamaged."""
    if choice.pattern:
        pattern = re.compile(choice.pattern)
        subjects = [each for each in log.subjects() if pattern.fullmatch(each)]
        return log.topology(subjects) if subjects else Topology({})
    found = log.topology(list(choice.subjects))
    chosen = assigned(choice, found.queues)
    return Topology({key: queue for key, queue in found.queues.items() if key in chosen}, found.routes)


def assigned(choice: Choice, known: Collection[QueueKey]) -> Collection[QueueKey]:
    """The known queues that `assign` names; all of them without `assign`. Raises InvalidArgument."""
    if choice.queues is None:
        return known
    return {offsets.find_queue("assign", subject, within, known) for subject, names in choice.queues.items() for within in names}


def edges(asked: ReadOptions, topology: Topology, first: FindTime, last: FindTime) -> tuple[dict[QueueKey, int], dict[QueueKey, int]]:
    """Where a batch read starts and ends; `first` and `last` find the sequences of a start and an end that are times.

    Raises InvalidArgument.
    """
    queues = topology.queues.values()
    start = starts(asked, queues, first)
    if asked.end_ms is not None:
        end = offsets.by_time(queues, asked.end_ms, last)
    else:
        end = offsets.resolve("endingOffsets", asked.end, queues, offsets.LATEST)
    for key, queue in topology.queues.items():
        if end[key] > queue.end:
            raise InvalidArgument(f"endingOffsets: {key} ends at {queue.end}, so {end[key]} does not exist yet")
    return start, end


def starts(asked: ReadOptions, queues: Iterable[SourceQueue], find_time: FindTime) -> dict[QueueKey, int]:
    """The start of a read without a checkpoint. Raises InvalidArgument."""
    if asked.start_ms is not None:
        return offsets.by_time(queues, asked.start_ms, find_time)
    return offsets.resolve("startingOffsets", asked.start, queues, offsets.EARLIEST)


def read_task(
    address: LogAddress, task: ReadTask | None, columns: ColumnNames, selection: ReadSelection, *, skips_lost: bool
) -> Iterator[pa.RecordBatch]:
    """The record batches of one task, in an executor. Raises MessagesExpired, NotConnected, LogDamaged."""
    if task is None:
        return
    from qmq.columns.projector import Projector

    key, version = task.piece.queue, task.route_version
    versions = {(key.subject, key.partition): version} if version is not None else {}
    projector = Projector(columns, routes=versions, selection=selection)
    batches = log_at(address).read(task.piece, selection, skips_lost=skips_lost)
    yield from projector.convert(batches, task.piece)
