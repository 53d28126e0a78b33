"""Read-ahead: what is near is checked ahead, and then single messages are read without their batch.
Damage is found before delivery.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from schedule_support import SECOND, START, checkpoint, delayed, opened, places
from support import ManualClock, eventually

from qmq.delay.batches import BatchCache, BatchOutline, SchedulePlace, StoredBatch
from qmq.delay.buckets import PICKED_MAX, PIECE_BYTES, READ_BYTES, ReadAheadPiece, name_of
from qmq.delay.config import DelayConfig
from qmq.delay.engine import Engine
from qmq.delay.schedule import Schedule
from qmq.errors import LogDamaged
from qmq.limits import KIB
from qmq.log.actions import Cancel, Close
from qmq.log.disk import Disk
from qmq.wire.batch import ENVELOPE_BYTES, Envelope

BUCKET = START // SECOND
LOG = f"{name_of(BUCKET, SECOND)}.log"
COUNT = 100
"""Messages in a batch."""


class CountingDisk(Disk):
    """Counts what is read."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def read(self, fd: int, size: int, at: int) -> bytes:
        self.sizes.append(size)
        return super().read(fd, size, at)


def batch(number: int, body_bytes: int = KIB) -> tuple[bytes, int]:
    bodies = [bytes([number, place]) * (body_bytes // 2) for place in range(COUNT)]
    return delayed([START + place for place in range(COUNT)], number=number, bodies=bodies)


def restarted(
    folder: Path, count: int, body_bytes: int = KIB, flip: int | None = None
) -> tuple[Schedule, CountingDisk]:
    """A schedule with this many batches of 100 KiB in one bucket, opened again, perhaps with a
    flipped bit in its log.
    """
    schedule = opened(folder)
    for number in range(1, count + 1):
        schedule.take(number, START, *batch(number, body_bytes))
    state = checkpoint(schedule)
    schedule.close()
    if flip is not None:
        data = bytearray((folder / LOG).read_bytes())
        data[flip] ^= 1
        (folder / LOG).write_bytes(data)
    disk = CountingDisk()
    schedule = Schedule(folder, disk, SECOND)
    schedule.load(state)
    return schedule, disk


def read_ahead(schedule: Schedule) -> int:
    """All pieces; how many."""
    pieces = 0
    while (piece := schedule.read_ahead(START, START)) is not None:
        schedule.note_read_ahead(piece())
        pieces += 1
    return pieces


def read(schedule: Schedule, *ordinals: int) -> list[bytes]:
    return [
        message.body[:2]
        for message in schedule.read(places([SchedulePlace(BUCKET, each) for each in ordinals]))
    ]


def region_at(number: int) -> int:
    """The log position of the n-th batch's region; n starts at 1."""
    return (number - 1) * (ENVELOPE_BYTES + len(batch(1)[0])) + ENVELOPE_BYTES


def test_after_the_survey_a_message_is_read_without_its_batch(tmp_path: Path) -> None:
    schedule, disk = restarted(tmp_path, 3)
    whole = schedule.read(places([SchedulePlace(BUCKET, each) for each in range(3 * COUNT)]))
    schedule.close()
    schedule, disk = restarted(tmp_path / "again", 3)
    assert read_ahead(schedule) == 1
    disk.sizes.clear()
    assert schedule.read(
        places([SchedulePlace(BUCKET, 250), SchedulePlace(BUCKET, 7), SchedulePlace(BUCKET, 120)])
    ) == [
        whole[250],
        whole[7],
        whole[120],
    ]
    assert sum(disk.sizes) < 10 * KIB
    schedule.close()


def test_without_read_ahead_a_batch_is_checked_at_its_first_message(tmp_path: Path) -> None:
    schedule, disk = restarted(tmp_path, 200)
    assert read(schedule, 5) == [b"\x01\x05"]
    assert sum(disk.sizes) > 100 * KIB
    for number in range(1, 200):  # other batches take its place in the cache
        read(schedule, number * COUNT)
    disk.sizes.clear()
    assert read(schedule, 6) == [b"\x01\x06"]
    assert sum(disk.sizes) < 10 * KIB
    schedule.close()


def test_many_messages_of_a_batch_are_read_with_it_at_once(tmp_path: Path) -> None:
    schedule, disk = restarted(tmp_path, 1)
    read_ahead(schedule)
    disk.sizes.clear()
    assert read(schedule, *range(PICKED_MAX + 1)) == [
        bytes([1, place]) for place in range(PICKED_MAX + 1)
    ]
    assert len(disk.sizes) == 3  # lines of the index; the batch's begin, and all of it
    schedule.close()


def test_a_bit_flipped_before_the_read_ahead_is_logged_and_found_at_reading(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    schedule, _ = restarted(tmp_path, 3, flip=region_at(2) + 50_000)
    read_ahead(schedule)
    assert f"{LOG} is damaged at byte {region_at(2) - ENVELOPE_BYTES} " in caplog.text
    assert read(schedule, 0, 2 * COUNT) == [b"\x01\x00", b"\x03\x00"]
    with pytest.raises(
        LogDamaged, match=f"{LOG} is damaged at byte {region_at(2) - ENVELOPE_BYTES} "
    ):
        read(schedule, COUNT)
    schedule.close()


@pytest.mark.parametrize("at", [-ENVELOPE_BYTES + 8, -ENVELOPE_BYTES + 11])
def test_after_a_damaged_envelope_read_ahead_ends_and_batches_are_read_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, at: int
) -> None:
    schedule, disk = restarted(tmp_path, 3, flip=region_at(2) + at)
    read_ahead(schedule)
    assert f"{LOG} is damaged" in caplog.text
    disk.sizes.clear()
    assert read(schedule, 2 * COUNT + 1) == [b"\x03\x01"]
    assert sum(disk.sizes) > 100 * KIB
    with pytest.raises(LogDamaged):
        read(schedule, COUNT)
    schedule.close()


def test_a_log_that_is_shorter_than_it_was_ends_the_survey(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    schedule, _ = restarted(tmp_path, 3)
    with (tmp_path / LOG).open("r+b") as file:
        file.truncate(region_at(3) + 500)
    read_ahead(schedule)
    assert "within a batch" in caplog.text
    assert read(schedule, COUNT) == [b"\x02\x00"]
    schedule.close()


def test_read_ahead_goes_piece_by_piece_also_over_batches_larger_than_a_piece(
    tmp_path: Path,
) -> None:
    schedule, disk = restarted(tmp_path, 9, body_bytes=6 * KIB)
    assert COUNT * 6 * KIB > READ_BYTES
    assert read_ahead(schedule) == 3
    assert 9 * COUNT * 6 * KIB > 2 * PIECE_BYTES
    disk.sizes.clear()
    assert read(schedule, *range(0, 9 * COUNT, COUNT)) == [
        bytes([number, 0]) for number in range(1, 10)
    ]
    assert sum(disk.sizes) < 100 * KIB
    schedule.close()


def test_less_than_a_batch_that_is_worth_an_outline_is_not_surveyed(tmp_path: Path) -> None:
    schedule, _ = restarted(tmp_path, 1, body_bytes=20)
    assert read_ahead(schedule) == 0
    assert read(schedule, 3) == [b"\x01\x03"]
    schedule.close()


def test_messages_stored_meanwhile_are_examined_next(tmp_path: Path) -> None:
    schedule, disk = restarted(tmp_path, 2)
    piece = schedule.read_ahead(START, START)
    assert piece is not None
    schedule.take(3, START, *batch(3))
    schedule.note_read_ahead(piece())
    assert read_ahead(schedule) == 1
    schedule.take(4, START, *delayed([START], number=4))
    assert schedule.read_ahead(START, START) is None  # only in memory
    disk.sizes.clear()
    assert read(schedule, 0, COUNT, 2 * COUNT, 3 * COUNT) == [
        b"\x01\x00",
        b"\x02\x00",
        b"\x03\x00",
        b"bo",
    ]
    assert sum(disk.sizes) < 20 * KIB
    schedule.close()


def test_only_near_buckets_that_have_something_left_are_surveyed(tmp_path: Path) -> None:
    schedule, _ = restarted(tmp_path, 1)
    assert schedule.read_ahead(START - 5 * SECOND, START - SECOND) is None
    assert schedule.read_ahead(START + SECOND, START + 5 * SECOND) is None
    assert schedule.read_ahead(START - SECOND, START) is not None
    for ordinal in range(COUNT):
        schedule.act(2 + ordinal, START, Cancel(BUCKET, ordinal))
    assert schedule.read_ahead(START, START) is None
    schedule.close()


def test_a_bucket_that_is_closed_meanwhile_is_forgotten(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    schedule, _ = restarted(tmp_path, 1)
    piece = schedule.read_ahead(START, START)
    assert piece is not None
    for ordinal in range(COUNT):
        schedule.act(2 + ordinal, START, Cancel(BUCKET, ordinal))
    schedule.act(2 + COUNT, START, Close(BUCKET + 1))
    (tmp_path / LOG).unlink()
    schedule.note_read_ahead(piece())
    assert schedule.read_ahead(START, START) is None
    assert not caplog.records
    schedule.close()


def test_a_disk_that_does_not_read_ends_the_survey_and_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule, disk = restarted(tmp_path, 1)

    def refuse(*_: Any) -> bytes:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(disk, "read", refuse)
        assert read_ahead(schedule) == 1
    assert "Input/output error" in caplog.text
    assert read(schedule, 0) == [b"\x01\x00"]
    schedule.close()


def test_a_reopened_schedule_starts_without_checked_buckets(tmp_path: Path) -> None:
    schedule, disk = restarted(tmp_path, 1)
    read_ahead(schedule)
    state = checkpoint(schedule)
    schedule.load(state)
    disk.sizes.clear()
    assert read(schedule, 0) == [b"\x01\x00"]
    assert sum(disk.sizes) > 100 * KIB
    schedule.close()


async def test_the_engine_surveys_what_is_near_one_piece_at_a_time(tmp_path: Path) -> None:
    schedule, disk = restarted(tmp_path, 50)
    running: list[ReadAheadPiece] = []
    pieces: list[ReadAheadPiece] = []

    async def run(work: Any) -> Any:
        if isinstance(work, ReadAheadPiece):
            assert not running
            pieces.append(work)
            running.append(work)
            await asyncio.sleep(0)
            running.clear()
        return work()

    dispatcher, writer = Mock(waiting=0, planned=0, stop=AsyncMock()), Mock()
    engine = Engine(
        schedule,
        writer,
        ManualClock(START - SECOND),
        DelayConfig(tick_ms=10),
        lambda _: dispatcher,
        writer.fatal,
        run=run,
    )
    engine.start()
    await eventually(lambda: len(pieces) == 3 and schedule.read_ahead(START, START) is None)
    await engine.stop()
    disk.sizes.clear()
    assert read(schedule, 49 * COUNT + 3) == [b"\x32\x03"]
    assert sum(disk.sizes) < 10 * KIB
    writer.fatal.assert_not_called()
    schedule.close()


def test_outlines_that_came_first_go_first_when_there_are_too_many() -> None:
    region, crc = batch(1)
    cache = BatchCache(outlines_max=2)
    found = StoredBatch(_envelope(region, crc), region)
    for bucket in (1, 2, 3):
        cache.put_outline(bucket, 8, BatchOutline(found.view))
    assert [cache.outline(bucket, 8) is not None for bucket in (1, 2, 3)] == [False, True, True]
    assert cache.outline(2, 16) is None


def _envelope(region: bytes, crc: int) -> Envelope:
    return Envelope(0, ENVELOPE_BYTES + len(region), crc, 0, 0, 1, START, 0)
