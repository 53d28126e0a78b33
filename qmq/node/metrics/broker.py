"""The metrics of a broker: its messages and requests, by `qmq.broker.metrics` and by the queues; its logs, its disk and its maintenance,
which masters and slaves have; its segments in an object store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from qmq.broker.broker import Broker
from qmq.broker.connection.server import DataServer
from qmq.broker.replica_time import ReplicaTime
from qmq.log.recent_writes import ACTIONS, MESSAGES
from qmq.log.segments import Segments
from qmq.metrics.figures import COUNTER, GAUGE, HISTOGRAM, SLICE, Figure, Reading, one, rows_of
from qmq.tiering.segment_copier import SegmentCopier
from qmq.tiering.stored_reads import StoredReads

_OF: Final = ("broker_group",)
_SUBJECT: Final = ("broker_group", "subject")

CONNECTIONS: Final = Figure("qmq_connections", GAUGE, _OF, "Connections to the data port, of clients and of other replicas.")
UNREAD: Final = Figure(
    "qmq_unread_connections", GAUGE, _OF, "Connections whose client does not read its answers: the broker sends it no messages."
)
UNANSWERED: Final = Figure("qmq_unanswered_bytes", GAUGE, _OF, "Bytes of received batches that are not committed yet.")
THROTTLED: Final = Figure(
    "qmq_throttled_seconds_total",
    COUNTER,
    _OF,
    "Seconds in which the broker did not read from connections, because their principals were over a quota.",
)
ACCEPTED: Final = Figure("qmq_connections_accepted_total", COUNTER, _OF, "Connections that the data port accepted.")
REFUSED: Final = Figure(
    "qmq_refused_requests_total", COUNTER, (*_OF, "error"), "Requests answered with an error, by its name (qmq.errors)."
)
QUEUES: Final = Figure("qmq_queues", GAUGE, _OF, "Queues: subjects, and partitions of ordered subjects, that are stored here.")
READ_ONLY: Final = Figure("qmq_read_only", GAUGE, _OF, "1 if the broker group is drained, and takes no new messages.")

STORED: Final = Figure("qmq_stored_messages_total", COUNTER, _SUBJECT, "Messages stored for producers, as master; a retry counts once.")
STORED_BYTES: Final = Figure("qmq_stored_bytes_total", COUNTER, _SUBJECT, "Bytes of those messages' batches in the message log.")
STORED_BATCHES: Final = Figure("qmq_stored_batches_total", COUNTER, _SUBJECT, "Those messages' batches.")
KEPT: Final = Figure("qmq_kept_messages", GAUGE, _SUBJECT, "Stored messages that retention has not deleted yet, on this replica.")


class BrokerSource:
    """`group` is the broker group's name."""

    figures: Final = (
        CONNECTIONS,
        THROTTLED,
        UNREAD,
        UNANSWERED,
        ACCEPTED,
        REFUSED,
        QUEUES,
        READ_ONLY,
        STORED,
        STORED_BYTES,
        STORED_BATCHES,
        KEPT,
    )

    def __init__(self, broker: Broker, group: str, server: DataServer) -> None:
        self._broker = broker
        self._group = group
        self._server = server

    def read(self) -> Iterator[Reading | None]:
        broker, counters, group = self._broker, self._broker.counters, self._group
        yield one(CONNECTIONS, self._server.connections, group)
        yield one(THROTTLED, self._server.throttle.paused_s, group)
        yield one(UNREAD, self._server.unread, group)
        yield one(UNANSWERED, self._server.unanswered_bytes, group)
        yield one(ACCEPTED, counters.accepted, group)
        yield Reading(REFUSED, [((group, name), count) for name, count in sorted(counters.refused.items())])
        yield one(QUEUES, len(broker.store.queues), group)
        yield one(READ_ONLY, int(broker.is_read_only), group)
        yield None
        yield from self._stored()
        yield from self._kept()

    def _stored(self) -> Iterator[Reading | None]:
        counters, found = self._broker.counters, dict(self._broker.counters.stored)
        for number, queue in enumerate(list(self._broker.store.queues.values())):
            more = counters.more(queue)
            if more is not None:
                found[queue.id.subject] = more.plus(found.get(queue.id.subject))
            if number % SLICE == 0:
                yield None
        labels = [(self._group, subject) for subject in found]
        for figure, place in ((STORED, 0), (STORED_BYTES, 1), (STORED_BATCHES, 2)):
            yield Reading(figure, rows_of(labels, [each[place] for each in found.values()]))
            yield None

    def _kept(self) -> Iterator[Reading | None]:
        kept: dict[str, int] = {}
        for number, queue in enumerate(list(self._broker.store.queues.values())):
            kept[queue.id.subject] = kept.get(queue.id.subject, 0) + max(queue.visible_sequence - queue.start_sequence, 0)
            if number % SLICE == 0:
                yield None
        yield Reading(KEPT, rows_of([(self._group, subject) for subject in kept], kept.values()))
        yield None


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


