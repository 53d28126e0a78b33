"""Bugs of Spark's source and sink, in drivers and in the processes of tasks (`planted/`).

Nothing of Spark is imported until a bug is planted: servers with other bugs need none of it.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from campaign.values import Bug

_DRIVERS = frozenset({"drivers"})


def _another_in_each_process() -> None:
    from pyspark_qmq.sink.row_identity import RowWriter

    known = RowWriter.producer_id

    def producer_id(self: RowWriter, to: Any) -> int:
        return known(replace(self, name=f"{self.name} {os.getpid()}"), to)

    RowWriter.producer_id = producer_id  # type: ignore[method-assign]


def _to_the_end_of_now() -> None:
    from pyspark_qmq import stream

    from qmq.columns import offsets

    known = stream.LogStreamReader.partitions

    def partitions(self: stream.LogStreamReader, start: Any, end: Any) -> Any:
        ends = {key: queue.end for key, queue in self._current_topology().queues.items()}
        return known(self, start, offsets.to_json(ends, offsets.per_task_of_json(end)))

    stream.LogStreamReader.partitions = partitions  # type: ignore[method-assign]


def _by_sizes_of_now() -> None:
    from pyspark_qmq import stream

    stream.are_cut = lambda *_: False


def _ahead_of_sources() -> None:
    from pyspark_qmq import stream

    def admit(topology: Any, start: Any, *_: Any) -> Any:
        return {**start, **{key: queue.end for key, queue in topology.queues.items()}}

    stream.admit = admit


BUGS = (
    Bug(
        name="another-writer-in-each-process",
        what="a task that is repeated by another process does not find what it stored",
        plant=_another_in_each_process,
        found_by="spark-kill-driver",
        finds=("copy_once",),
        into=_DRIVERS,
    ),
    Bug(
        name="read-to-the-end-of-now",
        what="the tasks of a micro-batch go to the end that the log has when they are planned",
        plant=_to_the_end_of_now,
        found_by="spark-none",
        finds=("copy_once",),
        into=_DRIVERS,
    ),
    Bug(
        name="cut-by-sizes-of-now",
        what="a repeated micro-batch is cut into tasks by the sizes that messages have now",
        plant=_by_sizes_of_now,
        found_by="spark-kill-driver",
        finds=("stream_goes_on", "copy_once", "copy_no_loss"),
        into=_DRIVERS,
    ),
    Bug(
        name="read-ahead-of-sources",
        what="a stream reads the target of a change together with its sources",
        plant=_ahead_of_sources,
        found_by="spark-ordered-none",
        finds=("fifo_order", "keyed_in_order"),
        into=_DRIVERS,
    ),
)
