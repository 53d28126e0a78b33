"""One line on standard error for each micro-batch of a session's streaming queries."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from pyspark.sql.streaming.listener import StreamingQueryListener

from pyspark_qmq.stream import lag

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.listener import (
        QueryIdleEvent,
        QueryProgressEvent,
        QueryStartedEvent,
        QueryTerminatedEvent,
    )


def print_progress(spark: SparkSession) -> StreamingQueryListener:
    """From now on, print a line for each micro-batch of each streaming query, and one for a query
    that fails. `spark.streams.removeListener` ends that.
    """
    lines = _Lines()
    spark.streams.addListener(lines)
    return lines


def line_of(progress: Any) -> str:
    """The line of a micro-batch: one of `query.recentProgress`, or of a listener's events."""
    name = progress.name or str(progress.id)
    rate = progress.processedRowsPerSecond or 0.0
    return (
        f"{name}: batch {progress.batchId}: {progress.numInputRows:,} rows in "
        f"{progress.batchDuration / 1000:.1f} s, {rate:,.0f}/s, {lag(progress):,} messages behind"
    )


class _Lines(StreamingQueryListener):
    def onQueryStarted(self, event: QueryStartedEvent) -> None:  # noqa: N802 - the name is Spark's
        pass

    def onQueryProgress(self, event: QueryProgressEvent) -> None:  # noqa: N802 - the name is Spark's
        print(line_of(event.progress), file=sys.stderr, flush=True)

    def onQueryIdle(self, event: QueryIdleEvent) -> None:  # noqa: N802 - the name is Spark's
        pass

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:  # noqa: N802 - the name is Spark's
        if event.exception:
            last = event.exception.strip().splitlines()[-1]
            print(f"{event.id}: the query failed: {last}", file=sys.stderr, flush=True)
