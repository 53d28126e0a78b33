"""The virtual clock, its events, and coroutines that wait for it. All events of a run happen here, in one order."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from heapq import heappop, heappush
from random import Random
from typing import Any

_MASK = (1 << 61) - 1


class Future:
    """The future that a simulated coroutine awaits."""

    __slots__ = ("_error", "_result", "is_done", "wake")

    def __init__(self) -> None:
        self.is_done = False
        self.wake: Callable[[], None] | None = None
        self._result: Any = None
        self._error: BaseException | None = None

    def set(self, result: Any = None, error: BaseException | None = None) -> None:
        """Decide it, once."""
        if self.is_done:
            return
        self.is_done, self._result, self._error = True, result, error
        if self.wake is not None:
            self.wake()

    def __await__(self) -> Generator[Future, None, Any]:
        if not self.is_done:
            yield self
        if self._error is not None:
            raise self._error
        return self._result


class World:
    """Time in whole milliseconds. `trace` is a fingerprint of all that happened."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.now = 0
        self.trace = 0
        self.events = 0
        self._heap: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._number = 0

    def after(self, ms: int, act: Callable[..., None], *args: Any) -> None:
        """Do something later."""
        self._number = number = self._number + 1
        heappush(self._heap, (self.now + ms, number, act, args))

    def run(self, until: int) -> None:
        """Let everything happen that is to happen up to `until`."""
        heap, trace, events = self._heap, self.trace, self.events
        try:
            while heap and heap[0][0] <= until:
                self.now, number, act, args = heappop(heap)
                trace = (trace * 1_000_003 + self.now * 31 + number) & _MASK
                events += 1
                act(*args)
        finally:
            self.trace, self.events = trace, events
        self.now = until

    def spawn(self, coroutine: Coroutine[Future, None, None], is_alive: Callable[[], bool]) -> None:
        """Run a coroutine. It is dropped if its process is dead."""
        self._advance(coroutine, is_alive)

    def _advance(self, coroutine: Coroutine[Future, None, None], is_alive: Callable[[], bool]) -> None:
        if not is_alive():
            coroutine.close()
            return
        try:
            waited = coroutine.send(None)
        except StopIteration:
            return
        waited.wake = lambda: self.after(0, self._advance, coroutine, is_alive)

    async def sleep(self, seconds: float) -> None:
        """A sleep for coroutines."""
        future = Future()
        self.after(int(seconds * 1000), future.set)
        await future
