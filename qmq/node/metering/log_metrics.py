"""The metrics of a broker's logs, its disk and its maintenance. Masters and slaves have them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from qmq.broker.broker import Broker
from qmq.broker.replica_time import ReplicaTime
from qmq.log.recent_writes import ACTIONS, MESSAGES
from qmq.metrics.figures import COUNTER, GAUGE, HISTOGRAM, Figure, Reading, one

_OF: Final = ("broker_group",)

LOG_BYTES: Final = Figure("qmq_log_bytes", GAUGE, (*_OF, "log"), "Bytes that the message log and the action log hold.")
DISK_FREE: Final = Figure("qmq_disk_free_bytes", GAUGE, _OF, "Free bytes of the disk that has the logs.")
DISK_RESERVED: Final = Figure(
    "qmq_disk_reserved_bytes", GAUGE, _OF, "Bytes reserved for acknowledgements: with less free, the broker refuses messages."
)
UNFLUSHED_AGE: Final = Figure(
    "qmq_unflushed_age_seconds",
    GAUGE,
    _OF,
    "Age of the oldest entry that a power cut here would lose; 0 if there is none.",
)
UNFLUSHED_BYTES: Final = Figure("qmq_unflushed_bytes", GAUGE, _OF, "Bytes of both logs that a power cut here would lose.")
FLUSH: Final = Figure("qmq_flush_seconds", HISTOGRAM, _OF, "Duration of flushes of both logs.")
COMMIT: Final = Figure(
    "qmq_commit_seconds",
    HISTOGRAM,
    _OF,
    "Time from the master's write to the commit, of each write; none on a single node, which commits at once.",
)
CHECKPOINTS: Final = Figure("qmq_checkpoints_total", COUNTER, _OF, "Checkpoints written.")
CHECKPOINT_AT: Final = Figure(
    "qmq_checkpoint_timestamp_seconds", GAUGE, _OF, "Time of the last checkpoint, in seconds since 1970; 0 before the first."
)
DELETED: Final = Figure("qmq_retention_deleted_files_total", COUNTER, _OF, "Files that retention deleted.")
RETENTION_FAILURES: Final = Figure(
    "qmq_retention_failures_total",
    COUNTER,
    _OF,
    "Queues that retention could not read and files that it could not delete; each attempt counts.",
)
RETENTION_BEHIND: Final = Figure(
    "qmq_retention_behind_seconds",
    GAUGE,
    _OF,
    "How far the time by which retention counts is behind the machine's clock, which nobody has confirmed; normally 0.",
)
UNREADABLE: Final = Figure(
    "qmq_unreadable_blocks_total", COUNTER, _OF, "Blocks of the logs that the disk could not read (EIO); each attempt counts."
)
DAMAGED: Final = Figure("qmq_scrub_damaged_entries_total", COUNTER, _OF, "Entries that the scrubber found damaged.")


class LogSource:
    figures: Final = (
        LOG_BYTES,
        DISK_FREE,
        DISK_RESERVED,
        UNFLUSHED_AGE,
        UNFLUSHED_BYTES,
        FLUSH,
        COMMIT,
        CHECKPOINTS,
        CHECKPOINT_AT,
        DELETED,
        RETENTION_FAILURES,
        RETENTION_BEHIND,
        DAMAGED,
        UNREADABLE,
    )

    def __init__(self, broker: Broker, group: str, time: ReplicaTime | None = None) -> None:
        self._broker = broker
        self._group = group
        self._time = time

    def read(self) -> Iterator[Reading | None]:
        store, counters, group = self._broker.store, self._broker.counters, self._group
        names = {MESSAGES: "message", ACTIONS: "action"}
        yield Reading(LOG_BYTES, [((group, names[number]), each.end - each.start) for number, each in enumerate(store.logs)])
        yield one(DISK_FREE, store.disk.free_bytes(store.folder), group)
        yield one(DISK_RESERVED, store.config.disk_free_bytes_min, group)
        yield one(UNFLUSHED_AGE, 0 if store.is_flushed else store.unflushed.age_ms(store.clock.monotonic_ms()) / 1000, group)
        yield one(UNFLUSHED_BYTES, sum(each.end - each.flushed for each in store.logs), group)
        yield one(FLUSH, counters.flushes.histogram(), group)
        yield one(COMMIT, counters.commits.histogram(), group)
        yield one(CHECKPOINTS, counters.checkpoints, group)
        yield one(CHECKPOINT_AT, counters.checkpoint_ms / 1000, group)
        yield one(DELETED, counters.files_deleted, group)
        yield one(RETENTION_FAILURES, counters.retention_failures, group)
        behind_ms = 0 if self._time is None else self._time.status().behind_clock_ms
        yield one(RETENTION_BEHIND, max(behind_ms, 0) / 1000, group)
        yield one(DAMAGED, counters.damaged, group)
        yield one(UNREADABLE, store.disk.unreadable, group)
