"""Limits the bytes that producers bring into one round of the event loop, so that small requests do not wait behind many large ones.

Everything that arrives in one round is written together, and all answers wait for that write. Ten producers of 1 MiB batches bring 10 MiB a
round; on a disk that takes 100 MB/s a heartbeat then waits for 100 ms. So a round takes about `bytes_max`: a connection that exceeds it is
not read from until its turn comes again, in the order in which connections exceeded it. Frames of at most `SMALL_BYTES` never wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

from qmq import limits

ROUND_BYTES_MAX: Final = 4 * limits.MIB
"""Few enough bytes for a slow disk to write in 40 ms, and enough for an efficient write."""


SMALL_BYTES: Final = 64 * limits.KIB


class TurnTaker(Protocol):
    """A connection that can stop reading for a while."""

    def wait_for_turn(self) -> None:
        """Stop reading."""
        ...

    def take_turn(self) -> None:
        """Read again."""
        ...


class RoundBudget:
    """Shares each round among the connections. `call_soon` calls in the next round of the event loop."""

    def __init__(
        self, call_soon: Callable[[Callable[[], None]], object], bytes_max: int = ROUND_BYTES_MAX, small_bytes: int = SMALL_BYTES
    ) -> None:
        self._call_soon, self._bytes_max, self._small_bytes = call_soon, bytes_max, small_bytes
        self._bytes = 0
        self._is_planned = False
        self._waiting: deque[tuple[TurnTaker, int]] = deque()
        """The waiting connections, with the bytes they brought last."""

    def took(self, connection: TurnTaker, count: int) -> None:
        """A connection has brought so many bytes in this round."""
        self._bytes += count
        if self._bytes > self._bytes_max and count > self._small_bytes:
            connection.wait_for_turn()
            self._waiting.append((connection, count))
        if not self._is_planned:
            self._is_planned = True
            self._call_soon(self._next_round)

    def _next_round(self) -> None:
        self._is_planned = False
        self._bytes = expected = 0
        while self._waiting and expected < self._bytes_max:
            connection, count = self._waiting.popleft()
            expected += count
            connection.take_turn()
        if self._waiting:
            self._is_planned = True
            self._call_soon(self._next_round)
