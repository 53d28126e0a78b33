"""Verdicts on their way to the broker: joined to ranges, sent together, kept until the broker has them. No I/O."""

from __future__ import annotations

from qmq.wire.messages import Settlement


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
