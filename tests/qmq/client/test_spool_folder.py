"""Files are found as soon as they are there, and the folder is not read for each who asks."""

from __future__ import annotations

import os
from pathlib import Path

from qmq.client.consuming.ack_spool import TICK_S, SpoolFolder


class World:
    """A stopped clock, and the number of times the folder was read."""

    def __init__(self, path: Path) -> None:
        self.now_s = 100.0
        self.reads = 0
        self.folder = SpoolFolder(path, lambda: self.now_s, self._list)

    def _list(self, path: Path) -> list[str]:
        self.reads += 1
        return os.listdir(path)

    def names(self, prefix: str = "a") -> list[str]:
        return [each.name for each in self.folder.files(prefix, ".v")]


def test_a_folder_that_did_not_change_is_read_no_more(tmp_path: Path) -> None:
    world = World(tmp_path)
    (tmp_path / "a-1.v").touch()
    world.names()
    world.now_s += 2 * TICK_S
    assert world.names() == ["a-1.v"]
    reads = world.reads
    for _ in range(100):
        assert world.names() == ["a-1.v"]
    assert world.reads == reads
    (tmp_path / "a-1.v").unlink()
    os.utime(tmp_path)
    assert world.names() == []


def test_a_file_that_comes_in_the_same_tick_of_the_clock_is_found(tmp_path: Path) -> None:
    world = World(tmp_path)
    assert world.names() == []
    changed_ns = tmp_path.stat().st_mtime_ns
    (tmp_path / "a-1.v").touch()
    os.utime(tmp_path, ns=(changed_ns, changed_ns))
    assert world.names() == ["a-1.v"]
