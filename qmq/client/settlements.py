"""What a consumer holds, and its verdicts on their way to the broker: joined to ranges, kept until it has them. No I/O."""

from __future__ import annotations

from bisect import bisect_right

from qmq.wire.messages import Settlement


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

    def clear(self) -> None:
        """Nothing is outstanding any more."""
        self._ranges.clear()
        self.messages = 0


class Settlements:
    """Collects verdicts; `take` gives what to send, `lost` puts it back."""

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

    def lost(self, settlements: list[Settlement]) -> None:
        """They may not have arrived: send them again. Settling twice does no harm."""
        self._collected = settlements + self._collected
        self.messages += sum([each.last - each.first + 1 for each in settlements])
