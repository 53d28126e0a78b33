"""What a consumer holds, and its verdicts on their way to the broker: joined to ranges, kept until it has them. No I/O."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qmq.wire.messages import Settlement

if TYPE_CHECKING:
    import asyncio


class Outstanding:
    """The pull sequences that were handed to the application or wait for it, and have no verdict yet."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []
        self.messages = 0

    def add(self, first: int, count: int) -> None:
        """Handed over: `count` from `first` on, behind all that came before."""
        if count:
            self._ranges.append((first, first + count - 1))
            self.messages += count

    def remove(self, first: int, last: int) -> list[tuple[int, int]]:
        """Take out what of `first` to `last` is still outstanding; give those ranges."""
        at = max(bisect_right(self._ranges, first, key=lambda each: each[0]) - 1, 0)
        stop, kept, removed = at, list[tuple[int, int]](), list[tuple[int, int]]()
        while stop < len(self._ranges) and self._ranges[stop][0] <= last:
            low, high = self._ranges[stop]
            parts = ((low, min(high, first - 1)), (max(low, first), min(high, last)), (max(low, last + 1), high))
            kept += [part for part in (parts[0], parts[2]) if part[0] <= part[1]]
            removed += [part for part in parts[1:2] if part[0] <= part[1]]
            stop += 1
        self._ranges[at:stop] = kept
        self.messages -= sum([b - a + 1 for a, b in removed])
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

    def add(self, first: int, last: int, verdict: int, delay_ms: int) -> None:
        """One more range; joined to the last one if it follows it."""
        self.messages += last - first + 1
        if self._collected:
            before = self._collected[-1]
            if before.last + 1 == first and before.verdict == verdict and before.delay_ms == delay_ms:
                self._collected[-1] = Settlement(before.first, last, verdict, delay_ms)
                return
        self._collected.append(Settlement(first, last, verdict, delay_ms))

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


def count(settlements: list[Settlement]) -> int:
    """How many messages they settle."""
    return sum([each.last - each.first + 1 for each in settlements])


@dataclass(slots=True, eq=False)
class Request:
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
        """See `Settlements.cut`."""
        self.settlements, lost = cut(self.settlements, before)
        self.lost += lost
        return lost
