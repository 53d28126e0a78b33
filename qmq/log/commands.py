"""Command messages: the last entry of a partition of an ordered subject. A batch of one message, of kind COMMAND, made by the master.

Its body is JSON: the change that closed the partition, and the route version that it leads to. It has a sequence like any message, so that
"done up to and including the command message" is a comparison of numbers.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from qmq.batch import encode
from qmq.errors import CorruptBatch
from qmq.log.queue import Sealed
from qmq.region import Columns, Layout, bytes_column, parse_header

if TYPE_CHECKING:
    from qmq.model import QueueId


def build(queue: QueueId, change_id: str, to_version: int) -> bytes:
    """The region of a command message."""
    body = json.dumps({"change_id": change_id, "to_version": to_version}, sort_keys=True).encode()
    _, region = encode(
        queue.subject.encode(), Columns([body]), producer_id=0, batch_sequence=0, create_time_ms=0, partition=queue.partition
    )
    return region


def read(region: bytes, sequence: int) -> Sealed:
    """What a command message at `sequence` says. Raises CorruptBatch."""
    header = parse_header(region)
    layout = Layout.walk(region, header)
    try:
        found = json.loads(bytes_column(region, layout.body, layout.body_data, 1)[0])
        return Sealed(sequence, found["change_id"], found["to_version"])
    except (ValueError, TypeError, KeyError) as cause:
        raise CorruptBatch(f"the command message at sequence {sequence} cannot be read: {cause!r}") from cause
