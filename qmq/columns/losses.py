"""What a read has lost, and what a stream is about to lose, in numbers. Pure.

A loss is said once for each queue, with all that is gone by then: retention, a purge, or a deletion
of the subject ran ahead of the reader. It is counted micro-batch by micro-batch, each message once,
however often a micro-batch is planned.

Retention is *near* a reader if it deleted messages of the queue at two moments while the reader
looked, and less than a tenth of the kept messages lies between the oldest one and the reader. One
deletion alone may be a purge, behind which a reader that has read everything continues.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from qmq.columns.model import QueueKey, SourceQueue
from qmq.columns.offsets import Offsets
from qmq.errors import MessagesExpired

NEAR: Final = 10
QUEUES_MAX: Final = 100
"""A text names so many queues, and how many there are besides."""


class LostRange(NamedTuple):
    """The messages `first` to `end` - 1 of a queue, which are not kept any more."""

    queue: QueueKey
    first: int
    end: int

    def __str__(self) -> str:
        return f"messages {self.first} to {self.end - 1} of {self.queue} ({self.end - self.first})"


def lost_ranges(
    start: Offsets, end: Offsets, queues: Mapping[QueueKey, SourceQueue]
) -> list[LostRange]:
    """What is not kept any more of each queue that has messages between the offsets: all from the
    start on, also behind the end.
    """
    return [
        LostRange(key, start.get(key, 0), queues[key].start)
        for key in sorted(end)
        if key in queues and start.get(key, 0) < min(queues[key].start, end[key])
    ]


def lost_text(found: Sequence[LostRange], reader: str = "") -> str:
    """What was lost, for an error and for the log."""
    count = sum(each.end - each.first for each in found)
    more = f"; and of {len(found) - QUEUES_MAX} more queues" if len(found) > QUEUES_MAX else ""
    return (
        f"{named(reader)}{count} messages were deleted before they were read, by retention, with "
        "their subject, or by a purge, which takes a sequence itself: "
        f"{'; '.join(map(str, found[:QUEUES_MAX]))}{more}"
    )


def lost_error(found: Sequence[LostRange], reader: str = "") -> MessagesExpired:
    """The error that names the messages that are no longer kept."""
    return MessagesExpired(
        f"{lost_text(found, reader)}; to continue with the remaining messages: option "
        "failOnDataLoss=false; to keep them longer: the subject's retention"
    )


def named(reader: str) -> str:
    """The beginning of a text about a reader."""
    return f"reader {reader}: " if reader else ""


class LossCount:
    """The losses of one stream since its driver began."""

    def __init__(self) -> None:
        self.lost: dict[QueueKey, int] = {}
        self._counted: dict[QueueKey, int] = {}
        self._said: dict[QueueKey, int] = {}

    def add(self, found: Iterable[LostRange], until: Offsets) -> list[LostRange]:
        """Count what a micro-batch that ends at `until` lost. Returns what was not said before."""
        news: list[LostRange] = []
        for each in found:
            key = each.queue
            first = max(each.first, self._counted.get(key, 0))
            end = min(each.end, until.get(key, each.end))
            if first < end:
                self.lost[key] = self.lost.get(key, 0) + end - first
                self._counted[key] = end
            first = max(each.first, self._said.get(key, 0))
            if first < each.end:
                news.append(LostRange(key, first, each.end))
                self._said[key] = each.end
        return news


class NearLoss(NamedTuple):
    """Retention is near a reader. `left_s`: when it reaches the reader, if it continues as before;
    None if that is unknown.
    """

    queue: SourceQueue
    done: int
    left_s: float | None

    def __str__(self) -> str:
        queue, read = self.queue, self.done - self.queue.start
        when = "" if self.left_s is None else f", in about {self.left_s:,.0f} s as it goes now"
        return (
            f"{queue.key} keeps messages {queue.start} to {queue.end - 1}; {read} of these "
            f"{queue.end - queue.start} are read, and {queue.end - self.done} wait: retention is "
            f"about to delete messages from {self.done} on before they are read{when}"
        )


@dataclass(slots=True)
class _Deletions:
    """The last two moments at which a queue's oldest message was seen to have changed."""

    start: int
    moves: list[tuple[float, int]] = field(default_factory=list)
    is_said: bool = False


class RetentionWatch:
    """Compares a stream's looks at its queues."""

    def __init__(self) -> None:
        self._seen: dict[QueueKey, _Deletions] = {}

    def look(
        self, queues: Mapping[QueueKey, SourceQueue], done: Offsets, now_s: float
    ) -> list[NearLoss]:
        """The queues where retention has come near since the look before."""
        found: list[NearLoss] = []
        for key, queue in queues.items():
            seen = self._seen.setdefault(key, _Deletions(queue.start))
            if queue.start > seen.start:
                seen.start = queue.start
                seen.moves = [*seen.moves[-1:], (now_s, queue.start)]
            read, kept = done.get(key, 0) - queue.start, queue.end - queue.start
            is_near = len(seen.moves) == 2 and 0 <= read < kept and read * NEAR < kept
            if is_near and not seen.is_said:
                found.append(NearLoss(queue, done.get(key, 0), _left_s(seen.moves, read)))
            seen.is_said = is_near
        return found


def _left_s(moves: Sequence[tuple[float, int]], read: int) -> float | None:
    (before_s, before), (now_s, now) = moves
    return read * (now_s - before_s) / (now - before) if now_s > before_s else None
