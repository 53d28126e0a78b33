"""The progress of a consumer group on a partition of an ordered subject. Pure."""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # commands that call no broker do not load protobuf
    from qmq.proto.v1 import control_pb2 as control


def messages_end(status: control.PartitionStatus) -> int:
    """The end of a partition's messages. The last entry of a closed partition is its command message."""
    return status.sealed_at if status.HasField("sealed_at") else status.next_sequence


def messages_left(status: control.PartitionStatus) -> int:
    """The messages of a partition that the group has not done, from its progress.

    Exact while the group is equally far in all ranges; otherwise each range counts by its width, since messages are not counted by range.
    """
    end = messages_end(status)
    if not status.progress:
        return end - min(end, status.start_sequence)
    whole = sum(each.lps.end - each.lps.first for each in status.progress)
    left = 0.0
    for each in status.progress:
        rest = 0 if each.is_finished else max(0, end - max(each.done_before, status.start_sequence))
        left += rest * (each.lps.end - each.lps.first) / whole
    return ceil(left - 1e-9)
