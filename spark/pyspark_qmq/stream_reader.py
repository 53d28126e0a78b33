"""A stream of messages: its start, the end of each micro-batch, and the tasks.

One reader lives in the driver for the whole query. Rules:
* `latestOffset` never exceeds the committed end, nor the border of a route change (`admission.admit`).
* The tasks that `partitions` returns follow from its arguments alone, and their rows from the immutable log, so a repeated micro-batch has
  the same tasks and the same rows (docs/SPARK.md). After a crash, Spark calls it without asking for an offset first, in another driver.
* The first offset is decided once, because Spark asks for it twice at a fresh start, and the latest offset may change in between.
* The reader does not rely on `commit` or `stop`, which Spark may never call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from pyspark_qmq import admission, offsets
from pyspark_qmq.admission import Limit
from pyspark_qmq.log_opening import address_of, forget, log_at
from pyspark_qmq.log_reader import TaskPartition
from pyspark_qmq.planning import ReadTask, are_cut, per_task, ranges, stream_tasks, tasks
from pyspark_qmq.read_options import ReadOptions
from pyspark_qmq.read_ranges import look, read_task, starts
from pyspark_qmq.source_model import QueueKey, Topology
from qmq.errors import InvalidArgument

if TYPE_CHECKING:
    import pyarrow as pa


class LogStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, asked: ReadOptions, schema: StructType) -> None:
        self._asked = asked
        self._schema = schema
        self._address = address_of(asked.where)
        self._initial: dict[str, dict[str, int]] | None = None
        self._until: dict[QueueKey, int] | None = None
        self._newest: dict[str, dict[str, int]] | None = None

    # --- in the driver -------------------------------------------------------------------------------------------------

    def initialOffset(self) -> dict[str, dict[str, int]]:  # noqa: N802 - the name is Spark's
        """The start of a query without a checkpoint. Raises UnknownSubject, InvalidArgument, NotConnected, LogDamaged."""
        if self._initial is None:
            topology = self._look()
            self._initial = offsets.to_json(starts(self._asked, topology.queues.values(), log_at(self._address).find_time))
        return self._initial

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - the name is Spark's
        """The limit given by `maxOffsetsPerTrigger` or `maxBytesPerTrigger`."""
        limit = self._asked.limit
        if limit.rows_max is not None:
            return ReadMaxRows(limit.rows_max)
        return ReadMaxBytes(limit.bytes_max) if limit.bytes_max is not None else ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - the name is Spark's
        """Read only up to the current end. Raises what `initialOffset` raises."""
        self._until = _ends(self._look())

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, dict[str, int]]:  # noqa: N802 - the name is Spark's
        """The end of the micro-batch that begins at `start`. Raises what `initialOffset` raises, and MessagesExpired."""
        topology = self._look()
        self._newest = offsets.to_json(_ends(topology))
        begin = offsets.of_json(start)
        end = admission.admit(topology, begin, self._limit(limit), self._until)
        return offsets.to_json(end, offsets.per_task_of_json(start) | per_task(topology, begin, end, self._asked.plan))

    def _limit(self, limit: ReadLimit) -> Limit:
        """The limit. The engine passes its own, and only one if both limits were given."""
        asked = self._asked.limit
        if isinstance(limit, ReadMaxRows):
            return Limit(limit.max_rows, asked.bytes_max)
        return Limit(None, limit.max_bytes) if isinstance(limit, ReadMaxBytes) else admission.NO_LIMIT

    def reportLatestOffset(self) -> dict[str, dict[str, int]] | None:  # noqa: N802 - the name is Spark's
        """The committed end when the last micro-batch was planned. Spark shows it as `latestOffset` of the source's progress."""
        return self._newest

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """The tasks of a micro-batch. Raises MessagesExpired if retention deleted messages of it; NotConnected, LogDamaged."""
        topology = self._look()
        first, last, cuts = offsets.of_json(start), offsets.of_json(end), offsets.per_task_of_json(end)
        asked, log = self._asked, log_at(self._address)
        found: Sequence[ReadTask | None]
        if are_cut(first, last, cuts):
            found = stream_tasks(log, topology, first, last, cuts, asked.selection, skips_lost=asked.skips_lost)
        else:  # Release 0.2 planned this micro-batch, and cut it by the sizes of then. If they changed since, the sink refuses the rows.
            found = tasks(log, topology, ranges(first, last, topology.queues, skips_lost=asked.skips_lost), asked.plan, asked.selection)
        return [TaskPartition(each) for each in found]

    def commit(self, end: dict[str, Any]) -> None:
        """Does nothing, because messages stay in the log."""

    def stop(self) -> None:
        """Close connections and files."""
        forget(self._address)

    def _look(self) -> Topology:
        topology = look(log_at(self._address), self._asked.choice)
        for key in topology.queues:
            if key.partition > 0 and key.subject not in topology.routes:
                raise InvalidArgument(
                    f"subject {key.subject!r} is ordered, and its files do not contain the routes: give option qmq.servers, "
                    "or qmq.routes with a file from `qmq route export`"
                )
            if key.partition > 0 and key.partition not in topology.routes[key.subject].partitions:
                raise InvalidArgument(f"the file of qmq.routes does not have {key}: export the routes again with `qmq route export`")
        return topology

    # --- in executors --------------------------------------------------------------------------------------------------

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        task = partition.task if isinstance(partition, TaskPartition) else None
        return read_task(self._address, task, self._schema, self._asked.selection, skips_lost=self._asked.skips_lost)


def _ends(topology: Topology) -> dict[QueueKey, int]:
    return {key: queue.end for key, queue in topology.queues.items()}
