"""The clock of a component: production passes the system's clock, tests and the simulator pass others."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Final, Protocol

TIME_MS_MIN: Final = -62_135_596_800_000
"""The calendar's first moment, 0001-01-01T00:00:00Z."""
TIME_MS_MAX: Final = 253_402_300_799_999
"""The calendar's last millisecond."""
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def ms_of(time_ns: int) -> int:
    """Nanoseconds as whole milliseconds, rounded down."""
    return time_ns // 1_000_000


def time_of(time_ms: int) -> datetime:
    """Milliseconds since 1970 as a datetime in UTC; a time beyond the calendar becomes the calendar's last or first moment. Senders choose
    the times of their messages.
    """
    return _EPOCH + timedelta(milliseconds=min(max(time_ms, TIME_MS_MIN), TIME_MS_MAX))


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
