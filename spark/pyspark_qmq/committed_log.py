"""The interface between the data source and the log, which brokers or files provide. Both give the same rows for the same offsets.

A `LogAddress` travels to executors; a `CommittedLog` is opened from it in each process, and used by one thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from pyspark_qmq.source_model import QueueKey, QueuePiece, ReadSelection, SourceBatch, Topology


class CommittedLog(Protocol):
    """Everything committed, and nothing else."""

    def subjects(self) -> list[str]:
        """All names, sorted. Raises NotConnected, LogDamaged."""
        ...

    def topology(self, subjects: list[str]) -> Topology:
        """The queues and routes of these subjects, now. Asked anew each time.

        Raises:
            UnknownSubject: one of them does not exist.
            NotConnected: a broker group did not answer in time: nobody can say where its queues end.
            LogDamaged: files do not hold.
        """
        ...

    def find_time(self, queue: QueueKey, time_ms: int) -> int:
        """The first sequence appended at or after a time (milliseconds since 1970); the queue's end if there is none.

        Raises as `topology`.
        """
        ...

    def pieces(self, queue: QueueKey, first: int, end: int, bytes_max: int) -> list[QueuePiece]:
        """`first` to `end` - 1 in pieces of about `bytes_max` stored bytes, ascending, covering all of it; none if first >= end.

        Raises as `topology`.
        """
        ...

    def read(self, piece: QueuePiece, selection: ReadSelection, *, skips_lost: bool) -> Iterator[SourceBatch]:
        """The piece's batches, whole, ascending; each holds at least one of its sequences. Batches that cannot match may be left out.

        Batches of command messages are never given, directed ones only if the selection wants them.

        Raises:
            MessagesExpired: retention took something of the piece, and `skips_lost` is False. Before the first batch, or in the middle.
            NotConnected: no master could be reached for `qmq.retryMs`.
            LogDamaged: a checksum does not hold.
        """
        ...

    def close(self) -> None:
        """Give back files and connections."""
        ...


class LogAddress(Protocol):
    """Where a log is; small, and can be sent to executors."""

    def open(self) -> CommittedLog:
        """In this process. Raises InvalidArgument, NotConnected, LogDamaged."""
        ...
