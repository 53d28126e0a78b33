"""The metrics of a broker's segments in an object store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from qmq.log.segments import Segments
from qmq.metrics.figures import COUNTER, GAUGE, Figure, Reading, one
from qmq.tiering.segment_copier import SegmentCopier
from qmq.tiering.stored_reads import StoredReads

_OF: Final = ("broker_group",)

STORED: Final = Figure(
    "qmq_object_store_bytes", GAUGE, _OF, "Bytes of sealed segments that are in the object store, read back and checked."
)
WAITING: Final = Figure(
    "qmq_object_store_waiting_bytes", GAUGE, _OF, "Bytes of sealed segments that are not known to be in the object store yet."
)
COPIED: Final = Figure("qmq_object_store_copied_bytes_total", COUNTER, _OF, "Bytes that this replica put into the object store.")
DELETED: Final = Figure(
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
DAMAGED: Final = Figure(
    "qmq_object_store_damaged_chunks", GAUGE, _OF, "Chunks of the log that the object store has lost or changed, as far as readers noticed."
)
CACHED: Final = Figure("qmq_object_store_cache_bytes", GAUGE, _OF, "Bytes of the chunks in the cache on the disk.")
LOCAL: Final = Figure("qmq_log_local_bytes", GAUGE, _OF, "Bytes of the message log that are on this disk.")


class TieringSource:
    """The source of a broker that has an object store."""

    figures: Final = (STORED, WAITING, COPIED, DELETED, FAILURES, READ, READ_FAILURES, DAMAGED, CACHED, LOCAL)

    def __init__(self, copier: SegmentCopier, stored: StoredReads, log: Callable[[], Segments], group: str) -> None:
        """`log` returns the message log."""
        self._copier = copier
        self._stored = stored
        self._log = log
        self._group = group

    def read(self) -> Iterator[Reading | None]:
        catalog, counters, group = self._copier.catalog, self._copier.counters, self._group
        yield one(STORED, sum(each.size for each in catalog.stored), group)
        yield one(WAITING, sum(each.size for each in catalog.noted), group)
        yield one(COPIED, counters.copied_bytes, group)
        yield one(DELETED, counters.deleted_segments, group)
        yield Reading(FAILURES, [((group, reason), count) for reason, count in counters.failures.items()])
        yield one(READ, self._stored.counters.fetched_bytes, group)
        yield one(READ_FAILURES, self._stored.counters.failures, group)
        yield one(DAMAGED, len(self._log().damaged_objects()), group)
        yield one(CACHED, self._stored.cached_bytes, group)
        yield one(LOCAL, self._log().local_bytes, group)
