"""The writers that Spark calls, for batches and streams. They are made in the driver, and their
`write` runs in tasks.

Spark makes a new stream writer for each epoch and another one for its commit, so writers keep no
state: the writer's identity is derived from the data that Spark passes to a task. A batch writer is
made once per job, and is sent with its random name to all tasks and attempts.
"""

from __future__ import annotations

import sys
import uuid
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType
from pyspark.taskcontext import TaskContext

import pyspark_qmq.needed  # noqa: F401 - before all others
from pyspark_qmq.sink.left_over import WrittenRows, refuse_left_over, refuse_other_subject
from pyspark_qmq.sink.options import Fields, SinkOptions
from pyspark_qmq.sink.row_identity import RowWriter
from pyspark_qmq.sink.write_task import Counts, WriteTask
from qmq.columns.servers.metaservers import Metadata, patiently
from qmq.errors import InvalidArgument

if TYPE_CHECKING:
    import pyarrow as pa

QUERY: str = "sql.streaming.queryId"
EPOCH: str = "streaming.sql.batchId"
RUN: str = "spark.jobGroup.id"
"""A query's run, from start to end. Only its first epoch may be a repetition: a run ends when an
epoch fails.
"""

_runs: set[str] = set()
"""The runs that this process has written for."""


@dataclass
class Written(WriterCommitMessage):
    """The result of one task."""

    rows: WrittenRows
    counts: Counts
    may_repeat: bool
    """Whether an earlier attempt of the epoch may have had other tasks."""


class LogWriter(DataSourceArrowWriter):
    """A batch write. `name`: the job's name. In `foreachBatch` the batch's number is the epoch of a
    write with a `qmq.txnId`, so that a name may be the same for all of them.
    """

    def __init__(self, options: SinkOptions, fields: Fields, name: str) -> None:
        self.options = options
        self._fields = fields
        self.name = name

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        """One task's rows. Raises as `WriteTask.run`."""
        has_name = bool(self.options.txn_id)
        epoch = _context().getLocalProperty(EPOCH) if has_name else None
        writer = _row_writer(self.name, int(epoch or 0), self._fields)
        return _write(iterator, self.options, self._fields, writer, may_repeat=has_name)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Everything that tasks reported as stored is stored. Raises InvalidArgument if an earlier
        attempt had more tasks.
        """
        _check(self.options, messages)
        _say(f"batch {self.name}", messages)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Stored rows cannot be removed from a log."""
        _say(f"batch {self.name}, aborted; what is stored stays", messages)


class LogStreamWriter(DataSourceStreamArrowWriter):
    """One epoch of a stream."""

    def __init__(self, options: SinkOptions, fields: Fields) -> None:
        self._options = options
        self._fields = fields

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        """One task's rows. Raises as `WriteTask.run`."""
        context = _context()
        query, epoch = context.getLocalProperty(QUERY), context.getLocalProperty(EPOCH)
        if epoch is None or (query is None and not self._options.txn_id):
            raise InvalidArgument(
                "Spark passes no query id and epoch, so the sink cannot tell a repeated "
                "write from a new one"
            )
        if int(epoch) == 0:
            find_subject(self._options)
        run = context.getLocalProperty(RUN) or uuid.uuid4().hex
        may_repeat = run not in _runs
        writer = _row_writer(self._options.txn_id or str(query), int(epoch), self._fields)
        if may_repeat and not self._options.txn_id:
            _refuse_other_subject(self._options, self._fields, writer)
        found = _write(iterator, self._options, self._fields, writer, may_repeat=may_repeat)
        _runs.add(run)
        return found

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - the name is Spark's
        """Everything that tasks reported as stored is stored. Raises InvalidArgument if an earlier
        attempt had more tasks.
        """
        _check(self._options, messages)
        _say(f"epoch {batchId}", messages)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - the name is Spark's
        """Stored rows cannot be removed from a log. Spark repeats the epoch, which finds them."""
        _say(
            f"epoch {batchId}, aborted; what is stored stays, and is found when it is repeated",
            messages,
        )


