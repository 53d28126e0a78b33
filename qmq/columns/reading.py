"""Opens the log given by options: brokers, files, or files with routes from brokers. Then the
ranges to read: the chosen queues as they are now, where a read starts and ends, and the rows of one
task.

Opened logs are cached by address for the life of a process, so that a stream with a task every
second does not reconnect each time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Container, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from qmq.columns import offsets
from qmq.columns.files.log import FileAddress, FileLog
from qmq.columns.model import (
    CommittedLog,
    QueueKey,
    QueuePiece,
    ReaderReport,
    ReadSelection,
    SourceBatch,
    SourceQueue,
    Topology,
)
from qmq.columns.options import Choice, ReadOptions, StartPosition
from qmq.columns.planning import ReadTask
from qmq.columns.servers.log import ServerAddress
from qmq.errors import InvalidArgument, UnknownSubject

if TYPE_CHECKING:
    import pyarrow as pa

    from qmq.columns.projector import ColumnNames

_opened: dict[LogAddress, CommittedLog] = {}


def address_of(where: StartPosition) -> LogAddress:
    """The address of the log."""
    servers = ServerAddress(where.servers, where.retry_ms, first_ms=where.first_ms)
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


LogAddress: TypeAlias = ServerAddress | FileAddress | RoutedAddress
"""The address of a log; small and picklable for executors. Its `open` opens the log in this
process, and raises InvalidArgument, NotConnected, LogDamaged."""


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

    def topology(self, subjects: list[str], report: ReaderReport | None = None) -> Topology:
        found = self._files.topology(subjects)
        return self._files.routed(found.queues, self._servers.topology(subjects, report).routes)

    def find_time(self, queue: QueueKey, time_ms: int) -> int:
        return self._files.find_time(queue, time_ms)

    def pieces(self, queue: QueueKey, first: int, end: int, bytes_max: int) -> list[QueuePiece]:
        return self._files.pieces(queue, first, end, bytes_max)

    def read(
        self, piece: QueuePiece, selection: ReadSelection, *, skips_lost: bool
    ) -> Iterator[SourceBatch]:
        return self._files.read(piece, selection, skips_lost=skips_lost)

    def close(self) -> None:
        self._files.close()
        self._servers.close()


FindTime = Callable[[QueueKey, int], int]
"""The first sequence of a queue that was stored at or after a time, in ms."""


def topology_of(
    log: CommittedLog,
    choice: Choice,
    report: ReaderReport | None = None,
    may_lack: Container[str] = (),
) -> Topology:
    """The committed part of the selected queues. Subjects of `may_lack` are left out if they do not
    exist. Raises UnknownSubject, InvalidArgument, NotConnected, LogDamaged.
    """
    if choice.pattern:
        pattern = re.compile(choice.pattern)
        subjects = [each for each in log.subjects() if pattern.fullmatch(each)]
        return _present(log, subjects, report, subjects) if subjects else Topology({})
    found = (
        _present(log, list(choice.subjects), report, may_lack) if choice.subjects else Topology({})
    )
    chosen = assigned(choice, found.queues, may_lack)
    return Topology(
        {key: queue for key, queue in found.queues.items() if key in chosen}, found.routes
    )


def _present(
    log: CommittedLog,
    subjects: list[str],
    report: ReaderReport | None,
    may_lack: Container[str],
) -> Topology:
    try:
        return log.topology(subjects, report)
    except UnknownSubject:
        if not any(each in may_lack for each in subjects):
            raise
    found = Topology({})
    for each in subjects:
        try:
            one = log.topology([each], report)
        except UnknownSubject:
            if each not in may_lack:
                raise
        else:
            found = Topology({**found.queues, **one.queues}, {**found.routes, **one.routes})
    return found


def assigned(
    choice: Choice, known: Collection[QueueKey], may_lack: Container[str] = ()
) -> Collection[QueueKey]:
    """The known queues that `assign` names; all of them without `assign`. Queues of a subject of
    `may_lack` without known queues are left out. Raises InvalidArgument.
    """
    if choice.queues is None:
        return known
    present = {key.subject for key in known}
    return {
        offsets.find_queue("assign", subject, within, known)
        for subject, names in choice.queues.items()
        if subject in present or subject not in may_lack
        for within in names
    }


def edges(
    asked: ReadOptions, topology: Topology, first: FindTime, last: FindTime
) -> tuple[dict[QueueKey, int], dict[QueueKey, int]]:
    """Where a batch read starts and ends; `first` and `last` find the sequences of a start and an
    end that are times.

    Raises InvalidArgument.
    """
    queues = topology.queues.values()
    start = starts(asked, queues, first)
    if asked.end_ms is not None:
        end = offsets.by_time(queues, asked.end_ms, last)
    else:
        end = offsets.resolve("endingOffsets", asked.end, queues, offsets.LATEST)
    for key, queue in topology.queues.items():
        if end[key] > queue.end:
            raise InvalidArgument(
                f"endingOffsets: {key} ends at {queue.end}, so {end[key]} does not exist yet"
            )
    return start, end


def starts(
    asked: ReadOptions, queues: Iterable[SourceQueue], find_time: FindTime
) -> dict[QueueKey, int]:
    """The start of a read without a checkpoint. Raises InvalidArgument."""
    if asked.start_ms is not None:
        return offsets.by_time(queues, asked.start_ms, find_time)
    return offsets.resolve("startingOffsets", asked.start, queues, offsets.EARLIEST)


def read_task(
    address: LogAddress,
    task: ReadTask | None,
    columns: ColumnNames,
    selection: ReadSelection,
    *,
    skips_lost: bool,
) -> Iterator[pa.RecordBatch]:
    """The record batches of one task, in an executor.
    Raises MessagesExpired, NotConnected, LogDamaged.
    """
    if task is None:
        return
    from qmq.columns.projector import Projector

    key, version = task.piece.queue, task.route_version
    versions = {(key.subject, key.partition): version} if version is not None else {}
    projector = Projector(columns, routes=versions, selection=selection)
    batches = log_at(address).read(task.piece, selection, skips_lost=skips_lost)
    yield from projector.convert(batches, task.piece)
