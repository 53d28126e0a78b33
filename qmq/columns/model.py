"""The values of the log in columns, and the interface to the log: brokers and files return the same
rows for the same offsets.

A *queue* is one subject's partition on one broker group. An offset is the sequence of the next
message. A `LogAddress` is sent to executors. Each process opens a `CommittedLog` from it, which one
thread uses.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol

from qmq_ordering.routes import LpRange

from qmq.errors import InvalidArgument
from qmq.wire.batch import Envelope

_QUEUE: Final = re.compile(r"(\d{1,9})@([A-Za-z0-9_-][A-Za-z0-9._-]*)")


class QueueKey(NamedTuple):
    """Identifies a queue in the cluster. Unordered subjects have partition 0 on each of their
    broker groups.
    """

    subject: str
    partition: int
    broker_group: str

    def __str__(self) -> str:
        return f"{self.subject}/{self.within}"

    @property
    def within(self) -> str:
        """The queue's name within its subject, such as `3@g1`."""
        return f"{self.partition}@{self.broker_group}"

    @classmethod
    def parse(cls, subject: str, within: str) -> QueueKey:
        """The inverse of `within`. Raises InvalidArgument."""
        match = _QUEUE.fullmatch(within)
        if match is None:
            raise InvalidArgument(
                f"{within!r} is not a queue of subject {subject!r}: write "
                "PARTITION@BROKER_GROUP, such as 0@g1"
            )
        return cls(subject, int(match[1]), match[2])


@dataclass(frozen=True, slots=True)
class SourceQueue:
    """The committed part of a queue at one point in time."""

    key: QueueKey
    start: int
    """The sequence of the oldest stored message."""
    end: int
    """The sequence after the newest visible message; for a sealed partition, the sequence of its
    command message.
    """
    stored_bytes: int = 0
    """The approximate size of the stored messages."""
    last_append_ms: int = 0
    """When the newest message was stored; 0 if there was none."""
    is_sealed: bool = False
    """Whether the queue is sealed."""


@dataclass(frozen=True, slots=True)
class RoutePartition:
    """A partition of an ordered subject, of any version."""

    number: int
    lps: LpRange
    broker_group: str
    version: int
    """The route version that opened it."""
    sources: tuple[int, ...] = ()
    """The partitions that were closed for it; empty for a subject's first partitions."""


@dataclass(frozen=True, slots=True)
class Routes:
    """All routes of an ordered subject, represented by the partitions that they opened."""

    logical_partitions: int
    version: int
    """The latest version."""
    partitions: Mapping[int, RoutePartition]
    sealed_at: Mapping[int, int] = field(default_factory=dict)
    """The sequence of the command message of each closed partition. A partition closed by a fence
    is missing until the sequence is known."""
    is_strict: bool = True
    """False for best-effort order, where a message may be in a partition that
    does not have its key.
    """


@dataclass(frozen=True, slots=True)
class Topology:
    """The committed state at one point in time."""

    queues: Mapping[QueueKey, SourceQueue]
    routes: Mapping[str, Routes] = field(default_factory=dict)
    """The routes of ordered subjects, if known (always when read from brokers)."""


class ReaderReport(NamedTuple):
    """What a stream says of itself to brokers, for operators: its name, everything before which it
    has read and committed, and how many messages it lost.
    """

    reader: str
    done: Mapping[QueueKey, int]
    lost: Mapping[QueueKey, int]


@dataclass(frozen=True, slots=True)
class ReadSelection:
    """A selection of messages; without conditions: all. A message must meet all conditions."""

    tags_any: tuple[str, ...] = ()
    tags_all: tuple[str, ...] = ()
    keys: tuple[bytes, ...] = ()
    """Exactly these keys."""
    key_from: bytes | None = None
    """Keys at or after this one, compared byte by byte. Messages without a key are in no range."""
    key_until: bytes | None = None
    """Keys below this one."""
    with_directed: bool = False
    """Whether to include copies for one consumer group (delayed retries)."""

    @property
    def has_keys(self) -> bool:
        """Whether there is a condition on keys."""
        return bool(self.keys) or self.key_from is not None or self.key_until is not None

    @property
    def is_all(self) -> bool:
        """Whether every row of an undirected batch is selected."""
        return not (self.tags_any or self.tags_all or self.has_keys)


ALL: Final = ReadSelection()


class SourceBatch(NamedTuple):
    """A whole committed batch with verified checksums. `region`: bytes, or a view of memory that
    does not change.
    """

    envelope: Envelope
    region: bytes | memoryview


@dataclass(frozen=True, slots=True)
class QueuePiece:
    """Sequences `first` to `end` - 1 of a queue, for one task.

    `place` is the log's own location of the piece, or None; picklable for executors.
    """

    queue: QueueKey
    first: int
    end: int
    place: Any = None
    lps: tuple[LpRange, ...] = ()
    """If not empty, only these logical partitions are wanted (batches without any of
    them may be skipped).
    """


class CommittedLog(Protocol):
    """Reads committed messages, and only those."""

    def subjects(self) -> list[str]:
        """The names of all subjects, sorted. Raises NotConnected, LogDamaged."""
        ...

    def topology(self, subjects: list[str], report: ReaderReport | None = None) -> Topology:
        """The current queues and routes of these subjects, without caching. Brokers learn the
        report by the way; files ignore it.

        Raises:
            UnknownSubject: one of them does not exist. NotConnected: a broker group did not answer
            in time, so the ends of its queues are unknown. LogDamaged: a file is damaged.
        """
        ...

    def find_time(self, queue: QueueKey, time_ms: int) -> int:
        """The sequence of the first message stored at or after a time (milliseconds since 1970);
        the queue's end if there is none.

        Raises as `topology`.
        """
        ...

    def pieces(self, queue: QueueKey, first: int, end: int, bytes_max: int) -> list[QueuePiece]:
        """Split `first` to `end` - 1 into ascending pieces of about `bytes_max` stored bytes; no
        pieces if first >= end.

        Raises as `topology`.
        """
        ...

    def read(
        self, piece: QueuePiece, selection: ReadSelection, *, skips_lost: bool
    ) -> Iterator[SourceBatch]:
        """Yields, in ascending order, all batches that have a sequence of the piece. Batches that
        cannot match may be left out.

        Command messages are never returned, and directed batches only if the selection asks for
        them.

        Raises:
            MessagesExpired: retention deleted messages of the piece, and `skips_lost` is False.
            Possible at any batch. NotConnected: no master could be reached for `qmq.retryMs`.
            LogDamaged: a checksum is wrong.
        """
        ...

    def close(self) -> None:
        """Close files and connections."""
        ...
