"""When a delayed message is due: converts timedeltas and datetimes to milliseconds since 1970. Pure: the caller passes the current time.

Rules:
* A `timedelta` counts from now. A `datetime` needs a time zone, since without one it means another moment on each machine.
* Fractions of a millisecond are rounded up: a message is never early.
* A time in the past is allowed and means now; a time before 1970 counts as 1970.
* Delays longer than `limits.DELAY_MS_MAX` are refused here. A delay group may be configured for less, and refuses them itself.
* Only the shape of a recurrence is checked here; the delay server knows cron's grammar and the time zones.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TypeAlias

from qmq import limits
from qmq.clock import ms_of
from qmq.errors import DelayTooLong, InvalidArgument

When: TypeAlias = timedelta | datetime
"""How long from now, or when (with a time zone)."""

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND: Final = timedelta(milliseconds=1)
_NS_PER_MS: Final = 1_000_000
_FIELD: Final = re.compile(r"[0-9A-Za-z*,/#-]+", re.ASCII)
_ZONE: Final = re.compile(r"[A-Za-z0-9_+-]+(/[A-Za-z0-9_+-]+)*", re.ASCII)
CRON_CHARS_MAX: Final = 1_000


def time_ms(at: object, what: str = "at") -> int:
    """A datetime as milliseconds since 1970, rounded up. Raises InvalidArgument if it is not a datetime, or has no time zone."""
    if not isinstance(at, datetime):
        raise InvalidArgument(f"{what} is a datetime with a time zone, not {type(at).__name__}")
    if at.utcoffset() is None:
        raise InvalidArgument(f"{what}={at.isoformat()} has no time zone: add one, datetime(..., tzinfo=ZoneInfo('Europe/Berlin'))")
    return -((_EPOCH - at) // _MILLISECOND)


def due_ms(when: object, now_ns: int) -> int:
    """When a message is due, in milliseconds since 1970; `now_ns` is the current time in nanoseconds. Raises
    InvalidArgument, DelayTooLong.
    """
    if isinstance(when, timedelta):
        # `when // timedelta(microseconds=1)` is slower, and some applications pass a delay with every message
        microseconds = (when.days * 86_400 + when.seconds) * 1_000_000 + when.microseconds
        due = -(-(now_ns + microseconds * 1000) // _NS_PER_MS)
    elif isinstance(when, datetime):
        due = time_ms(when)
    else:
        raise InvalidArgument(f"a delay is a timedelta, and a time is a datetime with a time zone, not {type(when).__name__}")
    return _bounded(due, now_ns)


def checked(due: object, now_ns: int) -> int:
    """Check a due time that was given as a number. Raises InvalidArgument, DelayTooLong."""
    if isinstance(due, bool) or not hasattr(due, "__index__"):
        raise InvalidArgument(f"a due time is a whole number of milliseconds since 1970, not {type(due).__name__}")
    return _bounded(int(due), now_ns)


def _bounded(due: int, now_ns: int) -> int:
    now = ms_of(now_ns)
    if due > now + limits.DELAY_MS_MAX:
        raise DelayTooLong(f"{_span(due - now)} from now is too long: the longest delay is {_span(limits.DELAY_MS_MAX)} (two years)")
    return due if due > 0 else 0


def due_of(delay: object, at: object, now_ns: int) -> int:
    """When a message that has `delay` or `at` is due. Raises InvalidArgument, DelayTooLong."""
    if delay is not None and at is not None:
        raise InvalidArgument("give delay or at, not both: delay counts from now, at is a date and time")
    if delay is not None and not isinstance(delay, timedelta):
        raise InvalidArgument(
            f"delay is a timedelta, not {type(delay).__name__}: write timedelta(seconds=...), or give a date and time as `at`"
        )
    if at is not None and not isinstance(at, datetime):
        raise InvalidArgument(f"at is a datetime with a time zone, not {type(at).__name__}")
    return due_ms(at if delay is None else delay, now_ns)


def many(due_times: object, count: int, now_ns: int, what: str = "due") -> list[int]:
    """When `count` messages are due: one item for each, or one for all. Raises InvalidArgument, DelayTooLong."""
    if isinstance(due_times, timedelta | datetime):
        return [due_ms(due_times, now_ns)] * count
    return [due_ms(each, now_ns) for each in _column(due_times, count, what)]


def many_ms(due_times_ms: Any, count: int, now_ns: int) -> Sequence[int]:
    """`many` for milliseconds since 1970, with little work for each message. Raises InvalidArgument, DelayTooLong."""
    if hasattr(due_times_ms, "__index__"):
        return [checked(due_times_ms, now_ns)] * count
    found = _column(due_times_ms, count, "due_ms")
    latest = ms_of(now_ns) + limits.DELAY_MS_MAX
    try:
        numbers = array("q", found)
    except (TypeError, OverflowError):
        return [checked(each, now_ns) for each in found]
    # A bool is 0 or 1, so a list whose least item is larger has none.
    if not found or (min(found) > 1 and max(found) <= latest):
        return numbers
    return [checked(each, now_ns) for each in found]


def many_of(delays: object, ats: object, count: int, now_ns: int) -> list[int]:
    """When messages that have `delays` or `ats` are due. Raises InvalidArgument, DelayTooLong."""
    if delays is not None and ats is not None:
        raise InvalidArgument("give delays or ats, not both: delays count from now, ats are dates and times")
    kind, what, given = (timedelta, "delays", delays) if ats is None else (datetime, "ats", ats)
    items = [given] if isinstance(given, timedelta | datetime) else _column(given, count, what)
    for each in items:
        if not isinstance(each, kind):
            raise InvalidArgument(f"{what} are {kind.__name__}s, one for each message or one for all, not {type(each).__name__}")
    return many(given, count, now_ns, what)


def _column(items: object, count: int, what: str) -> list[Any]:
    if isinstance(items, str | bytes) or not isinstance(items, Iterable):
        raise InvalidArgument(f"{what} are one for each message, or one for all, not {type(items).__name__}")
    found = list(items)
    if len(found) != count:
        raise InvalidArgument(f"{count} bodies, but {len(found)} {what}: give one for each message, or one for all")
    return found


def check_recurrence(cron: object, zone: object) -> tuple[str, str]:
    """Check the shape of a recurrence: five fields, and a time zone. Raises InvalidArgument."""
    if not isinstance(cron, str):
        raise InvalidArgument(f'cron is a str of five fields, such as "0 9 * * *", not {type(cron).__name__}')
    fields = cron.split()
    if len(fields) != 5 or len(cron) > CRON_CHARS_MAX or not all(map(_FIELD.fullmatch, fields)):
        raise InvalidArgument(f'cron is five fields (minute, hour, day, month, weekday), such as "0 9 * * *", not {cron[:80]!r}')
    if not isinstance(zone, str) or len(zone) > limits.NAME_CHARS_MAX or not _ZONE.fullmatch(zone):
        raise InvalidArgument(f'cron={cron!r} needs a time zone, such as zone="Europe/Berlin", not {zone!r}')
    return " ".join(fields), zone


def _span(ms: int) -> str:
    days = ms / 86_400_000
    return f"{days:,.0f} days" if days == round(days) else f"{days:,.3f} days"


DueTimes: TypeAlias = Sequence[When] | When
"""Due times of many messages: one item for each, or one for all."""
