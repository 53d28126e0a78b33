"""What is committed of an action log's files: who consumed what, and what a delay group did with its messages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from pyspark_qmq.files.bounds import Bound, bound_of_checkpoint, load_checkpoint, read_bound
from pyspark_qmq.files.log_folders import LogFolder, find_folders
from pyspark_qmq.files.log_walk import whole_end
from pyspark_qmq.files.mapped_segments import Mapped, SegmentFiles
from qmq.batch import Envelope, Kind
from qmq.errors import InvalidArgument, LogDamaged, MessagesExpired


def action_folders(paths: list[str], committed: str = "") -> list[LogFolder]:
    """Those of brokers and of delay groups, each group's once: of its replicas the furthest committed one.

    Raises InvalidArgument: a path names nothing that could be read, or nothing says what of it is committed.
    """
    groups: dict[str, list[LogFolder]] = {}
    for folder in find_folders(paths, with_delay=True):
        if folder.actions.is_dir():
            groups.setdefault(folder.broker_group, []).append(folder)
    return [_furthest(replicas, committed) for replicas in groups.values()]


def _furthest(replicas: list[LogFolder], committed: str) -> LogFolder:
    """One that says nothing of what is committed, since it has just begun, is behind all others. Raises InvalidArgument if all are so."""
    known: list[tuple[int, LogFolder]] = []
    for folder in replicas:
        with suppress(InvalidArgument):
            known.append((bound_of(folder, committed).index, folder))
    if not known:
        bound_of(replicas[0], committed)
    return max(known, key=lambda each: each[0])[1]


def bound_of(folder: LogFolder, committed: str = "") -> Bound:
    """Up to where a folder is committed. Raises InvalidArgument if nothing says so."""
    return read_bound(folder, bound_of_checkpoint(load_checkpoint(folder)), committed)


def committed_actions(folder: LogFolder | Path | str, committed: str = "") -> Iterator[tuple[Envelope, bytes]]:
    """Every committed entry of the folder's action log, the oldest first: kinds ACTIONS and SNAPSHOT, with their regions (`unwrap` them).

    A snapshot opens each segment but the first; only the one at the log's begin says something that no entry before it did.

    Raises:
        InvalidArgument: the folder has no action log, or nothing says what of it is committed.
        LogDamaged: a checksum does not hold, or a file is missing.
        MessagesExpired: retention took what was to be read next: begin again.
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
