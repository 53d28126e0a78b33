"""`qmq backup prune`: deletes old backups, and the chunks that no other backup has. The steps:

1. write a mark: while a backup is created, nothing is deleted
2. the manifests of the backups that stay: all must be readable
3. the list of chunks
4. the manifests of the others are deleted: from now on these backups do not exist
5. delete every chunk that no remaining backup has

A crash after 4 leaves chunks without a backup. The next prune deletes them, as it deletes those of
a backup that was never finished.

Marks in the place of backups keep a prune from deleting a chunk that a running `create` needs:

    running/WORK-TIME-TOKEN    WORK is create or prune, TIME its begin in ms; empty of content

Each command first writes its mark and then lists the others, so of two commands that begin at the
same time at least one sees the other. A prune that sees another mark gives up. A create that sees a
prune waits. A killed process leaves its mark, which expires: a prune ends long before that, and a
create looks for its mark when it is done.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Final

from qmq.backup.manifest import chunk_name, manifest_name, time_of_backup
from qmq.backup.objects import BackupObjects
from qmq.errors import BackupDamaged, InvalidArgument, Unavailable
from qmq.process.event_loop import time_of
from qmq.text import whole_number
from qmq.tiering.object_store import Objects, StoreAway

log = logging.getLogger("qmq.backup")

RUNNING_PREFIX: Final = "running"
HOUR_MS: Final = 3_600_000


class Work(StrEnum):
    CREATE = "create"
    PRUNE = "prune"


COUNTS_MS: Final = {Work.CREATE: 24 * HOUR_MS, Work.PRUNE: HOUR_MS}
"""How long a mark is valid."""


@dataclass(frozen=True, slots=True)
class Mark:
    work: Work
    since_ms: int
    token: str

    @property
    def name(self) -> str:
        return f"{RUNNING_PREFIX}/{self.work}-{self.since_ms}-{self.token}"

    def counts(self, now_ms: int) -> bool:
        return now_ms - self.since_ms < COUNTS_MS[self.work]


def mark_of(name: str) -> Mark | None:
    """The mark with this object name; None if the name is not one of a mark."""
    prefix, _, rest = name.partition("/")
    work, _, since = rest.partition("-")
    time, _, token = since.partition("-")
    since_ms = whole_number(time)
    if prefix != RUNNING_PREFIX or work not in tuple(Work) or since_ms is None or not token:
        return None
    return Mark(Work(work), since_ms, token)


class RunningMarks:
    """Writes and lists marks. The calls block: use a thread."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects

    def put(self, work: Work, now_ms: int) -> Mark:
        """Raises StoreAway."""
        mark = Mark(work, now_ms, secrets.token_hex(4))
        self._objects.create(mark.name, b"")
        return mark

    def is_there(self, mark: Mark) -> bool:
        """Raises StoreAway."""
        return self._objects.get(mark.name) is not None

    def take(self, mark: Mark) -> None:
        """Delete a mark. Raises StoreAway."""
        self._objects.delete(mark.name)

    def end(self, own: Mark) -> None:
        """Delete this command's mark. A failure does not undo the command's work."""
        try:
            self.take(own)
        except StoreAway as failure:
            log.warning(
                "%s could not be deleted: %s; backups in this place are not pruned for up to a day",
                own.name,
                failure,
            )

    def others(self, own: Mark) -> list[Mark]:
        """All marks of other commands, the oldest first. Raises StoreAway."""
        return sorted(
            _other(self._objects.names(RUNNING_PREFIX), own), key=lambda each: each.since_ms
        )


def _other(names: Iterable[str], own: Mark) -> list[Mark]:
    return [mark for mark in map(mark_of, names) if mark is not None and mark != own]


RUNS_S: Final = 1_800.0
"""A prune stops after this time, so that it never runs after its mark has expired.
The next prune continues.
"""
DELETED_AT_ONCE: Final = 1_000


@dataclass(frozen=True, slots=True)
class KeepRule:
    """Which backups stay: the newest `count`, and all backups younger than `days`.
    Raises InvalidArgument.
    """

    count: int = 0
    days: int = 0

    def __post_init__(self) -> None:
        if self.count < 0 or self.days < 0 or not (self.count or self.days):
            raise InvalidArgument(
                "say which backups stay: --keep NUMBER, --keep-days DAYS, or both; each at least 1"
            )


