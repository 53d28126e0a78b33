"""The columns of an ordered history: what is known of each message, each delivery, and each grant of a lane."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from history.events import Type
from history.ordered.events import Stored

NEVER = 1 << 62
Line = tuple[str, str]
"""Producer and key."""


@dataclass(slots=True, eq=False)
class Grant:
    """A lane as granted to one consumer. `first_ns` is the time of the first delivery; the grant was earlier."""

    group: str
    partition: int
    token: int
    consumer: str
    lps: range
    version: int
    first_ns: int

    def __str__(self) -> str:
        return f"{self.consumer} (token {self.token}, [{self.lps.start}, {self.lps.stop}) of partition {self.partition})"


class Outaged(NamedTuple):
    """A broker group may have had no master."""

    group: str
    since_ns: int
    until_ns: int
    kind: str


@dataclass(slots=True, eq=False)
class Messages:
    """Column by column, by a message's number."""

    line: list[int]
    serial: list[int]
    fate: list[Type]
    """`invoke` while it has no end."""
    is_resent: list[bool]
    place: list[Stored | None]
    """The place that the producer got in the answer."""
    invoked_ns: list[int]
    ended_ns: list[int]


@dataclass(slots=True, eq=False)
class Deliveries:
    """Column by column, by a delivery's number, in the order in which they happened."""

    message: list[int]
    grant: list[int]
    sequence: list[int]
    id: list[int]
    at_ns: list[int]
    began_ns: list[int]
    """When the settlement began; the delivery's own time if unknown."""
    end: list[Type]
    """The settlement's; `invoke` if there is none."""


def seconds(at_ns: int) -> str:
    """A moment, or "never"."""
    return "never" if at_ns >= NEVER else f"{at_ns / 1e9:.6f} s"
