"""Checkpoints: all derived state at one point of both logs, so that a restart replays only later entries.

File: magic "QMC1" | CRC-32C u32 of the rest | MessagePack of `Checkpoint`. Written to a temporary file, flushed, renamed, folder flushed;
the newest two are kept. If the checksum of one does not match, the older one is used, or everything is replayed: retention may have deleted
segments that the older one still refers to. A checkpoint is only written after both logs were flushed up to its positions; so a log that
ends before a checkpoint has lost acknowledged data, and the store refuses to open it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from qmq.log.checked_payload import UNREADABLE, checked_payload, with_checksum
from qmq.log.disk import Disk
from qmq.private_files import make_private

_MAGIC: Final = b"QMC1"
_KEEP: Final = 2
VERSION: Final = 1


class QueueState(msgspec.Struct, array_like=True):
    """The state of one queue. `tail` has the consume-log entries after the `persisted` ones, which are too few for a file."""

    snapshot: list[Any]
    start_sequence: int
    first_entry: int
    persisted: int
    tail: bytes
    shares: dict[str, list[Any]]
    lanes: dict[str, list[Any]] = {}
    """The groups' lanes, on an ordered subject."""


class Checkpoint(msgspec.Struct, array_like=True):
    """All derived state. Positions are ends: the state contains everything before them."""

    version: int
    index: int
    epoch: int
    time_ms: int
    message_start: int
    message_position: int
    action_start: int
    action_position: int
    queues: list[QueueState]
    epochs: list[tuple[int, int]] = []
    """The history: pairs of an epoch and its first index, ascending."""
    projection: Any = None
    """The state of the projection (qmq/log/projection.py)."""


_QUEUES: Final = Checkpoint.__struct_fields__.index("queues")


def encode_queue(state: QueueState) -> msgspec.Raw:
    """One queue's state, for `encode`. One encoded object for each queue is nothing to walk through for the garbage collector."""
    return msgspec.Raw(msgspec.msgpack.encode(state))


def encode(checkpoint: Checkpoint, queues: list[msgspec.Raw] | None = None) -> bytes:
    """The content of the file. `queues` are encoded states in place of the checkpoint's own."""
    fields = list(msgspec.structs.astuple(checkpoint))
    if queues is not None:
        fields[_QUEUES] = queues
    return with_checksum(_MAGIC, msgspec.msgpack.encode(fields))


def decode(data: bytes) -> Checkpoint | None:
    """Decode a checkpoint; None if the file is damaged, empty or of another version."""
    payload = checked_payload(_MAGIC, data)
    if payload is None:
        return None
    try:
        found = msgspec.msgpack.decode(payload, type=Checkpoint)
    except UNREADABLE:
        return None
    return found if found.version == VERSION else None


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("checkpoint-*.qmc"), reverse=True)


def read_all(folder: Path, disk: Disk) -> Iterator[Checkpoint | None]:
    """Read the checkpoints, the newest first; None in the place of an invalid one."""
    return (decode(disk.read_file(path)) for path in _files(folder))


def load(folder: Path, disk: Disk | None = None) -> Checkpoint | None:
    """Load the newest valid checkpoint; None if there is none."""
    return next((found for found in read_all(folder, disk or Disk()) if found is not None), None)


def save(disk: Disk, folder: Path, index: int, data: bytes) -> None:
    """Write a checkpoint and delete all but the newest two. Safe in a thread. Raises DiskFull, FlushFailed."""
    make_private(folder)
    disk.replace(folder / f"checkpoint-{index:020d}.qmc", data)
    for path in _files(folder)[_KEEP:]:
        path.unlink(missing_ok=True)


def discard(folder: Path) -> None:
    """Delete all checkpoints: the next start replays everything."""
    for path in _files(folder):
        path.unlink()
