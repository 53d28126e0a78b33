"""The packets in flight to one queue: an in-flight window (qmq/delivery/window.py) of numbered packets. Pure.

    flight ──stored──▶ gone
      │ ordered partition: OutOfSequence although every earlier packet is stored, or NumberTaken: look the queue up again
      │ RouteChanged: the partition may be closed: the owner of the window takes the packets back
      └ otherwise: ReadOnly (refused for now: the packet may go to another queue), NumberTaken (another attempt's batch has the number)

Rule: an unanswered packet is sent again to the same queue until there was no progress for `retry_s`; then the task fails, and Spark repeats
it.
"""

from __future__ import annotations

import math
from typing import Final

from pyspark_qmq.sink.packets import Done, Load, Packet
from pyspark_qmq.sink.row_identity import RowTarget
from qmq.delivery.retries import RetryRules
from qmq.delivery.window import InFlightWindow
from qmq.errors import DeadlineExceeded, NotConnected, NumberTaken, Outcome, QmqError, ReadOnly

WINDOW: Final = 8
"""Packets in flight to one queue: enough to keep a broker busy, and far fewer than the batches it remembers (64)."""


class PacketWindow(InFlightWindow[Packet]):
    """`number`: the first number, for a queue whose numbers have no gaps."""

    def __init__(self, to: RowTarget, retry_s: float, *, rules: RetryRules, number: int = 0, window: int = WINDOW) -> None:
        super().__init__(window, rules)
        self.to = to
        self.number = number
        self.stored = 0
        self._retry_s = retry_s
        self._returned: list[Load] = []
        self._taken: list[tuple[Load, QmqError]] = []
        self._is_miscounted = False
        self._last_failure: QmqError | None = None
        self.connected()  # The task connects when it has something to send.

    # --- out -----------------------------------------------------------------------------------------------------------

    def put(self, load: Load, now: float, number: int | None = None) -> None:
        """Add rows under this number; None: the next one."""
        if number is None:
            number, self.number = self.number, self.number + 1
        if not self.flight:
            self._quiet_since = now
        self.flight.append(Packet(load, self.to, number, size=load.size))

    def _may_send(self, packet: Packet) -> bool:
        return not self._is_miscounted

    def take(self) -> list[Load]:
        """Take all packets in order: the queue is closed, and a lookup will find the stored ones."""
        taken = [packet.load for packet in self.flight]
        for packet in list(self.flight):
            self._remove(packet)
        return taken

    def take_refused(self) -> list[Load]:
        """Take packets that are certainly not stored because the queue refuses messages; they may go to another queue."""
        returned, self._returned = self._returned, []
        return returned

    def take_disputed(self) -> list[tuple[Load, QmqError]]:
        """Take packets that are not stored because another batch has their number, with the refusals."""
        taken, self._taken = self._taken, []
        return taken

    def wake_at(self, now: float) -> float:
        """The latest time to call `next` and `check` again; infinity if only answers can change the state."""
        return min(super().wake_at(now), self._quiet_since + self._retry_s) if self.flight else math.inf

    # --- in ------------------------------------------------------------------------------------------------------------

    def answered(self, packet: Packet, attempt: int, failure: QmqError | None, now: float) -> int:
        """Handle the answer to a send; `failure` is None if the packet is stored.

        Returns the number of rows stored. Raises the failure if a retry cannot help.
        """
        if failure is not None:
            self.refused(packet, attempt, failure, now)
            return 0
        if not self.acknowledged(packet, now):
            return 0
        self._last_failure = None
        self.stored += 1
        return len(packet.load.rows)

    def refused(self, packet: Packet, attempt: int, failure: QmqError, now: float) -> None:
        is_current = attempt == packet.attempts and packet in self.flight[: self._sent]
        if is_current:
            self._last_failure = failure
        if is_current and isinstance(failure, ReadOnly | NumberTaken) and self.to.partition == 0:
            packet.unanswered -= 1
            self._remove(packet)  # The other packets are not held back; each gets its answer.
            if isinstance(failure, ReadOnly):
                self._returned.append(packet.load)
            else:
                self._taken.append((packet.load, failure))
        else:
            super().refused(packet, attempt, failure, now)

    def _rest(self, packet: Packet, failure: QmqError, now: float) -> None:
        if isinstance(failure, NumberTaken) and packet is self.flight[0]:
            self._forgotten(packet)
        super()._rest(packet, failure, now)

    def _forgotten(self, packet: Packet) -> None:
        """The queue's next number differs from ours: another attempt may have stored more rows."""
        self._is_miscounted = True

    def _reject(self, packet: Packet, failure: QmqError) -> None:
        raise failure

    def broken(self, failure: QmqError, now: float) -> None:
        """The connection was lost or could not be made: send all unanswered packets again."""
        for packet in self.flight:
            packet.is_uncertain, packet.unanswered = packet.is_uncertain or packet.unanswered > 0, 0
        self._begin_again()
        if self.flight:
            self._last_failure = failure
            self._back_off(failure, now)

    @property
    def wants_look(self) -> bool:
        """Whether the queue's next number differs from ours and no answer is outstanding."""
        return self._is_miscounted and not any(packet.unanswered for packet in self.flight)

    def looked(self, number: int, done: Done, now: float) -> int:
        """Handle the result of a new lookup: renumber the packets that are not stored. `number`: the queue's next number.

        Returns the number of rows found.
        """
        self._is_miscounted = False
        self._begin_again()
        found = [packet for packet in self.flight if done.left(packet.load) is None]
        for packet in found:
            self._remove(packet)
        for packet in self.flight:
            packet.number, packet.encoded = number, None
            number += 1
        self.number = number
        if found:
            self._quiet_since = now
        return sum(len(packet.load.rows) for packet in found)

    def check(self, now: float) -> None:
        """Raise the last failure if there was no progress for `retry_s`."""
        if not self.flight or now < self._quiet_since + self._retry_s:
            return
        text = f"{self.to} did not take a batch for {self._retry_s:g} s; last failure: {self._last_failure or 'no answer'}"
        kind = NotConnected if isinstance(self._last_failure, NotConnected) else DeadlineExceeded
        raise kind(text, outcome=Outcome.UNKNOWN) from self._last_failure