STORE_BYTES: Final = Figure(
    "qmq_object_store_bytes", GAUGE, _OF, "Bytes of sealed segments that are in the object store, read back and checked."
)
WAITING: Final = Figure(
    "qmq_object_store_waiting_bytes", GAUGE, _OF, "Bytes of sealed segments that are not known to be in the object store yet."
)
COPIED: Final = Figure("qmq_object_store_copied_bytes_total", COUNTER, _OF, "Bytes that this replica put into the object store.")
STORE_DELETED: Final = Figure(
    "qmq_object_store_deleted_segments_total", COUNTER, _OF, "Segments that this replica deleted from the object store."
)
FAILURES: Final = Figure(
    "qmq_object_store_failures_total",
    COUNTER,
    (*_OF, "reason"),
    "Steps that failed: the store is `away`, it has other bytes (`conflict`), the local segment is `damaged`.",
)
READ: Final = Figure("qmq_object_store_read_bytes_total", COUNTER, _OF, "Bytes of chunks that were read from the object store for readers.")
READ_FAILURES: Final = Figure(
    "qmq_object_store_read_failures_total", COUNTER, _OF, "Chunks that could not be read from the object store; they are asked for again."
)
STORE_DAMAGED: Final = Figure(
    "qmq_object_store_damaged_chunks", GAUGE, _OF, "Chunks of the log that the object store has lost or changed, as far as readers noticed."
)
CACHED: Final = Figure("qmq_object_store_cache_bytes", GAUGE, _OF, "Bytes of the chunks in the cache on the disk.")
LOCAL: Final = Figure("qmq_log_local_bytes", GAUGE, _OF, "Bytes of the message log that are on this disk.")


class TieringSource:
    """The source of a broker that has an object store."""

    figures: Final = (STORE_BYTES, WAITING, COPIED, STORE_DELETED, FAILURES, READ, READ_FAILURES, STORE_DAMAGED, CACHED, LOCAL)

    def __init__(self, copier: SegmentCopier, stored: StoredReads, log: Callable[[], Segments], group: str) -> None:
        """`log` returns the message log."""
        self._copier = copier
        self._stored = stored
        self._log = log
        self._group = group

    def read(self) -> Iterator[Reading | None]:
        catalog, counters, group = self._copier.catalog, self._copier.counters, self._group
        yield one(STORE_BYTES, sum(each.size for each in catalog.stored), group)
        yield one(WAITING, sum(each.size for each in catalog.noted), group)
        yield one(COPIED, counters.copied_bytes, group)
        yield one(STORE_DELETED, counters.deleted_segments, group)
        yield Reading(FAILURES, [((group, reason), count) for reason, count in counters.failures.items()])
        yield one(READ, self._stored.counters.fetched_bytes, group)
        yield one(READ_FAILURES, self._stored.counters.failures, group)
        yield one(STORE_DAMAGED, len(self._log().damaged_objects()), group)
        yield one(CACHED, self._stored.cached_bytes, group)
        yield one(LOCAL, self._log().local_bytes, group)
