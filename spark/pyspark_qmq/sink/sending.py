"""What is under way to one queue: packets in order, numbered, sent again until their fate is known. Pure: time comes in as a number.

    flight ──stored──▶ gone
      │ refused, or the connection broke: sent again from there on, in order, to the same queue
      │ OutOfSequence although all before it is stored, or another attempt's batch has the number: the queue is to be looked at again
      │ RouteChanged: the partition may be closed; whoever knows the route takes the flight over
      └ ReadOnly (no ordered partition): refused for now, and it may go to another queue

Rule: whatever was sent and not answered is asked about again at the same queue, for `retry_s` without any progress; then the task fails,
and Spark repeats it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from pyspark_qmq.sink.packets import Done, Load, Packet
from pyspark_qmq.sink.row_identity import RowTarget
from qmq.delivery.retries import is_worth_another_try, rest_s
from qmq.errors import DeadlineExceeded, NotConnected, NumberTaken, Outcome, OutOfSequence, QmqError, ReadOnly, RouteChanged

WINDOW: Final = 8
"""Packets in flight to one queue: enough to keep a broker busy, and much less than it remembers (64)."""

Rest = Callable[[int, QmqError], float]
"""(refusals in a row, the last one) -> seconds to keep still."""


class Sending:
    """Begins with the number `number` if the queue's numbers have no gaps."""

    def __init__(self, to: RowTarget, retry_s: float, *, number: int = 0, window: int = WINDOW, rest: Rest = rest_s) -> None:
        self.to = to
        self.number = number
        self.flight: list[Packet] = []
        self.wants_route = False
        """Whether the queue refused as if it were closed, and nobody looked for a newer route since."""
        self.refused: list[Load] = []
        """Certainly not stored, because the queue takes nothing for now."""
        self.stored = 0
        self._retry_s = retry_s
        self._window_max = self._window = window
        self._rest_s = rest
        self._sent = 0  # flight[:_sent] are on their way over the connection in use
        self._unanswered = 0
        self._is_miscounted = False
        self._refusals = 0
        self._rests_until = 0.0
        self._quiet_since = 0.0
        self._trouble: QmqError | None = None

    # --- out -----------------------------------------------------------------------------------------------------------

    def put(self, load: Load, now: float, number: int | None = None) -> None:
        """Send these rows too, under this number; None: under the next one."""
        if number is None:
            number, self.number = self.number, self.number + 1
        if not self.flight:
            self._quiet_since = now
        self.flight.append(Packet(load, self.to, number))

    def next(self, now: float) -> Packet | None:
        """The packet to send now: it counts as sent. Ask until there is none."""
        if now < self._rests_until or self._sent >= min(self._window, len(self.flight)) or self._is_miscounted:
            return None
        packet = self.flight[self._sent]
        self._sent += 1
        self._unanswered += 1
        packet.attempts += 1
        return packet

    def take(self) -> list[Load]:
        """All of the flight, in order: the queue is closed, and somebody else finds out what of it is there."""
        taken = [packet.load for packet in self.flight]
        self.flight.clear()
        self._sent = 0
        return taken

    def take_refused(self) -> list[Load]:
        """What may go to another queue."""
        refused, self.refused = self.refused, []
        return refused

    def wake_at(self, now: float) -> float:
        """When to ask `next` again and to `check`, at the latest; infinity if only answers change anything."""
        if not self.flight:
            return math.inf
        at = self._quiet_since + self._retry_s
        return min(at, self._rests_until) if self._rests_until > now else at

    # --- in ------------------------------------------------------------------------------------------------------------

    def answered(self, packet: Packet, attempt: int, failure: QmqError | None, now: float) -> int:
        """What became of a try: None is stored. Gives the rows that are stored by it. Raises what must not be tried again."""
        self._unanswered -= 1
        at = next((at for at, each in enumerate(self.flight) if each is packet), -1)
        if at < 0:
            return 0
        if failure is None:
            return self._stored(at, now)
        if attempt == packet.attempts and at < self._sent:
            self._refused(at, failure, now)
        return 0

    def _stored(self, at: int, now: float) -> int:
        packet = self.flight.pop(at)
        self._sent -= at < self._sent
        self._window, self._refusals, self._quiet_since, self._trouble = self._window_max, 0, now, None
        self.stored += 1
        return len(packet.load.rows)

    def _refused(self, at: int, failure: QmqError, now: float) -> None:
        if isinstance(failure, ReadOnly) and self.to.partition == 0:
            self.refused.append(self.flight.pop(at).load)
            self._sent -= 1
            return
        self._sent = at
        if isinstance(failure, RouteChanged):
            self.wants_route = True
        elif isinstance(failure, OutOfSequence) or (isinstance(failure, NumberTaken) and self.to.partition > 0):
            self._is_miscounted |= at == 0
        elif not is_worth_another_try(failure):
            raise failure
        self._rest(failure, now)

    def _rest(self, failure: QmqError, now: float) -> None:
        self._trouble = failure
        self._window = 1
        self._refusals += 1
        self._rests_until = now + self._rest_s(self._refusals, failure)

    def broken(self, failure: QmqError, now: float) -> None:
        """The connection is lost, or none could be had: all that is not answered is asked again."""
        self._sent = self._unanswered = 0
        if self.flight:
            self._rest(failure, now)

    def keep(self) -> None:
        """The newest route still has it: what it refused was not known there yet."""
        self.wants_route = False

    @property
    def wants_look(self) -> bool:
        """Whether the queue counts otherwise than we do, and no try is under way whose answer could still come."""
        return self._is_miscounted and not self._unanswered

    def looked(self, number: int, done: Done, now: float) -> int:
        """The queue was looked at again, and this number comes next: what of the flight is not there is numbered anew.

        Gives how many rows were found.
        """
        self._is_miscounted = False
        self._sent = 0
        found = [packet for packet in self.flight if done.left(packet.load) is None]
        self.flight = [packet for packet in self.flight if packet not in found]
        for packet in self.flight:
            packet.number, packet.encoded = number, None
            number += 1
        self.number = number
        if found:
            self._quiet_since = now
        return sum(len(packet.load.rows) for packet in found)

    def check(self, now: float) -> None:
        """Raises the last trouble when nothing was achieved for `retry_s`."""
        if not self.flight or now < self._quiet_since + self._retry_s:
            return
        text = f"{self.to} did not take a batch for {self._retry_s:g} s; the last trouble: {self._trouble or 'no answer'}"
        kind = NotConnected if isinstance(self._trouble, NotConnected) else DeadlineExceeded
        raise kind(text, outcome=Outcome.UNKNOWN) from self._trouble