def arrow_writer(options: Mapping[str, str], schema: StructType, overwrite: bool) -> LogWriter:
    """For `df.write`. Raises InvalidArgument, InvalidName."""
    asked, fields = _planned(options, schema, overwrite)
    return LogWriter(asked, fields, asked.txn_id or uuid.uuid4().hex)


def arrow_stream_writer(
    options: Mapping[str, str], schema: StructType, overwrite: bool
) -> LogStreamWriter:
    """For `df.writeStream`. Raises InvalidArgument, InvalidName."""
    return LogStreamWriter(*_planned(options, schema, overwrite))


def _planned(
    options: Mapping[str, str], schema: StructType, overwrite: bool
) -> tuple[SinkOptions, Fields]:
    if overwrite:
        raise InvalidArgument(
            'the sink can only append to a log: use .mode("append"), and for streams '
            '.outputMode("append")'
        )
    asked = SinkOptions.parse(options)
    return asked, Fields.of(schema, has_subject=bool(asked.subject))


def find_subject(asked: SinkOptions) -> None:
    """Find or create the subject before the first row is written, so that a wrong address or a
    missing subject is said at once. Raises UnknownSubject, AccessDenied, NotConnected.
    """
    if asked.subject:
        with closing(Metadata(asked.servers, asked.retry_ms, asked.first_ms)) as metadata:
            metadata.reach(
                lambda ms: metadata.locate(asked.subject, create=asked.creates, retry_ms=ms)
            )


def _context() -> Any:
    context = TaskContext.get()
    if context is None:
        raise InvalidArgument("rows can be written only in Spark's tasks")
    return context


def _row_writer(name: str, epoch: int, fields: Fields) -> RowWriter:
    return RowWriter(name, _context().partitionId(), epoch, has_own_ids=fields.message_id >= 0)


def _refuse_other_subject(options: SinkOptions, fields: Fields, writer: RowWriter) -> None:
    """Raise InvalidArgument if the query stored rows in another subject alone. Rows that name
    their subjects have many, and of rows with their own ids earlier epochs cannot be known.
    """
    from pyspark_qmq.sink.cluster import cluster_at

    if not writer.epoch or not options.subject or fields.subject >= 0 or writer.has_own_ids:
        return
    cluster = cluster_at(options.servers)
    refuse_other_subject(
        lambda ask, each: patiently(lambda: cluster.answer(ask, each), options.retry_ms),
        cluster.answer,
        writer,
        options.subject,
        cluster.subjects,
        may_delay=fields.has_delays,
    )


def _write(
    iterator: Iterator[pa.RecordBatch],
    options: SinkOptions,
    fields: Fields,
    writer: RowWriter,
    *,
    may_repeat: bool,
) -> Written:
    from pyspark_qmq.sink.cluster import cluster_at

    task = WriteTask(cluster_at(options.servers), writer, fields, options, may_repeat=may_repeat)
    counts = task.run(iterator)
    return Written(WrittenRows(writer, counts.rows, task.destinations), counts, may_repeat)


def _check(options: SinkOptions, messages: list[WriterCommitMessage | None]) -> None:
    """Raise InvalidArgument if an earlier attempt stored rows that no task has now."""
    from pyspark_qmq.sink.cluster import SinkCluster

    written = [each for each in messages if isinstance(each, Written)]
    if any(each.may_repeat for each in written):
        more = [(options.subject, False)] if options.subject else []
        with closing(SinkCluster(options.servers)) as cluster:
            refuse_left_over(
                lambda ask, writer: patiently(
                    lambda: cluster.answer(ask, writer), options.retry_ms
                ),
                [each.rows for each in written],
                more,
            )


def _say(what: str, messages: list[WriterCommitMessage | None]) -> None:
    """Write to standard error, which Spark puts into the driver's log."""
    total = sum([each.counts for each in messages if isinstance(each, Written)], Counts())
    if total.rows:
        print(
            (
                f"qmq: {what}: {total.rows} rows in {total.batches} batches, {total.found} were "
                "stored already"
            ),
            file=sys.stderr,
        )
