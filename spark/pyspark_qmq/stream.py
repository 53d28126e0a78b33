"""A stream of messages: its start, the end of each micro-batch, the tasks, and its lag, from
Spark's progress reports.

One reader lives in the driver for the whole query. Rules:
* `latestOffset` never exceeds the committed end, nor the border of a route change
  (`planning.admit`).
* The tasks that `partitions` returns follow from its arguments alone, and their rows from the
  immutable log, so a repeated micro-batch has the same tasks and the same rows (docs/SPARK.md).
  After a crash, Spark calls it without asking for an offset first, in another driver.
* The first offset is decided once, because Spark asks for it twice at a fresh start, and the latest
  offset may change in between.
* The reader does not rely on `commit` or `stop`, which Spark may never call.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
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

import pyspark_qmq.needed  # noqa: F401 - before all others
from pyspark_qmq.reader import TaskPartition
from pyspark_qmq.source_schema import columns_of
from qmq.columns import offsets
from qmq.columns.model import QueueKey, Topology
from qmq.columns.offsets import of_json
from qmq.columns.options import ReadOptions
from qmq.columns.planning import (
    NO_LIMIT,
    Limit,
    ReadTask,
    admit,
    are_cut,
    per_task,
    ranges,
    stream_tasks,
    tasks,
)
from qmq.columns.reading import address_of, forget, log_at, read_task, starts, topology_of
from qmq.errors import InvalidArgument
from qmq.text import parse_json

if TYPE_CHECKING:
    import pyarrow as pa


class LogStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, asked: ReadOptions, schema: StructType) -> None:
        self._asked = asked
        self._columns = columns_of(schema)
        self._address = address_of(asked.where)
        self._initial: dict[str, dict[str, int]] | None = None
        self._until: dict[QueueKey, int] | None = None
        self._newest: dict[str, dict[str, int]] | None = None

    # --- in the driver ----------------------------------------------------------------------------

    def initialOffset(self) -> dict[str, dict[str, int]]:  # noqa: N802 - the name is Spark's
        """The start of a query without a checkpoint. Raises UnknownSubject, InvalidArgument,
        NotConnected, LogDamaged.
        """
        if self._initial is None:
            topology = self._current_topology()
            self._initial = offsets.to_json(
                starts(self._asked, topology.queues.values(), log_at(self._address).find_time)
            )
        return self._initial

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - the name is Spark's
        """The limit given by `maxOffsetsPerTrigger` or `maxBytesPerTrigger`."""
        limit = self._asked.limit
        if limit.rows_max is not None:
            return ReadMaxRows(limit.rows_max)
        return ReadMaxBytes(limit.bytes_max) if limit.bytes_max is not None else ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - the name is Spark's
        """Read only up to the current end. Raises what `initialOffset` raises."""
        self._until = _ends(self._current_topology())

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, dict[str, int]]:  # noqa: N802 - the name is Spark's
        """The end of the micro-batch that begins at `start`. Raises what `initialOffset` raises,
        and MessagesExpired.
        """
        topology = self._current_topology()
        self._newest = offsets.to_json(_ends(topology))
        begin = offsets.of_json(start)
        end = admit(topology, begin, self._limit(limit), self._until)
        return offsets.to_json(
            end, offsets.per_task_of_json(start) | per_task(topology, begin, end, self._asked.plan)
        )

    def _limit(self, limit: ReadLimit) -> Limit:
        """The limit. The engine passes its own, and only one if both limits were given."""
        asked = self._asked.limit
        if isinstance(limit, ReadMaxRows):
            return Limit(limit.max_rows, asked.bytes_max)
        return Limit(None, limit.max_bytes) if isinstance(limit, ReadMaxBytes) else NO_LIMIT

    def reportLatestOffset(self) -> dict[str, dict[str, int]] | None:  # noqa: N802 - the name is Spark's
        """The committed end when the last micro-batch was planned. Spark shows it as `latestOffset`
        of the source's progress.
        """
        return self._newest

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """The tasks of a micro-batch. Raises MessagesExpired if retention deleted messages of it;
        NotConnected, LogDamaged.
        """
        topology = self._current_topology()
        first, last, cuts = (
            offsets.of_json(start),
            offsets.of_json(end),
            offsets.per_task_of_json(end),
        )
        asked, log = self._asked, log_at(self._address)
        found: Sequence[ReadTask | None]
        if are_cut(first, last, cuts):
            found = stream_tasks(
                log, topology, first, last, cuts, asked.selection, skips_lost=asked.skips_lost
            )
        else:
            # Release 0.2 planned this micro-batch, and cut it by the sizes of then. If they changed
            # since, the sink refuses the rows.
            found = tasks(
                log,
                topology,
                ranges(first, last, topology.queues, skips_lost=asked.skips_lost),
                asked.plan,
                asked.selection,
            )
        return [TaskPartition(each) for each in found]

    def commit(self, end: dict[str, Any]) -> None:
        """Does nothing, because messages stay in the log."""

    def stop(self) -> None:
        """Close connections and files."""
        forget(self._address)

    def _current_topology(self) -> Topology:
        topology = topology_of(log_at(self._address), self._asked.choice)
        for key in topology.queues:
            if key.partition > 0 and key.subject not in topology.routes:
                raise InvalidArgument(
                    f"subject {key.subject!r} is ordered, and its files do not contain the routes: "
                    "give option qmq.servers, or qmq.routes with a file from `qmq route export`"
                )
            if key.partition > 0 and key.partition not in topology.routes[key.subject].partitions:
                raise InvalidArgument(
                    f"the file of qmq.routes does not have {key}: export the routes again "
                    "with `qmq route export`"
                )
        return topology

    # --- in executors -----------------------------------------------------------------------------

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        task = partition.task if isinstance(partition, TaskPartition) else None
        return read_task(
            self._address,
            task,
            self._columns,
            self._asked.selection,
            skips_lost=self._asked.skips_lost,
        )


def _ends(topology: Topology) -> dict[QueueKey, int]:
    return {key: queue.end for key, queue in topology.queues.items()}


def lag(progress: Any) -> int:
    """The number of messages that were committed when a micro-batch was planned and were not read
    by it, over all sources of a query.

    Args:
        progress: one of `query.recentProgress`, `query.lastProgress`, or of a listener's events.
    """
    return sum(sum(lag_by_queue(source).values()) for source in sources_of(progress))


def lag_by_queue(source: Mapping[str, Any]) -> dict[QueueKey, int]:
    """The same for one source (`progress["sources"][0]`), by queue."""
    latest, end = (_parsed(source.get(name)) for name in ("latestOffset", "endOffset"))
    return {key: max(sequence - end.get(key, 0), 0) for key, sequence in latest.items()}


def sources_of(progress: Any) -> list[Mapping[str, Any]]:
    """The sources in a progress, each as `progress["sources"][0]`."""
    found = progress if isinstance(progress, Mapping) else json.loads(progress.json)
    return list(found["sources"])


def _parsed(value: Any) -> dict[QueueKey, int]:
    """The offsets; empty for another data source, whose offsets have another format."""
    with suppress(ValueError, InvalidArgument):
        found = parse_json(value or "{}") if isinstance(value, str) else value
        if isinstance(found, Mapping) and all(isinstance(each, Mapping) for each in found.values()):
            return of_json(found)
    return {}
