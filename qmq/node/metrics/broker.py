"""The metrics of a broker: its messages and requests, by `qmq.broker.metrics` and by the queues;
its logs, its disk and its maintenance, which masters and slaves have; its segments in an object
store; its consumer groups: their lag, and deliveries and settlements; and a delay server's
schedule, wheel, deliveries and clock.

A group has one row for a subject, over all the subject's partitions here, and over all its
consumers if it is a broadcast group. Only the master knows the lag; a slave has no such rows. The
same holds for readers without a group. Every replica of a delay group has the schedule, only a
master the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from qmq.broker.admin import describe_reader, lag_ms, messages_end, reported_readers
from qmq.broker.broker import Broker
from qmq.broker.connection.server import DataServer
from qmq.broker.dispatch.sessions import QueueGroup
from qmq.broker.metrics import GroupCounters
from qmq.broker.replica_time import ReplicaTime
from qmq.delay.broker import DelayWork, schedule_of
from qmq.errors import LogDamaged
from qmq.log.lane_state import GroupLaneState
from qmq.log.queue import Queue
from qmq.log.recent_writes import ACTIONS, MESSAGES
from qmq.log.segments import Segments
from qmq.metrics.figures import COUNTER, GAUGE, HISTOGRAM, SLICE, Figure, Reading, one, rows_of
from qmq.model import base_group

if TYPE_CHECKING:
    from qmq.proto.v1.control_pb2 import Reader
    from qmq.tiering.segment_copier import SegmentCopier
    from qmq.tiering.stored_reads import StoredReads

_OF: Final = ("broker_group",)
_SUBJECT: Final = ("broker_group", "subject")

CONNECTIONS: Final = Figure(
    "qmq_connections", GAUGE, _OF, "Connections to the data port, of clients and of other replicas."
)
UNREAD: Final = Figure(
    "qmq_unread_connections",
    GAUGE,
    _OF,
    "Connections whose client does not read its answers: the broker sends it no messages.",
)
UNANSWERED: Final = Figure(
    "qmq_unanswered_bytes", GAUGE, _OF, "Bytes of received batches that are not committed yet."
)
THROTTLED: Final = Figure(
    "qmq_throttled_seconds_total",
    COUNTER,
    _OF,
    (
        "Seconds in which the broker did not read from connections, because their principals "
        "were over a quota."
    ),
)
ACCEPTED: Final = Figure(
    "qmq_connections_accepted_total", COUNTER, _OF, "Connections that the data port accepted."
)
REFUSED: Final = Figure(
    "qmq_refused_requests_total",
    COUNTER,
    (*_OF, "error"),
    "Requests answered with an error, by its name (qmq.errors).",
)
QUEUES: Final = Figure(
    "qmq_queues",
    GAUGE,
    _OF,
    "Queues: subjects, and partitions of ordered subjects, that are stored here.",
)
READ_ONLY: Final = Figure(
    "qmq_read_only", GAUGE, _OF, "1 if the broker group is drained, and takes no new messages."
)

STORED: Final = Figure(
    "qmq_stored_messages_total",
    COUNTER,
    _SUBJECT,
    "Messages stored for producers, as master; a retry counts once.",
)
STORED_BYTES: Final = Figure(
    "qmq_stored_bytes_total",
    COUNTER,
    _SUBJECT,
    "Bytes of those messages' batches in the message log.",
)
STORED_BATCHES: Final = Figure(
    "qmq_stored_batches_total", COUNTER, _SUBJECT, "Those messages' batches."
)
KEPT: Final = Figure(
    "qmq_kept_messages",
    GAUGE,
    _SUBJECT,
    "Stored messages that retention has not deleted yet, on this replica.",
)


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
        yield Reading(
            REFUSED, [((group, name), count) for name, count in sorted(counters.refused.items())]
        )
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
            kept[queue.id.subject] = kept.get(queue.id.subject, 0) + max(
                queue.visible_sequence - queue.start_sequence, 0
            )
            if number % SLICE == 0:
                yield None
        yield Reading(KEPT, rows_of([(self._group, subject) for subject in kept], kept.values()))
        yield None


LOG_BYTES: Final = Figure(
    "qmq_log_bytes", GAUGE, (*_OF, "log"), "Bytes that the message log and the action log hold."
)
DISK_FREE: Final = Figure(
    "qmq_disk_free_bytes", GAUGE, _OF, "Free bytes of the disk that has the logs."
)
DISK_RESERVED: Final = Figure(
    "qmq_disk_reserved_bytes",
    GAUGE,
    _OF,
    "Bytes reserved for acknowledgements: with less free, the broker refuses messages.",
)
UNFLUSHED_AGE: Final = Figure(
    "qmq_unflushed_age_seconds",
    GAUGE,
    _OF,
    "Age of the oldest entry that a power cut here would lose; 0 if there is none.",
)
UNFLUSHED_BYTES: Final = Figure(
    "qmq_unflushed_bytes", GAUGE, _OF, "Bytes of both logs that a power cut here would lose."
)
FLUSH: Final = Figure("qmq_flush_seconds", HISTOGRAM, _OF, "Duration of flushes of both logs.")
COMMIT: Final = Figure(
    "qmq_commit_seconds",
    HISTOGRAM,
    _OF,
    (
        "Time from the master's write to the commit, of each write; none on a single node, which "
        "commits at once."
    ),
)
CHECKPOINTS: Final = Figure("qmq_checkpoints_total", COUNTER, _OF, "Checkpoints written.")
CHECKPOINT_AT: Final = Figure(
    "qmq_checkpoint_timestamp_seconds",
    GAUGE,
    _OF,
    "Time of the last checkpoint, in seconds since 1970; 0 before the first.",
)
DELETED: Final = Figure(
    "qmq_retention_deleted_files_total", COUNTER, _OF, "Files that retention deleted."
)
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
    (
        "How far the time by which retention counts is behind the machine's clock, which nobody "
        "has confirmed; normally 0."
    ),
)
UNREADABLE: Final = Figure(
    "qmq_unreadable_blocks_total",
    COUNTER,
    _OF,
    "Blocks of the logs that the disk could not read (EIO); each attempt counts.",
)
DAMAGED: Final = Figure(
    "qmq_scrub_damaged_entries_total", COUNTER, _OF, "Entries that the scrubber found damaged."
)


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
        yield Reading(
            LOG_BYTES,
            [
                ((group, names[number]), each.end - each.start)
                for number, each in enumerate(store.logs)
            ],
        )
        yield one(DISK_FREE, store.disk.free_bytes(store.folder), group)
        yield one(DISK_RESERVED, store.config.disk_free_bytes_min, group)
        yield one(
            UNFLUSHED_AGE,
            0 if store.is_flushed else store.unflushed.age_ms(store.clock.monotonic_ms()) / 1000,
            group,
        )
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
    "qmq_object_store_bytes",
    GAUGE,
    _OF,
    "Bytes of sealed segments that are in the object store, read back and checked.",
)
STORE_WAITING: Final = Figure(
    "qmq_object_store_waiting_bytes",
    GAUGE,
    _OF,
    "Bytes of sealed segments that are not known to be in the object store yet.",
)
COPIED: Final = Figure(
    "qmq_object_store_copied_bytes_total",
    COUNTER,
    _OF,
    "Bytes that this replica put into the object store.",
)
STORE_DELETED: Final = Figure(
    "qmq_object_store_deleted_segments_total",
    COUNTER,
    _OF,
    "Segments that this replica deleted from the object store.",
)
FAILURES: Final = Figure(
    "qmq_object_store_failures_total",
    COUNTER,
    (*_OF, "reason"),
    (
        "Steps that failed: the store is `away`, it has other bytes (`conflict`), the local "
        "segment is `damaged`."
    ),
)
READ: Final = Figure(
    "qmq_object_store_read_bytes_total",
    COUNTER,
    _OF,
    "Bytes of chunks that were read from the object store for readers.",
)
READ_FAILURES: Final = Figure(
    "qmq_object_store_read_failures_total",
    COUNTER,
    _OF,
    "Chunks that could not be read from the object store; they are asked for again.",
)
STORE_DAMAGED: Final = Figure(
    "qmq_object_store_damaged_chunks",
    GAUGE,
    _OF,
    "Chunks of the log that the object store has lost or changed, as far as readers noticed.",
)
CACHED: Final = Figure(
    "qmq_object_store_cache_bytes", GAUGE, _OF, "Bytes of the chunks in the cache on the disk."
)
LOCAL: Final = Figure(
    "qmq_log_local_bytes", GAUGE, _OF, "Bytes of the message log that are on this disk."
)


class TieringSource:
    """The source of a broker that has an object store."""

    figures: Final = (
        STORE_BYTES,
        STORE_WAITING,
        COPIED,
        STORE_DELETED,
        FAILURES,
        READ,
        READ_FAILURES,
        STORE_DAMAGED,
        CACHED,
        LOCAL,
    )

    def __init__(
        self, copier: SegmentCopier, stored: StoredReads, log: Callable[[], Segments], group: str
    ) -> None:
        """`log` returns the message log."""
        self._copier = copier
        self._stored = stored
        self._log = log
        self._group = group

    def read(self) -> Iterator[Reading | None]:
        catalog, counters, group = self._copier.catalog, self._copier.counters, self._group
        yield one(STORE_BYTES, sum(each.size for each in catalog.stored), group)
        yield one(STORE_WAITING, sum(each.size for each in catalog.noted), group)
        yield one(COPIED, counters.copied_bytes, group)
        yield one(STORE_DELETED, counters.deleted_segments, group)
        yield Reading(
            FAILURES, [((group, reason), count) for reason, count in counters.failures.items()]
        )
        yield one(READ, self._stored.counters.fetched_bytes, group)
        yield one(READ_FAILURES, self._stored.counters.failures, group)
        yield one(STORE_DAMAGED, len(self._log().damaged_objects()), group)
        yield one(CACHED, self._stored.cached_bytes, group)
        yield one(LOCAL, self._log().local_bytes, group)


_GROUP: Final = ("broker_group", "subject", "group")

LAG: Final = Figure(
    "qmq_group_lag_messages",
    GAUGE,
    _GROUP,
    (
        "Messages that the group has not settled; of an ordered subject, all from the oldest "
        "unsettled one on."
    ),
)
LAG_S: Final = Figure(
    "qmq_group_lag_seconds",
    GAUGE,
    _GROUP,
    "Age of the oldest message that the group has not settled; 0 if there is none.",
)
UNACKED: Final = Figure(
    "qmq_group_unacked_messages",
    GAUGE,
    _GROUP,
    "Messages that were handed to the group's consumers and are not settled yet.",
)
REQUEUED: Final = Figure(
    "qmq_group_requeued_messages",
    GAUGE,
    _GROUP,
    "Returned messages that wait to be handed out again.",
)
DYING: Final = Figure(
    "qmq_group_dying_messages", GAUGE, _GROUP, "Messages on their way to the dead-letter queue."
)
CONSUMERS: Final = Figure(
    "qmq_group_consumers",
    GAUGE,
    _GROUP,
    "Consumers with a valid lease; of an ordered subject, lanes that consumers hold.",
)
WAITING_PULLS: Final = Figure(
    "qmq_group_waiting_pulls",
    GAUGE,
    _GROUP,
    "Pulls that wait for messages, or for room in the connection.",
)
PARKED_KEYS: Final = Figure(
    "qmq_group_parked_keys",
    GAUGE,
    _GROUP,
    "Keys of an ordered subject that the group has set aside.",
)
PARKED: Final = Figure("qmq_group_parked_messages", GAUGE, _GROUP, "Messages of those keys.")
PAUSED: Final = Figure(
    "qmq_group_paused", GAUGE, _GROUP, "1 if an operator paused the group: it gets no messages."
)

PULLED: Final = Figure("qmq_pulled_messages_total", COUNTER, _GROUP, "Messages handed out.")
PULLED_BYTES: Final = Figure(
    "qmq_pulled_bytes_total", COUNTER, _GROUP, "Bytes of the batches that contain these messages."
)
RETRIED: Final = Figure(
    "qmq_retried_messages_total",
    COUNTER,
    _GROUP,
    "Messages handed out again after an earlier attempt.",
)
FILTERED: Final = Figure(
    "qmq_filtered_messages_total",
    COUNTER,
    _GROUP,
    "Messages that the tags of the group's consumers left out: they count as done.",
)
ACKED: Final = Figure(
    "qmq_acked_messages_total", COUNTER, _GROUP, "Messages that consumers acknowledged."
)
NACKED: Final = Figure(
    "qmq_nacked_messages_total", COUNTER, _GROUP, "Messages that consumers reported as failed."
)
RELEASED: Final = Figure(
    "qmq_released_messages_total",
    COUNTER,
    _GROUP,
    "Messages that consumers returned without having worked on them.",
)
DEAD: Final = Figure(
    "qmq_dead_messages_total",
    COUNTER,
    _GROUP,
    "Messages that failed for good: they go to the group's dead-letter queue.",
)
UNCOPIED: Final = Figure(
    "qmq_dead_messages_uncopied_total",
    COUNTER,
    _GROUP,
    "Dead messages without a copy in the dead-letter queue: the log says why.",
)
LEASES_LOST: Final = Figure(
    "qmq_leases_lost_total",
    COUNTER,
    _GROUP,
    "Leases of consumers, and of lanes, that ended because the consumer was silent.",
)
GRANTED: Final = Figure(
    "qmq_lanes_granted_total",
    COUNTER,
    _GROUP,
    "Lanes of ordered subjects that were granted to consumers.",
)

_TALLIES: Final[tuple[tuple[Figure, Callable[[GroupCounters], int]], ...]] = (
    (PULLED, lambda counters: counters.pulled),
    (PULLED_BYTES, lambda counters: counters.pulled_bytes),
    (RETRIED, lambda counters: counters.retried),
    (FILTERED, lambda counters: counters.filtered),
    (ACKED, lambda counters: counters.acked),
    (NACKED, lambda counters: counters.nacked),
    (RELEASED, lambda counters: counters.released),
    (DEAD, lambda counters: counters.dead),
    (UNCOPIED, lambda counters: counters.uncopied),
    (LEASES_LOST, lambda counters: counters.leases_lost),
    (GRANTED, lambda counters: counters.lanes_granted),
)
Names = tuple[str, str]
"""A subject and a group."""


@dataclass(slots=True)
class Behind:
    """The lag of a group on a subject."""

    lag: int = 0
    lag_s: float = 0.0
    unacked: int = 0
    requeued: int = 0
    dying: int = 0
    consumers: int = 0
    waiting: int = 0
    parked_keys: int = 0
    parked: int = 0
    is_paused: bool = False


_BEHIND: Final[tuple[tuple[Figure, Callable[[Behind], float]], ...]] = (
    (LAG, lambda each: each.lag),
    (LAG_S, lambda each: each.lag_s),
    (UNACKED, lambda each: each.unacked),
    (REQUEUED, lambda each: each.requeued),
    (DYING, lambda each: each.dying),
    (CONSUMERS, lambda each: each.consumers),
    (WAITING_PULLS, lambda each: each.waiting),
    (PARKED_KEYS, lambda each: each.parked_keys),
    (PARKED, lambda each: each.parked),
    (PAUSED, lambda each: each.is_paused),
)


_READER: Final = ("broker_group", "subject", "reader")

READER_LAG: Final = Figure(
    "qmq_reader_lag_messages",
    GAUGE,
    _READER,
    "Kept messages that the reader, a streaming query of Spark, has not read and committed.",
)
READER_LAG_S: Final = Figure(
    "qmq_reader_lag_seconds",
    GAUGE,
    _READER,
    "Age of the oldest message that the reader has not read; 0 if there is none.",
)
READER_READ: Final = Figure(
    "qmq_reader_read_messages_total", COUNTER, _READER, "Messages that the reader passed."
)
READER_COMMITTED: Final = Figure(
    "qmq_reader_committed_seconds",
    GAUGE,
    _READER,
    "Time since the reader last committed messages, as far as this master knows.",
)
READER_SILENT: Final = Figure(
    "qmq_reader_silent_seconds", GAUGE, _READER, "Time since the reader's last report."
)
READER_LOST: Final = Figure(
    "qmq_reader_lost_messages",
    GAUGE,
    _READER,
    "Messages that were deleted before the reader read them, since it began.",
)
READER_NEAR_LOSS: Final = Figure(
    "qmq_reader_near_loss",
    GAUGE,
    _READER,
    (
        "1 if messages that the reader has not read are deleted, or soon will be: less than a "
        "tenth of what retention keeps is left."
    ),
)


@dataclass(slots=True)
class ReaderFigures:
    """A reader on a subject, over all its partitions here."""

    lag: int = 0
    lag_s: float = 0.0
    read: int = 0
    committed_s: float = float("inf")
    silent_s: float = 0.0
    lost: int = 0
    is_near_loss: bool = False


_READERS: Final[tuple[tuple[Figure, Callable[[ReaderFigures], float]], ...]] = (
    (READER_LAG, lambda each: each.lag),
    (READER_LAG_S, lambda each: each.lag_s),
    (READER_READ, lambda each: each.read),
    (READER_COMMITTED, lambda each: each.committed_s),
    (READER_SILENT, lambda each: each.silent_s),
    (READER_LOST, lambda each: each.lost),
    (READER_NEAR_LOSS, lambda each: each.is_near_loss),
)


class GroupsSource:
    """`group` is the broker group's name."""

    figures: Final = tuple(figure for figure, _ in (*_BEHIND, *_TALLIES, *_READERS))

    def __init__(self, broker: Broker, group: str) -> None:
        self._broker = broker
        self._group = group

    def read(self) -> Iterator[Reading | None]:
        if self._broker.is_serving:
            yield from self._behind()
            yield from _readers(self._broker, self._group)
        yield from self._counted()

    def _behind(self) -> Iterator[Reading | None]:
        found: dict[Names, Behind] = {}
        now_ms = self._broker.clock.time_ms()
        for number, state in enumerate(self._broker.dispatch.groups):
            names = (state.queue.id.subject, base_group(state.name))
            _add_share(found.setdefault(names, Behind()), state, now_ms)
            if number % SLICE == 0:
                yield None
        for queue in [each for each in self._broker.store.queues.values() if each.lanes]:
            for name, lanes in list(queue.lanes.items()):
                _add_lanes(
                    found.setdefault((queue.id.subject, name), Behind()), queue, lanes, now_ms
                )
            yield None
        for names in self._broker.lanes.waiting():
            found.setdefault(names, Behind()).waiting += 1
        yield None
        for names, each in found.items():
            each.is_paused = self._broker.rules.is_paused(*names, "", "")
        labels, ordered = self._labels(found), list(found.values())
        yield None
        for figure, of in _BEHIND:
            yield Reading(figure, rows_of(labels, map(of, ordered)))
            yield None

    def _labels(self, found: Iterable[Names]) -> list[tuple[str, ...]]:
        return [(self._group, *names) for names in found]

    def _counted(self) -> Iterator[Reading | None]:
        counters = self._broker.counters
        found = dict(counters.groups)
        labels = self._labels(found)
        for figure, of in _TALLIES:
            yield Reading(figure, rows_of(labels, map(of, found.values())))
            yield None


