"""A disk that is slow, fails or lies, for one server: the functions of the C library that read,
write and sync files are replaced in its process (preload/disk_calls.c). What they do is in a page
of memory that both share through a file, so a test changes it while the server runs.

    disk = BrokenDisk(folder / "g1-a", data_folder)
    disk.set(sync_delay_ms=300)    # each sync begins 300 ms later
    disk.set(sync_lies=1)          # a sync succeeds, and nothing is synced
    disk.set(sync_errno=5)         # EIO: a sync fails, and nothing is synced
    disk.spoil(path, [3, 9])       # these blocks cannot be read until they are written again
    disk.work()                    # as a disk should

Counts say how often that happened: a fault that nobody met proves nothing.
"""

from __future__ import annotations

import mmap
import shutil
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

SOURCE: Final = Path(__file__).parent / "preload" / "disk_calls.c"
PAGE_BYTES: Final = 4096
BLOCK_BYTES: Final = 4096
BLOCKS_MAX: Final = 64
FOLDER_AT: Final = 1024
BLOCKS_AT: Final = 2048
BLOCK: Final = struct.Struct("<QQQ")
SETTINGS: Final = {
    "sync_delay_ms": 0,
    "write_delay_ms": 4,
    "sync_lies": 8,
    "sync_errno": 12,
    "write_errno": 16,
    "bad_blocks": 20,
}
COUNTS: Final = {
    "syncs_slowed": 32,
    "syncs_failed": 40,
    "syncs_lied": 48,
    "writes_slowed": 56,
    "writes_failed": 64,
    "reads_failed": 72,
}


def no_preload() -> str:
    """Why this machine cannot do it; empty if it can."""
    if shutil.which("cc") is None:
        return "disks that fail: a C compiler (cc) is missing"
    return ""


def build(folder: Path) -> Path:
    """The library, compiled once for each test."""
    library = folder / "disk_calls.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        words = ["cc", "-O2", "-shared", "-fPIC", "-o", str(library), str(SOURCE)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")
    return library


class BrokenDisk:
    """What one server's disk does. Works as a disk should until something is set."""

    def __init__(self, file: Path, folder: Path) -> None:
        """Concerns files below `folder`; `file` holds the page, and is made again."""
        self.file = file
        name = str(folder.resolve()).encode()
        page = bytearray(PAGE_BYTES)
        page[FOLDER_AT : FOLDER_AT + len(name)] = name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(page)
        with file.open("r+b") as opened:
            self._page = mmap.mmap(opened.fileno(), PAGE_BYTES)

    def environment(self, library: Path) -> dict[str, str]:
        """The variables of a server on this disk."""
        return {"LD_PRELOAD": str(library), "CAMPAIGN_DISK": str(self.file)}

    def set(self, **settings: int) -> None:
        """Change what the disk does: names of SETTINGS."""
        for name, value in settings.items():
            struct.pack_into("<I", self._page, SETTINGS[name], value)

    def work(self) -> None:
        """As a disk should."""
        self.set(**dict.fromkeys(SETTINGS, 0))

    def count(self, name: str) -> int:
        """How often something happened since the start of the test: names of COUNTS."""
        found: int = struct.unpack_from("<Q", self._page, COUNTS[name])[0]
        return found

    def spoil(self, path: Path, blocks: Sequence[int]) -> None:
        """From now on these blocks of a file, and no others, cannot be read until they are
        written.
        """
        inode = path.stat().st_ino
        self.set(bad_blocks=0)
        for number, block in enumerate(blocks[:BLOCKS_MAX]):
            BLOCK.pack_into(self._page, BLOCKS_AT + number * BLOCK.size, inode, block, 0)
        self.set(bad_blocks=min(len(blocks), BLOCKS_MAX))
