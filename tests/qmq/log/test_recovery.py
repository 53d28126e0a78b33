"""Opening a store after damage: each kind of damage has one promised outcome."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
from replica_support import checkpoint, flush
from support import ManualClock, intake
from support.retention import begin_retention, end_retention

from qmq.errors import FolderInUse, LogDamaged
from qmq.limits import KIB, MIB
from qmq.log.actions import Begin, Join, PullAction, Pulled, SettleAction
from qmq.log.checkpoint import close_store
from qmq.log.disk import Disk
from qmq.log.log_config import Flush, LogConfig
from qmq.log.recovery import open_store
from qmq.log.store import Store
from qmq.model import MessageId, SubjectConfig
from qmq.wire.batch import BatchView
from qmq.wire.frame_payloads import Verdict

CONFIG = LogConfig(segment_bytes=64 * KIB, action_segment_bytes=64 * KIB)


def opened(
    folder: Path,
    config: LogConfig = CONFIG,
    disk: Disk | None = None,
    clock: ManualClock | None = None,
) -> Store:
    return open_store(folder, config, clock or ManualClock(), disk=disk)


def fill(
    store: Store, batches: int, *, subject: str = "s", size: int = 1000, start: int = 0
) -> None:
    queue = store.open_queue(subject, 0)
    for number in range(start, start + batches):
        store.append(
            [
                intake(
                    queue,
                    [f"{subject}{number}-{at}".encode().ljust(size, b".") for at in range(3)],
                    number=number,
                )
            ]
        )


def bodies(store: Store, subject: str = "s") -> list[bytes]:
    queue = store.queue(subject, 0)
    assert queue is not None
    found: list[bytes] = []
    for _, entry in queue.index.scan(queue.index.first):
        envelope, region = store.read(queue, entry)
        found += [body.rstrip(b".") for body in BatchView.parse(envelope + region).bodies()]
    return found


def expected(batches: int, subject: str = "s", start: int = 0) -> list[bytes]:
    return [
        f"{subject}{number}-{at}".encode() for number in range(start, batches) for at in range(3)
    ]


def consume(store: Store, *, pulled: int, acked: int) -> None:
    where = ("s", 0, "g")
    store.act(Begin(*where, "", 0))
    store.act(Join(*where, "c", "i", 1000, -1))
    store.act(PullAction(*where, "c", (Pulled(0, pulled, 1),)))
    store.act(SettleAction(*where, "c", 0, ((0, acked - 1, Verdict.ACK, 0),)))
    store.write_actions()


def last_segment(folder: Path, log: str = "message") -> Path:
    return max((folder / log).glob("*.log"))


@pytest.mark.parametrize("at", [0, 1, 50, 99])
def test_a_checkpoint_at_any_moment_changes_nothing(tmp_path: Path, at: int) -> None:
    store = opened(tmp_path)
    for number in range(100):
        fill(store, 1, start=number)
        if number == at:
            consume(store, pulled=at + 1, acked=max(at // 2, 1))
            checkpoint(store)
    store.close()
    store = opened(tmp_path)
    assert bodies(store) == expected(100)
    assert store.queue("s", 0).shares["g"].next_sequence == at + 1
    fill(store, 10, start=100)
    assert bodies(store) == expected(110)
    close_store(store)
    store = opened(tmp_path)
    assert bodies(store) == expected(110)
    store.close()


def test_every_truncation_of_the_unflushed_tail_is_cut_to_whole_batches(tmp_path: Path) -> None:
    base = tmp_path / "base"
    store = opened(base, LogConfig())
    fill(store, 3, size=40)
    store.close()
    size = last_segment(base).stat().st_size
    batch = size // 3
    for end in range(size):
        copy = tmp_path / "copy"
        shutil.copytree(base, copy)
        with last_segment(copy).open("r+b") as file:
            file.truncate(end)
        store = opened(copy, LogConfig())
        assert bodies(store) if end >= batch else store.queue("s", 0) is None
        if end >= batch:
            assert bodies(store) == expected(end // batch)
        fill(store, 1, start=50, size=40)
        store.close()
        shutil.rmtree(copy)


def test_a_flipped_bit_in_the_flushed_middle_is_refused_and_nothing_is_cut(tmp_path: Path) -> None:
    store = opened(tmp_path)
    fill(store, 10)
    flush(store)
    fill(store, 1, start=10)
    store.close()
    segment = last_segment(tmp_path)
    data = bytearray(segment.read_bytes())
    chosen = random.Random(1)
    flushed = len(data) * 10 // 11 - 8
    for _ in range(60):
        bit = chosen.randrange(flushed * 8)
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        segment.write_bytes(damaged)
        with pytest.raises(LogDamaged, match="Nothing was cut"):
            opened(tmp_path)
        assert segment.stat().st_size == len(data)
    segment.write_bytes(data)
    store = opened(tmp_path)
    assert bodies(store) == expected(11)
    store.close()


def test_damage_behind_the_last_flush_is_a_torn_tail(tmp_path: Path) -> None:
    """A power cut may keep later pages and lose earlier ones; none of them was promised to
    anybody.
    """
    store = opened(tmp_path)
    fill(store, 10)
    store.close()
    segment = last_segment(tmp_path)
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 1
    segment.write_bytes(data)
    store = opened(tmp_path)
    assert bodies(store) == expected(5)
    store.close()


def test_a_bit_that_flips_under_a_checkpoint_is_noticed_at_the_read(tmp_path: Path) -> None:
    store = opened(tmp_path)
    fill(store, 10)
    close_store(store)
    segment = last_segment(tmp_path)
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 1
    segment.write_bytes(data)
    store = opened(tmp_path)
    with pytest.raises(LogDamaged, match="group reset --to 18"):
        bodies(store)
    store.close()


def test_a_missing_segment_is_refused(tmp_path: Path) -> None:
    for which in (0, 1, -1):
        folder = tmp_path / str(which)
        store = opened(folder)
        fill(store, 100)
        close_store(store)
        sorted((folder / "message").glob("*.log"))[which].unlink()
        with pytest.raises(LogDamaged):
            opened(folder)


def test_a_deleted_consume_log_is_rebuilt(tmp_path: Path) -> None:
    store = opened(tmp_path)
    for number in range(60):
        fill(store, 1, start=number)
        fill(store, 1, start=number, subject="other")
    close_store(store)
    before = opened(tmp_path)
    entries = list(before.queue("s", 0).index.scan(0))
    before.close()
    shutil.rmtree(tmp_path / "consume")
    store = opened(tmp_path)
    assert list(store.queue("s", 0).index.scan(0)) == entries
    fill(store, 5, start=60)
    assert bodies(store) == expected(65)
    assert bodies(store, "other") == expected(60, "other")
    store.close()


def test_everything_derived_may_be_lost_at_once(tmp_path: Path) -> None:
    store = opened(tmp_path)
    fill(store, 100)
    consume(store, pulled=50, acked=20)
    close_store(store)
    shutil.rmtree(tmp_path / "consume")
    shutil.rmtree(tmp_path / "checkpoint")
    store = opened(tmp_path)
    assert bodies(store) == expected(100)
    assert store.queue("s", 0).shares["g"].settled_before() == 20
    store.close()


@pytest.mark.parametrize("damage", ["flip", "empty", "cut", "foreign"])
def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, damage: str) -> None:
    store = opened(tmp_path)
    fill(store, 20)
    consume(store, pulled=9, acked=3)
    close_store(store)
    path = next((tmp_path / "checkpoint").glob("*.qmc"))
    data = path.read_bytes()
    flipped = data[:-1] + bytes([data[-1] ^ 1])
    path.write_bytes(
        {"flip": flipped, "empty": b"", "cut": data[: len(data) // 2], "foreign": b"PK\3\4" * 50}[
            damage
        ]
    )
    store = opened(tmp_path)
    assert bodies(store) == expected(20)
    assert store.queue("s", 0).shares["g"].next_sequence == 9
    store.close()


@pytest.mark.parametrize("is_replicated", [False, True])
def test_without_the_newest_checkpoint_a_log_opens_after_retention(
    tmp_path: Path, is_replicated: bool
) -> None:
    """The older checkpoint refers to segments that retention deleted."""
    clock = ManualClock()

    def open_again() -> Store:
        return open_store(tmp_path, CONFIG, clock, is_replicated=is_replicated)

    store = open_again()
    fill(store, 60)
    checkpoint(store)
    clock.now_ms += CONFIG.retention_ms + 1
    fill(store, 60, start=60)
    store.commit(store.index)
    gone = begin_retention(store, lambda name: SubjectConfig(name))
    checkpoint(store)
    end_retention(gone)
    fill(store, 10, start=120)
    start = store.queue("s", 0).start_sequence
    store.close()
    newest = max((tmp_path / "checkpoint").glob("*.qmc"))
    newest.write_bytes(newest.read_bytes()[:-1])
    store = open_again()
    assert store.queue("s", 0).start_sequence <= start
    assert bodies(store)[-210:] == expected(130, start=60)
    fill(store, 1, start=130)
    store.commit(store.index)
    assert bodies(store)[-3:] == expected(131, start=130)
    close_store(store)
    open_again().close()


def test_without_the_newest_checkpoint_the_older_one_serves(tmp_path: Path) -> None:
    store = opened(tmp_path)
    fill(store, 60)
    checkpoint(store)
    fill(store, 10, start=60)
    checkpoint(store)
    store.close()
    newest = max((tmp_path / "checkpoint").glob("*.qmc"))
    newest.write_bytes(b"")
    store = opened(tmp_path)
    assert bodies(store) == expected(70)
    store.close()


def test_a_checkpoint_from_the_future_means_that_flushed_data_is_gone(tmp_path: Path) -> None:
    store = opened(tmp_path)
    fill(store, 5)
    close_store(store)
    with last_segment(tmp_path).open("r+b") as file:
        file.truncate(file.seek(0, 2) // 2)
    with pytest.raises(LogDamaged, match="its end is missing"):
        opened(tmp_path)
    shutil.rmtree(tmp_path / "checkpoint")
    store = opened(tmp_path)
    assert bodies(store) == expected(2)
    store.close()


def test_empty_files_are_an_empty_log(tmp_path: Path) -> None:
    for log in ("message", "action"):
        (tmp_path / log).mkdir()
        (tmp_path / log / f"{0:020d}.log").touch()
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "checkpoint-00000000000000000001.qmc").touch()
    store = opened(tmp_path)
    fill(store, 2)
    assert bodies(store) == expected(2)
    store.close()


def test_a_sequence_that_a_consumer_saw_is_never_given_to_another_message(tmp_path: Path) -> None:
    """The tail of the message log is lost, the action log is not: the numbers that were handed out
    stay used.
    """
    store = opened(tmp_path)
    fill(store, 4)
    consume(store, pulled=12, acked=12)
    store.close()
    with last_segment(tmp_path).open("r+b") as file:
        file.truncate(file.seek(0, 2) // 2)
    store = opened(tmp_path)
    assert bodies(store) == expected(2)
    produced = store.append([intake(store.open_queue("s", 0), [b"new"], number=99)])
    assert produced[0].base_sequence == 12
    store.close()
    store = opened(tmp_path)
    assert bodies(store) == [*expected(2), b"new"]
    store.close()


def test_a_second_process_on_the_folder_is_refused(tmp_path: Path) -> None:
    store = opened(tmp_path)
    with pytest.raises(FolderInUse, match="stop it first"):
        opened(tmp_path)
    store.close()
    opened(tmp_path).close()


def test_a_batch_is_stored_once_however_often_it_is_sent(tmp_path: Path) -> None:
    store = opened(tmp_path)
    queue = store.open_queue("s", 0)
    first = store.append([intake(queue, [b"a"], number=3), intake(queue, [b"a"], number=3)])
    assert first[0] == first[1]
    for number in range(4, 200):
        store.append([intake(queue, [b"x"], number=number)])
    assert (
        store.append([intake(queue, [b"a"], number=3)])[0].base_sequence == first[0].base_sequence
    )
    close_store(store)
    store = opened(tmp_path)
    queue = store.open_queue("s", 0)
    assert store.append([intake(queue, [b"a"], number=150)])[0].base_sequence == 147
    assert queue.next_sequence == 197
    assert store.append([intake(queue, [b"a"], number=2)])[0].base_sequence == 197
    store.close()
    shutil.rmtree(tmp_path / "checkpoint")
    store = opened(tmp_path)
    assert store.append([intake(store.open_queue("s", 0), [b"a"], number=3)])[0].base_sequence == 0
    store.close()


def test_retention_by_age_takes_segments_and_a_replay_still_numbers_on(tmp_path: Path) -> None:
    clock = ManualClock()
    store = opened(tmp_path, clock=clock)
    fill(store, 60)
    clock.now_ms += CONFIG.retention_ms + 1
    fill(store, 30, start=60)
    gone = begin_retention(store, lambda name: SubjectConfig(name))
    checkpoint(store)
    end_retention(gone)
    queue = store.queue("s", 0)
    assert queue.start_sequence == 180
    assert bodies(store)[-90:] == expected(90, start=60)
    assert len(list((tmp_path / "message").glob("*.log"))) < 5
    store.close()
    shutil.rmtree(tmp_path / "checkpoint")
    shutil.rmtree(tmp_path / "consume")
    store = opened(tmp_path, clock=clock)
    assert store.queue("s", 0).next_sequence == 270
    assert bodies(store)[-90:] == expected(90, start=60)
    store.close()


def test_retention_by_size_keeps_the_newest_of_a_subject(tmp_path: Path) -> None:
    store = opened(tmp_path)
    fill(store, 60)
    fill(store, 60, subject="kept")
    begin_retention(
        store, lambda name: SubjectConfig(name, retention_bytes=None if name == "kept" else 20_000)
    )
    queue = store.queue("s", 0)
    assert 180 - 21 <= queue.start_sequence < 180
    assert store.queue("kept", 0).start_sequence == 0
    store.close()


def test_retention_by_the_whole_logs_size_takes_the_oldest_segments(tmp_path: Path) -> None:
    config = LogConfig(segment_bytes=8 * MIB, retention_bytes=16 * MIB)
    store = opened(tmp_path, config)
    for number in range(40):
        store.append([intake(store.open_queue("s", 0), [bytes(MIB)], number=number)])
    assert begin_retention(store, lambda name: SubjectConfig(name)).dropped
    assert store.messages.end - store.messages.start <= 16 * MIB
    assert store.queue("s", 0).start_sequence > 20
    store.close()


def test_a_crash_between_checkpoint_and_deletion_is_finished_at_the_next_start(
    tmp_path: Path,
) -> None:
    clock = ManualClock()
    store = opened(tmp_path, clock=clock)
    fill(store, 60)
    clock.now_ms += CONFIG.retention_ms + 1
    fill(store, 30, start=60)
    gone = begin_retention(store, lambda name: SubjectConfig(name))
    checkpoint(store)
    store.close()
    segments = [path for path in gone.dropped if path.suffix == ".log"]
    assert segments
    assert all(path.exists() for path in segments)
    opened(tmp_path, clock=clock).close()
    assert not any(path.exists() for path in segments)


def test_with_sync_flush_nothing_is_visible_before_it_is_flushed(tmp_path: Path) -> None:
    store = opened(tmp_path, LogConfig(flush=Flush.SYNC))
    fill(store, 2)
    queue = store.queue("s", 0)
    assert (queue.visible_sequence, queue.next_sequence) == (0, 6)
    plan = store.begin_flush()
    fill(store, 1, start=2)
    plan.run()
    assert store.commit(store.end_flush(plan)) == [queue]
    assert (queue.visible_sequence, queue.next_sequence) == (6, 9)
    store.close()


def test_message_ids_are_text_and_bytes_both_ways() -> None:
    found = MessageId(2**64 - 1, 2**48 - 1, 2**16 - 1)
    assert MessageId.parse(str(found)) == found
    assert found.to_bytes() == b"\xff" * 16
