"""Counters of a worker of the OpenMessaging Benchmark, for the time between two requests of the
coordinator and in total.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Final

from hdrh.histogram import HdrHistogram

PUBLISH_US_MAX: Final = 60_000_000
END_TO_END_US_MAX: Final = 12 * 3_600_000_000
DIGITS: Final = 5
RANGES_US: Final = {
    "publishLatency": PUBLISH_US_MAX,
    "publishDelayLatency": PUBLISH_US_MAX,
    "endToEndLatency": END_TO_END_US_MAX,
}
"""Ranges and precision of the histograms, as the benchmark's own workers have them: the coordinator
adds histograms.
"""

Counts = dict[str, Counter[int]]


class Latencies:
    """Microseconds of each kind of latency, since the last `period` and since the last `total`."""

    def __init__(self) -> None:
        self._new, self._period, self._total = _none(), _none(), _none()

    def add(self, name: str, latencies_us: Iterable[int]) -> None:
        """Count latencies. What is above the histogram's range counts as its end."""
        self._new[name].update(latencies_us)

    def period(self) -> dict[str, str]:
        """Each histogram in HdrHistogram's compressed V2 encoding as base64, which Jackson reads as
        bytes. The next one starts at zero.
        """
        self._spread()
        found, self._period = self._period, _none()
        return _histograms(found)

    def total(self) -> dict[str, str]:
        """The same for all periods since the last call of `total`."""
        self._spread()
        found, self._total = self._total, _none()
        return _histograms(found)

    def _spread(self) -> None:
        for name, found in self._new.items():
            self._period[name].update(found)
            self._total[name].update(found)
        self._new = _none()


def _none() -> Counts:
    return {name: Counter() for name in RANGES_US}


def _histograms(found: Counts) -> dict[str, str]:
    return {name: encoded(found[name], highest_us) for name, highest_us in RANGES_US.items()}


def encoded(latencies_us: Counter[int], highest_us: int) -> str:
    """One histogram."""
    histogram = HdrHistogram(1, highest_us, DIGITS)
    for latency_us, count in latencies_us.items():
        histogram.record_value(min(latency_us, highest_us), count)
    text: str = histogram.encode().decode()
    return text


Sent = tuple[int, int, int]
"""A message: its size, when it was to be sent,
and when it was given to the client, in nanoseconds.
"""


class WorkerStats:
    """Counters and latencies of the messages of one worker.
    The names are those of the benchmark's JSON.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all."""
        self._period: Counter[str] = Counter()
        self._total: Counter[str] = Counter()
        self.reset_latencies()

    def reset_latencies(self) -> None:
        """Forget the latencies. The counters continue."""
        self._latencies = Latencies()

    def probed(self) -> None:
        """A message that only shows that a producer works is stored."""
        self._total["messagesSent"] += 1

    def sent(self, messages: Sequence[Sent], stored_ns: int) -> None:
        """Messages are stored."""
        self._add("messagesSent", len(messages), "bytesSent", sum(size for size, _, _ in messages))
        self._latencies.add(
            "publishLatency", [(stored_ns - sent_ns) // 1_000 for _, _, sent_ns in messages]
        )
        self._latencies.add(
            "publishDelayLatency",
            [max(0, sent_ns - intended_ns) // 1_000 for _, intended_ns, sent_ns in messages],
        )

    def failed(self, messages: int) -> None:
        """Messages could not be stored."""
        self._period["messageSendErrors"] += messages
        self._total["messageSendErrors"] += messages

    def received(self, size: int, latency_ms: int) -> None:
        """A message came `latency_ms` after it was given to the producer. The benchmark's workers
        leave out zero, and so does this one.
        """
        self._add("messagesReceived", 1, "bytesReceived", size)
        if latency_ms > 0:
            self._latencies.add("endToEndLatency", (latency_ms * 1_000,))

    def period(self) -> dict[str, Any]:
        """Counts and latencies since the last call."""
        found, self._period = self._period, Counter()
        counted = (
            "messagesSent",
            "messageSendErrors",
            "bytesSent",
            "messagesReceived",
            "bytesReceived",
        )
        total = {
            f"total{name[0].upper()}{name[1:]}": count for name, count in self.counters().items()
        }
        return {name: found[name] for name in counted} | total | self._latencies.period()

    def latencies(self) -> dict[str, str]:
        """Latencies since the last reset or the last call."""
        return self._latencies.total()

    def counters(self) -> dict[str, int]:
        """Messages since the last reset."""
        return {
            name: self._total[name]
            for name in ("messagesSent", "messageSendErrors", "messagesReceived")
        }

    def _add(self, name: str, messages: int, bytes_name: str, size: int) -> None:
        self._period[name] += messages
        self._period[bytes_name] += size
        self._total[name] += messages
