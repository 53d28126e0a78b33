"""The copies of a broker's segments in an object store."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from qmq.metrics.figures import COUNTER, GAUGE, Figure, Reading, one
from qmq.tiering.segment_copier import SegmentCopier

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


class TieringSource:
    """Exists if the broker has an object store."""

    figures: Final = (STORED, WAITING, COPIED, DELETED, FAILURES)

    def __init__(self, copier: SegmentCopier, group: str) -> None:
        self._copier = copier
        self._group = group

    def read(self) -> Iterator[Reading | None]:
        catalog, counters, group = self._copier.catalog, self._copier.counters, self._group
        yield one(STORED, sum(each.size for each in catalog.stored), group)
        yield one(WAITING, sum(each.size for each in catalog.noted), group)
        yield one(COPIED, counters.copied_bytes, group)
        yield one(DELETED, counters.deleted_segments, group)
        yield Reading(FAILURES, [((group, reason), count) for reason, count in counters.failures.items()])
