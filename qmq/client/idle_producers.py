"""Ends the shared producers of `Client.send` that are no longer used: a client that sends to ten thousand subjects holds memory for the
busy ones only.

A producer is closed when two checks, `idle_s` apart, find no undecided message and no message was sent in between. The next `send` makes
another one. Each tick looks at a part of the producers, so that many of them never hold up the event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Hashable, MutableMapping
from typing import Any, Final, TypeVar

from qmq.client.backlog import Backlog

PARTS: Final = 60
"""Ticks within which every producer is checked once."""

K = TypeVar("K", bound=Hashable)
P = TypeVar("P", bound=Backlog)


class IdleProducers:
    """Closes idle producers. `watch` adds one of them."""

    def __init__(self, idle_s: float) -> None:
        self._tick_s = idle_s / PARTS
        self._queue: deque[tuple[MutableMapping[Any, Any], Hashable, int]] = deque()
        """(the producers that it belongs to, key, tickets that it had given out when it was idle at the last look; -1 if it was busy or
        new)
        """
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, shared: MutableMapping[K, P], key: K) -> None:
        """Examine the new producer `shared[key]` from now on, and delete it there when it is closed."""
        self._queue.append((shared, key, -1))
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._tick_s, self._tick)

    def _tick(self) -> None:
        self.look(-(-len(self._queue) // PARTS))
        self._timer = asyncio.get_running_loop().call_later(self._tick_s, self._tick) if self._queue else None

    def look(self, count: int) -> None:
        """Examine the `count` producers that were not examined for longest."""
        for _ in range(min(count, len(self._queue))):
            shared, key, tickets = self._queue.popleft()
            producer = shared.get(key)
            if producer is None:
                continue
            if producer.is_idle and producer.tickets == tickets:
                del shared[key]
                producer.abort()
            else:
                self._queue.append((shared, key, producer.tickets if producer.is_idle else -1))

    def close(self) -> None:
        """Stop ending idle producers."""
        self._queue.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
