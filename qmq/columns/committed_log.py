"""The interface of the data source to the log. Brokers and files implement it, and return the same rows for the same offsets.

A `LogAddress` is sent to executors. Each process opens a `CommittedLog` from it, which one thread uses.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from qmq.columns.model import QueueKey, QueuePiece, ReadSelection, SourceBatch, Topology


class CommittedLog(Protocol):
    """Reads committed messages, and only those."""

    def subjects(self) -> list[str]:
        """The names of all subjects, sorted. Raises NotConnected, LogDamaged."""
        ...

    def topology(self, subjects: list[str]) -> Topology:
        """The current queues and routes of these subjects, without caching.

        Raises:
            UnknownSubject: one of them does not exist.
            NotConnected: a broker group did not answer in time, so the ends of its queues are unknown.
            LogDamaged: a file is damaged.
        """
        ...

    def find_time(self, queue: QueueKey, time_ms: int) -> int:
        """The sequence of the first message stored at or after a time (milliseconds since 1970); the queue's end if there is none.

        Raises as `topology`.
        """
        ...

    def pieces(self, queue: QueueKey, first: int, end: int, bytes_max: int) -> list[QueuePiece]:
        """Split `first` to `end` - 1 into ascending pieces of about `bytes_max` stored bytes; no pieces if first >= end.

        Raises as `topology`.
        """
        ...

    def read(self, piece: QueuePiece, selection: ReadSelection, *, skips_lost: bool) -> Iterator[SourceBatch]:
        """Yields, in ascending order, all batches that have a sequence of the piece. Batches that cannot match may be left out.

        Command messages are never returned, and directed batches only if the selection asks for them.

        Raises:
            MessagesExpired: retention deleted messages of the piece, and `skips_lost` is False. Possible at any batch.
            NotConnected: no master could be reached for `qmq.retryMs`.
            LogDamaged: a checksum is wrong.
        """
        ...

    def close(self) -> None:
        """Close files and connections."""
        ...


class LogAddress(Protocol):
    """The address of a log; small and picklable for executors."""

    def open(self) -> CommittedLog:
        """Open the log in this process. Raises InvalidArgument, NotConnected, LogDamaged."""
        ...
