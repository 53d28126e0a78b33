"""Makes the schedule's folder match the state when it is opened after any crash."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from qmq.delay.buckets import SUFFIXES
from qmq.delay.files import damaged
from qmq.log.disk import Disk


def cut_back(disk: Disk, folder: Path, lengths: dict[str, int], first_kept: str, *, keep: str) -> set[str]:
    """Cut files to their lengths, and delete those that are not named. Returns the files that an earlier checkpoint may name.

    They are of buckets before `first_kept`. The file `keep` stays. Raises LogDamaged if a file is shorter, and then nothing was changed.
    """
    missing = dict(lengths)
    long: list[tuple[Path, int]] = []
    unknown: list[Path] = []
    older: set[str] = set()
    with os.scandir(folder) as found:
        entries = list(found)
    for entry in entries:
        length = missing.pop(entry.name, None)
        if length is not None:
            size = entry.stat().st_size
            if size < length:
                raise damaged(entry.name, size, f"it ends there, and had {length} bytes when the last checkpoint was written")
            if size > length:
                long.append((Path(entry.path), length))
        elif entry.name < first_kept and entry.name.endswith(SUFFIXES):
            older.add(entry.name)
        elif entry.name != keep:
            unknown.append(Path(entry.path))
    for name, length in missing.items():
        raise damaged(name, 0, f"it is gone, and had {length} bytes when the last checkpoint was written")
    for path, length in long:
        fd = disk.open_append(path)
        disk.truncate(fd, length)
        disk.close(fd)
    for path in unknown:
        path.unlink()
    return older


class Leftovers:
    """The files of closed buckets. Older checkpoints name them, so a file stays until the newest two checkpoints no longer name it. `names`
    are the files found at the start that the loaded checkpoint does not name.
    """

    def __init__(self, folder: Path, names: Iterable[str] = ()) -> None:
        self._folder = folder
        self._all = set(names)
        self._unnamed = frozenset(self._all)
        """The files that the newest checkpoint does not name."""

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def add(self, names: Iterable[str]) -> None:
        self._all.update(names)

    def captured(self) -> frozenset[str]:
        """The files that a checkpoint captured now does not name, for `saved`."""
        return frozenset(self._all)

    def saved(self, unnamed: frozenset[str]) -> None:
        """That checkpoint and the previous one are on disk: delete files that neither names."""
        unlink(self._folder, self._unnamed)
        self._all -= self._unnamed
        self._unnamed = unnamed - self._unnamed


def delete_all(folder: Path) -> None:
    """Delete all files; they will be rebuilt from the log."""
    unlink(folder, os.listdir(folder))


def unlink(folder: Path, names: Iterable[str]) -> None:
    """Delete those of the files that exist."""
    for name in names:
        (folder / name).unlink(missing_ok=True)
