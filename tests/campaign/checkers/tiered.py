"""Reads of messages whose segments are only in an object store.

    {"process":"w","type":"ok","f":"tiered","segments":3}       so many segments have no file at a replica
    {"process":"r","type":"info","f":"garbled","value":7,"queue":"s/0@g1","sequence":4}

The body of a message follows from its value; a reader that gets another body writes it down. `tiered`
is for the gates: without it, everything was read from files.

A cache that hands out the chunk of another segment is found here, and a file that is deleted before
the store has its bytes by `reset_gives_all`.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from history.events import Anomaly, Operation, learn

from campaign.values import Checker, Evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class TieredSegments(Operation):
    """Segments without a file."""

    f: ClassVar[str] = "tiered"
    segments: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Garbled(Operation):
    """A message with another body than it was sent with."""

    f: ClassVar[str] = "garbled"
    value: int
    queue: str
    sequence: int


learn(TieredSegments, Garbled)


def _garbled(evidence: Evidence) -> Iterator[Anomaly]:
    for event in evidence.history:
        if isinstance(event, Garbled):
            yield Anomaly(
                "tiered_same",
                f"{event.value} at {event.queue} {event.sequence} has another body than was sent",
            )


CHECKERS = (
    Checker(
        name="tiered_same",
        what="what is read from the store has the bytes that were sent",
        find=_garbled,
    ),
)
