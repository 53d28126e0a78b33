"""Adds rejected messages to their table exactly once, although two tables cannot change in one commit.

The files are written first. The commit that moves the subject's table past their messages also sets the table's property `qmq.rejected`,
which names the files. Then the files are added to the table of rejected messages, whose property `qmq.round` names the last round that it
has. A writer does the second step before it commits the next round, so at most one round is missing there, and any writer can add it.

A writer reads the rejected table first, then the subject's table. Its commit requires that the rejected table has not changed
since, so a round that another process added in between is not added again.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from pyspark_qmq.lake.lake_damage import require_within
from pyspark_qmq.lake.lake_table import LakeTable
from qmq.errors import LogDamaged, Overloaded
from qmq.json_values import parse_json

PENDING: Final = "qmq.rejected"
ROUND: Final = "qmq.round"
_TRIES: Final = 20


def told(locations: Iterable[str]) -> Mapping[str, str]:
    """The property of the subject's table that names the files of a round's rejected messages."""
    return {PENDING: json.dumps({"round": uuid.uuid4().hex, "files": list(locations)})}


@dataclass(frozen=True, slots=True)
class PendingFiles:
    """The files of the last round's rejected messages."""

    round: str
    files: tuple[str, ...]


def pending_of(text: str) -> PendingFiles:
    """The inverse of `told`. Raises LogDamaged."""
    try:
        found = parse_json(text)
        files = found["files"]
        if not isinstance(files, list) or not all(isinstance(each, str) for each in (*files, found["round"])):
            raise TypeError("a file's name or the round is no text")
    except (ValueError, KeyError, TypeError) as cause:
        raise LogDamaged(f"the table's property {PENDING} is unreadable, {text[:200]!r}: {cause}; another tool wrote it") from None
    return PendingFiles(found["round"], tuple(files))


def require_pending(pending: PendingFiles, tables: Iterable[LakeTable]) -> None:
    """Raises LogDamaged for files outside of the folders of the subject's tables."""
    folders = [each.iceberg.location() for each in tables]
    for location in pending.files:
        require_within(folders, location, f"property {PENDING}")


def complete(table: LakeTable, rejected: LakeTable) -> None:
    """Add the rejected messages of the last round that had any, unless their table has them. Raises Overloaded, LogDamaged."""
    if _is_done(table, rejected):
        return
    for _ in range(_TRIES):
        rejected.iceberg.refresh()
        table.iceberg.refresh()
        if _is_done(table, rejected):
            return
        pending = pending_of(table.iceberg.properties[PENDING])
        require_pending(pending, [table, rejected])
        rejected.add(pending.files, {ROUND: pending.round})
    raise Overloaded(f"other writers blocked the table of rejected messages of {table.subject!r}: start again")


def _is_done(table: LakeTable, rejected: LakeTable) -> bool:
    pending = table.iceberg.properties.get(PENDING)
    return pending is None or pending_of(pending).round == rejected.iceberg.properties.get(ROUND)
