"""Which stored messages are read without a group, and from which queues. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from qmq.client.message import CONTENT, Decoded, StoredMessage

_END: Final = (1 << 63) - 1


class BrowsedMessage(StoredMessage):
    """A stored message, and where it is stored."""

    __slots__ = (*CONTENT, "broker_group", "partition", "subject")

    def __init__(self, batch: Decoded, index: int, queue: BrowsedQueue) -> None:
        self.body, self.attempt, self.is_settled = batch.bodies[index], 1, False
        self._batch, self._index = batch, index
        self.subject, self.broker_group, self.partition = queue.subject, queue.broker_group, queue.partition


@dataclass(frozen=True, slots=True)
class BrowsedQueue:
    """One queue of the subject: the messages of a broker group, or of a partition. `next_sequence` is the sequence to read next."""

    subject: str
    broker_group: str
    partition: int
    next_sequence: int

    @property
    def key(self) -> tuple[str, int]:
        """Identifies the queue among those of the subject."""
        return self.broker_group, self.partition


@dataclass(frozen=True, slots=True)
class BrowseSelection:
    """Selects messages. Times of storing are milliseconds since 1970, 0 for no limit. `last` is a number of the newest messages of each
    queue. `is_directed`: only messages that were sent to one consumer group; without it, only those for all. `content` must be in the body.
    """

    start_ms: int = 0
    end_ms: int = 0
    last: int | None = None
    key: bytes | None = None
    tags_any: tuple[str, ...] = ()
    tags_all: tuple[str, ...] = ()
    first_sequence: int = 0
    end_sequence: int | None = None
    positions: Mapping[tuple[str, int], int] = field(default_factory=dict)
    is_directed: bool = False
    content: bytes = b""

    def first_of(self, queue: BrowsedQueue) -> int:
        """The sequence with which to begin in a queue."""
        if self.last is not None:
            return max(queue.next_sequence - self.last, 0)
        return max(self.first_sequence, self.positions.get(queue.key, 0))

    def end_of(self, queue: BrowsedQueue, *, follow: bool) -> int:
        """The sequence before which to end."""
        end = _END if follow else queue.next_sequence
        return end if self.end_sequence is None else min(end, self.end_sequence)

    def wants(self, message: StoredMessage) -> bool:
        """Whether the selection has this message, apart from `last`. Pure."""
        if message.append_time_ms < self.start_ms or (self.end_ms and message.append_time_ms >= self.end_ms):
            return False
        if self.key is not None and message.key_bytes != self.key:
            return False
        if self.content not in message.body:
            return False
        tags = message.tags if self.tags_any or self.tags_all else ()
        return (not self.tags_any or any(tag in tags for tag in self.tags_any)) and all(tag in tags for tag in self.tags_all)
