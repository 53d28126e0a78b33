"""A queue as the store holds it: its numbers, its consume log, its producers, and the groups' shares of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qmq.log.consume_log import ConsumeLog, IndexEntry
from qmq.log.consumption import Share
from qmq.log.disk import Disk
from qmq.log.producers import Producers
from qmq.model import QueueId
from qmq.wire.messages import Produced


class Queue:
    """Everything derived about one queue.

    `start_sequence <= visible_sequence <= next_sequence`: retention took what is before the first; consumers see what is before the
    second (it is committed); the third is given to the next message.
    """

    __slots__ = (
        "cumulative_bytes",
        "id",
        "index",
        "last_append_ms",
        "next_sequence",
        "producers",
        "shares",
        "start_sequence",
        "visible_sequence",
    )

    def __init__(self, disk: Disk, folder: Path, queue_id: QueueId) -> None:
        self.id = queue_id
        self.index = ConsumeLog(disk, folder, queue_id)
        self.producers = Producers()
        self.shares: dict[str, Share] = {}
        self.start_sequence = 0
        self.next_sequence = 0
        self.visible_sequence = 0
        self.cumulative_bytes = 0
        self.last_append_ms = 0

    def add(self, entry: IndexEntry) -> None:
        """A batch was stored: index it and remember its producer. Used alike when appending and when replaying."""
        self.index.append(entry)
        self.note(entry)

    def note(self, entry: IndexEntry) -> None:
        """A batch was stored that the consume log has already."""
        self.next_sequence = entry.base_sequence + entry.count
        self.cumulative_bytes = entry.cumulative_bytes + entry.total_bytes
        self.last_append_ms = entry.append_time_ms
        produced = Produced(entry.base_sequence, entry.append_time_ms)
        self.producers.add(entry.producer_id, entry.batch_sequence, produced)

    def to_snapshot(self) -> list[Any]:
        """What a segment's opening snapshot keeps: enough to number on and to refuse duplicates."""
        return [
            self.id.subject, self.id.partition, self.next_sequence, self.cumulative_bytes, self.last_append_ms,
            self.producers.to_state(),
        ]  # fmt: skip

    def load_snapshot(self, state: list[Any]) -> None:
        """The inverse: the queue has nothing stored, but a past."""
        self.next_sequence, self.cumulative_bytes, self.last_append_ms = state[2:5]
        self.start_sequence = self.visible_sequence = self.next_sequence
        self.producers = Producers.from_state(state[5])

    def share(self, group: str) -> Share:
        """The group's share; made if absent."""
        share = self.shares.get(group)
        if share is None:
            share = self.shares[group] = Share()
        return share
