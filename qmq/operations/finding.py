"""A finding: an unusual state in a cluster, its severity, why it matters, and the next command to try.

A kind of finding has a code that never changes (docs/reference/findings.md lists them all). `Thresholds`, which an operator may change,
decide which states are findings.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any, Final


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
    """A kind of finding: a row of docs/reference/findings.md. `why` explains it to a reader who sees it for the first time."""

    code: str
    severities: str
    """The severities that it can have, and when."""
    condition: str
    why: str


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding. `about` names the object, `what` describes the problem, `command` is the command to try next."""

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


def in_words(duration_ms: int) -> str:
    """A duration in its largest unit, with a second one below ten: "250 ms", "42 s", "3 min 20 s", "2 d 5 h"."""
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
