"""However many files a checkpoint writes, one that cannot be synced ends the process, and none is
counted as durable.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support import ManualClock, intake

from qmq.errors import FlushFailed
from qmq.log.checkpoint import SPILL_BYTES_MIN, begin_checkpoint
from qmq.log.consume_log import ENTRY_BYTES
from qmq.log.disk import Disk
from qmq.log.log_config import LogConfig
from qmq.log.recovery import open_store
from qmq.log.segments import Segments


class Failing(Disk):
    """Cannot sync the files of this folder."""

    folder = ""

    def sync(self, fd: int) -> None:
        if self.folder and f"/{self.folder}/" in os.readlink(f"/proc/self/fd/{fd}"):
            raise FlushFailed("EIO (in this test)")
        super().sync(fd)


@pytest.mark.parametrize("queues", [3, 65])
def test_a_checkpoint_whose_files_cannot_be_synced_is_not_written(
    tmp_path: Path, queues: int
) -> None:
    disk = Failing()
    store = open_store(tmp_path, LogConfig(), ManualClock(), disk=disk)
    for number in range(queues):
        queue = store.open_queue(f"s{number}", 0)
        for batch in range(SPILL_BYTES_MIN // ENTRY_BYTES + 1):
            store.append([intake(queue, [b"x"], number=batch)])
    plan = begin_checkpoint(store)
    disk.folder = "consume"
    with pytest.raises(FlushFailed):
        plan.run()
    assert not list(tmp_path.glob("checkpoint/*.qmc"))
    store.close()


@pytest.mark.parametrize("count", [3, 100])
def test_every_file_is_synced_and_a_deleted_one_is_left_out(tmp_path: Path, count: int) -> None:
    synced: list[str] = []

    class Noting(Disk):
        def sync(self, fd: int) -> None:
            synced.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)
            super().sync(fd)

    paths = [tmp_path / str(number) for number in range(count)]
    for path in paths[1:]:
        path.write_bytes(b"x")
    Noting().sync_files(paths)
    assert sorted(synced) == sorted(path.name for path in paths[1:])


def test_a_file_that_is_being_synced_stays_open_however_many_segments_are_read(
    tmp_path: Path,
) -> None:
    """While a thread flushes the newest segment, the log continues in another one, and readers open
    more files than may stay open.
    """
    segments = Segments(Disk(), tmp_path / "log", 100)
    for _ in range(80):
        segments.roll() if segments.must_roll(80) else None
        segments.append([bytes(80)], 80)
    plan = segments.begin_sync()
    segments.roll()
    segments.append([bytes(80)], 80)
    for base in segments.bases[:-2]:
        assert segments.read(base, 80) == bytes(80)
    plan.run()
    segments.end_sync(plan)
    segments.close_set_aside()
    assert segments.read(segments.bases[-2], 80) == bytes(80)
    segments.close()
