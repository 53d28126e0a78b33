"""When the broker's next turn runs, and which connections write answers in it. A turn runs at the end of the round of the event loop in
which it was requested, or immediately if only one connection sent frames recently: then no other frames would join, and another round of
the event loop costs as much as half of the turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from qmq.broker.sessions import Flushable


class TurnSchedule:
    def __init__(self, loop: asyncio.AbstractEventLoop, turn: Callable[[], None]) -> None:
        """`turn` calls `begin` first, and `end`."""
        self._loop = loop
        self._turn = turn
        self._full: dict[Flushable, None] = {}
        self.leisurely: dict[Flushable, None] = {}
        """Connections whose answers may wait for the next tick."""
        self._is_scheduled = self._wants_turn = False
        self._is_receiving = False
        """Whether frames of a connection are being handled: the turn that they need is decided on behind them."""
        self._is_turning = False
        """Whether a turn is running: it does itself what is scheduled meanwhile."""
        self.count = 0
        """How many turns have begun."""
        self._sole_sender: object = None
        """The connection that alone brought what the last turn handled."""

    def schedule(self) -> None:
        """Schedule a turn for the end of this round of the event loop."""
        if not (self._is_scheduled or self._is_receiving or self._is_turning):
            self._is_scheduled = True
            self._loop.call_soon(self._turn)
        self._wants_turn = True

    def begin(self) -> None:
        """The turn begins."""
        self._is_scheduled = False
        self._is_turning = True
        self.count += 1

    def end(self) -> None:
        """The turn has ended. Later requests need another turn."""
        self._is_turning = False

    @property
    def has_answers(self) -> bool:
        """Whether an outbox has answers to write."""
        return bool(self._full)

    def begin_frames(self) -> None:
        """The frames of one read are about to be handled; `end_frames` follows."""
        self._is_receiving, self._wants_turn = True, False

    def end_frames(self, sender: object) -> None:
        """The frames of one read are handled. If only this connection sent frames recently, the turn runs now; otherwise it waits for the
        other connections of this round.
        """
        self._is_receiving = False
        if not self._wants_turn:
            return
        if self._is_scheduled:
            self._sole_sender = None
        elif self._sole_sender is sender:
            self._turn()
        else:
            self._sole_sender = sender
            self.schedule()

    def register_outbox(self, outbox: Flushable) -> None:
        """`outbox` has answers to write at the end of the turn."""
        self._full[outbox] = None
        self.schedule()

    def flush_outboxes(self) -> None:
        """Write the answers of all connections."""
        full, self._full = self._full, {}
        for outbox in full:
            outbox.flush()

    def tick(self) -> bool:
        """Answers that could wait are due. Returns whether any answer is to be written."""
        self._full.update(self.leisurely)
        self.leisurely.clear()
        return bool(self._full)
