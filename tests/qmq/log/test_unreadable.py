"""An unreadable sector (EIO) is damage like a wrong checksum: found, named, never cut away, never
fatal.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from replica_support import checkpoint, flush
from support import ManualClock, intake
from support.disks import BadSectors

from qmq.errors import LogDamaged
from qmq.log import checkpoint as checkpoints
from qmq.log.checkpoint import close_store
from qmq.log.consume_log import ENTRY_BYTES
from qmq.log.disk import BLOCK_BYTES, Disk
from qmq.log.log_config import LogConfig
from qmq.log.recovery import open_store
from qmq.log.scrub import Scrubber
from qmq.log.store import Store

CONFIG = LogConfig(segment_bytes=64 * 1024, cache_bytes=0)


def opened(folder: Path, disk: Disk, *, is_replicated: bool = False) -> Store:
    return open_store(folder, CONFIG, ManualClock(), disk=disk, is_replicated=is_replicated)


def fill(store: Store, count: int, start: int = 0) -> None:
    queue = store.open_queue("s", 0)
    for number in range(start, start + count):
        store.append([intake(queue, [os.urandom(900)], number=number)])


def segment(folder: Path, number: int) -> Path:
    return sorted((folder / "message").glob("*.log"))[number]


def damage_of(store: Store) -> list[LogDamaged]:
    """The damage that one scrubbing round finds."""
    scrubber, found = Scrubber(store), []
    while not scrubber.rounds:
        damage = scrubber.slice(1 << 20)
        found += [damage] if damage is not None else []
    return found


def test_the_scrubber_finds_an_unreadable_sector_with_its_place(tmp_path: Path) -> None:
    disk = BadSectors()
    store = opened(tmp_path, disk)
    fill(store, 100)
    flush(store)
    disk.spoil(segment(tmp_path, 0), 5 * BLOCK_BYTES)
    found = damage_of(store)
    assert found
    assert all(
        each.log == 0 and 4 * BLOCK_BYTES < each.position < 6 * BLOCK_BYTES for each in found
    )
    assert disk.unreadable > 0
    store.close()


def test_only_the_messages_of_the_sector_cannot_be_read(tmp_path: Path) -> None:
    disk = BadSectors()
    store = opened(tmp_path, disk)
    fill(store, 100)
    disk.spoil(segment(tmp_path, 0), 5 * BLOCK_BYTES)
    queue, hurt = store.open_queue("s", 0), list[tuple[int, int]]()
    for _, entry in queue.index.scan(0):
        try:
            store.read(queue, entry)
        except LogDamaged as damage:
            hurt.append((damage.position, entry.position))
    assert 4 <= len(hurt) <= 6
    assert all(found == wanted for found, wanted in hurt)
    store.close()


def test_only_an_unreadable_sector_counts_as_damage(tmp_path: Path) -> None:
    class Gone(Disk):
        def read(self, fd: int, size: int, at: int) -> bytes:
            raise PermissionError("not allowed (in this test)")

    store = opened(tmp_path, Disk())
    fill(store, 1)
    queue = store.open_queue("s", 0)
    store.messages.disk = Gone()
    with pytest.raises(PermissionError):
        store.read(queue, queue.index.entry(0))
    store.close()


def test_a_broker_alone_refuses_to_open_over_an_unreadable_flushed_part(tmp_path: Path) -> None:
    store = opened(tmp_path, Disk())
    fill(store, 100)
    store.close()
    disk = BadSectors()
    disk.spoil(segment(tmp_path, 0), 5 * BLOCK_BYTES)
    before = segment(tmp_path, 0).read_bytes()
    for _ in range(2):
        with pytest.raises(LogDamaged, match="Nothing was cut") as failure:
            opened(tmp_path, disk)
        assert 4 * BLOCK_BYTES < failure.value.position < 6 * BLOCK_BYTES
    assert segment(tmp_path, 0).read_bytes() == before


def test_an_unreadable_tail_is_not_taken_for_a_torn_one(tmp_path: Path) -> None:
    store = opened(tmp_path, Disk())
    fill(store, 40)
    store.close()
    disk = BadSectors()
    disk.spoil(segment(tmp_path, 0), segment(tmp_path, 0).stat().st_size - 1)
    with pytest.raises(LogDamaged, match="cannot be read"):
        opened(tmp_path, disk)


@pytest.mark.parametrize("size", [10, 900, 3 * BLOCK_BYTES])
def test_a_log_goes_on_behind_an_unreadable_block(tmp_path: Path, size: int) -> None:
    disk = BadSectors()
    store = opened(tmp_path, disk, is_replicated=True)
    store.append_barrier(1)
    fill(store, 40)
    path = segment(tmp_path, 0)
    end = path.stat().st_size
    assert end % BLOCK_BYTES
    disk.spoil(path, end - 1)
    queue = store.open_queue("s", 0)
    store.append([intake(queue, [b"x" * size], number=40)])
    store.append([intake(queue, [b"y"], number=41)])
    assert not disk.bad
    assert b"x" * size in path.read_bytes()[end:]
    assert store.messages.end == path.stat().st_size
    flush(store)
    (damage,) = damage_of(store)
    assert damage.position < end, "what the block had is damage, as before"
    store.close()


def test_a_replica_with_an_unreadable_tail_says_that_it_may_lack_something(tmp_path: Path) -> None:
    store = opened(tmp_path, Disk(), is_replicated=True)
    store.append_barrier(1)
    fill(store, 40)
    store.close()
    disk = BadSectors()
    disk.spoil(segment(tmp_path, 0), segment(tmp_path, 0).stat().st_size - 1)
    store = opened(tmp_path, disk, is_replicated=True)
    assert store.lost_tail
    assert 0 < store.index < 41
    store.close()


def test_an_unreadable_checkpoint_is_passed_over(tmp_path: Path) -> None:
    disk = BadSectors()
    store = opened(tmp_path, disk)
    fill(store, 40)
    checkpoint(store)
    older = checkpoints.load(tmp_path / "checkpoint", disk)
    fill(store, 40, start=40)
    close_store(store)
    disk.spoil(max((tmp_path / "checkpoint").glob("*.qmc")), 0)
    assert checkpoints.load(tmp_path / "checkpoint", disk) == older
    store = opened(tmp_path, disk)
    assert store.open_queue("s", 0).next_sequence == 80
    store.close()


def test_an_unreadable_consume_log_is_rebuilt_at_the_next_start(tmp_path: Path) -> None:
    disk = BadSectors()
    store = opened(tmp_path, disk)
    fill(store, 200)
    checkpoint(store)
    fill(store, 10, start=200)
    whole = [entry for _, entry in store.open_queue("s", 0).index.scan(0)]
    disk.spoil(next((tmp_path / "consume").glob("*.idx")), 0)
    with pytest.raises(LogDamaged, match="restart the broker"):
        store.open_queue("s", 0).index.entry(3)
    assert store.open_queue("s", 0).index.entry(205) == whole[205]
    checkpoint(store)
    store.close()
    store = opened(tmp_path, disk)
    disk.bad.clear()
    assert [entry for _, entry in store.open_queue("s", 0).index.scan(0)] == whole
    checkpoint(store)
    store.close()
    assert list((tmp_path / "consume").glob("*.bad")) == []
    store = opened(tmp_path, disk)
    assert [entry for _, entry in store.open_queue("s", 0).index.scan(0)] == whole
    store.close()


@pytest.mark.parametrize(
    "field", [0, 1, 7, 8], ids=["base_sequence", "position", "total_bytes", "count"]
)
def test_a_flipped_bit_of_a_consume_log_is_reported_and_never_moves_a_reader(
    tmp_path: Path, field: int
) -> None:
    """A count that is too high would have a group skip messages; a place that is wrong is no damage
    of the log.
    """
    store = opened(tmp_path, Disk())
    fill(store, 20)
    checkpoint(store)
    queue = store.open_queue("s", 0)
    whole = [entry for _, entry in queue.index.scan(0)]
    path = next((tmp_path / "consume").glob("*.idx"))
    data = path.read_bytes()
    at = 9 * ENTRY_BYTES + (field * 8 if field < 8 else 60)
    for bit in range(64 if field < 7 else 32):
        changed = bytearray(data)
        changed[at + bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        with pytest.raises(LogDamaged, match="restart the broker to rebuild it") as damage:
            store.read(queue, queue.index.entry(9))
        assert damage.value.position == -1
        assert not queue.index.is_whole()
        store.read(queue, queue.index.entry(8))
    store.close()
    store = opened(tmp_path, Disk())
    assert [entry for _, entry in store.open_queue("s", 0).index.scan(0)] == whole
    store.close()


def test_a_damaged_message_is_not_reported_as_a_damaged_consume_log(tmp_path: Path) -> None:
    store = opened(tmp_path, Disk())
    fill(store, 20)
    checkpoint(store)
    queue = store.open_queue("s", 0)
    entry = queue.index.entry(9)
    for at in (3, 9, 20, 63, 64, 200):
        with segment(tmp_path, 0).open("r+b") as file:
            for change in (True, False):
                file.seek(entry.position + at)
                byte = file.read(1)[0]
                file.seek(entry.position + at)
                file.write(bytes([byte ^ 8]))
                file.flush()
                if change:
                    with pytest.raises(LogDamaged, match="are damaged on disk") as damage:
                        store.read(queue, entry)
                    assert damage.value.position == entry.position
    assert queue.index.is_whole()
    store.close()


def test_a_folder_that_is_refused_is_free_again(tmp_path: Path) -> None:
    store = opened(tmp_path, Disk())
    fill(store, 150)
    store.close()
    with segment(tmp_path, 0).open("r+b") as file:
        file.truncate(1_000)
    for _ in range(2):
        with pytest.raises(LogDamaged, match="a segment is missing or cut"):
            opened(tmp_path, Disk())
