"""Command messages: a batch of one message, of kind COMMAND, made by the master. Its body is JSON.

A seal is the last entry of a partition of an ordered subject. It names the change that closed the
partition, and the change's route version. A seal has a sequence like any message, so that "done up
to and including the command message" is a comparison of numbers.

A drop (docs/DELETION.md) deletes the content of its queue: nothing up to and including the drop
belongs to the queue any more. A purge deletes the messages up to it, as retention does: producers,
groups and a seal stay.
"""

from __future__ import annotations

import json
from enum import Enum
from typing import TYPE_CHECKING, Final

from qmq.errors import CorruptBatch
from qmq.log.queue import Sealed
from qmq.wire.batch import encode
from qmq.wire.batch_columns import Columns, Layout, bytes_column, parse_header

if TYPE_CHECKING:
    from qmq.model import QueueId


COMMAND_PRODUCER: Final = 0
"""The producer id of command messages. Ids of producers are larger."""


class QueueErasure(Enum):
    """The kinds of erasing command messages; the value is the key in the body."""

    DROP = "drop"
    PURGE = "purge"


def build(queue: QueueId, change_id: str, to_version: int) -> bytes:
    """Build the region of a seal."""
    return _region(queue, {"change_id": change_id, "to_version": to_version})


def build_drop(queue: QueueId) -> bytes:
    """Build the region of a drop."""
    return _region(queue, {QueueErasure.DROP.value: True})


def build_purge(queue: QueueId) -> bytes:
    """Build the region of a purge."""
    return _region(queue, {QueueErasure.PURGE.value: True})


def _region(queue: QueueId, content: dict[str, object]) -> bytes:
    body = json.dumps(content, sort_keys=True).encode()
    _, region = encode(
        queue.subject.encode(),
        Columns([body]),
        producer_id=COMMAND_PRODUCER,
        batch_sequence=0,
        create_time_ms=0,
        partition=queue.partition,
    )
    return region


def read(region: bytes, sequence: int) -> Sealed | QueueErasure:
    """The content of a seal at `sequence`, or the kind of an erasure. Raises CorruptBatch."""
    header = parse_header(region)
    layout = Layout.walk(region, header)
    try:
        found = json.loads(bytes_column(region, layout.body, layout.body_data, 1)[0])
        for each in QueueErasure:
            if each.value in found:
                return each
        return Sealed(sequence, found["change_id"], found["to_version"])
    except (ValueError, TypeError, KeyError) as cause:
        raise CorruptBatch(
            f"the command message at sequence {sequence} cannot be read: {cause!r}"
        ) from cause
