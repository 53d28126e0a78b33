"""Opens the log given by options: brokers, files, or files with routes from brokers.

Opened logs are cached by address for the life of a process, so that a stream with a task every second does not reconnect each time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from qmq.columns.committed_log import CommittedLog, LogAddress
from qmq.columns.files.log import FileAddress, FileLog
from qmq.columns.model import QueueKey, QueuePiece, ReadSelection, SourceBatch, Topology
from qmq.columns.options import StartPosition
from qmq.columns.servers.server_address import ServerAddress

_opened: dict[LogAddress, CommittedLog] = {}


def address_of(where: StartPosition) -> LogAddress:
    """The address of the log."""
    servers = ServerAddress(where.servers, where.retry_ms)
    if not where.paths:
        return servers
    files = FileAddress(where.paths, committed=where.committed, routes=where.routes)
    return RoutedAddress(files, servers) if where.servers and not where.routes else files


def log_at(address: LogAddress) -> CommittedLog:
    """The log, opened once per process. Raises InvalidArgument, NotConnected, LogDamaged."""
    found = _opened.get(address)
    if found is None:
        found = _opened[address] = address.open()
    return found


def forget(address: LogAddress) -> None:
    """Close the log if it is open, after an error or when it is no longer needed."""
    found = _opened.pop(address, None)
    if found is not None:
        found.close()


@dataclass(frozen=True, slots=True)
class RoutedAddress:
    """Messages from files, routes from brokers."""

    files: FileAddress
    servers: ServerAddress

    def open(self) -> CommittedLog:
        return RoutedLog(self.files.open(), self.servers.open())


class RoutedLog:
    """A log whose messages come from files and whose routes come from brokers.

    It requests routes after it has read the files' ends (docs/SPARK.md, "Order in a stream").
    """

    def __init__(self, files: FileLog, servers: CommittedLog) -> None:
        self._files = files
        self._servers = servers

    def subjects(self) -> list[str]:
        """The subjects in the files."""
        return self._files.subjects()

    def topology(self, subjects: list[str]) -> Topology:
        found = self._files.topology(subjects)
        return self._files.routed(found.queues, self._servers.topology(subjects).routes)

    def find_time(self, queue: QueueKey, time_ms: int) -> int:
        return self._files.find_time(queue, time_ms)

    def pieces(self, queue: QueueKey, first: int, end: int, bytes_max: int) -> list[QueuePiece]:
        return self._files.pieces(queue, first, end, bytes_max)

    def read(self, piece: QueuePiece, selection: ReadSelection, *, skips_lost: bool) -> Iterator[SourceBatch]:
        return self._files.read(piece, selection, skips_lost=skips_lost)

    def close(self) -> None:
        self._files.close()
        self._servers.close()
