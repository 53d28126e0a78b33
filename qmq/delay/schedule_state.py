"""The state of a schedule in a checkpoint: lengths of files, open plans, aliases, and how many messages of each subject are pending; and
the plan that writes a checkpoint. Pure, except for that and the mark of an adopted schedule.

A schedule that came from another replica has a *mark* in its folder: the state of its files. The mark counts until one of this replica's
own checkpoints contains a schedule.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from typing import Any, Final, cast

import msgspec

from qmq.delay.append_files import AppendFiles, Grown
from qmq.delay.bucket import DONE, IDX, LOG, ROW_BYTES, Bucket, name_of
from qmq.delay.interfaces import SchedulePlace
from qmq.errors import LogDamaged
from qmq.log.actions import PlanAction, decode_actions, encode_actions
from qmq.log.checked_payload import UNREADABLE, checked_payload, with_checksum
from qmq.log.disk import Disk

VERSION: Final = 1
MARK_FILE: Final = "adopted.qms"
_MAGIC: Final = b"QMS1"
_BUCKET_ROW: Final = Struct("<iQIQI")
"""bucket, log_bytes, count, done_bytes, settled"""
_ALIAS_ROW: Final = Struct("<16siI")
_ALIASED: Final = Struct("<iI")


class ScheduleState(msgspec.Struct, array_like=True):
    """Everything about a schedule except the content of its files. `buckets` and `aliases` are packed: see FORMAT.md."""

    version: int
    bucket_ms: int
    index: int
    closed_before: int
    next_plan: int
    plans: bytes
    """The open plans, in the form of an action log entry."""
    aliases: bytes
    buckets: bytes
    pending: dict[str, int] = {}
    """Undelivered messages by subject; a state of an older version has none."""

    def open_plans(self) -> dict[int, PlanAction]:
        """By number, ascending."""
        return {each.number: each for each in decode_actions(self.plans) if isinstance(each, PlanAction)}

    def places_by_id(self) -> dict[bytes, SchedulePlace]:
        return {each: SchedulePlace(bucket, ordinal) for each, bucket, ordinal in _ALIAS_ROW.iter_unpack(self.aliases)}

    def rows(self) -> Iterator[tuple[int, int, int, int, int]]:
        """(bucket, log_bytes, count, done_bytes, settled), ascending."""
        return cast("Iterator[tuple[int, int, int, int, int]]", _BUCKET_ROW.iter_unpack(self.buckets))

    def lengths(self) -> list[tuple[str, int]]:
        """The files with their lengths; empty files are left out."""
        found: list[tuple[str, int]] = []
        for bucket, log_bytes, count, done_bytes, _ in self.rows():
            name = name_of(bucket, self.bucket_ms)
            found += ((name + LOG, log_bytes), (name + IDX, count * ROW_BYTES))
            if done_bytes:
                found.append((name + DONE, done_bytes))
        return found


def capture(
    bucket_ms: int,
    index: int,
    closed_before: int,
    next_plan: int,
    plans: Iterable[PlanAction],
    aliases: dict[bytes, SchedulePlace],
    buckets: Iterable[Bucket],
    pending: dict[str, int],
) -> ScheduleState:
    """The current state, independent of later changes."""
    rows = [_BUCKET_ROW.pack(each.number, each.log.end, each.count, each.done.end, each.settled) for each in buckets]
    names = [each + _ALIASED.pack(*place) for each, place in aliases.items()]
    packed = encode_actions(plans), b"".join(names), b"".join(rows)
    return ScheduleState(VERSION, bucket_ms, index, closed_before, next_plan, *packed, pending)


def restore(bucket_ms: int | None, state: Any) -> ScheduleState:
    """A state from a checkpoint or another replica. Raises LogDamaged if it does not fit this schedule (None: any)."""
    if isinstance(state, ScheduleState):
        return state
    try:
        found = msgspec.convert(state, ScheduleState)
    except UNREADABLE as cause:
        raise LogDamaged(f"the checkpoint's schedule cannot be read ({cause}): delete the checkpoint") from cause
    if found.version != VERSION:
        raise LogDamaged(f"the schedule has version {found.version}, this program supports {VERSION}: use the program that wrote it")
    if bucket_ms not in (None, found.bucket_ms):
        raise LogDamaged(
            f"the schedule's buckets last {found.bucket_ms} ms, not {bucket_ms}: a delay group's bucket length is fixed when it is created"
        )
    return found


def read_mark(folder: Path, bucket_ms: int) -> ScheduleState | None:
    """The mark of an adopted schedule; None without a valid one."""
    try:
        data = (folder / MARK_FILE).read_bytes()
    except FileNotFoundError:
        return None
    payload = checked_payload(_MAGIC, data)
    if payload is None:
        return None
    try:
        state = msgspec.msgpack.decode(payload)
    except UNREADABLE:
        return None
    return restore(bucket_ms, state)


def write_mark(disk: Disk, folder: Path, state: bytes) -> None:
    """Mark the folder's files as those of `state` (MessagePack). Raises DiskFull, FlushFailed."""
    disk.replace(folder / MARK_FILE, with_checksum(_MAGIC, state))


class PendingCounts:
    """How many messages of each subject a delay group still has to deliver: pending or planned.

    A batch counts when it is stored, a recurring message's next run when it is written. A message no longer counts when it is delivered or
    cancelled; one that is moved still counts. A checkpoint of an older version has no counts: what was stored before it then counts for
    nothing, and no count falls below 0.
    """

    __slots__ = ("_counts",)

    def __init__(self, counts: Mapping[str, int] | None = None) -> None:
        self._counts = dict(counts or {})

    def of(self, subject: str) -> int:
        return self._counts.get(subject, 0)

    def all(self) -> dict[str, int]:
        """A copy of the counts of all subjects with pending messages."""
        return dict(self._counts)

    def add(self, subject: str, messages: int) -> None:
        """Count new pending messages."""
        self._counts[subject] = self._counts.get(subject, 0) + messages

    def take(self, subject: str, messages: int) -> None:
        """Count messages that were delivered or cancelled."""
        left = self._counts.get(subject, 0) - messages
        if left > 0:
            self._counts[subject] = left
        else:
            self._counts.pop(subject, None)


@dataclass(frozen=True, slots=True)
class SchedulePlan:
    """A captured schedule; see `qmq.log.projection.ProjectionPlan`."""

    state: Any
    files: AppendFiles
    tails: list[Grown]
    unsynced: dict[str, int]
    unnamed: frozenset[str] = frozenset()
    """Files that exist and that the state does not name."""

    def run(self) -> None:
        """Raises FlushFailed, DiskFull."""
        self.files.write_and_sync(self.tails, self.unsynced)
