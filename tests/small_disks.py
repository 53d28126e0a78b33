"""Small disks of a test's own, to be filled to the last byte. Mounting one needs root (`needs.mounts`)."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def small_disk_at(folder: Path, mib: int) -> Iterator[Path]:
    """A tmpfs of so many MiB, in a new folder."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Take the last byte; returns the file that has it."""
    filler = folder / "filler"
    file = os.open(filler, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with suppress(OSError):
        while True:
            os.write(file, bytes(4096))
    os.close(file)
    return filler
