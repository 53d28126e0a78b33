"""Rejected messages reach their table once, though two tables cannot change in one commit.

The files are written first. The commit to the subject's table, which says that their messages are done, names them in the property
`qmq.rejected` in the same commit. Then they are added to the table of rejected messages, whose property `qmq.round` says which round it
has. A writer does the second step before it commits the next round, so at most one round is missing there, and any writer can add it.

A writer reads the rejected table first and the subject's table then. Its commit requires that the rejected table has not changed
since, so a round that another process added in between is not added again.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Mapping
from typing import Final

from pyspark_qmq.lake.lake_table import LakeTable
from qmq.errors import Overloaded

PENDING: Final = "qmq.rejected"
ROUND: Final = "qmq.round"
_TRIES: Final = 20


def told(locations: Iterable[str]) -> Mapping[str, str]:
    """What a commit to the subject's table says about a round's rejected messages."""
    return {PENDING: json.dumps({"round": uuid.uuid4().hex, "files": list(locations)})}


def complete(table: LakeTable, rejected: LakeTable) -> None:
    """Add the rejected messages of the last round that had some, unless they are there. Raises Overloaded."""
    if _is_done(table, rejected):
        return
    for _ in range(_TRIES):
        rejected.iceberg.refresh()
        table.iceberg.refresh()
        if _is_done(table, rejected):
            return
        pending = json.loads(table.iceberg.properties[PENDING])
        rejected.add(pending["files"], {ROUND: pending["round"]})
    raise Overloaded(f"other writers blocked the table of rejected messages of {table.subject!r}: start again")


def _is_done(table: LakeTable, rejected: LakeTable) -> bool:
    pending = table.iceberg.properties.get(PENDING)
    return pending is None or json.loads(pending)["round"] == rejected.iceberg.properties.get(ROUND)
