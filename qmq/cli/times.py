"""Times as people type them: how long, and when."""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from typing import Final

from qmq.errors import InvalidArgument

_UNITS: Final = {"ms": "milliseconds", "s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
_PART: Final = re.compile(r"(\d+(?:\.\d+)?)(ms|[smhdw])", re.ASCII)


def parse_duration(text: str) -> timedelta:
    """"10m", "1h30m", "2d", "1.5s", "500ms"; weeks are "w". Raises InvalidArgument."""
    parts = _PART.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise InvalidArgument(f"{text!r} is no duration: write 90s, 10m, 1h30m, 2d or 1w")
    try:
        return sum((timedelta(**{_UNITS[unit]: float(number)}) for number, unit in parts), timedelta())
    except OverflowError:
        raise InvalidArgument(f"{text!r} is longer than any calendar") from None


def parse_when(text: str) -> datetime:
    """"2027-01-01T09:00:00+01:00", or with Z for UTC. Raises InvalidArgument; also without a time zone."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidArgument(f"{text!r} is no time: write 2027-01-01T09:00:00+01:00, or ...Z for UTC") from None
    if found.utcoffset() is None:
        raise InvalidArgument(f"{text!r} has no time zone: write {found.isoformat()}+01:00, say, or {found.isoformat()}Z for UTC")
    return found
