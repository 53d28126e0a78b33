"""A delay group's files as of its newest checkpoint: the buckets, the lengths of their files, and the open plans. Pure.

Files only grow, and bytes after these lengths do not count (docs/FORMAT.md). So a folder can be read while its server works,
and two reads with one state give the same rows.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from struct import Struct, error
from typing import Any, Final, NamedTuple

import msgspec
from google_crc32c import value as crc32c

from qmq.errors import CorruptBatch, LogDamaged
from qmq.log.actions import PlanAction, decode_actions
from qmq.log.checked_payload import UNREADABLE

VERSION: Final = 1
ROW_BYTES: Final = 16
"""Of a line of `.idx`."""
_BUCKET: Final = Struct("<iQIQI")
_MARK_MAGIC: Final = b"QMS1"


class BucketFiles(NamedTuple):
    """One bucket: `name` is that of its files, without suffix."""

    name: str
    number: int
    begin_ms: int
    log_bytes: int
    messages: int
    done_bytes: int
    planned: tuple[bytes, ...] = ()
    """Ordinals in open plans, u32 each."""


@dataclass(frozen=True, slots=True)
class ScheduleContents:
    """The files and open plans of one delay group."""

    index: int
    """Of the newest entry that it knows."""
    buckets: tuple[BucketFiles, ...]
    """Ascending."""


def of_checkpoint(projection: Any) -> ScheduleContents:
    """A checkpoint's projection, as MessagePack decodes it. Raises LogDamaged if this program does not know its version."""
    try:
        version, bucket_ms, index, _, _, plans, _, buckets, *_ = projection
        if version != VERSION:
            raise LogDamaged(
                f"the schedule has version {version}, this program supports {VERSION}: use a release as new as the delay group's"
            )
        planned: dict[int, list[bytes]] = {}
        for plan in decode_actions(plans):
            for number, ordinals in plan.items if isinstance(plan, PlanAction) else ():
                planned.setdefault(number, []).append(ordinals)
        rows = [
            BucketFiles(name_of(number, bucket_ms), number, number * bucket_ms, log, messages, done, tuple(planned.get(number, ())))
            for number, log, messages, done, _ in _BUCKET.iter_unpack(buckets)
        ]
    except (TypeError, ValueError, OverflowError, OSError, error, CorruptBatch) as cause:
        raise LogDamaged(f"the checkpoint's schedule cannot be read ({cause})") from cause
    return ScheduleContents(index, tuple(rows))


def of_mark(data: bytes) -> ScheduleContents | None:
    """Parse the file `adopted.qms`, which describes schedule files that came from another replica. None if it is incomplete."""
    if data[:4] != _MARK_MAGIC or int(crc32c(data[8:])).to_bytes(4, "little") != data[4:8]:
        return None
    try:
        projection = msgspec.msgpack.decode(data[8:])
    except UNREADABLE as cause:
        raise LogDamaged(f"the mark of the schedule's files cannot be read ({cause})") from cause
    return of_checkpoint(projection)


def name_of(bucket: int, bucket_ms: int) -> str:
    """The name of a bucket's files: the bucket's beginning in UTC."""
    return time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(bucket * bucket_ms // 1000))
