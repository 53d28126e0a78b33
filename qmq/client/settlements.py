"""What a consumer holds, and its verdicts on their way to the broker: joined to ranges, kept until it has them. No I/O."""

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
"""What one SETTLE holds at most."""


class Outstanding:
    """The pull sequences that were handed to the application or wait for it, and have no verdict yet; and what they take."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int, int]] = []
        """(first, last, bytes a message)"""
        self.messages = 0
        self.bytes = 0

    def add(self, first: int, count: int, message_bytes: int = 0) -> None:
        """Handed over: `count` from `first` on, behind all that came before, of so many bytes each."""
        if count:
            self._ranges.append((first, first + count - 1, message_bytes))
            self.messages += count
            self.bytes += count * message_bytes

    def remove(self, first: int, last: int) -> list[tuple[int, int]]:
        """Take out what of `first` to `last` is still outstanding; give those ranges."""
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
        """Nothing from `before` on is outstanding any more."""
        if self._ranges and self._ranges[-1][1] >= before:
            self.remove(before, self._ranges[-1][1])


class Settlements:
    """Collects verdicts that wait to be sent; `take` gives them."""

    def __init__(self) -> None:
        self._collected: list[Settlement] = []
        self.messages = 0

    def add(self, first: int, last: int, verdict: int, delay_ms: int, error: str = "") -> None:
        """One more range; joined to the last one if it follows it and says the same."""
        self.messages += last - first + 1
        if self._collected:
            before = self._collected[-1]
            if before.last + 1 == first and before[2:] == (verdict, delay_ms, error):
                self._collected[-1] = Settlement(before.first, last, verdict, delay_ms, error)
                return
        self._collected.append(Settlement(first, last, verdict, delay_ms, error))

    @property
    def waiting(self) -> list[Settlement]:
        """What `take` would give."""
        return list(self._collected)

    def take(self) -> list[Settlement]:
        """All that was collected."""
        taken, self._collected, self.messages = self._collected, [], 0
        return taken

    def cut(self, before: int) -> int:
        """Forget verdicts on pull sequences from `before` on: those messages are no longer ours. How many they were."""
        self._collected, lost = cut(self._collected, before)
        self.messages -= lost
        return lost


def cut(settlements: list[Settlement], before: int) -> tuple[list[Settlement], int]:
    """The verdicts on pull sequences before `before`, and on how many messages there were others."""
    kept = [each._replace(last=min(each.last, before - 1)) for each in settlements if each.first < before]
    return kept, count(settlements) - count(kept)


def in_frames(settlements: list[Settlement]) -> Iterator[list[Settlement]]:
    """The same in parts that are no burden for a connection: errors may be long, and many failed messages have each its own."""
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
    """How many messages they settle."""
    return sum([each.last - each.first + 1 for each in settlements])


@dataclass(slots=True, eq=False)
class SettleRequest:
    """Verdicts that were sent, kept until the broker has them.

    `is_repeated`: an earlier answer may have been lost, so that a verdict which settles nothing now has settled it then.
    """

    settlements: list[Settlement]
    waiter: asyncio.Future[None] | None = None
    is_repeated: bool = False
    is_flying: bool = False
    lost: int = 0
    """Messages of it that ceased to be ours on the way."""

    def holds(self, first: int, last: int) -> bool:
        """Whether it has a verdict on any of these."""
        return any(each.first <= last and first <= each.last for each in self.settlements)

    def cut(self, before: int) -> int:
        self.settlements, lost = cut(self.settlements, before)
        self.lost += lost
        return lost
