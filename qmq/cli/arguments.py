"""Arguments and options that several commands have, durations and times as people type them, and
how long commands wait before they poll again.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Annotated, Any, Final

import typer

from qmq.errors import InvalidArgument
from qmq.limits import LOGICAL_PARTITIONS_MAX, MIB
from qmq.operations.text import in_words
from qmq.text import INT64_MAX, visible

GIVEN: Final = "qmq.environment"
"""The key under which the root command stores the environment before a context was applied."""

Words = Annotated[
    list[str],
    typer.Argument(
        metavar="[SUBJECT] ID",
        help="The id of a message or of a delayed message. Give the subject to search faster.",
    ),
]


def subject_and_id(words: list[str]) -> tuple[str, str]:
    """The subject, if given, and the id. Raises BadParameter."""
    if len(words) == 1:
        return "", words[0]
    if len(words) == 2:
        return words[0], words[1]
    raise typer.BadParameter("give [SUBJECT] ID")


def assignments(
    words: Iterable[str], known: Mapping[str, type[int] | type[float]]
) -> dict[str, int | float]:
    """Parse words such as "connections=200"; `known` has the names and the types of their values.
    Raises InvalidArgument, also for a value below 0.
    """
    found: dict[str, int | float] = {}
    for word in words:
        name, _, value = word.partition("=")
        if name not in known:
            raise InvalidArgument(
                f"{word!r} sets nothing: write NAME=VALUE, where NAME is one of {', '.join(known)}"
            )
        try:
            found[name] = known[name](value)
        except ValueError:
            raise InvalidArgument(
                f"{word!r} needs a{' whole' if known[name] is int else ''} number behind the ="
            ) from None
        if not 0 <= found[name] < math.inf:
            raise InvalidArgument(f"{word!r} needs a number that is 0 or more")
    return found


class View:
    """Whether this process shows wide tables; set by `--wide`."""

    is_wide = False


PORT_MAX: Final = 65_535
HOUR_MS: Final = 3_600_000
HOURS_MAX: Final = INT64_MAX // HOUR_MS
"""Every option, argument and variable that takes a number has a least and a greatest value: it is
not NaN, not infinite, and fits the program's arithmetic and the field that it is sent in.
"""
SECONDS_MAX: Final = 1_000_000_000
RATE_MAX: Final = 1_000_000_000_000
COUNT_MAX: Final = 1_000_000_000_000
"""Messages, rows or entries."""
DAYS_MAX: Final = 1_000_000
MIB_MAX: Final = INT64_MAX // MIB
PARTITION_MAX: Final = (1 << 32) - 1
"""The largest number of a partition that a route can hold."""
Partition = Annotated[
    int,
    typer.Argument(
        min=0, max=PARTITION_MAX, help="The partition's number, as shown by `qmq route show`."
    ),
]
Neighbours = Annotated[
    list[int],
    typer.Argument(min=0, max=PARTITION_MAX, help="The numbers of neighbouring partitions."),
]
SplitAt = Annotated[
    list[int] | None,
    typer.Option(
        "--at",
        min=0,
        max=LOGICAL_PARTITIONS_MAX,
        help="First logical partition of a part; repeatable.",
    ),
]
RouteVersion = Annotated[
    int,
    typer.Option(
        "--version", min=0, max=INT64_MAX, help="The version of the route; 0: the latest."
    ),
]
_PEM_FILES: Final = {
    "ca": "the authority of the servers' certificates",
    "cert": "the client's certificate",
    "key": "the certificate's key",
}


def require_utf8(name: str, text: str) -> None:
    """Raise BadParameter for the value of a parameter or variable if it holds bytes that are not
    UTF-8.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise typer.BadParameter(f"{name}: {visible(text)} is not valid UTF-8") from None


def port_option(text: str, envvar: str | None = None) -> Any:
    """An option for a port to listen on. 0 means any free port; the help says so after `text`."""
    return typer.Option(min=0, max=PORT_MAX, envvar=envvar, help=f"{text}; 0: any free port.")


