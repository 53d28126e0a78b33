"""Reading messages in a batch: what is committed of the chosen queues, cut into tasks; and a task's rows, in an executor."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from pyspark_qmq import offsets
from pyspark_qmq.committed_log import CommittedLog, LogAddress
from pyspark_qmq.log_opening import address_of, log_at
from pyspark_qmq.planning import ReadTask, ranges, tasks
from pyspark_qmq.read_options import Choice, ReadOptions
from pyspark_qmq.source_model import QueueKey, ReadSelection, SourceQueue, Topology
from qmq.errors import InvalidArgument, UnknownSubject

if TYPE_CHECKING:
    import pyarrow as pa


class TaskPartition(InputPartition):
    """One Spark partition; None where there is nothing to read, but Spark wants one all the same."""

    def __init__(self, task: ReadTask | None) -> None:
        super().__init__(None)
        self.task = task


class LogReader(DataSourceReader):
    """A batch read of messages."""

    def __init__(self, asked: ReadOptions, schema: StructType) -> None:
        self._asked = asked
        self._schema = schema
        self._address = address_of(asked.where)

    def partitions(self) -> list[InputPartition]:
        """The tasks, for the offsets as they are now. Raises UnknownSubject, InvalidArgument, MessagesExpired, NotConnected, LogDamaged."""
        asked, log = self._asked, log_at(self._address)
        topology = look(log, asked.choice)
        if not topology.queues:
            raise UnknownSubject(f"no subject matches {asked.choice.pattern!r}")
        start, end = edges(asked, topology, log)
        wanted = ranges(start, end, topology.queues, skips_lost=asked.skips_lost)
        return [TaskPartition(each) for each in tasks(log, topology, wanted, asked.plan, asked.selection)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """A task's rows, in an executor."""
        task = partition.task if isinstance(partition, TaskPartition) else None
        return read_task(self._address, task, self._schema, self._asked.selection, skips_lost=self._asked.skips_lost)


def look(log: CommittedLog, choice: Choice) -> Topology:
    """What is committed now of the chosen queues. Raises UnknownSubject, InvalidArgument, NotConnected, LogDamaged."""
    if choice.pattern:
        pattern = re.compile(choice.pattern)
        subjects = [each for each in log.subjects() if pattern.fullmatch(each)]
        return log.topology(subjects) if subjects else Topology({})
    found = log.topology(list(choice.subjects))
    if choice.queues is None:
        return found
    chosen = {offsets.find_queue("assign", subject, within, found.queues) for subject, names in choice.queues.items() for within in names}
    return Topology({key: queue for key, queue in found.queues.items() if key in chosen}, found.routes)


def edges(asked: ReadOptions, topology: Topology, log: CommittedLog) -> tuple[dict[QueueKey, int], dict[QueueKey, int]]:
    """Where a batch read starts and ends. Raises InvalidArgument."""
    queues = topology.queues.values()
    start = starts(asked, queues, log)
    if asked.end_ms is not None:
        end = offsets.by_time(queues, asked.end_ms, log.find_time)
    else:
        end = offsets.resolve("endingOffsets", asked.end, queues, offsets.LATEST)
    for key, queue in topology.queues.items():
        if end[key] > queue.end:
            raise InvalidArgument(f"endingOffsets: {key} ends at {queue.end}, so {end[key]} is not there yet")
    return start, end


def starts(asked: ReadOptions, queues: Iterable[SourceQueue], log: CommittedLog) -> dict[QueueKey, int]:
    """Where a read without a checkpoint starts. Raises InvalidArgument."""
    if asked.start_ms is not None:
        return offsets.by_time(queues, asked.start_ms, log.find_time)
    return offsets.resolve("startingOffsets", asked.start, queues, offsets.EARLIEST)


def read_task(
    address: LogAddress, task: ReadTask | None, schema: StructType, selection: ReadSelection, *, skips_lost: bool
) -> Iterator[pa.RecordBatch]:
    """The record batches of one task, in an executor. Raises MessagesExpired, NotConnected, LogDamaged."""
    if task is None:
        return
    from pyspark_qmq.columns import Projector  # pyarrow and numpy are the executors' business

    key, version = task.piece.queue, task.route_version
    versions = {(key.subject, key.partition): version} if version is not None else {}
    projector = Projector(schema, routes=versions, selection=selection)
    batches = log_at(address).read(task.piece, selection, skips_lost=skips_lost)
    yield from projector.convert(batches, task.piece)