@dataclass(frozen=True, slots=True)
class Pruned:
    """The ids of the backups that stay and of those that are deleted, oldest first, and the number
    of deleted chunks.
    """

    kept: tuple[str, ...]
    deleted: tuple[str, ...]
    chunks: int


def split_by(
    rule: KeepRule, ids: Sequence[str], now_ms: int
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(backups that stay, backups to delete), oldest first. The newest backup stays, and so does
    every backup of unknown age.
    """
    since = time_of(now_ms) - timedelta(days=rule.days)
    times = {each: found for each in sorted(ids) if (found := time_of_backup(each)) is not None}
    newest = list(times)[-max(rule.count, 1) :]
    deleted = [
        each
        for each, found in times.items()
        if each not in newest and not (rule.days and found >= since)
    ]
    return tuple(each for each in sorted(ids) if each not in deleted), tuple(deleted)


class BackupPruner:
    """Deletes old backups. The calls block: use a thread."""

    def __init__(
        self,
        objects: BackupObjects,
        *,
        now_ms: Callable[[], int],
        seconds: Callable[[], float] = time.monotonic,
        runs_s: float = RUNS_S,
    ) -> None:
        self._objects = objects
        self._now_ms = now_ms
        self._seconds = seconds
        self._runs_s = runs_s

    def preview(self, rule: KeepRule) -> Pruned:
        """The result that `prune` would have now.
        Raises StoreAway, BackupDamaged, BackupVersion.
        """
        pruned, _ = self._plan(rule)
        return pruned

    def prune(self, rule: KeepRule, *, is_clock_confirmed: bool = False) -> Pruned:
        """Raises StoreAway, BackupDamaged, BackupVersion, Unavailable if another backup command
        runs, or after the time limit; InvalidArgument if more backups are too old than stay, and
        nobody has confirmed the clock that says so.
        """
        ends_s = self._seconds() + self._runs_s
        marks = RunningMarks(self._objects.store)
        own = marks.put(Work.PRUNE, self._now_ms())
        try:
            for other in marks.others(own):
                if other.counts(self._now_ms()):
                    began = time_of(other.since_ms)
                    raise Unavailable(
                        f"`qmq backup {other.work}` works here since "
                        f"{began:%Y-%m-%d %H:%M:%S} UTC: prune when it has ended"
                    )
                marks.take(other)
            pruned, chunks = self._plan(rule)
            if rule.days and len(pruned.deleted) > len(pruned.kept) and not is_clock_confirmed:
                raise InvalidArgument(
                    f"by this machine's clock ({time_of(self._now_ms()):%Y-%m-%d %H:%M} UTC) "
                    f"{len(pruned.deleted)} backups are too old, and only {len(pruned.kept)} stay: "
                    "nothing was deleted. If the clock is right, say --confirm-clock"
                )
            self._delete([manifest_name(each) for each in pruned.deleted], ends_s)
            self._delete(chunks, ends_s)
            return pruned
        finally:
            marks.end(own)

    def _plan(self, rule: KeepRule) -> tuple[Pruned, list[str]]:
        kept, deleted = split_by(rule, self._objects.ids(), self._now_ms())
        needed: set[str] = set()
        for backup_id in kept:
            try:
                contents = self._objects.manifest(backup_id).contents()
            except BackupDamaged as cause:
                advice = f"delete backups/{backup_id}/manifest yourself if it is of no use"
                raise BackupDamaged(
                    f"backup {backup_id} is to stay and its manifest is damaged, so nothing "
                    f"is deleted: {advice}"
                ) from cause
            needed.update(chunk_name(digest) for each in contents for digest in each.chunks)
        chunks = [each for each in self._objects.chunk_names() if each not in needed]
        return Pruned(kept, deleted, len(chunks)), chunks

    def _delete(self, names: list[str], ends_s: float) -> None:
        for at in range(0, len(names), DELETED_AT_ONCE):
            if self._seconds() >= ends_s:
                raise Unavailable(
                    f"{len(names) - at:,} objects are still to be deleted: prune again, it "
                    "continues"
                )
            self._objects.store.delete_all(names[at : at + DELETED_AT_ONCE])
