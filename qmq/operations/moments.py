"""Moments as text that still knows its milliseconds: exact for machines, and a table may show it relative to now."""

from __future__ import annotations

from datetime import UTC, datetime


class Time(str):
    """A moment: as text in ISO 8601, UTC; in tables for people relative to now."""

    __slots__ = ("time_ms",)

    time_ms: int

    def __new__(cls, time_ms: int) -> Time:
        """`time_ms` is milliseconds since 1970; 0 stands for none, which is empty."""
        text = datetime.fromtimestamp(time_ms / 1000, UTC).isoformat(timespec="milliseconds") if time_ms else ""
        made = super().__new__(cls, text)
        made.time_ms = time_ms
        return made
