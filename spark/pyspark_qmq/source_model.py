"""What the parts of the data source say to each other. Values only.

A *queue* is one subject's partition on one broker group. Offsets are sequences: the next message. docs/SPARK.md has the words.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from qmq_ordering.route import LpRange

from qmq.batch import Envelope
from qmq.errors import InvalidArgument

_QUEUE: Final = re.compile(r"(\d{1,9})@([A-Za-z0-9_-][A-Za-z0-9._-]*)")


class QueueKey(NamedTuple):
    """Names a queue over the whole cluster. Unordered subjects have partition 0, on each of their broker groups."""

    subject: str
    partition: int
    broker_group: str

    def __str__(self) -> str:
        return f"{self.subject}/{self.within}"

    @property
    def within(self) -> str:
        """Its name within its subject, `3@g1`."""
        return f"{self.partition}@{self.broker_group}"

    @classmethod
    def parse(cls, subject: str, within: str) -> QueueKey:
        """The inverse of `within`. Raises InvalidArgument."""
        match = _QUEUE.fullmatch(within)
        if match is None:
            raise InvalidArgument(f"{within!r} is no queue of subject {subject!r}: write PARTITION@BROKER_GROUP, such as 0@g1")
        return cls(subject, int(match[1]), match[2])


@dataclass(frozen=True, slots=True)
class SourceQueue:
    """What is committed of a queue at one moment."""

    key: QueueKey
    start: int
    """The oldest message that is kept."""
    end: int
    """Behind the newest message that applications may see; of a sealed partition the sequence of its command message."""
    stored_bytes: int = 0
    """What the kept messages take, about."""
    last_append_ms: int = 0
    """When the newest was stored; 0 if there never was one."""
    is_sealed: bool = False
    """Whether nothing will ever follow."""


@dataclass(frozen=True, slots=True)
class RoutePartition:
    """A partition of an ordered subject, of any version."""

    number: int
    lps: LpRange
    broker_group: str
    version: int
    """The route version that opened it."""
    sources: tuple[int, ...] = ()
    """The partitions that were closed for it; none of a subject's first ones."""


@dataclass(frozen=True, slots=True)
class Routes:
    """All routes of an ordered subject, as the partitions that they opened."""

    logical_partitions: int
    version: int
    """The latest."""
    partitions: Mapping[int, RoutePartition]
    sealed_at: Mapping[int, int] = field(default_factory=dict)
    """Of closed partitions the sequence of the command message; one that a fence closed is missing until it is known."""
    is_strict: bool = True
    """False: best-effort order, where a message may lie in a partition that is not its key's."""


@dataclass(frozen=True, slots=True)
class Topology:
    """What is committed, at one moment."""

    queues: Mapping[QueueKey, SourceQueue]
    routes: Mapping[str, Routes] = field(default_factory=dict)
    """Of ordered subjects, as far as they are known (always, when brokers are asked)."""


@dataclass(frozen=True, slots=True)
class ReadSelection:
    """Which messages are wanted; nothing given: all. A message has to meet everything that is given."""

    tags_any: tuple[str, ...] = ()
    tags_all: tuple[str, ...] = ()
    keys: tuple[bytes, ...] = ()
    """Exactly these."""
    key_from: bytes | None = None
    """Keys from this one on, in the order of bytes. Messages without a key never lie in a range."""
    key_until: bytes | None = None
    """Keys below this one."""
    with_directed: bool = False
    """Also copies that are for one consumer group only (retries that were delayed)."""

    @property
    def has_keys(self) -> bool:
        """Whether anything is said of keys."""
        return bool(self.keys) or self.key_from is not None or self.key_until is not None

    @property
    def is_all(self) -> bool:
        """Whether no row of an undirected batch is left out."""
        return not (self.tags_any or self.tags_all or self.has_keys)


ALL: Final = ReadSelection()


class SourceBatch(NamedTuple):
    """A whole committed batch; its checksums hold. `region` is bytes, or a view of memory that stays as it is."""

    envelope: Envelope
    region: bytes | memoryview


@dataclass(frozen=True, slots=True)
class QueuePiece:
    """Sequences `first` to `end` - 1 of a queue, for one task.

    `place` is the log's own note of where they lie, or None; it can be sent to executors.
    """

    queue: QueueKey
    first: int
    end: int
    place: Any = None
    lps: tuple[LpRange, ...] = ()
    """If not empty: only logical partitions within these are wanted (batches without any of them may be passed over)."""