def port_of(parts: str, number: int, given: int, step: int = 1) -> int:
    """The port of one of several `parts`, such as "shards", whose first, 0, has the given port. Any
    free port stays any free port. Raises InvalidArgument.
    """
    found = given + step * number if given else 0
    if found > PORT_MAX:
        raise InvalidArgument(
            f"port {given} + {step * number} is over {PORT_MAX}: use lower ports, or fewer {parts}"
        )
    return found


def tls_option(part: str, *, has_variable: bool = True) -> Any:
    """`--tls-ca`, `--tls-cert` or `--tls-key` of a client;
    also QMQ_TLS_CA and so on if `has_variable`.
    """
    return typer.Option(
        f"--tls-{part}",
        envvar=f"QMQ_TLS_{part.upper()}" if has_variable else None,
        help=f"PEM file: {_PEM_FILES[part]}.",
    )


_UNITS: Final = {
    "ms": "milliseconds",
    "s": "seconds",
    "m": "minutes",
    "h": "hours",
    "d": "days",
    "w": "weeks",
}
_PART: Final = re.compile(r"(\d+(?:\.\d+)?)(ms|[smhdw])", re.ASCII)
_PARTS: Final = re.compile(f"(?:{_PART.pattern})+", re.ASCII)


def parse_duration(text: str) -> timedelta:
    """Parse a duration such as "10m", "1h30m", "2d", "1w", "1.5s" or "500ms".
    Raises InvalidArgument.
    """
    if not _PARTS.fullmatch(text):
        raise InvalidArgument(f"{text!r} is not a duration: write 90s, 10m, 1h30m, 2d or 1w")
    try:
        return sum(
            (timedelta(**{_UNITS[unit]: float(number)}) for number, unit in _PART.findall(text)),
            timedelta(),
        )
    except OverflowError:
        raise InvalidArgument(f"{text!r} is too long a duration") from None


def parse_delays(text: str) -> tuple[int, ...]:
    """Parse comma-separated durations such as "1s,5s,1m" into milliseconds.
    Raises InvalidArgument.
    """
    return tuple(
        [
            round(parse_duration(part.strip()) / timedelta(milliseconds=1))
            for part in text.split(",")
        ]
    )


def delays_text(delays_ms: Iterable[int]) -> str:
    """The inverse of `parse_delays`; each duration in the largest unit that divides it."""
    units = (("h", 3_600_000), ("m", 60_000), ("s", 1_000), ("ms", 1))
    return ",".join(
        [
            next(f"{delay // size}{unit}" for unit, size in units if delay % size == 0)
            if delay
            else "0s"
            for delay in delays_ms
        ]
    )


def parse_when(text: str) -> datetime:
    """Parse a time such as "2027-01-01T09:00:00+01:00", or with Z for UTC. Raises InvalidArgument,
    also for a time without a zone.
    """
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidArgument(
            f"{text!r} is not a time: write 2027-01-01T09:00:00+01:00, or ...Z for UTC"
        ) from None
    if found.utcoffset() is None:
        raise InvalidArgument(
            f"{text!r} has no time zone: write {found.isoformat()}+01:00, or "
            f"{found.isoformat()}Z for UTC"
        )
    return found


def shifted(time: datetime, by: timedelta) -> datetime:
    """The time moved by a duration. Raises InvalidArgument if the result is
    outside the calendar.
    """
    try:
        return time + by
    except OverflowError:
        raise InvalidArgument(
            f"{by.days:,} days from {time:%Y-%m-%d} is outside the calendar: choose a "
            "shorter duration"
        ) from None


def age(lag_ms: int) -> str:
    """The age of the oldest waiting message; "0 s" if none waits."""
    return in_words(lag_ms - lag_ms % 1000) if lag_ms >= 1_000 else "<1 s" if lag_ms else "0 s"


@dataclass(frozen=True, slots=True)
class CliTiming:
    """All values are in seconds. Tests pass shorter ones as the `obj` of the command's context."""

    follow_s: float = 0.5
    """Between two polls of the consumer groups that have not yet followed a route change."""
    conflict_s: float = 0.5
    """Between two attempts while another change of the subject is in progress."""


TIMING: Final = CliTiming()


def timing_of(context: typer.Context) -> CliTiming:
    return context.find_object(CliTiming) or TIMING
