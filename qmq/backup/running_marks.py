"""Marks in the place of backups, so that no prune deletes a chunk that a running `create` needs.

running/WORK-TIME-TOKEN    WORK is create or prune, TIME its begin in ms; empty of content

Each command first writes its mark and then lists the others, so of two commands that begin at the same time at least one sees the other. A
prune that sees another mark gives up. A create that sees a prune waits. A killed process leaves its mark, which expires: a prune ends long
before that, and a create looks for its mark when it is done.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from qmq.backup.backup_objects import ListedObjects
from qmq.text_numbers import whole_number
from qmq.tiering.object_store import StoreAway

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

    def __init__(self, objects: ListedObjects) -> None:
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
            log.warning("%s could not be deleted: %s; backups in this place are not pruned for up to a day", own.name, failure)

    def others(self, own: Mark) -> list[Mark]:
        """All marks of other commands, the oldest first. Raises StoreAway."""
        return sorted(_other(self._objects.names(RUNNING_PREFIX), own), key=lambda each: each.since_ms)


def _other(names: Iterable[str], own: Mark) -> list[Mark]:
    return [mark for mark in map(mark_of, names) if mark is not None and mark != own]
