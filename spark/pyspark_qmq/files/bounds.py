"""Up to where a folder's logs are committed: by its commit mark or its newest checkpoint, whichever knows more.

Both name only what is committed, so the further of the two counts. A folder without either says nothing of the kind; then somebody else
must (`qmq.committed=all`), and everything whole in it counts. Where there is nothing at all, nothing is committed.
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
    """Everything before these positions is committed; -1: everything whole is."""

    index: int
    messages: int
    actions: int

    @property
    def is_open(self) -> bool:
        """Whether nobody says where it ends."""
        return self.messages < 0


EVERYTHING: Final = Bound(-1, -1, -1)


def check_committed(committed: str) -> None:
    """Raises InvalidArgument if the option is neither absent nor `all`."""
    if committed not in ("", ALL):
        raise InvalidArgument(f"qmq.committed is 'all' or absent, not {committed!r}")


def checkpoint_folder(folder: LogFolder) -> Path:
    """Where its checkpoints lie; of copies perhaps beside the segments."""
    found = folder.path / "checkpoint"
    return found if found.is_dir() else folder.path


def newest_checkpoint(folder: LogFolder) -> str:
    """Name of its newest checkpoint's file; empty if there is none. It changes when there is something new to know."""
    return max((each.name for each in checkpoint_folder(folder).glob(_CHECKPOINT)), default="")


def load_checkpoint(folder: LogFolder) -> Checkpoint | None:
    """The newest that is whole. A running broker deletes old ones, so it is looked for twice. Raises OSError."""
    try:
        return checkpoints.load(checkpoint_folder(folder))
    except FileNotFoundError:
        return checkpoints.load(checkpoint_folder(folder))


def bound_of_checkpoint(found: Checkpoint | None) -> Bound | None:
    """What a checkpoint knows."""
    return None if found is None else Bound(found.index, found.message_position, found.action_position)


def read_bound(folder: LogFolder, of_checkpoint: Bound | None, committed: str = "") -> Bound:
    """Up to where it is committed. Raises InvalidArgument if nothing says so, NotConnected if the folder is gone."""
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
        f"{folder.path} does not say what of it is committed: it has neither {commit_mark.FILE} nor a checkpoint. A running broker writes "
        "the first within a second of its start; of copies, copy it too, before the segments. If all that is here is known to be "
        "committed, set qmq.committed to 'all'"
    )
