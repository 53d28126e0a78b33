"""Determines up to which position a folder's logs are committed, from its commit mark and its newest checkpoint.

Both name only committed positions, so the larger one is used. For a folder with neither, the user must say that everything is committed
(`qmq.committed=all`); then all whole entries count. In an empty folder, no entry is committed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pyspark_qmq.files.log_folders import LogFolder
from qmq.errors import InvalidArgument, NotConnected
from qmq.log import checkpoint as checkpoints
from qmq.log import commit_mark
from qmq.log.checkpoint import Checkpoint

ALL: Final = "all"
_PAUSE_S: Final = 0.002
_CHECKPOINT: Final = "checkpoint-*.qmc"


@dataclass(frozen=True, slots=True)
class Bound:
    """Entries before these positions are committed; -1: all whole entries are."""

    index: int
    messages: int
    actions: int

    @property
    def is_open(self) -> bool:
        """Whether no position is known."""
        return self.messages < 0


EVERYTHING: Final = Bound(-1, -1, -1)


def check_committed(committed: str) -> None:
    """Raise InvalidArgument if the option is neither absent nor `all`."""
    if committed not in ("", ALL):
        raise InvalidArgument(f"qmq.committed must be 'all' or absent, not {committed!r}")


def checkpoint_folder(folder: LogFolder) -> Path:
    """The folder with the checkpoints; for copies it may be next to the segments."""
    found = folder.path / "checkpoint"
    return found if found.is_dir() else folder.path


def newest_checkpoint(folder: LogFolder) -> str:
    """The file name of the newest checkpoint; empty if there is none. It changes with each new checkpoint."""
    return max((each.name for each in checkpoint_folder(folder).glob(_CHECKPOINT)), default="")


def load_checkpoint(folder: LogFolder) -> Checkpoint | None:
    """The newest valid checkpoint. A running broker deletes old ones, so a failed read is repeated once. Raises OSError."""
    try:
        return checkpoints.load(checkpoint_folder(folder))
    except FileNotFoundError:
        return checkpoints.load(checkpoint_folder(folder))


def bound_of_checkpoint(found: Checkpoint | None) -> Bound | None:
    """The committed positions in a checkpoint."""
    return None if found is None else Bound(found.index, found.message_position, found.action_position)


def read_bound(folder: LogFolder, of_checkpoint: Bound | None, committed: str = "") -> Bound:
    """The committed positions of a folder. Raises InvalidArgument if they are unknown, NotConnected if the folder is gone."""
    if not folder.messages.is_dir():
        raise NotConnected(f"{folder.messages} does not exist: is its disk mounted?")
    mark = commit_mark.read(folder.path, lambda: time.sleep(_PAUSE_S))
    known = [Bound(mark.index, mark.message_position, mark.action_position)] if mark is not None else []
    if of_checkpoint is not None:
        known.append(of_checkpoint)
    if known:
        return max(known, key=lambda each: each.index)
    if committed == ALL:
        return EVERYTHING
    if not any(each.stat().st_size for log in (folder.messages, folder.actions) for each in log.glob("*.log")):
        return Bound(0, 0, 0)
    raise InvalidArgument(
        f"{folder.path} has neither {commit_mark.FILE} nor a checkpoint, so its committed position is unknown. A running broker writes "
        "the former within a second of its start; copy it too, before the segments. If all messages of the folder are known to be "
        "committed, set qmq.committed to 'all'"
    )
