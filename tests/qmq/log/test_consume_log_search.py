"""Searching a consume log: the same answers as by looking at every entry, with few reads; and
retention that reads only what changed.
"""

from __future__ import annotations

from bisect import bisect_left
from pathlib import Path
from random import Random

import pytest
from replica_support import checkpoint
from support import ManualClock, intake

from qmq.log.consume_log import FILE_ENTRIES, ConsumeLog, IndexEntry
from qmq.log.disk import Disk
from qmq.log.log_config import LogConfig
from qmq.log.recovery import open_store
from qmq.log.retention import QUEUES_AT_ONCE, Retention
from qmq.model import Partition, QueueId, SubjectConfig


class CountingDisk(Disk):
    """Counts what is opened for reading."""

    opened = 0

    def open_read(self, path: Path) -> int:
        self.opened += 1
        return super().open_read(path)


def filled(
    folder: Path, disk: Disk, in_files: int, in_memory: int, random: Random
) -> tuple[ConsumeLog, list[IndexEntry]]:
    index = ConsumeLog(disk, folder, QueueId("s", Partition(0)))
    entries: list[IndexEntry] = []
    place = [0, 0, 1000, 0]
    for number in range(in_files + in_memory):
        entries.append(IndexEntry(place[0], place[1], place[2], 1, number, 0, place[3], 100, 1))
        place = [
            each + step
            for each, step in zip(
                place, (1, random.randrange(1, 300), random.choice((0, 0, 5)), 100), strict=True
            )
        ]
    for entry in entries[:in_files]:
        index.append(entry)
    spill = index.spill()
    if spill is not None:
        index.write_spill(spill)
        index.spilled(spill)
    for entry in entries[in_files:]:
        index.append(entry)
    return index, entries


def first_where(entries: list[IndexEntry], first: int, column: int, value: int) -> int:
    return bisect_left(entries, value, first, key=lambda entry: entry[column])


@pytest.mark.parametrize(
    ("in_files", "in_memory"),
    [(0, 30), (500, 0), (500, 90), (FILE_ENTRIES + 900, 40), (FILE_ENTRIES, 0)],
)
def test_a_search_finds_what_looking_at_every_entry_finds(
    tmp_path: Path, in_files: int, in_memory: int
) -> None:
    random, disk = Random(in_files), CountingDisk()
    index, entries = filled(tmp_path, disk, in_files, in_memory, random)
    count = len(entries)
    for first in (0, count // 3, max(in_files - 1, 0)):
        index.first = first
        near = [
            0,
            first,
            in_files - 1,
            in_files,
            count - 1,
            *[random.randrange(count) for _ in range(5)],
        ]
        for at in near:
            entry = entries[min(max(at, 0), count - 1)]
            for by in (-1, 0, 1):
                disk.opened = 0
                assert index.find_time(entry.append_time_ms + by) == first_where(
                    entries, first, 2, entry.append_time_ms + by
                )
                assert disk.opened <= 2
                assert index.find_position(entry.position + by) == first_where(
                    entries, first, 1, entry.position + by
                )
                assert index.find_bytes(entry.cumulative_bytes + by) == first_where(
                    entries, first, 6, entry.cumulative_bytes + by
                )
                sequence = entry.base_sequence + by
                assert index.find_sequence(sequence) == max(
                    first_where(entries, first, 0, sequence + 1) - 1, first
                )
        assert index.find_time(-5) == first
        assert index.find_time(1 << 60) == count


def test_retention_skips_queues_without_deleted_messages(tmp_path: Path) -> None:
    disk = CountingDisk()
    store = open_store(tmp_path, LogConfig(), ManualClock(), disk=disk)
    for queue in [store.open_queue(f"s{number}", 0) for number in range(20)]:
        for number in range(30):
            store.append([intake(queue, [b"x"], number=number)])
    checkpoint(store)
    retention = Retention(store)
    looks = [sum(1 for _ in retention.steps(SubjectConfig)) for _ in range(2)]
    opened = disk.opened
    assert looks[0] >= 20 > looks[1]
    list(retention.steps(SubjectConfig))
    assert disk.opened == opened
    store.close()


def test_retention_takes_queues_whose_entries_are_in_memory_many_at_a_time(tmp_path: Path) -> None:
    store = open_store(tmp_path, LogConfig(), ManualClock())
    store.append(
        [
            intake(store.open_queue(f"s{number}", 0), [b"x"], number=number)
            for number in range(3 * QUEUES_AT_ONCE)
        ]
    )
    assert sum(1 for _ in Retention(store).steps(SubjectConfig)) == 6, (
        "three slices for the starts, three for the entries"
    )
    store.close()
