"""Finds the stores named by `qmq.path`, their broker groups, and up to which position their logs
are committed.

    DATA                a data folder of a replica (replica.json names its group), or of `qmq dev`
                        (its database names the group)
    DATA/broker         the store in a data folder
    anything else       copies of message/*.log; the folder's name is the broker group. A commit
                        mark may be next to them

A store with a schedule belongs to a delay group. It has pending messages for subjects that are
stored elsewhere, so it is left out.

A folder's commit mark and its newest checkpoint name only committed positions, so the larger one is
used. For a folder with neither, the user must say that everything is committed
(`qmq.committed=all`); then all whole entries count. In an empty folder, no entry is committed.
"""

from __future__ import annotations

import glob
import sqlite3
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from qmq.errors import InvalidArgument, NotConnected, QmqError
from qmq.log import checkpoint, commit_mark
from qmq.log.checkpoint import Checkpoint
from qmq.model import check_name
from qmq.text import parse_json

_STORE: Final = "broker"
_MESSAGES, _ACTIONS, _SCHEDULE = "message", "action", "schedule"
_SEGMENT: Final = "[0-9]" * 20 + ".log"
_REPLICA: Final = "replica.json"
_DELAY: Final = "delay.json"
"""The folder next to a delay group's store."""
_DATABASE: Final = "coordination.db"
_GROUPS: Final = "/qmq/groups/"
_DEV_GROUP: Final = "broker-0"


@dataclass(frozen=True, slots=True)
class LogFolder:
    """One store's files."""

    path: Path
    """The folder with the commit mark and the subfolders `checkpoint`, `consume` and `action`, if
    they exist.
    """
    messages: Path
    """The folder with the segments of the message log."""
    broker_group: str
    is_delay: bool = False

    @property
    def actions(self) -> Path:
        """The folder with the segments of the action log, if it exists."""
        return self.path / _ACTIONS


def find_folders(paths: Iterable[str], *, with_delay: bool = False) -> list[LogFolder]:
    """The stores named by these paths, each once, with all replicas of a group. `with_delay`:
    include delay groups.

    Raises InvalidArgument if a path cannot be read.
    """
    found: dict[Path, LogFolder] = {}
    for path in _expanded(paths):
        for folder in _stores(path):
            found.setdefault(folder.messages.resolve(), folder)
    kept = [each for each in found.values() if with_delay or not each.is_delay]
    if not kept:
        names = ", ".join(str(each.path) for each in found.values())
        raise InvalidArgument(
            f"{names} belongs to a delay group: it has pending delayed messages, not the "
            "subjects' logs. Give folders of brokers"
        )
    return kept


def _expanded(paths: Iterable[str]) -> list[Path]:
    found: list[Path] = []
    for each in (part.strip() for path in paths for part in path.split(",")):
        if not each:
            continue
        names = (
            sorted(glob.glob(each)) if glob.has_magic(each) and not Path(each).exists() else [each]
        )
        if not names:
            raise InvalidArgument(f"qmq.path {each!r} matches nothing")
        found += [Path(name).absolute() for name in names]
    if not found:
        raise InvalidArgument(
            "qmq.path is empty: give a broker's data folder, or a folder with copies of its "
            "message/*.log"
        )
    return found


def _stores(path: Path) -> list[LogFolder]:
    """The stores in a folder. A node's folder has a broker's store and possibly a delay group's.
    Raises InvalidArgument.
    """
    if not path.is_dir():
        raise InvalidArgument(f"qmq.path {str(path)!r} is not a folder")
    if path.name == _MESSAGES and _is_store(path.parent):
        path = path.parent
    if _is_store(path):
        return [_store(path)]
    inner = [each for each in sorted(path.iterdir()) if each.is_dir() and _is_store(each)]
    if inner:
        return [_store(each) for each in inner]
    if any(path.glob(_SEGMENT)):
        return [LogFolder(path, path, _named(path))]
    raise InvalidArgument(
        f"{path} has no log: neither broker/message, nor message, nor segments (20 digits and .log)"
    )


def _is_store(path: Path) -> bool:
    return (path / _MESSAGES).is_dir()


