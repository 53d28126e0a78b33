"""Idempotent producing: the batches of each producer that a queue already has. Pure; derived from
the message log.

A producer numbers its batches over all its subjects, and sends a batch again under the same number
if its outcome is unknown. A queue remembers the newest `WINDOW` numbers of each producer with the
batches' positions. If a batch's number is in the window, the broker answers with the stored
position. Numbers may have gaps (other subjects) and may arrive out of order (a refused batch, tried
again after later ones), so the window is a set, not a high-water mark. For a number older than the
window the caller searches the consume log, which is exact but slower.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from qmq.wire.frame_payloads import Produced

WINDOW: Final = 64
"""The numbers that a window keeps:
at least as many as the batches that a client keeps in flight.
"""

PRODUCERS_MAX: Final = 9_000
"""The producers that a queue remembers. Beyond this number the producer that was silent for the
longest time is forgotten. Their windows have at most 1,760 bytes each in a snapshot, so that a
queue's state fits into one entry.
"""


CLOCKS_MS: Final = 24 * 3600 * 1000
"""The largest difference between the clocks of a producer and a broker. With a producer's clock
that is further ahead, a queue does not recognise a batch that is sent again after more than an
hour, once the queue has messages from after the producer's time.
"""


def birth_ms(producer_id: int) -> int:
    """The time when the producer was created, by its own clock: its id contains the time. None of
    its batches is older.
    """
    return max((producer_id >> 20) - CLOCKS_MS, 0)


class ProducerWindow:
    """The newest batches of one producer in one queue."""

    __slots__ = ("last_ms", "newest", "oldest_ever", "stored")

    def __init__(self) -> None:
        self.stored: dict[int, Produced] = {}
        """The newest numbers, with their places."""
        self.newest = -1
        """The highest number that was ever stored. On a partition of an ordered subject the next
        one must be its successor.
        """
        self.last_ms = 0
        self.oldest_ever = 0
        """Below this number the window does not know whether a batch was stored."""

    def find(self, batch_sequence: int) -> Produced | None:
        """The position of the batch, if the window has it."""
        return self.stored.get(batch_sequence)

    def may_have_forgotten(self, batch_sequence: int) -> bool:
        """True if a batch may have been stored although its number is not in the window."""
        return batch_sequence < self.oldest_ever

    @property
    def tells_from(self) -> int:
        """The number from which on the window is complete,
        even if the producer was forgotten before.
        """
        return self.oldest_ever or min(self.stored)

    def stored_below(self, before: int) -> list[tuple[int, Produced]]:
        """The stored numbers below `before` with their places, the highest first; complete from
        `tells_from` on.
        """
        begin = self.tells_from
        return sorted(
            [(number, where) for number, where in self.stored.items() if begin <= number < before],
            reverse=True,
        )

    def to_state(self) -> list[int]:
        """For checkpoint and snapshot."""
        flat = [self.oldest_ever, self.last_ms]
        for number, (base_sequence, append_time_ms) in self.stored.items():
            flat += (number, base_sequence, append_time_ms)
        return flat

    @classmethod
    def from_state(cls, flat: list[int]) -> ProducerWindow:
        """The inverse of `to_state`."""
        window = cls()
        window.oldest_ever, window.last_ms = flat[0], flat[1]
        for at in range(2, len(flat), 3):
            window.stored[flat[at]] = Produced(flat[at + 1], flat[at + 2])
        window.newest = max([*window.stored, window.oldest_ever - 1])
        return window


class Producers:
    """The windows of one queue."""

    __slots__ = ("windows",)

    def __init__(self) -> None:
        self.windows: OrderedDict[int, ProducerWindow] = OrderedDict()
        """The producer that was silent for the longest time comes first."""

    def window(self, producer_id: int) -> ProducerWindow | None:
        """The producer's window; None if the producer did not send to this queue lately."""
        return self.windows.get(producer_id)

    def add(self, producer_id: int, batch_sequence: int, produced: Produced) -> None:
        """Remember a stored batch of a producer."""
        window = self.windows.get(producer_id)
        if window is None:
            if len(self.windows) >= PRODUCERS_MAX:
                self.windows.popitem(last=False)
            window = self.windows[producer_id] = ProducerWindow()
        else:
            self.windows.move_to_end(producer_id)
        stored = window.stored
        stored[batch_sequence] = produced
        if batch_sequence > window.newest:
            window.newest = batch_sequence
        window.last_ms = produced.append_time_ms
        if len(stored) > WINDOW:
            oldest = next(iter(stored))
            del stored[oldest]
            if oldest >= window.oldest_ever:
                window.oldest_ever = oldest + 1

    def expire(self, before_ms: int) -> None:
        """Forget producers that were silent since `before_ms` (append time, so that all replicas
        forget the same producers).
        """
        windows = self.windows
        while windows and windows[next(iter(windows))].last_ms < before_ms:
            windows.popitem(last=False)

    def to_state(self) -> dict[int, list[int]]:
        """For checkpoint and snapshot."""
        return {producer_id: window.to_state() for producer_id, window in self.windows.items()}

    @classmethod
    def from_state(cls, state: dict[int, list[int]]) -> Producers:
        """The inverse of `to_state`."""
        producers = cls()
        found = [
            (producer_id, ProducerWindow.from_state(flat)) for producer_id, flat in state.items()
        ]
        found.sort(
            key=lambda each: each[1].last_ms
        )  # release 0.2 wrote more of them, and in another order
        producers.windows.update(found[-PRODUCERS_MAX:])
        return producers
