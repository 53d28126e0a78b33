"""A power cut of a real file system: ext4 on a loop device is shut down without writing its
journal, so unsynced pages are gone.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest
from support import ManualClock, intake, needs

from qmq.log.checkpoint import begin_checkpoint, end_checkpoint
from qmq.log.log_config import Flush, LogConfig
from qmq.log.recovery import open_store
from qmq.log.store import Store

pytestmark = [
    pytest.mark.long,
    needs.mounts,
    pytest.mark.skipif(
        not Path("/dev/loop-control").exists() or shutil.which("mkfs.ext4") is None,
        reason="no loop devices, or no ext4",
    ),
]

SHUTDOWN: Final = 0x8004587D
"""EXT4_IOC_SHUTDOWN."""
NO_LOG_FLUSH: Final = 2
CONFIG: Final = LogConfig(flush=Flush.SYNC, segment_bytes=64 * 1024, disk_free_bytes_min=0)


@contextmanager
def mounted(image: Path, folder: Path) -> Iterator[None]:
    subprocess.run(["mount", "-o", "loop", str(image), str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def lose_power(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        fcntl.ioctl(fd, SHUTDOWN, struct.pack("I", NO_LOG_FLUSH))
    finally:
        os.close(fd)


def fill(store: Store, first: int, count: int) -> None:
    queue = store.open_queue("s", 0)
    for number in range(first, first + count):
        store.append([intake(queue, [b"%06d" % number * 200], number=number)])


@pytest.mark.parametrize("has_checkpoint", [False, True])
def test_what_was_flushed_survives_a_power_cut_of_a_real_file_system(
    tmp_path: Path, has_checkpoint: bool
) -> None:
    image, folder = tmp_path / "image", tmp_path / "disk"
    folder.mkdir()
    with image.open("wb") as file:
        file.truncate(64 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=True)
    flushed = 0
    for turn in range(4):
        with mounted(image, folder):
            store = open_store(folder / "store", CONFIG, ManualClock(), is_replicated=True)
            queue = store.open_queue("s", 0)
            assert queue.next_sequence >= flushed
            first = queue.next_sequence
            for _, entry in queue.index.scan(0):
                store.read(queue, entry)
            fill(store, first, 70)
            plan = store.begin_flush()
            plan.run()
            store.end_flush(plan)
            flushed = queue.next_sequence
            if has_checkpoint and turn % 2:
                store.commit(store.index)
                written = begin_checkpoint(store)
                written.run()
                end_checkpoint(store, written)
            fill(store, flushed, 30)  # these only the page cache has
            lose_power(folder)
            store.close()
    with mounted(image, folder):
        store = open_store(folder / "store", CONFIG, ManualClock(), is_replicated=True)
        assert flushed <= store.open_queue("s", 0).next_sequence < flushed + 30, (
            "the cut took nothing, and so proves nothing"
        )
        store.close()