def _store(path: Path) -> LogFolder:
    is_delay = (path / _SCHEDULE).is_dir() or (
        path.name == _STORE and (path.parent / _DELAY).is_file()
    )
    return LogFolder(path, path / _MESSAGES, _group_of(path.resolve(), is_delay=is_delay), is_delay)


# --- whose it is ----------------------------------------------------------------------------------


def _group_of(store: Path, *, is_delay: bool) -> str:
    data = store.parent
    if (data / _REPLICA).is_file():
        return _replica_group(data / _REPLICA)
    if (data / _DATABASE).is_file():
        return _dev_group(data / _DATABASE, is_delay=is_delay) or (
            store.name if is_delay else _DEV_GROUP
        )
    return _named(data if store.name == _STORE else store)


def _replica_group(path: Path) -> str:
    """Raises InvalidArgument."""
    try:
        return str(parse_json(parse_json(path.read_bytes())["content"])["group"])
    except (OSError, ValueError, KeyError, TypeError) as cause:
        raise InvalidArgument(
            f"{path} does not name the folder's broker group ({cause}): restore it from a copy"
        ) from cause


def _dev_group(path: Path, *, is_delay: bool) -> str:
    """The one group of that kind that a node has; empty if its database does not say."""
    try:
        connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
        try:
            rows = connection.execute(
                "SELECT DISTINCT key FROM kv WHERE key LIKE ?", (f"{_GROUPS}%",)
            ).fetchall()
        finally:
            connection.close()
    except sqlite3.Error:
        return ""
    keys = {str(key).removeprefix(_GROUPS) for (key,) in rows}
    groups = [key.split("/")[0] for key in keys if key.endswith("/members")]
    found = [each for each in groups if (f"{each}/delay" in keys) == is_delay]
    return found[0] if len(found) == 1 else ""


def _named(folder: Path) -> str:
    """Raises InvalidArgument."""
    name = folder.resolve().name
    try:
        return check_name("broker group", name)
    except QmqError as cause:
        raise InvalidArgument(
            f"{folder}: a folder of copied segments has their broker group's name ({cause.message})"
        ) from cause


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
    """The file name of the newest checkpoint; empty if there is none.
    It changes with each new checkpoint.
    """
    return max((each.name for each in checkpoint_folder(folder).glob(_CHECKPOINT)), default="")


def load_checkpoint(folder: LogFolder) -> Checkpoint | None:
    """The newest valid checkpoint. A running broker deletes old ones, so a failed read is repeated
    once. Raises OSError.
    """
    try:
        return checkpoint.load(checkpoint_folder(folder))
    except FileNotFoundError:
        return checkpoint.load(checkpoint_folder(folder))


def bound_of_checkpoint(found: Checkpoint | None) -> Bound | None:
    """The committed positions in a checkpoint."""
    return (
        None if found is None else Bound(found.index, found.message_position, found.action_position)
    )


def read_bound(folder: LogFolder, of_checkpoint: Bound | None, committed: str = "") -> Bound:
    """The committed positions of a folder. Raises InvalidArgument if they are unknown, NotConnected
    if the folder is gone.
    """
    if not folder.messages.is_dir():
        raise NotConnected(f"{folder.messages} does not exist: is its disk mounted?")
    mark = commit_mark.read(folder.path, lambda: time.sleep(_PAUSE_S))
    known = (
        [Bound(mark.index, mark.message_position, mark.action_position)] if mark is not None else []
    )
    if of_checkpoint is not None:
        known.append(of_checkpoint)
    if known:
        return max(known, key=lambda each: each.index)
    if committed == ALL:
        return EVERYTHING
    if not any(
        each.stat().st_size
        for log in (folder.messages, folder.actions)
        for each in log.glob("*.log")
    ):
        return Bound(0, 0, 0)
    raise InvalidArgument(
        f"{folder.path} has neither {commit_mark.FILE} nor a checkpoint, so its committed position "
        "is unknown. A running broker writes the former within a second of its start; copy it too, "
        "before the segments. If all messages of the folder are known to be committed, "
        "set qmq.committed to 'all'"
    )
