"""Reads committed entries of an action log's files: what groups consumed, and what a delay group did with its messages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from qmq.columns.files.folders import Bound, LogFolder, bound_of_checkpoint, find_folders, load_checkpoint, read_bound
from qmq.columns.files.index import whole_end
from qmq.columns.files.segments import Mapped, SegmentFiles
from qmq.errors import InvalidArgument, LogDamaged, MessagesExpired
from qmq.wire.batch import Envelope, Kind


def action_folders(paths: list[str], committed: str = "") -> list[LogFolder]:
    """The folders of brokers and delay groups, one per group: the replica with the largest committed position.

    Raises InvalidArgument if a path cannot be read, or if the committed position is unknown.
    """
    groups: dict[str, list[LogFolder]] = {}
    for folder in find_folders(paths, with_delay=True):
        if folder.actions.is_dir():
            groups.setdefault(folder.broker_group, []).append(folder)
    return [_furthest(replicas, committed) for replicas in groups.values()]


def _furthest(replicas: list[LogFolder], committed: str) -> LogFolder:
    """The replica with the largest committed position. A new replica without one comes last. Raises InvalidArgument if none has one."""
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


def committed_actions(folder: LogFolder | Path | str, committed: str = "") -> Iterator[tuple[Envelope, bytes]]:
    """Yields all committed entries of the folder's action log, oldest first: kinds ACTIONS and SNAPSHOT, with their regions (`unwrap`
    them).

    Each segment but the first begins with a snapshot. Only the snapshot at the start of the log has information that is not in earlier
    entries.

    Raises:
        InvalidArgument: the folder has no action log, or its committed position is unknown.
        LogDamaged: a checksum is wrong, or a file is missing.
        MessagesExpired: retention deleted entries that were not yet read; start again.
    """
    if not isinstance(folder, LogFolder):
        found = find_folders([str(folder)], with_delay=True)
        if len(found) != 1:
            raise InvalidArgument(f"{folder} has {len(found)} logs: name one of {', '.join(str(each.path) for each in found)}")
        folder = found[0]
    if not folder.actions.is_dir():
        raise InvalidArgument(f"{folder.path} has no action log: look for the folder action/ of a broker's store")
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
            f"{segments.path(base)} is missing, although retention deletes only the oldest segments and never all: restore it from a copy"
        )
    raise MessagesExpired(f"retention deleted {segments.path(base)} while the action log was read: read again")


def _entries(mapped: Mapped, end: int) -> Iterator[tuple[Envelope, bytes]]:
    position = mapped.base
    while position < end:
        envelope = mapped.entry(position)
        region = mapped.region(position, envelope)
        if envelope.kind in (Kind.ACTIONS, Kind.SNAPSHOT):
            yield envelope, bytes(region)
        position += envelope.total_bytes