def _add_share(behind: Behind, state: QueueGroup, now_ms: int) -> None:
    queue, share = state.queue, state.share
    unacked, requeued, dying = share.unacked(), share.waiting_again(), share.dying_messages()
    behind.lag += (
        max(queue.visible_sequence - max(share.next_sequence, queue.start_sequence), 0)
        + unacked
        + requeued
        + dying
    )
    behind.lag_s = max(behind.lag_s, _lag_s(queue, share.settled_before(), now_ms))
    behind.unacked += unacked
    behind.requeued += requeued
    behind.dying += dying
    behind.consumers += len(share.holders)
    behind.waiting += len(state.waiters)


def _add_lanes(behind: Behind, queue: Queue, lanes: GroupLaneState, now_ms: int) -> None:
    behind.consumers += len(lanes.holders)
    behind.parked_keys += sum([bool(parked.sequences) for parked in lanes.parked.values()])
    behind.parked += sum([len(parked.sequences) for parked in lanes.parked.values()])
    if not lanes.progress:
        return
    done_before = lanes.done_before()
    behind.lag += max(messages_end(queue) - max(done_before, queue.start_sequence), 0)
    behind.lag_s = max(behind.lag_s, _lag_s(queue, done_before, now_ms))


def _lag_s(queue: Queue, done_before: int, now_ms: int) -> float:
    try:
        return lag_ms(queue, done_before, now_ms) / 1000
    except LogDamaged:
        return 0.0  # consumers of the queue get the error


