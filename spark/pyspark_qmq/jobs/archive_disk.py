"""The archive's disk operations. Tests pass a disk that fails at any of them.

An archive needs a file system with atomic hard links and atomic renames: local file systems, and network file systems that behave alike
(NFS). Object stores do not work.
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
        """Create a folder with its parents, durably. It may exist."""
        if path.is_dir():
            return
        self.make_folder(path.parent)
        path.mkdir(exist_ok=True)
        self.sync_folder(path.parent)

    def create(self, path: Path, data: bytes, writer: str) -> bool:
        """Create a file atomically and durably; False if it exists. `writer` must be unique among writers.

        Raises:
            InvalidArgument: the file system has no hard links.
            DiskFull: no file was created.
        """
        draft = path.with_name(f".{path.name}.{writer}")
        self._write(draft, data)
        try:
            return self.link(draft, path)
        finally:
            draft.unlink(missing_ok=True)

    def replace(self, path: Path, data: bytes, writer: str) -> None:
        """Replace a file atomically. Raises DiskFull."""
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
                raise DiskFull(f"no space left for {path.parent}: free some space and run the job again") from cause
            raise

    def link(self, source: Path, target: Path) -> bool:
        """Create a hard link durably; False if the name belongs to another file. Raises InvalidArgument if the file system has no hard
        links."""
        try:
            os.link(source, target)
        except FileExistsError:
            # On a network file system, the answer to a successful request may be lost, and the repeated request be refused.
            if not os.path.samefile(source, target):
                return False
        except OSError as cause:
            if cause.errno in _NO_LINKS:
                raise InvalidArgument(f"{target.parent} is on a file system without hard links, which an archive needs: {cause}") from cause
            raise
        self.sync_folder(target.parent)
        return True

    def unlink(self, path: Path) -> None:
        """Remove a file name, if it exists."""
        path.unlink(missing_ok=True)

    def remove_folder(self, path: Path) -> None:
        """Remove a folder and its content, as far as possible. A later sweep removes the rest."""
        shutil.rmtree(path, ignore_errors=True)

    def sync_tree(self, folder: Path) -> None:
        """Flush all files below a folder, and their names, to disk."""
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
        """Flush created and deleted names of a folder to disk."""
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def walk(folder: Path) -> Iterator[Path]:
    """All files below a folder, sorted by path."""
    for parent, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            yield Path(parent) / name
