"""Decides where a micro-batch ends: by order and by amount. Pure.

A partition of an ordered subject is *open* when each partition that was closed for it is open and finished in the offsets from which the
micro-batch starts. A micro-batch reads no messages of a partition that is not open. So the last message of a source and the first message
of a target are in different micro-batches, which Spark runs one after the other: per key, rows arrive in log order (docs/SPARK.md, "Order
in a stream").

Rules:
* Finished means: sealed, and the offset has reached the command message. A partition closed by a fence is not finished until its command
  message is known.
* A source that is not read (`assign` excludes it) does not hold back its targets.
* The result depends only on topology, offsets and limit, never on the time of the call. A queue without progress is left out, so that equal
  offsets stay equal.

Worked example: partition 1 is split into 2 and 3. Offsets {1: 90}, sealed at 100, all of 2 and 3 waiting. First micro-batch: {1: 100};
second: {1: 100, 2: ..., 3: ...}.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass

from qmq.columns.model import QueueKey, Routes, SourceQueue, Topology
from qmq.columns.offsets import Offsets


@dataclass(frozen=True, slots=True)
class Limit:
    """How much one micro-batch may read; None: no limit."""

    rows_max: int | None = None
    bytes_max: int | None = None


NO_LIMIT = Limit()


def open_partitions(subject: str, routes: Routes, offsets: Offsets, known: Container[QueueKey]) -> frozenset[int]:
    """The partitions of an ordered subject whose sources have been read completely.

    Sources of sources count, too: an empty source is finished immediately, but its own source may not be finished.
    """
    is_open: dict[int, bool] = {}
    is_past: dict[int, bool] = {}
    for number in sorted(routes.partitions):  # A source has a lower number than its targets.
        partition = routes.partitions[number]
        key = QueueKey(subject, number, partition.broker_group)
        is_open[number] = all(is_past.get(source, True) for source in partition.sources)
        is_past[number] = is_open[number] and (key not in known or is_finished(key, routes, offsets))
    return frozenset(number for number, opened in is_open.items() if opened)


def is_finished(key: QueueKey, routes: Routes, offsets: Offsets) -> bool:
    """Whether a partition is sealed and has been read to its end."""
    sealed_at = routes.sealed_at.get(key.partition)
    return sealed_at is not None and offsets.get(key, 0) >= sealed_at


def admit(topology: Topology, start: Offsets, limit: Limit = NO_LIMIT, until: Offsets | None = None) -> dict[QueueKey, int]:
    """The end offsets of the micro-batch that starts at `start`. `until`: upper bounds; queues not in it are not read."""
    opened = {subject: open_partitions(subject, routes, start, topology.queues) for subject, routes in topology.routes.items()}
    waiting: dict[QueueKey, int] = {}
    for key, queue in topology.queues.items():
        end = queue.end if until is None else min(queue.end, until.get(key, 0))
        count = end - start.get(key, 0)
        if count > 0 and (key.subject not in opened or key.partition in opened[key.subject]):
            waiting[key] = count
    return {**start, **{key: start.get(key, 0) + count for key, count in share_out(waiting, topology.queues, limit).items()}}


def share_out(waiting: Mapping[QueueKey, int], queues: Mapping[QueueKey, SourceQueue], limit: Limit) -> dict[QueueKey, int]:
    """The number of messages to read from each queue: in proportion to its backlog, at least one."""
    part = 1.0
    total = sum(waiting.values())
    if limit.rows_max is not None and total > limit.rows_max:
        part = limit.rows_max / total
    if limit.bytes_max is not None:
        size = sum(count * bytes_per_message(queues[key]) for key, count in waiting.items())
        part = min(part, limit.bytes_max / size) if size > limit.bytes_max else part
    if part >= 1.0:
        return dict(waiting)
    return {key: max(int(count * part), 1) for key, count in waiting.items()}


def bytes_per_message(queue: SourceQueue) -> float:
    """The average size of a stored message of the queue."""
    return queue.stored_bytes / max(queue.end - queue.start, 1)