def _readers(broker: Broker, group: str) -> Iterator[Reading | None]:
    """The readers without a group."""
    found: dict[Names, ReaderFigures] = {}
    for number, (queue, reader) in enumerate(reported_readers(broker)):
        with suppress(LogDamaged):  # who reads the queue gets the error
            told = describe_reader(broker, group, queue, reader)
            names = told.subject, told.reader
            _add_reader(found.setdefault(names, ReaderFigures()), told, reader.read)
        if number % SLICE == 0:
            yield None
    labels = [(group, *names) for names in found]
    for figure, of in _READERS:
        yield Reading(figure, rows_of(labels, map(of, found.values())))
        yield None


def _add_reader(figures: ReaderFigures, told: Reader, read: int) -> None:
    figures.lag += told.waiting
    figures.lag_s = max(figures.lag_s, told.lag_ms / 1000)
    figures.read += read
    figures.committed_s = min(figures.committed_s, told.committed_ms_ago / 1000)
    figures.silent_s = max(figures.silent_s, told.seen_ms_ago / 1000)
    figures.lost += told.lost
    figures.is_near_loss |= told.is_near_loss


PENDING: Final = Figure(
    "qmq_delay_pending_messages",
    GAUGE,
    _OF,
    "Delayed messages that are neither delivered, cancelled nor moved.",
)
BUCKETS: Final = Figure("qmq_delay_buckets", GAUGE, _OF, "Buckets of the schedule that are kept.")
SCHEDULE_BYTES: Final = Figure(
    "qmq_delay_schedule_bytes", GAUGE, _OF, "Bytes of the buckets' files."
)
WHEEL: Final = Figure(
    "qmq_delay_wheel_messages",
    GAUGE,
    _OF,
    "Messages in the wheel: due before the horizon, in memory.",
)
WHEEL_BYTES: Final = Figure("qmq_delay_wheel_bytes", GAUGE, _OF, "Memory that the wheel uses.")
HORIZON: Final = Figure(
    "qmq_delay_horizon_timestamp_seconds",
    GAUGE,
    _OF,
    "The horizon: messages due before it are in the wheel; seconds since 1970.",
)
DUE: Final = Figure(
    "qmq_delay_waiting_messages",
    GAUGE,
    _OF,
    "Due messages that are not planned yet, including late ones.",
)
PLANNED: Final = Figure(
    "qmq_delay_planned_messages",
    GAUGE,
    _OF,
    "Messages in plans: on their way to the real-time brokers.",
)
TROUBLED: Final = Figure(
    "qmq_delay_troubled_messages",
    GAUGE,
    (*_OF, "subject"),
    "Due messages of a subject that cannot be delivered now.",
)
UNREADABLE_MESSAGES: Final = Figure(
    "qmq_delay_unreadable_messages",
    GAUGE,
    _OF,
    "Due messages that cannot be read: the schedule is damaged there.",
)
SET_ASIDE: Final = Figure(
    "qmq_delay_set_aside_messages",
    GAUGE,
    _OF,
    "Due messages that cannot be delivered and are set aside: the log names them.",
)
DISPATCHED: Final = Figure(
    "qmq_delay_dispatched_messages_total", COUNTER, _OF, "Messages delivered to real-time brokers."
)
CANCELLED: Final = Figure(
    "qmq_delay_cancelled_messages_total", COUNTER, _OF, "Messages that were cancelled."
)
MOVED: Final = Figure(
    "qmq_delay_moved_messages_total", COUNTER, _OF, "Messages that were moved to another due time."
)
LATENESS: Final = Figure(
    "qmq_delay_lateness_seconds",
    HISTOGRAM,
    _OF,
    "Time from a message's due time until it was stored at a real-time broker.",
)
CLOCK_STEP: Final = Figure(
    "qmq_delay_clock_step_seconds",
    GAUGE,
    _OF,
    "Difference between the machine's clock and the kept time; 0 while the clock is trusted.",
)


