"""Acknowledgements of one round of the event loop, joined to ranges where messages are neighbours: handlers that finish one after the other
cost one settlement, not one each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from qmq.client.message import Message, Settler
from qmq.wire.frame_payloads import Verdict


class Acks:
    """Those of one listener. `soon` has a function called at the end of the round."""

    def __init__(self, soon: Callable[[Callable[[], None]], Any]) -> None:
        self._soon = soon
        self._settler: Settler | None = None
        self._first = self._last = 0
        self._is_waiting = False

    def add(self, message: Message) -> None:
        """The message is done, unless it has a verdict."""
        if message.is_settled:
            return
        message.is_settled = True
        pull, settler = message.pull_sequence, message.settler
        if settler is self._settler and pull == self._last + 1:
            self._last = pull
            return
        self.flush()
        self._settler, self._first, self._last = settler, pull, pull
        if not self._is_waiting:
            self._is_waiting = True
            self._soon(self._round_over)

    def _round_over(self) -> None:
        self._is_waiting = False
        self.flush()

    def flush(self) -> None:
        """Hand over what there is."""
        settler, self._settler = self._settler, None
        if settler is not None:
            settler.settle(self._first, self._last, Verdict.ACK)
