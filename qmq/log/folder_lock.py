"""A lock that gives a data folder to one process. The lock ends with the process."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from qmq.errors import FolderInUse
from qmq.private_files import FILE_MODE


class FolderLock:
    """The lock, held from construction to `release`. Raises FolderInUse."""

    def __init__(self, folder: Path) -> None:
        self._fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._fd)
            raise FolderInUse(f"{folder} is used by another running broker: stop it first, or choose another folder") from None

    def release(self) -> None:
        """Release the folder, for another process or another store of this one."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1
