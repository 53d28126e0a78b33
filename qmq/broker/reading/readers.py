"""Readers without a consumer group, as they report themselves: streaming queries of Spark. A report
comes with the FETCH by which a reader asks for a queue's numbers, so it costs no request.

Rules:
* Reports are in the memory of the master only. A new master knows a reader after its next report.
* A reader whose reports end is kept for `KEPT_MS`, or for twice its usual pause if that is longer.
  It is silent after `SILENT_MS`, or after twice its usual pause.
* A queue has at most `READERS_MAX` readers; a further one takes the place of the reader that was
  silent for longest.
* A sealed partition that a reader has finished is forgotten.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from qmq.model import QueueId, check_name
from qmq.process.event_loop import Clock

KEPT_MS: Final = 15 * 60_000
KEPT_MS_MAX: Final = 24 * 3600_000
SILENT_MS: Final = 60_000
RATE_MS: Final = 60_000
"""A rate is the average of the last one to two times this."""
READERS_MAX: Final = 100


class Reached(NamedTuple):
    """How far a reader was at a time (monotonic)."""

    at_ms: int
    done: int


@dataclass(slots=True)
class ReportedReader:
    """A reader on one queue. Times are monotonic."""

    name: str
    done: int
    """Everything before this sequence is read and committed."""
    lost: int
    """Messages that were deleted before it read them."""
    seen_ms: int
    moved_ms: int
    """When `done` last changed; the first report counts as a change."""
    before: Reached
    mark: Reached
    pause_ms: int = 0
    """The usual time between two reports."""
    read: int = 0
    """Messages of the queue that it passed since its first report here."""

    @classmethod
    def first(cls, name: str, done: int, lost: int, now_ms: int) -> ReportedReader:
        begin = Reached(now_ms, done)
        return cls(name, done, lost, now_ms, now_ms, begin, begin)

    def report(self, done: int, lost: int, now_ms: int) -> None:
        """Another report."""
        self.pause_ms = max(now_ms - self.seen_ms, self.pause_ms // 2)
        if done < self.done:  # it began again at an earlier place
            self.before = self.mark = Reached(now_ms, done)
        elif now_ms - self.mark.at_ms >= RATE_MS:
            self.before, self.mark = self.mark, Reached(now_ms, done)
        if done != self.done:
            self.moved_ms = now_ms
        self.read += max(done - self.done, 0)
        self.done, self.lost, self.seen_ms = done, lost, now_ms

    def messages_per_s(self, now_ms: int) -> float:
        """The average rate of the last one to two minutes."""
        return (self.done - self.before.done) * 1000 / max(now_ms - self.before.at_ms, 1000)

    def is_silent(self, now_ms: int) -> bool:
        """Whether a report is overdue."""
        return now_ms - self.seen_ms > max(SILENT_MS, 2 * self.pause_ms)

    def is_kept(self, now_ms: int) -> bool:
        kept_ms = min(max(KEPT_MS, 2 * self.pause_ms), KEPT_MS_MAX)
        return now_ms - self.seen_ms <= kept_ms


class Readers:
    """The readers of all queues."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._by_queue: dict[QueueId, dict[str, ReportedReader]] = {}
        """The one that reported last comes last."""

    def note(self, queue: QueueId, name: str, done: int, lost: int) -> None:
        """A reader reported. Raises InvalidName."""
        now_ms = self._clock.monotonic_ms()
        readers = self._by_queue.setdefault(queue, {})
        found = readers.pop(check_name("reader", name), None)
        if found is None:
            found = ReportedReader.first(name, done, lost, now_ms)
            if len(readers) >= READERS_MAX:
                del readers[next(iter(readers))]
        else:
            found.report(done, lost, now_ms)
        readers[name] = found

    def forget(self, queue: QueueId, name: str) -> None:
        self._by_queue.get(queue, {}).pop(name, None)

    def kept(self) -> list[tuple[QueueId, ReportedReader]]:
        """The readers of all queues, without those whose reports ended long ago."""
        now_ms = self._clock.monotonic_ms()
        self._by_queue = {
            queue: left
            for queue, readers in self._by_queue.items()
            if (left := {name: each for name, each in readers.items() if each.is_kept(now_ms)})
        }
        return [
            (queue, each) for queue, readers in self._by_queue.items() for each in readers.values()
        ]
