"""The calls that the archive makes to the disk. Tests pass a disk that fails at any of them.

It needs two things of a file system: a hard link is made or refused in one step, and a rename replaces in one step. So local file systems
will do, and what is mounted as one and behaves like it (NFS); object stores will not.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from qmq.errors import DiskFull, InvalidArgument

_NO_LINKS: Final = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)
_NO_SPACE: Final = (errno.ENOSPC, errno.EDQUOT)


class ArchiveDisk:
    """The real file system."""

    def make_folder(self, path: Path) -> None:
        """With its parents; durable. There may be one already."""
        if path.is_dir():
            return
        self.make_folder(path.parent)
        path.mkdir(exist_ok=True)
        self.sync_folder(path.parent)

    def create(self, path: Path, data: bytes, writer: str) -> bool:
        """Put a whole file there, all or nothing and durable, if there is none: False if there is. `writer` is like no other writer's.

        Raises:
            InvalidArgument: the file system has no hard links.
            DiskFull: nothing was made.
        """
        draft = path.with_name(f".{path.name}.{writer}")
        self._write(draft, data)
        try:
            return self.link(draft, path)
        finally:
            draft.unlink(missing_ok=True)

    def replace(self, path: Path, data: bytes, writer: str) -> None:
        """Put a whole file there, instead of what is there. Raises DiskFull."""
        draft = path.with_name(f".{path.name}.{writer}")
        self._write(draft, data)
        draft.rename(path)

    def _write(self, path: Path, data: bytes) -> None:
        try:
            with path.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except OSError as cause:
            path.unlink(missing_ok=True)
            if cause.errno in _NO_SPACE:
                raise DiskFull(f"no space left for {path.parent}: free some, and run it again") from cause
            raise

    def link(self, source: Path, target: Path) -> bool:
        """A second name for a file, durable; False if another file has it. Raises InvalidArgument if the file system cannot do it."""
        try:
            os.link(source, target)
        except FileExistsError:
            # over a network the answer to a link that was made may get lost, and the repeated request be refused
            if not os.path.samefile(source, target):
                return False
        except OSError as cause:
            if cause.errno in _NO_LINKS:
                raise InvalidArgument(f"{target.parent} is on a file system without hard links, which an archive needs: {cause}") from cause
            raise
        self.sync_folder(target.parent)
        return True

    def unlink(self, path: Path) -> None:
        """Take a name away; it may be gone already."""
        path.unlink(missing_ok=True)

    def remove_folder(self, path: Path) -> None:
        """With all that is in it; what cannot be removed now is for another time."""
        shutil.rmtree(path, ignore_errors=True)

    def sync_tree(self, folder: Path) -> None:
        """Make all files below a folder, and their names, survive a power cut."""
        for path in walk(folder):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        for parent, _, _ in os.walk(folder):
            self.sync_folder(Path(parent))
        self.sync_folder(folder.parent)

    def sync_folder(self, folder: Path) -> None:
        """Make new and deleted names survive a power cut."""
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def walk(folder: Path) -> Iterator[Path]:
    """All files below a folder, in the order of their paths."""
    for parent, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            yield Path(parent) / name
