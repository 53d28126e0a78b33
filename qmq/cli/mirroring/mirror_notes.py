"""How far a mirror is with one subject: notes that pair places in the source with places in the
target. Pure.

    note      every message of the source before `mark` that is to be copied is in the target,
              before `ends`
    thinned   all recent notes are kept, and older ones at growing distances: a group that is far
              behind gets an older place

A group's progress is translated by the newest note whose messages it has all done (as Kafka's
MirrorMaker 2 does by its offset syncs): what lies before the note's ends is done, so the group may
begin there. What it has done behind them is delivered again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from qmq.text import parse_json

Places = Mapping[tuple[str, int], int]
"""(broker group, partition) -> the sequence of the next message."""

NOTES_KEPT: Final = 64
RECENT_NOTES: Final = 16


@dataclass(frozen=True, slots=True)
class MirrorNote:
    """`time_ms`: the mirror's clock when the note was made, which may be wrong: it names the note,
    and no place is found by it.
    """

    mark: Places
    ends: Places
    time_ms: int

    def to_json(self) -> dict[str, Any]:
        return {
            "mark": places_json(self.mark),
            "ends": places_json(self.ends),
            "time_ms": self.time_ms,
        }

    @classmethod
    def of_json(cls, found: Mapping[str, Any]) -> MirrorNote:
        """The inverse of `to_json`. Raises ValueError, KeyError or TypeError."""
        return cls(
            places_of(found["mark"]),
            places_of(found["ends"]),
            msgspec.convert(found["time_ms"], int),
        )

    def is_done(self, done: Mapping[tuple[str, int], float]) -> bool:
        """Whether a group with this progress has done all messages of the note."""
        return all(done.get(queue, 0) >= place for queue, place in self.mark.items())


def places_json(places: Places) -> list[list[Any]]:
    return [[group, partition, place] for (group, partition), place in sorted(places.items())]


def places_of(found: list[list[Any]]) -> dict[tuple[str, int], int]:
    """The inverse of `places_json`. Raises ValueError or TypeError."""
    return {
        (group, partition): place
        for group, partition, place in msgspec.convert(found, list[tuple[str, int, int]])
    }


def with_note(notes: tuple[MirrorNote, ...], new: MirrorNote) -> tuple[MirrorNote, ...]:
    """The notes, oldest first, with a newer one; thinned if they are too many."""
    if notes and notes[-1].mark == new.mark:
        return (
            *notes[:-1],
            new,
        )  # nothing was copied since: the newer one says the same of a later moment
    found = (*notes, new)
    if len(found) <= NOTES_KEPT:
        return found
    old, recent = found[:-RECENT_NOTES], found[-RECENT_NOTES:]
    return (*old[len(old) % 2 :: 2], *recent)


def newest_done(
    notes: tuple[MirrorNote, ...], done: Mapping[tuple[str, int], float]
) -> MirrorNote | None:
    """The newest note whose messages a group has all done; None if there is no such note."""
    return next((each for each in reversed(notes) if each.is_done(done)), None)


@dataclass(frozen=True, slots=True)
class MirrorRecord:
    """A mirror's record of a subject, besides the load's journal. Losing it loses no message:
    groups wait for new notes, and the lag is counted from the last message that was copied.
    """

    notes: tuple[MirrorNote, ...] = ()
    read_to: Places = field(default_factory=dict)
    """The position up to which the source was read.
    Earlier messages are copied, or are not to be copied.
    """
    moved: Mapping[str, int] = field(default_factory=dict)
    """The time of the note to which each group was moved last."""

    def encode(self) -> bytes:
        notes = [each.to_json() for each in self.notes]
        return json.dumps(
            {"notes": notes, "read_to": places_json(self.read_to), "moved": dict(self.moved)}
        ).encode()

    @classmethod
    def decode(cls, data: bytes) -> MirrorRecord:
        """The inverse of `encode`. Raises ValueError, KeyError or TypeError."""
        found = parse_json(data)
        notes = tuple(MirrorNote.of_json(each) for each in found["notes"])
        return cls(
            notes, places_of(found["read_to"]), msgspec.convert(found["moved"], dict[str, int])
        )

    def lag(self, ends: Places, starts: Places) -> int:
        """The number of messages of the source that were not read yet.
        Deleted messages do not count.
        """
        return sum(
            max(0, end - max(self.read_to.get(queue, 0), starts.get(queue, 0)))
            for queue, end in ends.items()
        )