class DelaySource:
    figures: Final = (
        PENDING,
        BUCKETS,
        SCHEDULE_BYTES,
        WHEEL,
        WHEEL_BYTES,
        HORIZON,
        DUE,
        PLANNED,
        TROUBLED,
        UNREADABLE_MESSAGES,
        SET_ASIDE,
        DISPATCHED,
        CANCELLED,
        MOVED,
        LATENESS,
        CLOCK_STEP,
    )

    def __init__(self, broker: Broker, work: DelayWork, group: str) -> None:
        self._broker = broker
        self._work = work
        self._group = group

    def read(self) -> Iterator[Reading | None]:
        work, group = self._work, self._group
        buckets = schedule_of(self._broker.store).buckets()
        yield one(PENDING, sum([each.pending for each in buckets]), group)
        yield one(BUCKETS, len(buckets), group)
        yield one(SCHEDULE_BYTES, sum([each.stored_bytes for each in buckets]), group)
        yield None
        yield from self._of_engine()
        yield one(CANCELLED, work.admin.cancelled, group)
        yield one(MOVED, work.admin.moved, group)
        yield one(
            CLOCK_STEP, work.timekeeper.step_ms / 1000 if work.timekeeper is not None else 0, group
        )

    def _of_engine(self) -> Iterator[Reading | None]:
        engine, group = self._work.engine, self._group
        if engine is None:
            return
        lateness = engine.plan_log.lateness
        yield one(WHEEL, len(engine.wheel), group)
        yield one(WHEEL_BYTES, engine.wheel.nbytes, group)
        if engine.loader.horizon_ms > 0:  # the engine has begun
            yield one(HORIZON, engine.loader.horizon_ms / 1000, group)
        yield one(DUE, engine.waiting, group)
        yield one(PLANNED, engine.dispatcher.planned, group)
        yield Reading(
            TROUBLED,
            [((group, subject), count) for subject, count, _ in engine.dispatcher.troubles()],
        )
        yield one(UNREADABLE_MESSAGES, len(engine.damaged), group)
        yield one(SET_ASIDE, engine.dispatcher.set_aside, group)
        yield one(DISPATCHED, lateness.delivered, group)
        yield one(LATENESS, lateness.histogram(), group)
