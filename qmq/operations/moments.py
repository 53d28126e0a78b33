"""Times and durations that are exact for programs and short in tables for people."""

from __future__ import annotations

from qmq.clock import time_of


class Time(str):
    """A time: as text in ISO 8601, UTC; in tables for people relative to now."""

    __slots__ = ("time_ms",)

    time_ms: int

    def __new__(cls, time_ms: int) -> Time:
        """`time_ms` is milliseconds since 1970; 0 means none, and the text is empty."""
        text = time_of(time_ms).isoformat(timespec="milliseconds") if time_ms else ""
        made = super().__new__(cls, text)
        made.time_ms = time_ms
        return made


class Duration(int):
    """A duration in milliseconds: a number for programs; in tables for people in words."""

    __slots__ = ()
