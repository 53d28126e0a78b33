"""A batch read of messages: splits the committed part of the selected queues into tasks, and reads
a task's rows in an executor.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

import pyspark_qmq.needed  # noqa: F401 - before all others
from pyspark_qmq.source_schema import columns_of
from qmq.columns.options import ReadOptions
from qmq.columns.planning import ReadTask, ranges, tasks
from qmq.columns.reading import address_of, edges, log_at, read_task, topology_of
from qmq.errors import UnknownSubject

if TYPE_CHECKING:
    import pyarrow as pa


class TaskPartition(InputPartition):
    """One Spark partition; None for an empty read, because Spark requires at least one."""

    def __init__(self, task: ReadTask | None) -> None:
        super().__init__(None)
        self.task = task


class LogReader(DataSourceReader):
    """A batch read of messages."""

    def __init__(self, asked: ReadOptions, schema: StructType) -> None:
        self._asked = asked
        self._columns = columns_of(schema)
        self._address = address_of(asked.where)

    def partitions(self) -> list[InputPartition]:
        """The tasks for the current offsets. Raises UnknownSubject, InvalidArgument,
        MessagesExpired, NotConnected, LogDamaged.
        """
        asked, log = self._asked, log_at(self._address)
        topology = topology_of(log, asked.choice)
        if not topology.queues:
            raise UnknownSubject(f"no subject matches {asked.choice.pattern!r}")
        start, end = edges(asked, topology, log.find_time, log.find_time)
        wanted = ranges(start, end, topology.queues, skips_lost=asked.skips_lost)
        return [
            TaskPartition(each)
            for each in tasks(log, topology, wanted, asked.plan, asked.selection)
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read a task's rows in an executor."""
        task = partition.task if isinstance(partition, TaskPartition) else None
        return read_task(
            self._address,
            task,
            self._columns,
            self._asked.selection,
            skips_lost=self._asked.skips_lost,
        )
