"""Answers that wait until what they promise is true: that it is committed, or besides that it is flushed on a majority."""

from __future__ import annotations

from collections import deque

from qmq.broker.sessions import HeldAnswer


class PendingResponses:
    """Held in the order of their indexes; who waits for a flush holds up nobody who does not."""

    def __init__(self) -> None:
        self._for_commit: deque[HeldAnswer] = deque()
        self._for_flush: deque[HeldAnswer] = deque()

    def hold(self, held: HeldAnswer, *, for_flush: bool = False) -> None:
        """Let it go when its index is committed, or flushed."""
        (self._for_flush if for_flush else self._for_commit).append(held)

    def release(self, committed_index: int, flushed_index: int) -> None:
        """Send what may go."""
        for waiting, index in ((self._for_commit, committed_index), (self._for_flush, flushed_index)):
            while waiting and waiting[0].index <= index:
                held = waiting.popleft()
                held.peer.send(held.answer)

    def take(self) -> list[HeldAnswer]:
        """All that are left; none is held any more."""
        left = [*self._for_commit, *self._for_flush]
        self._for_commit.clear()
        self._for_flush.clear()
        return left
