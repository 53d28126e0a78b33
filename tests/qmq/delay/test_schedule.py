"""The schedule: files and their ends, damage, lookup by id, notifications, adopting another
replica's files.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from google_crc32c import value as crc32c
from schedule_support import (
    PRODUCER,
    SECOND,
    START,
    checkpoint,
    contents,
    delayed,
    opened,
    places,
    plan,
)
from support import PLENTY, FillingDisk
from support.disks import BadSectors

from qmq.delay import buckets
from qmq.delay.batches import SchedulePlace
from qmq.delay.files import LARGE_BYTES
from qmq.delay.schedule import MARK_FILE, Schedule
from qmq.errors import DiskFull, InvalidArgument, LogDamaged, MessageNotFound
from qmq.log.actions import Cancel, Close, Postpone, Recur
from qmq.log.disk import Disk
from qmq.model import SCHEDULE_ID, DelayedId, MessageId
from qmq.wire.batch import BatchView
from qmq.wire.batch_columns import REGION, REGION_BYTES, BatchFlag, Compression

BUCKET = START // SECOND
NAME = "20231114T221320Z"
"""The name of the bucket that begins at START."""


def reloaded(schedule: Schedule, state: Any) -> Schedule:
    schedule.close()
    return opened(schedule.folder, msgspec.msgpack.decode(msgspec.msgpack.encode(state)))


def filled(folder: Path, batches: Sequence[Sequence[int]], **options: Any) -> Schedule:
    schedule = opened(folder, **options)
    for number, due_times_ms in enumerate(batches, 1):
        schedule.take(number, START - 5_000, *delayed(due_times_ms, number=number))
    return schedule


def id_of(number: int, place: int, due_ms: int, append_ms: int = START - 5_000) -> DelayedId:
    return DelayedId(MessageId(PRODUCER, number, place), due_ms, append_ms, "d0")


# --- files ----------------------------------------------------------------------------------------


def test_a_batch_of_one_bucket_is_copied_unchanged_under_a_new_envelope(tmp_path: Path) -> None:
    schedule = opened(tmp_path)
    region, crc = delayed([START + 5, START + 3], number=3)
    schedule.take(7, START - 9, *delayed([START], number=2))
    schedule.take(8, START - 8, region, crc)
    files = contents(schedule)
    assert list(files) == [f"{NAME}.log", f"{NAME}.idx"]
    first = BatchView.parse(files[f"{NAME}.log"])
    view = BatchView.parse(files[f"{NAME}.log"], first.envelope.total_bytes)
    assert (view.region, view.envelope.region_crc) == (region, crc)
    assert (
        view.base_sequence,
        view.envelope.index,
        view.envelope.append_time_ms,
        view.envelope.epoch,
    ) == (1, 8, START - 8, 0)


def test_a_batch_without_due_times_changes_nothing_but_the_index(tmp_path: Path) -> None:
    schedule = opened(tmp_path)
    region, crc = delayed([START])
    header = bytearray(region)
    header[32] = 0
    schedule.take(3, START, bytes(header), crc)
    assert (schedule.index, schedule.buckets()) == (3, [])


def test_large_batches_are_written_at_once_and_small_ones_when_memory_is_used_up(
    tmp_path: Path,
) -> None:
    schedule = opened(tmp_path, buffer_bytes_max=3_000)
    schedule.take(1, START, *delayed([START], bodies=[bytes(LARGE_BYTES)]))
    assert (tmp_path / f"{NAME}.log").stat().st_size > LARGE_BYTES
    for index in range(2, 40):
        schedule.take(index, START, *delayed([START + index * SECOND], number=index))
        schedule.check()
    assert 1 < len(list(tmp_path.iterdir())) < 80
    assert (
        len(schedule.read(places(SchedulePlace(BUCKET + each, 0) for each in (0, *range(2, 40)))))
        == 39
    )
    assert len(contents(schedule)) == 78
    assert len(contents(reloaded(schedule, checkpoint(schedule)))) == 78


@pytest.mark.parametrize("refusals", [1, PLENTY], ids=["for a moment", "for long"])
def test_a_disk_that_fills_at_any_write_leaves_the_schedule_whole(
    tmp_path: Path, refusals: int
) -> None:
    due_times_ms = [
        [START + each * 137 % 4_000 for each in range(batch, batch + 7)] for batch in range(30)
    ]
    whole = contents(filled(tmp_path / "whole", due_times_ms))

    def writes(folder: Path, room: int) -> int:
        disk = FillingDisk()
        schedule = Schedule(folder, disk, SECOND, buffer_bytes_max=900)
        schedule.load(None)
        disk.room, disk.refusals = room, refusals
        for number, each in enumerate(due_times_ms, 1):
            schedule.take(number, START - 5_000, *delayed(each, number=number))
            schedule.check()
            if number % 10 == 0:
                with suppress(DiskFull):
                    checkpoint(schedule)
        used, disk.room = room - disk.room, PLENTY
        assert contents(schedule) == whole
        assert contents(opened(folder, checkpoint(schedule))) == whole
        return used

    for room in range(writes(tmp_path / "enough", PLENTY)):
        writes(tmp_path / str(room), room)


def test_a_reader_shows_the_bucket_as_it_was_when_the_reader_was_made(tmp_path: Path) -> None:
    schedule = filled(tmp_path, [[START, START + 1]])
    checkpoint(schedule)
    schedule.take(2, START, *delayed([START + 2]))
    reader = schedule.reader(BUCKET)
    schedule.take(3, START, *delayed([START + 3]))
    checkpoint(schedule)
    assert reader.count == 3
    assert reader.read(0, 3)["due"].tolist() == [START, START + 1, START + 2]
    assert reader.read(1, 2)["due"].tolist() == [START + 1]
    assert reader.read(2, 3)["due"].tolist() == [START + 2]


# --- closing and older checkpoints ----------------------------------------------------------------


def test_files_of_a_closed_bucket_stay_while_a_kept_checkpoint_names_them(tmp_path: Path) -> None:
    schedule = filled(tmp_path, [[START], [START + SECOND]])
    schedule.act(3, START, Cancel(BUCKET, 0))
    before = checkpoint(schedule)
    schedule.act(4, START, Close(BUCKET + 1))
    assert [info.bucket for info in schedule.buckets()] == [BUCKET + 1]
    with pytest.raises(MessageNotFound):
        schedule.state_of(SchedulePlace(BUCKET, 0))
    newest = checkpoint(schedule)
    assert (tmp_path / f"{NAME}.log").exists()
    schedule = reloaded(schedule, newest)
    assert (tmp_path / f"{NAME}.log").exists(), (
        "opened from the newest one, the older one may be needed still"
    )
    older = reloaded(schedule, before)
    assert older.state_of(SchedulePlace(BUCKET, 0)) == "cancelled"
    older.act(4, START, Close(BUCKET + 1))
    assert checkpoint(older) == newest
    assert (tmp_path / f"{NAME}.log").exists()
    checkpoint(older)
    assert not list(tmp_path.glob(f"{NAME}.*"))


def test_what_a_crash_left_behind_the_checkpoint_is_cut_off(tmp_path: Path) -> None:
    schedule = filled(tmp_path, [[START, START + 1], [START + SECOND]])
    schedule.act(3, START, Cancel(BUCKET, 0))
    files, state = contents(schedule), checkpoint(schedule)
    for name in (f"{NAME}.log", f"{NAME}.idx", f"{NAME}.done", "20301114T221320Z.log", "noise"):
        with (tmp_path / name).open("ab") as file:
            file.write(b"left")
    schedule = reloaded(schedule, state)
    schedule.check()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == files


@pytest.mark.parametrize("suffix", ["log", "idx", "done"])
@pytest.mark.parametrize("is_gone", [False, True])
def test_a_file_that_is_shorter_than_it_was_is_refused_and_nothing_is_changed(
    tmp_path: Path, suffix: str, is_gone: bool
) -> None:
    schedule = filled(tmp_path, [[START]])
    schedule.act(2, START, Cancel(BUCKET, 0))
    state = checkpoint(schedule)
    schedule.close()
    path = tmp_path / f"{NAME}.{suffix}"
    if is_gone:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1])
    (tmp_path / "noise").touch()
    with pytest.raises(LogDamaged, match=f"{NAME}.{suffix}.*restore"):
        opened(tmp_path, state)
    assert (tmp_path / "noise").exists()


def test_without_a_checkpoint_everything_follows_from_the_log_again(tmp_path: Path) -> None:
    filled(tmp_path, [[START]], buffer_bytes_max=0).close()
    schedule = opened(tmp_path)
    assert (list(tmp_path.iterdir()), schedule.index, schedule.is_whole) == ([], 0, True)


def test_a_state_of_other_buckets_or_another_version_is_refused(tmp_path: Path) -> None:
    state = checkpoint(filled(tmp_path, [[START]]))
    with pytest.raises(LogDamaged, match="fixed when it is created"):
        opened(tmp_path, msgspec.to_builtins(state, builtin_types=(bytes,)), bucket_ms=2 * SECOND)
    with pytest.raises(LogDamaged, match="cannot be read"):
        opened(tmp_path, [1, 2])
    with pytest.raises(LogDamaged, match="has version 9"):
        opened(tmp_path, [9, *msgspec.to_builtins(state, builtin_types=(bytes,))[1:]])
    with pytest.raises(InvalidArgument):
        Schedule(tmp_path, Disk(), 1500)


# --- another replica's ----------------------------------------------------------------------------


def test_a_state_of_an_older_version_counts_what_comes_from_then_on(tmp_path: Path) -> None:
    schedule = filled(tmp_path, [[START, START + 1]])
    older = msgspec.msgpack.decode(msgspec.msgpack.encode(checkpoint(schedule)))[:8]
    schedule = reloaded(schedule, older)
    assert schedule.pending.all() == {}
    schedule.take(2, START, *delayed([START + 2] * 3, number=2))
    assert schedule.pending.of("orders") == 3
    schedule.act(3, START, Cancel(BUCKET, 0))
    schedule.act(3, START, Cancel(BUCKET, 2))
    schedule.act(3, START, Cancel(BUCKET, 3))
    schedule.act(3, START, Cancel(BUCKET, 4))
    assert schedule.pending.all() == {}
    schedule.take(4, START, *delayed([START + 2], number=3))
    assert schedule.pending.of("orders") == 1


def test_an_adopted_schedule_is_used_if_the_log_reaches_back_to_it(tmp_path: Path) -> None:
    donor = filled(tmp_path / "a", [[START], [START + 1]])
    state = msgspec.msgpack.encode(checkpoint(donor))
    donor.take(3, START, *delayed([START + 2]))
    checkpoint(donor)
    (tmp_path / "b").mkdir()
    for name, length in Schedule.files(msgspec.msgpack.decode(state)):
        (tmp_path / "b" / name).write_bytes((tmp_path / "a" / name).read_bytes()[:length])
    Schedule.adopt(tmp_path / "b", state)
    for replayed_from in (2, 3):
        taken = Schedule(tmp_path / "b", Disk(), SECOND)
        taken.load(None, replayed_from)
        assert (taken.is_whole, taken.index, taken.count(BUCKET)) == (True, 2, 2)
    taken.take(2, START, *delayed([START + 9]))
    taken.take(3, START, *delayed([START + 2]))
    assert contents(taken) == contents(donor)
    assert (tmp_path / "b" / MARK_FILE).exists()
    checkpoint(taken)
    assert not (tmp_path / "b" / MARK_FILE).exists()


def test_a_log_that_does_not_reach_back_far_enough_gives_no_schedule(tmp_path: Path) -> None:
    donor = filled(tmp_path, [[START], [START + 1]])
    Schedule.adopt(tmp_path, msgspec.msgpack.encode(checkpoint(donor)))
    donor.close()
    schedule = Schedule(tmp_path, Disk(), SECOND)
    schedule.load(None, 4)
    assert (schedule.is_whole, list(tmp_path.iterdir())) == (False, [])
    schedule.take(4, START, *delayed([START]))
    schedule.act(5, START, plan(1, (BUCKET, [8])))
    assert (schedule.buckets(), schedule.plans) == ([], {})
    assert checkpoint(schedule) is None
    schedule.load(None, 6)
    assert not schedule.is_whole


def test_a_torn_mark_does_not_count(tmp_path: Path) -> None:
    Schedule.adopt(tmp_path, msgspec.msgpack.encode(checkpoint(filled(tmp_path, [[START]]))))
    (tmp_path / MARK_FILE).write_bytes((tmp_path / MARK_FILE).read_bytes()[:-1] + b"!")
    schedule = Schedule(tmp_path, Disk(), SECOND)
    schedule.load(None, 2)
    assert not schedule.is_whole


# --- damage ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("suffix", "at", "named"),
    [("log", 70, "log"), ("log", 3, "log"), ("idx", 0, "idx"), ("idx", 12, "idx")],
)
def test_damage_is_found_when_it_is_read_and_says_where(
    tmp_path: Path, suffix: str, at: int, named: str
) -> None:
    schedule = filled(tmp_path, [[START], [START + 1, START + 2]])
    second = BatchView.parse(contents(schedule)[f"{NAME}.log"]).envelope.total_bytes
    state = checkpoint(schedule)
    schedule.close()
    path = tmp_path / f"{NAME}.{suffix}"
    data = bytearray(path.read_bytes())
    where = at + (second if suffix == "log" else 16)
    data[where] ^= 1
    path.write_bytes(data)
    schedule = opened(tmp_path, state)
    assert schedule.read(places([SchedulePlace(BUCKET, 0)]))[0].due_ms == START
    with pytest.raises(
        LogDamaged, match=f"{NAME}.{named} is damaged at byte {second if named == 'log' else 16} "
    ):
        schedule.read(places([SchedulePlace(BUCKET, 1)]))
    schedule.close()


@pytest.mark.parametrize("suffix", ["log", "idx", "done"])
def test_a_sector_that_cannot_be_read_is_damage_and_names_no_place_in_the_log(
    tmp_path: Path, suffix: str
) -> None:
    """The place would be looked for in another file: the schedule is not repaired from another
    replica.
    """
    schedule = filled(tmp_path, [[START, START + 1]])
    schedule.act(2, START, Cancel(BUCKET, 0))
    state = checkpoint(schedule)
    schedule.close()
    disk = BadSectors()
    disk.spoil(tmp_path / f"{NAME}.{suffix}", 0)
    schedule = Schedule(tmp_path, disk, SECOND)
    schedule.load(msgspec.msgpack.decode(msgspec.msgpack.encode(state)))
    with pytest.raises(
        LogDamaged, match=f"{NAME}.{suffix} is damaged at byte .* .the disk cannot read it"
    ) as damage:
        schedule.state_of(SchedulePlace(BUCKET, 1))
        schedule.read(places([SchedulePlace(BUCKET, 1)]))
    assert (damage.value.log, damage.value.position) == (-1, -1)
    schedule.close()


def test_damage_in_the_dispatch_log_is_found_when_it_is_first_needed(tmp_path: Path) -> None:
    schedule = filled(tmp_path, [[START, START + 1]])
    for ordinal in (0, 1):
        schedule.act(2 + ordinal, START, Cancel(BUCKET, ordinal))
    state = checkpoint(schedule)
    schedule.close()
    path = tmp_path / f"{NAME}.done"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + b"!")
    with pytest.raises(LogDamaged, match=f"{NAME}.done is damaged at byte {len(whole) // 2} "):
        opened(tmp_path, state).state_of(SchedulePlace(BUCKET, 0))
    path.write_bytes(whole[: len(whole) // 2] * 2)
    with pytest.raises(LogDamaged, match="does not have the 2 messages"):
        opened(tmp_path, state).settled(BUCKET)
    path.write_bytes(whole)
    assert opened(tmp_path, state).settled(BUCKET).tolist() == [True, True]


def test_bodies_that_cannot_be_decompressed_are_kept_and_marked_damaged(tmp_path: Path) -> None:
    region, _ = delayed(
        [START + SECOND, START], bodies=[b"x" * 99, b"y" * 99], compression=Compression.ZSTD
    )
    broken = region[:-16] + bytes(16)
    schedule = opened(tmp_path)
    schedule.take(1, START, broken, _crc(broken))
    assert [(info.bucket, info.messages) for info in schedule.buckets()] == [(BUCKET, 2)]
    with pytest.raises(LogDamaged, match="decompress"):
        schedule.read(places([SchedulePlace(BUCKET, 0)]))


def test_compressed_bodies_are_read_whole_or_cut(tmp_path: Path) -> None:
    schedule = opened(tmp_path)
    for number, due_times_ms in enumerate(([START, START + 1], [START, START + SECOND]), 1):
        schedule.take(
            number,
            START,
            *delayed(
                due_times_ms,
                number=number,
                bodies=[b"x" * 99, b"y" * 99],
                compression=Compression.ZSTD,
            ),
        )
    found = schedule.read(
        places(
            [
                SchedulePlace(BUCKET, 1),
                SchedulePlace(BUCKET, 0),
                SchedulePlace(BUCKET, 2),
                SchedulePlace(BUCKET + 1, 0),
            ]
        )
    )
    assert [each.body[:1] for each in found] == [b"y", b"x", b"x", b"y"]


def _crc(region: bytes) -> int:
    from google_crc32c import value

    return int(value(region))


# --- looking up -----------------------------------------------------------------------------------


def test_messages_are_found_by_id_among_many_of_one_append_time(tmp_path: Path) -> None:
    due_times_ms = [[START + each, START + SECOND * (each % 2), START + 5] for each in range(20)]
    schedule = filled(tmp_path, due_times_ms)
    schedule.take(21, START - 4_000, *delayed([START], number=21))
    for number, each in enumerate(due_times_ms, 1):
        for place, due_ms in enumerate(each):
            found = schedule.read(places([schedule.find(id_of(number, place, due_ms))]))[0]
            assert (found.body, found.due_ms) == (b"body %d.%d" % (number, place), due_ms)
    assert (
        schedule.read(places([schedule.find(id_of(21, 0, START, START - 4_000))]))[0].body
        == b"body 21.0"
    )
    for wrong in (
        id_of(99, 0, START),
        id_of(1, 7, START),
        id_of(1, 0, START, START),
        id_of(1, 0, START + 9 * SECOND),
    ):
        with pytest.raises(MessageNotFound):
            schedule.find(wrong)


def test_a_large_scan_reads_a_bucket_several_times_and_returns_each_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buckets, "SORTED_MAX", 10)
    monkeypatch.setattr(buckets, "_SLICE_ROWS", 7)
    due_times_ms = [
        [START + each * 7919 % 50 for each in range(batch, batch + 9)] for batch in range(20)
    ]
    schedule = filled(tmp_path, due_times_ms)
    schedule.act(21, START, Cancel(BUCKET, 3))
    every = sorted(
        (due, ordinal)
        for ordinal, due in enumerate(due for batch in due_times_ms for due in batch)
        if ordinal != 3
    )
    assert [(each.due_ms, each.place.ordinal) for each in schedule.scan("")] == every
    assert [each.due_ms for each in schedule.scan("", START + 10, START + 20)] == [
        due for due, _ in every if 10 <= due - START < 20
    ]


def test_a_plan_of_what_is_not_pending_is_a_broken_invariant(tmp_path: Path) -> None:
    schedule = filled(tmp_path, [[START]])
    schedule.act(2, START, Cancel(BUCKET, 0))
    with pytest.raises(AssertionError, match="not pending"):
        schedule.act(3, START, plan(1, (BUCKET, [0])))


def test_every_replica_skips_a_batch_that_cannot_be_parsed(tmp_path: Path) -> None:
    """An older version let it in; an apply that raised would end all replicas, at every start."""
    schedule = opened(tmp_path)
    region, _ = delayed([START])
    fields = list(REGION.unpack_from(region))
    fields[9] = int(Compression.ZSTD)
    poison = REGION.pack(*fields) + region[REGION_BYTES:]
    schedule.take(1, START, poison, crc32c(poison))
    schedule.take(
        2,
        START,
        *delayed([START], number=2, flags=BatchFlag.RECURRING, headers=[{SCHEDULE_ID: b"no id"}]),
    )
    actions = (
        Postpone(BUCKET, 0, START + 5),
        Recur(BUCKET, 0, START + 5),
        Recur(BUCKET, 7, START),
        Recur(BUCKET, 1, START + 5_000),
    )
    for index, action in enumerate(actions, 3):
        schedule.act(index, START, action)
    assert schedule.state_of(SchedulePlace(BUCKET, 0)) == "pending"
    assert [(each.bucket, each.messages) for each in schedule.buckets()] == [
        (BUCKET, 2),
        (BUCKET + 5, 1),
    ]
