"""The counters of a client: plain integers, incremented once for each batch, delivery or request. `metrics.py` reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qmq.metrics.figures import Durations
from qmq.model import base_group
from qmq.wire.settle_payloads import Settlement, Verdict


class SendCounters:
    """Counters of all producers of one subject. `seconds` is shared by the whole client."""

    __slots__ = ("batches", "bytes", "failed", "messages", "resent", "seconds")

    def __init__(self, seconds: Durations) -> None:
        self.messages = self.bytes = self.batches = 0
        self.resent = 0
        """Sends of a batch after its first."""
        self.failed = 0
        """Messages that failed for good."""
        self.seconds = seconds

    def stored(self, messages: int, size: int, attempts: int, seconds: float) -> None:
        """Count a stored batch. `seconds`: the time since the batch was closed."""
        self.messages += messages
        self.bytes += size
        self.batches += 1
        self.resent += attempts - 1
        self.seconds.note(seconds)


@dataclass(slots=True)
class ReceiveCounters:
    """Counters of all consumers of one group on one subject."""

    received: int = 0
    acked: int = 0
    nacked: int = 0
    released: int = 0
    rejected: int = 0
    stale: int = 0
    """Stale messages of closed consumers; open consumers count their own."""

    def sent(self, settlements: Sequence[Settlement]) -> None:
        for each in settlements:
            verdict, count = each.verdict, each.last - each.first + 1
            if verdict == Verdict.ACK:
                self.acked += count
            elif verdict == Verdict.NACK:
                self.nacked += count
            elif verdict == Verdict.RELEASE:
                self.released += count
            else:
                self.rejected += count


class ClientCounters:
    """All counters of a client."""

    def __init__(self) -> None:
        self.seconds = Durations()
        """From closing a batch to its receipt."""
        self.sends: dict[str, SendCounters] = {}
        self.takes: dict[tuple[str, str], ReceiveCounters] = {}

    def sending(self, subject: str) -> SendCounters:
        """The counters of a subject; made if absent."""
        return self.sends.setdefault(subject, SendCounters(self.seconds))

    def taking(self, subject: str, group: str) -> ReceiveCounters:
        """The counters of a group on a subject, where a broadcast group counts as one; made if absent."""
        return self.takes.setdefault((subject, base_group(group)), ReceiveCounters())
