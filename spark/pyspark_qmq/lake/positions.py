"""How far a table has each queue of its subject. Pure.

A position is the sequence after the last message of a queue that the table has. The positions of all queues are a property of the snapshot
that added the files, so both change in one commit. Other tools (such as compaction by Spark) make snapshots without the property: then the
property of the nearest ancestor that has one counts. If no such ancestor is left, the table's own property counts, which each commit also
writes.

The ancestors come before the table, because a table that was rolled back to an older snapshot has only that snapshot's messages.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from pyspark_qmq.offsets import Offsets, sequence_of
from pyspark_qmq.source_model import QueueKey
from qmq.errors import InvalidArgument, LogDamaged
from qmq.json_values import parse_json

PROPERTY: Final = "qmq.positions"
COMPLETE_FROM: Final = "qmq.complete-from"
"""Property of a table: of each queue, the sequence from which on the table has every message up to its position; 0 for a missing queue. It
only rises: when a new table begins later, and when messages that retention deleted are skipped."""


class Snapshot(NamedTuple):
    """The parts of a snapshot that positions need."""

    parent: int | None
    properties: Mapping[str, str]


def encode(subject: str, positions: Offsets) -> str:
    """The positions as JSON, `{"0@g1":120}`, sorted, so that equal positions are equal text."""
    return json.dumps({key.within: positions[key] for key in sorted(positions) if key.subject == subject}, separators=(",", ":"))


def decode(subject: str, text: str) -> dict[QueueKey, int]:
    """The inverse of `encode`. Raises LogDamaged."""
    try:
        found: Any = parse_json(text)
        return {QueueKey.parse(subject, within): sequence_of(sequence) for within, sequence in found.items()}
    except (ValueError, AttributeError, TypeError, InvalidArgument) as cause:
        raise LogDamaged(f"the table of {subject!r} has unreadable positions, {text[:200]!r}: {cause}") from None


def complete_from(known: Offsets, begin: Offsets, end: Offsets, read_from: Offsets) -> dict[QueueKey, int]:
    """From where a table is complete after a round from `begin` to `end` that found only the messages from `read_from` on."""
    found = dict(known)
    for key, last in end.items():
        first = begin.get(key, 0)
        if first < last and read_from.get(key, last) > first:
            found[key] = read_from.get(key, last)
    return found


def newest(subject: str, current: int | None, snapshot: Callable[[int], Snapshot | None], table: Mapping[str, str]) -> dict[QueueKey, int]:
    """The positions of a table.

    Args:
        current: the id of its current snapshot; None for a new table.
        snapshot: a snapshot by its id; None for one that has expired.
        table: the table's properties.

    Raises:
        LogDamaged: the table has messages but no positions.
    """
    at = current
    while at is not None and (found := snapshot(at)) is not None:
        if PROPERTY in found.properties:
            return decode(subject, found.properties[PROPERTY])
        at = found.parent
    if PROPERTY in table:
        return decode(subject, table[PROPERTY])
    if current is None:
        return {}
    raise LogDamaged(f"the table of {subject!r} has a snapshot, and no property {PROPERTY}: it was not written by qmq lake")
