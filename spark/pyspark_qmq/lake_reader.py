"""A batch read of messages, in one plan: history from the lake, the rest from the log
(docs/SPARK.md, "History from the lake").
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

import pyspark_qmq.needed  # noqa: F401 - before all others
from pyspark_qmq.lake.rows import LakeTask, TimeRange, lake_tasks, read_lake_task
from pyspark_qmq.lake.snapshot import (
    Extents,
    LakeSnapshot,
    edges,
    joined,
    read_files,
    read_snapshots,
    split,
)
from pyspark_qmq.reader import TaskPartition
from pyspark_qmq.source_schema import MORE_COLUMNS, columns_of
from qmq.columns.model import QueueKey, Topology
from qmq.columns.options import Choice, LakeAddress, ReadOptions
from qmq.columns.planning import may_match, tasks
from qmq.columns.projector import arrow_schema
from qmq.columns.reading import address_of, assigned, log_at, read_task, topology_of
from qmq.errors import InvalidArgument, UnknownSubject

if TYPE_CHECKING:
    import pyarrow as pa


class LakePartition(InputPartition):
    """One Spark partition that reads files of the lake."""

    def __init__(self, task: LakeTask) -> None:
        super().__init__(None)
        self.task = task


class LakeReader(DataSourceReader):
    """Raises InvalidArgument for a column that the tables do not have."""

    def __init__(self, asked: ReadOptions, lake: LakeAddress, schema: StructType) -> None:
        missing = [
            name
            for name in schema.fieldNames()
            if name in MORE_COLUMNS and name != "logical_partition"
        ]
        if missing:
            raise InvalidArgument(
                f"the lake's tables have no column {missing[0]!r}: leave out the column, or "
                "option qmq.lake"
            )
        self._asked = asked
        self._lake = lake
        self._columns = columns_of(schema)
        self._address = address_of(asked.where)

    def partitions(self) -> list[InputPartition]:
        """The tasks for the current offsets: first those of the lake, then those of the log.

        Raises:
            UnknownSubject, InvalidArgument, NotConnected, LogDamaged: as for a read without the
            lake. UnknownSubject: a subject has no table, and the log no longer has its first
            messages. MessagesExpired: neither the lake nor the log has some of the messages.
            CatalogAway: the catalog did not answer for `qmq.retryMs`.
        """
        asked, log = self._asked, log_at(self._address)
        subjects = sorted({key.subject for key in topology_of(log, _whole(asked.choice)).queues})
        if not subjects:
            raise UnknownSubject(f"no subject matches {asked.choice.pattern!r}")
        retry_ms = asked.where.retry_ms
        snapshots = read_snapshots(self._lake, subjects, retry_ms)
        topology = log.topology(
            subjects
        )  # After the tables are read, so that the log's ends are not below the tables' positions.
        self._require_tables(topology, snapshots)
        held: Extents = dict(chain.from_iterable(each.held.items() for each in snapshots.values()))
        topology, held = _chosen(asked.choice, topology, held)
        whole = joined(topology, held, may_lag=bool(asked.where.paths))
        start, end = edges(asked, whole, topology, log.find_time)
        found = split(start, end, topology.queues, held, skips_lost=asked.skips_lost)
        times = TimeRange(asked.start_ms, asked.end_ms)
        of_lake: list[LakeTask] = []
        for subject, snapshot in snapshots.items():
            wanted = [
                each
                for each in found.lake
                if each.queue.subject == subject
                and may_match(each.queue, topology, asked.selection)
            ]
            if wanted:
                files = read_files(snapshot, asked.selection, times, retry_ms)
                of_lake += lake_tasks(
                    subject, files, wanted, topology, asked.plan, times, snapshot.storage
                )
        of_log = tasks(log, topology, found.log, asked.plan, asked.selection)
        return [*map(LakePartition, of_lake), *map(TaskPartition, of_log)]

    def _require_tables(self, topology: Topology, snapshots: dict[str, LakeSnapshot]) -> None:
        for key, queue in topology.queues.items():
            if key.subject not in snapshots and queue.start > 0:
                raise UnknownSubject(
                    f"subject {key.subject!r} has no table in namespace {self._lake.namespace!r} "
                    f"of the lake, and retention has deleted the first messages of {key}: "
                    "`qmq lake follow` makes a table; without option qmq.lake, only the log is read"
                )

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read a task's rows in an executor."""
        if isinstance(partition, LakePartition):
            return read_lake_task(
                partition.task, arrow_schema(self._columns), self._asked.selection
            )
        task = partition.task if isinstance(partition, TaskPartition) else None
        return read_task(
            self._address,
            task,
            self._columns,
            self._asked.selection,
            skips_lost=self._asked.skips_lost,
        )


def _whole(choice: Choice) -> Choice:
    """The selected subjects with all of their queues."""
    return Choice(choice.subjects, choice.pattern)


def _chosen(choice: Choice, topology: Topology, held: Extents) -> tuple[Topology, Extents]:
    """The topology without the queues that `assign` does not name."""
    known: set[QueueKey] = {*topology.queues, *held}
    chosen = assigned(choice, known)
    queues = {key: queue for key, queue in topology.queues.items() if key in chosen}
    return Topology(queues, topology.routes), {
        key: each for key, each in held.items() if key in chosen
    }
