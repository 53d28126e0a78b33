"""A file system of a replica's own: ext4 in a file on a loop device.

`cut` is a power cut: the ioctl EXT4_IOC_SHUTDOWN without a flush of the journal. From then on every
call fails with EIO, and what was not synced is gone when the file system is mounted again. The
processes on it must be dead before `mount_again`.

`fill` takes the last byte, `make_room` gives everything back.
"""

from __future__ import annotations

import fcntl
import os
import struct
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

SHUTDOWN: Final = 0x8004587D
NO_LOG_FLUSH: Final = 2
FILLER: Final = ".filler"
CHUNK: Final = bytes(1 << 20)
UNMOUNT_S: Final = 10.0
LOOK_S: Final = 0.05


class LoopDisk:
    """One file system. `folder` is where it is mounted."""

    def __init__(self, image: Path, folder: Path, mib: int) -> None:
        self.folder = folder
        self._image = image
        image.parent.mkdir(parents=True, exist_ok=True)
        with image.open("wb") as file:
            file.truncate(mib << 20)
        _run("mkfs.ext4", "-q", "-F", "-m", "0", str(image))
        self.mount_again()

    def mount_again(self) -> None:
        """The journal is replayed, as after a start of the machine."""
        self.folder.mkdir(parents=True, exist_ok=True)
        _run("mount", "-o", "loop", str(self._image), str(self.folder))

    def cut(self) -> None:
        """The power is gone."""
        fd = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, SHUTDOWN, struct.pack("I", NO_LOG_FLUSH))
        finally:
            os.close(fd)

    def unmount(self) -> None:
        """Nothing may have files open there; threads of a process that was killed still may, for a
        moment.
        """
        for _ in range(int(UNMOUNT_S / LOOK_S)):
            with suppress(OSError):
                return _run("umount", str(self.folder))
            time.sleep(LOOK_S)
        return _run("umount", str(self.folder))

    def size_bytes(self) -> int:
        """Bytes in all files that can be looked at."""
        found = 0
        for path in self.folder.rglob("*"):
            with suppress(OSError):
                found += path.stat().st_size if path.is_file() else 0
        return found

    def fill(self) -> None:
        """Take all blocks, to the last."""
        file = os.open(self.folder / FILLER, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            for size in (len(CHUNK), 4096):
                with suppress(OSError):
                    while True:
                        os.write(file, CHUNK[:size])
        finally:
            os.close(file)

    def free_bytes(self) -> int:
        """What is left for processes."""
        found = os.statvfs(self.folder)
        return found.f_bavail * found.f_frsize

    def make_room(self) -> None:
        """The opposite of `fill`."""
        (self.folder / FILLER).unlink(missing_ok=True)

    def remove(self) -> None:
        """Unmount, also where something is still open."""
        subprocess.run(["umount", "-l", str(self.folder)], check=False, capture_output=True)


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")
