"""The pull sequences that a consumer holds, and its unsent verdicts, joined into ranges. No I/O."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from qmq import limits
from qmq.wire.frame_payloads import Settlement

if TYPE_CHECKING:
    import asyncio


_ERRORS_CHARS: Final = 256 * 1024
"""Most characters of errors in one SETTLE."""


class Outstanding:
    """The pull sequences without a verdict, and their bytes."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int, int]] = []
        """(first, last, bytes of each message)"""
        self.messages = 0
        self.bytes = 0

    def add(self, first: int, count: int, message_bytes: int = 0) -> None:
        """Add `count` messages from pull sequence `first` on, which is behind all earlier ones, each of so many bytes."""
        if count:
            self._ranges.append((first, first + count - 1, message_bytes))
            self.messages += count
            self.bytes += count * message_bytes

    def remove(self, first: int, last: int) -> list[tuple[int, int]]:
        """Remove the pull sequences from `first` to `last` that are outstanding; returns them as ranges."""
        at = max(bisect_right(self._ranges, first, key=lambda each: each[0]) - 1, 0)
        stop, kept, removed = at, list[tuple[int, int, int]](), list[tuple[int, int]]()
        while stop < len(self._ranges) and self._ranges[stop][0] <= last:
            low, high, message_bytes = self._ranges[stop]
            begin, end = max(low, first), min(high, last)
            if low < first:
                kept.append((low, min(high, first - 1), message_bytes))
            if last < high:
                kept.append((max(low, last + 1), high, message_bytes))
            if begin <= end:
                removed.append((begin, end))
                self.messages -= end - begin + 1
                self.bytes -= (end - begin + 1) * message_bytes
            stop += 1
        self._ranges[at:stop] = kept
        return removed

    def cut(self, before: int) -> None:
        """Forget pull sequences from `before` on."""
        if self._ranges and self._ranges[-1][1] >= before:
            self.remove(before, self._ranges[-1][1])


class Settlements:
    """Collects verdicts to be sent; `take` returns them."""

    def __init__(self) -> None:
        self._collected: list[Settlement] = []
        self.messages = 0

    def add(self, first: int, last: int, verdict: int, delay_ms: int, error: str = "") -> None:
        """Add a range; it is joined to the last one if it is adjacent and has the same verdict."""
        self.messages += last - first + 1
        if self._collected:
            before = self._collected[-1]
            if before.last + 1 == first and before[2:] == (verdict, delay_ms, error):
                self._collected[-1] = Settlement(before.first, last, verdict, delay_ms, error)
                return
        self._collected.append(Settlement(first, last, verdict, delay_ms, error))

    @property
    def waiting(self) -> list[Settlement]:
        """The collected verdicts."""
        return list(self._collected)

    def take(self) -> list[Settlement]:
        """Return and remove the collected verdicts."""
        taken, self._collected, self.messages = self._collected, [], 0
        return taken

    def cut(self, before: int) -> int:
        """Drop verdicts on pull sequences from `before` on, which are void. Returns their number."""
        self._collected, lost = cut(self._collected, before)
        self.messages -= lost
        return lost


def cut(settlements: list[Settlement], before: int) -> tuple[list[Settlement], int]:
    """The verdicts on pull sequences before `before`, and the number of the other messages."""
    kept = [each._replace(last=min(each.last, before - 1)) for each in settlements if each.first < before]
    return kept, count(settlements) - count(kept)


def in_frames(settlements: list[Settlement]) -> Iterator[list[Settlement]]:
    """The verdicts in parts of limited size: errors may be long, and each failed message may have its own."""
    part: list[Settlement] = []
    errors = 0
    for each in settlements:
        if part and (errors + len(each.error) > _ERRORS_CHARS or len(part) == limits.SETTLE_RANGES_SENT):
            yield part
            part, errors = [], 0
        part.append(each)
        errors += len(each.error)
    if part:
        yield part


def count(settlements: list[Settlement]) -> int:
    """How many messages the verdicts are about."""
    return sum([each.last - each.first + 1 for each in settlements])


@dataclass(slots=True, eq=False)
class SettleRequest:
    """Verdicts that were sent, kept until the broker answers.

    `is_repeated`: an earlier answer may have been lost, so a verdict that settles nothing now was effective then.
    """

    settlements: list[Settlement]
    waiter: asyncio.Future[None] | None = None
    is_repeated: bool = False
    is_flying: bool = False
    lost: int = 0
    """Messages of the request that became void on the way."""

    def holds(self, first: int, last: int) -> bool:
        """Whether the request has a verdict on any of these."""
        return any(each.first <= last and first <= each.last for each in self.settlements)

    def cut(self, before: int) -> int:
        self.settlements, lost = cut(self.settlements, before)
        self.lost += lost
        return lost
