"""The destinations of a delay group: it accepts delayed batches of all subjects, each into the subject's queue.

Before a batch is stored, its due times, the flag of ordered subjects, required keys, and the recurrence of recurring messages are checked.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final

import numpy as np
from qmq_coordination.broker_groups import DelaySettings

from qmq.batch import BatchView, Envelope
from qmq.batch_columns import BatchFlag, Layout, RegionHeader
from qmq.broker.destinations import FindSubject
from qmq.broker.produce_checks import CheckDueTimes, Destination
from qmq.delay.delay_admin import check_due
from qmq.delay.recurrence import check as check_recurrence
from qmq.errors import InvalidArgument, OrderMismatch, Overloaded
from qmq.headers import CRON, SCHEDULE_ID, ZONE
from qmq.log.store import Store
from qmq.model import Order, SubjectConfig, SubjectFlush

_ORDERED: Final = int(BatchFlag.ORDERED)
_RECURRING: Final = int(BatchFlag.RECURRING)
_HALF: Final = int(BatchFlag.HALF)


class DelayDestinations:
    """`full_buckets` returns the buckets that take no more messages."""

    def __init__(self, settings: DelaySettings, now_ms: Callable[[], int], full_buckets: Callable[[], Collection[int]]) -> None:
        self._settings = settings
        self._now_ms = now_ms
        self._full_buckets = full_buckets

    def find(self, store: Store, find_subject: FindSubject, subject: bytes, partition: int) -> Destination:
        try:
            config = find_subject(subject.decode())
        except UnicodeDecodeError:
            raise InvalidArgument("a subject must be UTF-8") from None
        if partition != 0:
            raise InvalidArgument(f"a delayed message has no partition yet: {partition} was named")
        queue, awaits_flush = store.open_queue(config.name, 0), config.flush is SubjectFlush.SYNC
        return Destination(queue, config.body_bytes_max, check_due_times=self._check_of(config), awaits_flush=awaits_flush)

    def _check_of(self, config: SubjectConfig) -> CheckDueTimes:
        is_ordered = config.order is not Order.NONE

        def check(region: bytes, header: RegionHeader, layout: Layout) -> None:
            if layout.due < 0:
                raise InvalidArgument("a delay group takes only delayed messages: send this one to the subject's broker group")
            now_ms = self._now_ms()
            check_due(latest_due(region, header, layout), now_ms, self._settings.delay_ms_max)
            if header.compression:
                raise InvalidArgument("a delayed batch is cut by due time, so its bodies must not be compressed: compress each, if need be")
            self._require_room(region, header, layout)
            if bool(header.flags & _ORDERED) != is_ordered:
                raise OrderMismatch(f"subject {config.name!r} is {'' if is_ordered else 'not '}ordered, and the batch says otherwise")
            if is_ordered and layout.key < 0:
                raise OrderMismatch(f"messages to the ordered subject {config.name!r} need keys")
            if header.flags & _RECURRING:
                if header.flags & _HALF:
                    raise InvalidArgument("a recurring message cannot wait for a decision: send it when it is decided")
                check_recurring(region, header)
            if header.flags & _HALF and earliest_due(region, header, layout) <= now_ms:
                raise InvalidArgument(
                    "the half message would be rolled back at once: its limit has passed by the delay group's time (check the clock)"
                )

        return check

    def _require_room(self, region: bytes, header: RegionHeader, layout: Layout) -> None:
        full_buckets, bucket_ms = self._full_buckets(), self._settings.bucket_ms
        if not full_buckets:
            return
        wanted = set((np.frombuffer(region, "<i8", header.count, layout.due) // bucket_ms).tolist())
        full = wanted.intersection(full_buckets)
        if full:
            raise Overloaded(
                f"the hour that begins at {min(full) * bucket_ms} ms is full: send to another delay "
                "group, or create one with shorter buckets"
            )


def earliest_due(region: bytes, header: RegionHeader, layout: Layout) -> int:
    """The earliest due time of a batch."""
    return int(np.frombuffer(region, "<i8", header.count, layout.due).min())


def latest_due(region: bytes, header: RegionHeader, layout: Layout) -> int:
    """The latest due time of a batch; a negative one if the batch has any."""
    due_times_ms = np.frombuffer(region, "<i8", header.count, layout.due)
    earliest = int(due_times_ms.min())
    return earliest if earliest < 0 else int(due_times_ms.max())


def check_recurring(region: bytes, header: RegionHeader) -> None:
    """Raises InvalidArgument."""
    headers = BatchView(Envelope(0, 0, 0, -1, 0, 0, 0, 0), region).headers()
    if header.count != 1 or headers is None or CRON not in headers[0] or ZONE not in headers[0] or SCHEDULE_ID in headers[0]:
        raise InvalidArgument(f"a recurring message must be alone in its batch, with the headers {CRON} and {ZONE}")
    try:
        check_recurrence(headers[0][CRON].decode(), headers[0][ZONE].decode())
    except UnicodeDecodeError:
        raise InvalidArgument(f"{CRON} and {ZONE} must be UTF-8") from None
