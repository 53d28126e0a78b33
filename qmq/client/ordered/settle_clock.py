"""When the lanes of one consumer send their verdicts: all of them together, so that the broker gets one write for all, handles it in one
turn, and writes one entry to its log.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

SETTLE_DELAY_S: Final = 0.005
"""Verdicts wait this long, to be sent together with others."""

Send = Callable[[], None]


class SettleClock:
    """Shared by all lanes of a consumer."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: dict[Send, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, send: Send) -> None:
        """Call `send` with the others, `SETTLE_DELAY_S` after the first of them was added."""
        self._waiting[send] = None
        if self._timer is None:
            self._timer = self._loop.call_later(SETTLE_DELAY_S, self._ring)

    def discard(self, send: Send) -> None:
        """Do not call `send`, if it waits."""
        self._waiting.pop(send, None)
        if not self._waiting and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _ring(self) -> None:
        self._timer = None
        waiting, self._waiting = self._waiting, {}
        for send in waiting:
            send()
