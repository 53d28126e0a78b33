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
* Each question for the queues' ends also reports how far the query is, for operators: the offset
  from which a micro-batch begins is what the query has committed (docs/SPARK.md). The reader does
  not know the query's name, because Spark tells it to no source.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

import pyspark_qmq.needed  # noqa: F401 - before all others
from pyspark_qmq.reader import TaskPartition
from pyspark_qmq.source_schema import columns_of
from qmq.columns import offsets
from qmq.columns.losses import (
    LossCount,
    LostRange,
    RetentionWatch,
    lost_error,
    lost_ranges,
    lost_text,
    named,
)
from qmq.columns.model import QueueKey, ReaderReport, Topology
from qmq.columns.offsets import Offsets, lost_of_json, of_json
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
    waiting,
)
from qmq.columns.reading import address_of, forget, log_at, read_task, starts, topology_of
from qmq.errors import InvalidArgument, UnknownSubject
from qmq.text import parse_json

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger("pyspark_qmq")

GOES_ON: Final = "the stream continues without them (failOnDataLoss=false)"
LOOK_AGAIN_S: Final = 1.0
"""A subject that was deleted is asked for again after so long: an idle query asks for its end a
hundred times a second.
"""


class LogStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(
        self,
        asked: ReadOptions,
        schema: StructType,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._asked = asked
        self._monotonic_s = monotonic_s
        self._columns = columns_of(schema)
        self._address = address_of(asked.where)
        self._initial: dict[str, dict[str, int]] | None = None
        self._until: dict[QueueKey, int] | None = None
        self._newest: dict[QueueKey, int] | None = None
        self._ends: dict[QueueKey, int] = {}
        """The last known ends, also of subjects that were deleted since."""
        self._gone: frozenset[str] = frozenset()
        """Subjects that the query has read, and that do not exist now."""
        self._looked_s = 0.0
        """When subjects that were deleted were last asked for."""
        self._losses = LossCount()
        self._retention = RetentionWatch()
        self._waiting_since_s: float | None = None

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
        """The limit given by options; the first of them, because Spark takes only one."""
        limit, rows_min = self._asked.limit, self._asked.minimum.rows
        if limit.rows_max is not None:
            return ReadMaxRows(limit.rows_max)
        if limit.bytes_max is not None:
            return ReadMaxBytes(limit.bytes_max)
        return ReadMinRows(rows_min) if rows_min else ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - the name is Spark's
        """Read only up to the current end. Raises what `initialOffset` raises."""
        self._until = _ends(self._current_topology(is_start_unknown=True))

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, dict[str, int]]:  # noqa: N802 - the name is Spark's
        """The end of the micro-batch that begins at `start`. Raises what `initialOffset` raises,
        and MessagesExpired.
        """
        begin = offsets.of_json(start)
        topology = self._current_topology(
            begin, ReaderReport(self._reader, begin, self._losses.lost)
        )
        self._newest = _ends(topology)
        for near in self._retention.look(topology.queues, begin, self._monotonic_s()):
            log.warning("%s%s", named(self._reader), near)
        if not self._is_enough(waiting(topology, begin), limit):
            return offsets.to_json(begin, offsets.per_task_of_json(start))
        end = admit(topology, begin, self._limit(limit), self._until)
        if end != begin:
            self._waiting_since_s = None
        if self._asked.skips_lost:
            # Spark takes the report for this micro-batch's progress before it asks for the tasks.
            self._note_losses(begin, end, topology)
        return offsets.to_json(
            end, offsets.per_task_of_json(start) | per_task(topology, begin, end, self._asked.plan)
        )

    def _is_enough(self, count: int, limit: ReadLimit) -> bool:
        """Whether so many waiting messages are read now. A query that ends by itself never waits
        for more.
        """
        if count == 0:
            self._waiting_since_s = None
        if count == 0 or self._until is not None or isinstance(limit, ReadAllAvailable):
            return True
        now_s = self._monotonic_s()
        if self._waiting_since_s is None:
            self._waiting_since_s = now_s
        return self._asked.minimum.is_met(count, int((now_s - self._waiting_since_s) * 1000))

    def _limit(self, limit: ReadLimit) -> Limit:
        """The limit. The engine passes its own, and only one if both limits were given."""
        asked = self._asked.limit
        if isinstance(limit, ReadMaxRows):
            return Limit(limit.max_rows, asked.bytes_max)
        return Limit(None, limit.max_bytes) if isinstance(limit, ReadMaxBytes) else NO_LIMIT

    def reportLatestOffset(self) -> dict[str, dict[str, int]] | None:  # noqa: N802 - the name is Spark's
        """The committed end when the last micro-batch was planned, and what was lost so far. Spark
        shows it as `latestOffset` of the source's progress.
        """
        if self._newest is None:
            return None
        return offsets.to_json(self._newest, lost=self._losses.lost)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """The tasks of a micro-batch. Raises MessagesExpired if messages of it were deleted;
        NotConnected, LogDamaged.
        """
        first, last, cuts = (
            offsets.of_json(start),
            offsets.of_json(end),
            offsets.per_task_of_json(end),
        )
        topology = self._current_topology({**last, **first})
        self._note_losses(first, last, topology)
        asked, queues = self._asked, log_at(self._address)
        found: Sequence[ReadTask | None]
        if are_cut(first, last, cuts):
            found = stream_tasks(
                queues, topology, first, last, cuts, asked.selection, gone=self._gone
            )
        else:
            # Release 0.2 planned this micro-batch, and cut it by the sizes of then. If they changed
            # since, the sink refuses the rows.
            kept = {key: each for key, each in last.items() if key.subject not in self._gone}
            found = tasks(
                queues,
                topology,
                ranges(first, kept, topology.queues, skips_lost=asked.skips_lost),
                asked.plan,
                asked.selection,
            )
        return [TaskPartition(each) for each in found]

    def commit(self, end: dict[str, Any]) -> None:
        """Does nothing, because messages stay in the log."""

    def stop(self) -> None:
        """Close connections and files."""
        forget(self._address)

    @property
    def _reader(self) -> str:
        """The name for operators."""
        if self._asked.reader:
            return self._asked.reader
        from qmq.client.consuming.consumer import process_name

        return f"spark-{process_name()}"

    def _note_losses(self, first: Offsets, last: Offsets, topology: Topology) -> None:
        """Say and count what a micro-batch has lost. Raises MessagesExpired if that
        is not allowed.
        """
        found = lost_ranges(first, last, topology.queues)
        found += [
            LostRange(key, first.get(key, 0), last[key])
            for key in sorted(last)
            if key.subject in self._gone and first.get(key, 0) < last[key]
        ]
        if found and not self._asked.skips_lost:
            raise lost_error(found, self._reader)
        news = self._losses.add(found, last)
        if news:
            log.warning("%s; %s", lost_text(news, self._reader), GOES_ON)

    def _note_gone(self, known: Offsets, gone: frozenset[str]) -> None:
        """Subjects that the query has read do not exist any more. Raises MessagesExpired if it had
        not read them to their end, and that is not allowed.
        """
        unread = [
            LostRange(key, done, self._ends[key])
            for key, done in sorted(known.items())
            if key.subject in gone and done < self._ends.get(key, 0)
        ]
        if unread and not self._asked.skips_lost:
            raise lost_error(unread, self._reader)
        self._losses.add(unread, self._ends)
        for subject in sorted(gone - self._gone):
            lost = [each for each in unread if each.queue.subject == subject]
            log.warning(
                "%ssubject %r does not exist any more; the stream continues without it until it is "
                "created again: %s",
                named(self._reader),
                subject,
                lost_text(lost) if lost else "as far as this driver knows, it was read to its end",
            )
        self._gone = gone

    def _current_topology(
        self,
        known: Offsets | None = None,
        report: ReaderReport | None = None,
        *,
        is_start_unknown: bool = False,
    ) -> Topology:
        """`known`: the offsets that the query has, whose subjects may have been deleted.
        `is_start_unknown`: it may have any.
        """
        choice = self._asked.choice
        read = {each.subject for each in known or () if choice.selects(each.subject)}
        may_lack: Container[str] = ()
        if self._asked.skips_lost:
            may_lack = choice.subjects if is_start_unknown else read
        now_s = self._monotonic_s()
        if self._gone and now_s - self._looked_s < LOOK_AGAIN_S:
            choice = choice.without(self._gone)
        elif self._gone:
            self._looked_s = now_s
        try:
            topology = topology_of(log_at(self._address), choice, report, may_lack)
        except UnknownSubject as failure:
            if not read:
                raise
            raise UnknownSubject(
                f"{named(self._reader)}{failure.message}. To continue without a subject that was "
                "deleted, until it is created again: option failOnDataLoss=false"
            ) from failure
        gone = frozenset(read - {key.subject for key in topology.queues})
        if known is not None and gone != self._gone:
            self._note_gone(known, gone)
        self._ends.update(_ends(topology))
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


def lost(progress: Any) -> int:
    """The number of messages that were deleted before a query read them, since its driver began,
    over all sources of the query. Only a query with `failOnDataLoss=false` continues after a loss.
    """
    return sum(
        sum(lost_of_json(found).values())
        for source in sources_of(progress)
        if (found := _mapping(source.get("latestOffset")))
    )


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
    with suppress(InvalidArgument):
        return of_json(_mapping(value))
    return {}


def _mapping(value: Any) -> Mapping[str, Mapping[str, int]]:
    with suppress(ValueError):
        found = parse_json(value or "{}") if isinstance(value, str) else value
        if isinstance(found, Mapping) and all(isinstance(each, Mapping) for each in found.values()):
            return found
    return {}
