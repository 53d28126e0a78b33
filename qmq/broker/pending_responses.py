"""Answers that wait until their index is committed, or flushed on a majority; and coroutines of this process that wait for a commit.

unwritten          the index is not known yet: the entry is written at the end of the turn
held for a commit  answered when their index is committed
held for a flush   answered when their index is flushed on a majority
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from qmq.broker.sessions import HeldAnswer
from qmq.errors import QmqError


class PendingResponses:
    """Answers in the order of their indexes; one that waits for a flush does not delay the others."""

    def __init__(self) -> None:
        self.unwritten: list[HeldAnswer] = []
        """Answers to entries that are not written yet; they get their index then."""
        self._unwritten_waiters: list[asyncio.Future[None]] = []
        self._for_commit: deque[HeldAnswer] = deque()
        self._for_flush: deque[HeldAnswer] = deque()
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()

    def hold(self, held: HeldAnswer, *, for_flush: bool = False) -> None:
        """Send the answer when its index is committed, or flushed."""
        (self._for_flush if for_flush else self._for_commit).append(held)

    def wait(self, waiter: asyncio.Future[None], index: int | None) -> None:
        """Set the future when `index` is committed; None: the index of the unwritten entries."""
        if index is None:
            self._unwritten_waiters.append(waiter)
        else:
            self._waiters.append((index, waiter))

    @property
    def has_unwritten(self) -> bool:
        """Whether an answer waits for an unwritten entry."""
        return bool(self.unwritten or self._unwritten_waiters)

    def written(self, index: int) -> None:
        """All entries are in the log, up to `index`."""
        unwritten, self.unwritten = self.unwritten, []
        for held in unwritten:
            held.index = index
        self._for_commit.extend(unwritten)
        if self._unwritten_waiters:
            self._waiters.extend([(index, waiter) for waiter in self._unwritten_waiters])
            self._unwritten_waiters.clear()

    def release(self, committed_index: int, flushed_index: int) -> None:
        """Send the answers that are due."""
        if self._for_commit:
            self._answer(self._for_commit, committed_index)
        if self._for_flush:
            self._answer(self._for_flush, flushed_index)
        while self._waiters and self._waiters[0][0] <= committed_index:
            waiter = self._waiters.popleft()[1]
            if not waiter.done():
                waiter.set_result(None)

    @staticmethod
    def _answer(waiting: deque[HeldAnswer], index: int) -> None:
        while waiting and waiting[0].index <= index:
            held = waiting.popleft()
            held.peer.send(held.answer)

    def abandon(self, failure: Callable[[], QmqError]) -> list[HeldAnswer]:
        """Drop everything: waiting coroutines get the failure, and the waiting answers are returned."""
        for waiter in (*self._unwritten_waiters, *[waiter for _, waiter in self._waiters]):
            if not waiter.done():
                waiter.set_exception(failure())
        left = [*self._for_commit, *self._for_flush, *self.unwritten]
        for held in (self._unwritten_waiters, self._waiters, self._for_commit, self._for_flush, self.unwritten):
            held.clear()
        return left
