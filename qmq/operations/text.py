"""How values are written: keys as people read and type them, text, `hex:00ff`, or `base64:AP8=`, so
that a printed key is valid input; times and durations exactly for programs, and shortly in tables
for people.

Also what a finding is: an unusual state in a cluster, its severity, why it matters, and the next
command to try. A kind of finding has a code that never changes (docs/reference/findings.md lists
them all). `Thresholds`, which an operator may change, decide which states are findings.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any, Final

from qmq.errors import InvalidArgument
from qmq.process.event_loop import time_of

HEX: Final = "hex:"
BASE64: Final = "base64:"


def key_text(key: bytes) -> str:
    """A key as text if it is printable and not ambiguous, otherwise in hexadecimal digits."""
    try:
        text = key.decode()
    except UnicodeDecodeError:
        return HEX + key.hex()
    is_plain = text.isprintable() and text == text.strip() and not text.startswith((HEX, BASE64))
    return text if text and is_plain else HEX + key.hex()


def parse_key(text: str) -> bytes:
    """Parse a key: text, hexadecimal digits or base64. Raises InvalidArgument."""
    try:
        if text.startswith(HEX):
            return bytes.fromhex(text.removeprefix(HEX))
        if text.startswith(BASE64):
            return base64.b64decode(text.removeprefix(BASE64), validate=True)
        return text.encode()  # arguments of a command may hold bytes that are no UTF-8
    except (ValueError, binascii.Error) as cause:
        raise InvalidArgument(
            f"{text!r} is not a key: {cause}; a key is text, hex:00ff or base64:AP8="
        ) from None


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


class Severity(IntEnum):
    """The severity of a finding. Only warnings and worse change the exit status of `qmq doctor`."""

    NOTICE = 1
    """Information: an operator's own order, or a deliberate risk."""
    WARNING = 2
    """Messages are lost, late or at risk, and will be until an operator acts."""
    CRITICAL = 3
    """Messages are refused or stand still, or the next fault loses some."""


@dataclass(frozen=True, slots=True)
class FindingKind:
    """A kind of finding: a row of docs/reference/findings.md. `why` explains it to a reader who
    sees it for the first time.
    """

    code: str
    severities: str
    """The severities that it can have, and when."""
    condition: str
    why: str


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding. `about` names the object, `what` describes the problem, `command` is the command
    to try next.
    """

    kind: FindingKind
    severity: Severity
    about: str
    what: str
    command: str

    @property
    def code(self) -> str:
        return self.kind.code

    @property
    def why(self) -> str:
        return self.kind.why

    def as_json(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "code": self.code,
            "severity": self.severity.name.lower(),
            "about": self.about,
            "what": self.what,
            "why": self.why,
            "command": self.command,
        }


@dataclass(frozen=True, slots=True)
class Thresholds:
    """The values from which on something counts as unusual. Times are milliseconds."""

    lag_ms: int = 300_000
    lag_messages: int = 1_000_000
    unconsumed_ms: int = 60_000
    """Messages that wait longer for a group without consumers are a finding."""
    dead_letters_recent_ms: int = 600_000
    store_silent_ms: int = 5_000
    replica_silent_ms: int = 5_000
    replica_lag_entries: int = 10_000
    unflushed_age_ms: int = 10_000
    disk_reserves: int = 4
    """A disk is nearly full when less than this multiple of its reserve is free."""
    certificate_warning_ms: int = 7 * 86_400_000
    certificate_notice_ms: int = 30 * 86_400_000
    clock_ms: int = 2_000
    retention_behind_ms: int = 3_600_000
    route_change_ms: int = 60_000
    lateness_ms: int = 5_000

    def as_json(self) -> dict[str, int]:
        """As JSON has it."""
        return asdict(self)


THRESHOLDS: Final = Thresholds()
MANY: Final = 5
"""The number of findings of one kind that are shown individually."""


def folded(found: Iterable[Finding], most: int = MANY) -> tuple[Finding, ...]:
    """The findings for a person: beyond `most` findings of one kind and severity, one line replaces
    the rest.
    """
    kept: list[Finding] = []
    counts: dict[tuple[str, Severity], int] = {}
    for each in found:
        key = (each.code, each.severity)
        counts[key] = counts.get(key, 0) + 1
        if counts[key] <= most:
            kept.append(each)
    result: list[Finding] = []
    for place, each in enumerate(kept):
        result.append(each)
        key = (each.code, each.severity)
        is_last = place + 1 == len(kept) or (kept[place + 1].code, kept[place + 1].severity) != key
        if is_last and counts[key] > most:
            more = f"{counts[key] - most:,} more"
            result.append(
                Finding(
                    each.kind, each.severity, more, "likewise; --json lists them all", each.command
                )
            )
    return tuple(result)


def worst(found: Iterable[Finding]) -> Severity | None:
    """The highest severity; None if nothing was found."""
    return max((each.severity for each in found), default=None)


def in_words(duration_ms: int) -> str:
    """A duration in its largest unit, with a second one below ten: "250 ms", "42 s", "3 min 20 s",
    "2 d 5 h".
    """
    if duration_ms < 1_000:
        return f"{duration_ms} ms"
    units = ((86_400_000, "d"), (3_600_000, "h"), (60_000, "min"), (1_000, "s"))
    for place, (size, unit) in enumerate(units):
        count, rest = divmod(duration_ms, size)
        if not count:
            continue
        smaller, name = units[place + 1] if place + 1 < len(units) else (0, "")
        more = rest // smaller if smaller and count < 10 else 0
        return f"{count} {unit} {more} {name}" if more else f"{count} {unit}"
    raise AssertionError("a second and more has a unit")


def counted(number: int, noun: str) -> str:
    """A number with its noun: "1 message", "1,234 messages"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def size_in_words(size_bytes: int) -> str:
    """A size in binary units, three digits: "512 MiB"."""
    size = float(size_bytes)
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            return f"{size:.3g} {unit}" if unit != "bytes" else f"{size_bytes} bytes"
        size /= 1024
    raise AssertionError("the loop above returns")
