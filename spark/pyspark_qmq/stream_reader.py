"""A stream of messages: where it begins, how far the next micro-batch goes, and what its tasks read.

One reader lives in the driver for the whole query. Rules:
* `latestOffset` never goes beyond what is committed, nor past the border of a route change (`admission.admit`).
* `partitions` depends on its arguments and on the immutable log alone, so that a micro-batch that is repeated gives the same rows. After a
  crash Spark calls it without having asked for an offset.
* The first offset is decided once: Spark asks for it twice at a fresh start, and what is latest may move in between.
* Nothing depends on `commit` or `stop`, which Spark may never call.
"""

from __future__ import annotations

from collections.abc import Iterator
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
from pyspark_qmq.planning import ranges, tasks
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
        """Where a query without a checkpoint begins. Raises UnknownSubject, InvalidArgument, NotConnected, LogDamaged."""
        if self._initial is None:
            topology = self._look()
            self._initial = offsets.to_json(starts(self._asked, topology.queues.values(), log_at(self._address)))
        return self._initial

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - the name is Spark's
        """What `maxOffsetsPerTrigger` or `maxBytesPerTrigger` say."""
        limit = self._asked.limit
        if limit.rows_max is not None:
            return ReadMaxRows(limit.rows_max)
        return ReadMaxBytes(limit.bytes_max) if limit.bytes_max is not None else ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - the name is Spark's
        """Read up to what is there now, and no further. Raises as `initialOffset`."""
        self._until = _ends(self._look())

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, dict[str, int]]:  # noqa: N802 - the name is Spark's
        """Where the micro-batch that begins at `start` ends. Raises as `initialOffset`; MessagesExpired."""
        topology = self._look()
        self._newest = offsets.to_json(_ends(topology))
        return offsets.to_json(admission.admit(topology, offsets.of_json(start), self._limit(limit), self._until))

    def _limit(self, limit: ReadLimit) -> Limit:
        """The engine may set its own; where both limits were asked for, it knows only one."""
        asked = self._asked.limit
        if isinstance(limit, ReadMaxRows):
            return Limit(limit.max_rows, asked.bytes_max)
        return Limit(None, limit.max_bytes) if isinstance(limit, ReadMaxBytes) else admission.NO_LIMIT

    def reportLatestOffset(self) -> dict[str, dict[str, int]] | None:  # noqa: N802 - the name is Spark's
        """What was committed when the last micro-batch was planned: Spark shows it as `latestOffset` of the source's progress."""
        return self._newest

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """The tasks of a micro-batch. Raises MessagesExpired if retention took some of it; NotConnected, LogDamaged."""
        asked, topology = self._asked, self._look()
        wanted = ranges(offsets.of_json(start), offsets.of_json(end), topology.queues, skips_lost=asked.skips_lost)
        return [TaskPartition(each) for each in tasks(log_at(self._address), topology, wanted, asked.plan, asked.selection)]

    def commit(self, end: dict[str, Any]) -> None:
        """Nothing: what is read stays in the log."""

    def stop(self) -> None:
        """Give back connections and files."""
        forget(self._address)

    def _look(self) -> Topology:
        topology = look(log_at(self._address), self._asked.choice)
        for key in topology.queues:
            if key.partition > 0 and key.subject not in topology.routes:
                raise InvalidArgument(
                    f"subject {key.subject!r} is ordered, and its files do not say which partition follows which: give option qmq.servers, "
                    "or qmq.routes with a file from `qmq route export`"
                )
            if key.partition > 0 and key.partition not in topology.routes[key.subject].partitions:
                raise InvalidArgument(f"the routes that qmq.routes has do not know {key}: export them again with `qmq route export`")
        return topology

    # --- in executors --------------------------------------------------------------------------------------------------

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        task = partition.task if isinstance(partition, TaskPartition) else None
        return read_task(self._address, task, self._schema, self._asked.selection, skips_lost=self._asked.skips_lost)


def _ends(topology: Topology) -> dict[QueueKey, int]:
    return {key: queue.end for key, queue in topology.queues.items()}
