"""`qmq backup verify`: reads everything of a backup back, and checks it as a restore and a starting
broker would.

every chunk      exists, and its bytes have the digest in its name
every log        its segments join, and each entry's checksums hold; the indexes of a log rise, up
                 to the backup's index
every schedule   its state can be read, and its files have the lengths that the state names
the keys         can be read; each group has the parts that a restore needs
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain

import msgspec

from qmq.backup.manifest import (
    BackedUpGroup,
    BackedUpSchedule,
    BackedUpSegment,
    BackupManifest,
    decode_items,
)
from qmq.backup.objects import BackupObjects
from qmq.delay.schedule import Schedule
from qmq.errors import BackupDamaged, CorruptBatch, LogDamaged
from qmq.log.envelopes import walk_rising
from qmq.log.segment_index import UNREADABLE

LOGS = ("message", "action")


class BackupVerifier:
    """Verifies one backup. The calls block: use a thread.
    `told` is called with the bytes of each chunk.
    """

    def __init__(
        self, objects: BackupObjects, told: Callable[[int], None] = lambda _: None
    ) -> None:
        self._objects = objects
        self._told = told

    def verify(self, manifest: BackupManifest) -> int:
        """Verify the backup. Returns the number of entries. Raises StoreAway, BackupDamaged."""
        decode_items(self._objects.read_bytes(manifest.items))
        return sum(self._verify_group(group) for group in manifest.groups)

    def _verify_group(self, group: BackedUpGroup) -> int:
        entries, last = 0, 0
        for log, segments in zip(LOGS, group.logs, strict=True):
            found, index = self._verify_log(f"{group.name}: the {log} log", segments)
            entries, last = entries + found, max(last, index)
        if last != group.index:
            raise BackupDamaged(
                f"{group.name}: the logs end at index {last}, and the manifest says {group.index}"
            )
        if group.schedule is not None:
            self._verify_schedule(group.name, group.schedule)
        return entries

    def _verify_log(self, what: str, segments: tuple[BackedUpSegment, ...]) -> tuple[int, int]:
        """(the number of entries, the last index)"""
        entries, index = 0, 0
        for at, segment in enumerate(segments):
            if at and segments[at - 1].end != segment.base:
                raise BackupDamaged(
                    f"{what}: a segment ends at {segments[at - 1].end}, and the next one "
                    f"begins at {segment.base}"
                )
            reader = _ForwardReader(segment.base, self._chunks(segment))
            try:
                for entry in walk_rising(reader.read, segment.base, segment.end, index):
                    entries, index = entries + 1, entry.envelope.index
            except CorruptBatch as cause:
                raise BackupDamaged(
                    f"{what}: the segment at {segment.base} has a damaged entry ({cause.message})"
                ) from cause
        return entries, index

    def _chunks(self, segment: BackedUpSegment) -> Iterator[bytes]:
        for chunk in self._objects.read_chunks(segment.content):
            self._told(len(chunk))
            yield chunk

    def _verify_schedule(self, group: str, schedule: BackedUpSchedule) -> None:
        try:
            expected = Schedule.files(
                msgspec.msgpack.decode(self._objects.read_bytes(schedule.state))
            )
        except (LogDamaged, *UNREADABLE) as cause:
            raise BackupDamaged(
                f"{group}: the schedule's state cannot be read ({cause})"
            ) from cause
        if dict(expected) != {each.name: each.content.size for each in schedule.files}:
            raise BackupDamaged(f"{group}: the schedule's files are not those that its state names")
        for chunk in chain.from_iterable(
            self._objects.read_chunks(each.content) for each in schedule.files
        ):
            self._told(len(chunk))


class _ForwardReader:
    """Forward reads over chunks that arrive in order."""

    def __init__(self, position: int, chunks: Iterator[bytes]) -> None:
        self._position = position
        self._buffer = b""
        self._chunks = chunks

    def read(self, position: int, size: int) -> bytes:
        """Up to `size` bytes; fewer only at the end."""
        self._buffer = self._buffer[position - self._position :]
        self._position = position
        while len(self._buffer) < size:
            chunk = next(self._chunks, None)
            if chunk is None:
                break
            self._buffer += chunk
        return self._buffer[:size]
