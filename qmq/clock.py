"""The clock of a component: production passes the system's clock, tests and the simulator pass others."""

from __future__ import annotations

import time
from typing import Protocol


def ms_of(time_ns: int) -> int:
    """Nanoseconds as whole milliseconds, rounded down."""
    return time_ns // 1_000_000


class Clock(Protocol):
    """Wall time for people and logs; monotonic time for leases and deadlines."""

    def time_ms(self) -> int:
        """Milliseconds since 1970-01-01 UTC; may jump."""
        ...

    def monotonic_ms(self) -> int:
        """Milliseconds since some start; never goes back."""
        ...


class SystemClock:
    """The machine's own clocks."""

    def time_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic_ms(self) -> int:
        return time.monotonic_ns() // 1_000_000
