"""Logs which messages retention deleted: the queue, the messages, when they were stored, and why.

A queue gets a line at once, and then at most one every hour, which covers everything since the line before. The logger is `qmq.retention`,
at the level INFO, which is on even if other messages of this level are not.
"""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import Final, NamedTuple

from qmq.model import QueueId

log = logging.getLogger("qmq.retention")
log.setLevel(logging.INFO)

EVERY_MS: Final = 3_600_000

AGE: Final = "older than its retention"
QUEUE_BYTES: Final = "more than its subject's size limit"
LOG_BYTES: Final = "more than the log's size limit"


class DeletedMessages(NamedTuple):
    """The messages `first` to `end` (exclusive) of a queue, and when the oldest and the newest of their batches were stored."""

    queue: QueueId
    first: int
    end: int
    oldest_ms: int
    newest_ms: int
    before_ms: int
    """Older messages were too old, by the time of retention."""
    why: str


class DeletionReport:
    """The deletions of one store."""

    def __init__(self) -> None:
        self._waiting: dict[QueueId, DeletedMessages] = {}
        self._logged_ms: dict[QueueId, int] = {}

    def note(self, deletion: DeletedMessages) -> None:
        earlier = self._waiting.get(deletion.queue)
        if earlier is not None:
            deletion = deletion._replace(first=earlier.first, oldest_ms=earlier.oldest_ms)
        self._waiting[deletion.queue] = deletion

    def tell(self, monotonic_ms: int) -> None:
        """Log what is due."""
        self._logged_ms = {queue: at_ms for queue, at_ms in self._logged_ms.items() if monotonic_ms - at_ms < EVERY_MS}
        for queue in [queue for queue in self._waiting if queue not in self._logged_ms]:
            self._logged_ms[queue] = monotonic_ms
            _log(self._waiting.pop(queue))

    def tell_all(self) -> None:
        """Log everything that is not logged yet."""
        for deletion in self._waiting.values():
            _log(deletion)
        self._waiting.clear()


def _log(told: DeletedMessages) -> None:
    stored = f"stored {_time(told.oldest_ms)} to {_time(told.newest_ms)}"
    why = f"{told.why}, which ends {_time(told.before_ms)}" if told.why == AGE else told.why
    log.info("retention deleted messages %d to %d of %s, %s: %s", told.first, told.end - 1, told.queue, stored, why)


def _time(ms: int) -> str:
    try:
        return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="seconds")
    except (OverflowError, ValueError, OSError):
        return f"{ms} ms since 1970"
