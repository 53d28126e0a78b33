"""The committed log in segment files, and the action logs beside them (implements
qmq.columns.model.CommittedLog).

The driver keeps an index of each folder (`index.py`) and refreshes it at each call. It uses the
replica of a broker group with the largest committed position. Tasks need no index: a piece contains
its location and is read from there (`reading.py`).

The log's address is small and picklable for executors, which must see the same folders under the
same names.

An action log has what groups consumed, and what a delay group did with its messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from qmq.columns.files.folders import (
    Bound,
    LogFolder,
    bound_of_checkpoint,
    check_committed,
    find_folders,
    load_checkpoint,
    read_bound,
)
from qmq.columns.files.index import FolderIndex, QueueIndex, whole_end
from qmq.columns.files.reading import FilePieceReader, place_of
from qmq.columns.files.routes import empty_queues, read_routes
from qmq.columns.files.segments import Mapped, SegmentFiles
from qmq.columns.model import (
    QueueKey,
    QueuePiece,
    ReaderReport,
    ReadSelection,
    Routes,
    SourceBatch,
    SourceQueue,
    Topology,
)
from qmq.errors import InvalidArgument, LogDamaged, MessagesExpired, NotConnected, UnknownSubject
from qmq.wire.batch import Envelope, Kind


class FileLog:
    """See `model.CommittedLog`. Raises InvalidArgument."""

    def __init__(self, paths: tuple[str, ...], committed: str = "", routes: str = "") -> None:
        check_committed(committed)
        self._paths = paths
        self._committed = committed
        self._routes = routes
        self._indexes: dict[LogFolder, FolderIndex] = {}
        self._chosen: dict[str, FolderIndex] = {}

    def subjects(self) -> list[str]:
        self._refresh()
        return sorted(
            {subject.decode() for index in self._chosen.values() for subject, _ in index.queues}
        )

    def topology(self, subjects: list[str], report: ReaderReport | None = None) -> Topology:
        self._refresh()
        queues: dict[QueueKey, SourceQueue] = {}
        for subject in subjects:
            found = {key: self._described(key) for key in self._queues_of(subject)}
            if not found:
                raise UnknownSubject(
                    f"no folder of qmq.path has messages of subject {subject!r}: subjects "
                    f"there: {', '.join(self._names()) or 'none'}"
                )
            queues |= found
        return self.routed(queues, self._known_routes(subjects))

    def routed(
        self, queues: Mapping[QueueKey, SourceQueue], routes: Mapping[str, Routes]
    ) -> Topology:
        """The topology with partitions of these routes that have no message in the folders yet:
        other partitions may succeed them.
        """
        return Topology({**empty_queues(routes, self._chosen), **queues}, routes)

    def find_time(self, queue: QueueKey, time_ms: int) -> int:
        return self._require(queue)[1].find_time(time_ms)

    def pieces(self, queue: QueueKey, first: int, end: int, bytes_max: int) -> list[QueuePiece]:
        if first >= end:
            return []
        index, found = self._require(queue, end)
        if end > found.end:
            raise LogDamaged(
                f"{queue}: messages up to {end - 1} are needed, but {index.folder.path} has "
                f"committed messages only up to {found.end - 1}: "
                "the folder is an older copy, or a power cut has truncated it"
            )
        entries = found.between(first, end)
        cuts = _cuts(entries["bytes"].cumsum(dtype=np.int64), max(bytes_max, 1))
        marks = [first, *[int(entries["base"][each]) for each in cuts[1:-1]], end]
        places = [place_of(index.files, found.start, entries[a:b]) for a, b in pairwise(cuts)]
        return [
            QueuePiece(queue, a, b, place)
            for (a, b), place in zip(pairwise(marks), places, strict=True)
        ]

    def read(
        self, piece: QueuePiece, selection: ReadSelection, *, skips_lost: bool
    ) -> Iterator[SourceBatch]:
        """See `CommittedLog.read`. Regions are views of mapped memory,
        which stays while they do.
        """
        return FilePieceReader(piece, selection, skips_lost=skips_lost).batches()

    def close(self) -> None:
        """Release the indexes. Files are closed when the last view of them is gone."""
        self._indexes.clear()
        self._chosen.clear()

    # --- folders ----------------------------------------------------------------------------------

    def _refresh(self) -> None:
        """Choose the replica of each group with the largest committed position,
        and read that position.
        """
        self._look_for_folders()
        groups: dict[str, list[FolderIndex]] = {}
        for folder, index in self._indexes.items():
            groups.setdefault(folder.broker_group, []).append(index)
        for group, replicas in groups.items():
            now = self._chosen.get(group)
            far = [_committed_index(each) if len(replicas) > 1 else 0 for each in replicas]
            best = (
                now
                if now is not None and far[replicas.index(now)] == max(far)
                else replicas[far.index(max(far))]
            )
            best.refresh()
            self._chosen[group] = best

    def _look_for_folders(self) -> None:
        """Evaluate the globs again. Folders found earlier are kept, because a replica may be
        restarting. Raises InvalidArgument.
        """
        try:
            found = find_folders(self._paths)
        except InvalidArgument:
            if not self._indexes:
                raise
            return
        for folder in found:
            if folder not in self._indexes:
                self._indexes[folder] = FolderIndex(folder, self._committed)

    def _queues_of(self, subject: str) -> list[QueueKey]:
        name = subject.encode()
        return [
            QueueKey(subject, partition, group)
            for group, index in sorted(self._chosen.items())
            for found, partition in sorted(index.queues)
            if found == name
        ]

    def _names(self) -> list[str]:
        return sorted(
            {subject.decode() for index in self._chosen.values() for subject, _ in index.queues}
        )[:20]

    def _require(self, queue: QueueKey, end: int = 0) -> tuple[FolderIndex, QueueIndex]:
        """The queue, indexed up to `end` if it is that long. Raises UnknownSubject."""
        for is_fresh in (False, True):
            if is_fresh:
                self._refresh()
            index = self._chosen.get(queue.broker_group)
            found = (
                index.require((queue.subject.encode(), queue.partition))
                if index is not None
                else None
            )
            if index is not None and found is not None and (found.end >= end or is_fresh):
                return index, found
        raise UnknownSubject(
            f"no folder of qmq.path has the queue {queue}: it has no message, or its broker "
            "group's folder is not named"
        )

    def _described(self, key: QueueKey) -> SourceQueue:
        _, found = self._require(key)
        return SourceQueue(
            key,
            found.start,
            found.end,
            found.stored_bytes,
            found.last_append_ms,
            found.sealed_at is not None,
        )

    def _known_routes(self, subjects: list[str]) -> dict[str, Routes]:
        if not self._routes:
            return {}
        known = read_routes(self._routes)
        return {subject: known[subject] for subject in subjects if subject in known}


def _committed_index(replica: FolderIndex) -> int:
    """The committed position of a replica; lowest for a new replica that has none."""
    try:
        return replica.peek().index
    except (InvalidArgument, NotConnected):
        return -2


def _cuts(ends: np.ndarray[tuple[int], np.dtype[np.int64]], bytes_max: int) -> list[int]:
    """The numbers of the first batch of each piece, and the end. There is at least one piece, even
    if it is empty.
    """
    cuts, before = [0], 0
    while cuts[-1] < len(ends):
        following = max(int(np.searchsorted(ends, before + bytes_max, "right")), cuts[-1] + 1)
        cuts.append(following)
        before = int(ends[following - 1])
    return cuts if len(cuts) > 1 else [0, 0]


@dataclass(frozen=True, slots=True)
class FileAddress:
    paths: tuple[str, ...]
    """Folders. Each item may be a glob, or several folders separated by commas."""
    committed: str = ""
    """`all`: treat all whole entries as committed if no committed position is known."""
    routes: str = ""
    """The file written by `qmq route export`, for ordered subjects."""

    def open(self) -> FileLog:
        """Does not read files yet. Raises InvalidArgument if `committed` is
        neither empty nor `all`.
        """
        return FileLog(self.paths, self.committed, self.routes)


def action_folders(paths: list[str], committed: str = "") -> list[LogFolder]:
    """The folders of brokers and delay groups, one per group: the replica with the largest
    committed position.

    Raises InvalidArgument if a path cannot be read, or if the committed position is unknown.
    """
    groups: dict[str, list[LogFolder]] = {}
    for folder in find_folders(paths, with_delay=True):
        if folder.actions.is_dir():
            groups.setdefault(folder.broker_group, []).append(folder)
    return [_furthest(replicas, committed) for replicas in groups.values()]


def _furthest(replicas: list[LogFolder], committed: str) -> LogFolder:
    """The replica with the largest committed position. A new replica without one comes last. Raises
    InvalidArgument if none has one.
    """
    known: list[tuple[int, LogFolder]] = []
    for folder in replicas:
        with suppress(InvalidArgument):
            known.append((bound_of(folder, committed).index, folder))
    if not known:
        bound_of(replicas[0], committed)
    return max(known, key=lambda each: each[0])[1]


def bound_of(folder: LogFolder, committed: str = "") -> Bound:
    """The committed position of a folder. Raises InvalidArgument if it is unknown."""
    return read_bound(folder, bound_of_checkpoint(load_checkpoint(folder)), committed)


def committed_actions(
    folder: LogFolder | Path | str, committed: str = ""
) -> Iterator[tuple[Envelope, bytes]]:
    """Yields all committed entries of the folder's action log, oldest first: kinds ACTIONS and
    SNAPSHOT, with their regions (`unwrap` them).

    Each segment but the first begins with a snapshot. Only the snapshot at the start of the log has
    information that is not in earlier entries.

    Raises:
        InvalidArgument: the folder has no action log, or its committed position is unknown.
        LogDamaged: a checksum is wrong, or a file is missing.
        MessagesExpired: retention deleted entries that were not yet read; start again.
    """
    if not isinstance(folder, LogFolder):
        found = find_folders([str(folder)], with_delay=True)
        if len(found) != 1:
            raise InvalidArgument(
                f"{folder} has {len(found)} logs: name one of "
                f"{', '.join(str(each.path) for each in found)}"
            )
        folder = found[0]
    if not folder.actions.is_dir():
        raise InvalidArgument(
            f"{folder.path} has no action log: look for the folder action/ of a broker's store"
        )
    bound = bound_of(folder, committed).actions
    segments = SegmentFiles.list(folder.actions)
    for base in segments.bases:
        if 0 <= bound <= base:
            return
        mapped = _mapped(segments, base, bound)
        yield from _entries(mapped, whole_end(mapped) if bound < 0 else mapped.end)


def _mapped(segments: SegmentFiles, base: int, bound: int) -> Mapped:
    """Raises MessagesExpired, LogDamaged."""
    try:
        return segments.map(base, bound)
    except FileNotFoundError:
        left = SegmentFiles.list(segments.folder).bases
    if not left or left[0] < base:
        raise LogDamaged(
            f"{segments.path(base)} is missing, although retention deletes only the oldest "
            "segments and never all: restore it from a copy"
        )
    raise MessagesExpired(
        f"retention deleted {segments.path(base)} while the action log was read: read again"
    )


def _entries(mapped: Mapped, end: int) -> Iterator[tuple[Envelope, bytes]]:
    position = mapped.base
    while position < end:
        envelope = mapped.entry(position)
        region = mapped.region(position, envelope)
        if envelope.kind in (Kind.ACTIONS, Kind.SNAPSHOT):
            yield envelope, bytes(region)
        position += envelope.total_bytes
