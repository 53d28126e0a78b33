"""Files that were damaged, cut or removed: no data is skipped silently, and errors name the file,
the byte and what to do.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from file_support import GROUP, Traffic, batch, checkpoint, folder_in_memory, mark, opened, rows_of

from qmq.columns.files import reading
from qmq.columns.files.index import entry_at, pasts
from qmq.columns.files.segments import Mapped
from qmq.columns.model import QueueKey, ReadSelection
from qmq.errors import LogDamaged
from qmq.log.consume_log import ENTRY_BYTES
from qmq.wire.batch import Kind, wrap

A = QueueKey("a", 0, GROUP)


@pytest.fixture
def traffic() -> Iterator[Traffic]:
    """A store that was closed, with three subjects in several segments."""
    with folder_in_memory() as data:
        found = Traffic(data, Random(5))
        for _ in range(120):
            found.send()
        mark(found.store)
        yield found
        found.store.close()


def segments(traffic: Traffic) -> list[Path]:
    return sorted((traffic.folder / "message").iterdir())


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def read(traffic: Traffic, subject: str = "a") -> list[tuple[int, bytes]]:
    log = opened(traffic.folder)
    key = QueueKey(subject, 0, GROUP)
    queue = log.topology([subject]).queues[key]
    return rows_of(log.pieces(key, queue.start, queue.end, 2_000))


@pytest.mark.parametrize("is_walked", [True, False])
@pytest.mark.parametrize("is_stretch", [True, False])
def test_every_flipped_bit_of_a_batch_is_seen(
    traffic: Traffic, is_walked: bool, is_stretch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_POSITIONS_MAX", 0 if is_stretch else 1 << 20)
    monkeypatch.setattr(reading, "_FILL_MIN", 0.0)
    if not is_walked:
        checkpoint(traffic.store)
    entry = traffic.store.queues[b"a", 0].index.entry(10)
    base = traffic.store.messages.base_of(entry.position)
    path = traffic.folder / "message" / f"{base:020d}.log"
    for at in range(entry.total_bytes):
        flip(path, entry.position - base + at)
        with pytest.raises(LogDamaged, match=rf"{path.name}.*byte \d+.*restore"):
            read(traffic)
        flip(path, entry.position - base + at)
    assert read(traffic) == traffic.sent["a", 0]


@pytest.mark.parametrize(
    "states", [b"\x91\x97\xa1\xff", b"\x91\xa1\xff", b"\xc1", b"\x91\x91\x01"], ids=bytes.hex
)
def test_a_snapshot_that_is_no_messagepack_of_states_is_named(states: bytes) -> None:
    """Its checksums are correct: the program that wrote it had a bug, or the disk returned wrong
    bytes.
    """
    data = b"".join(wrap(Kind.SNAPSHOT, states, count=1, epoch=1, index=1, time_ms=1, flushed=0))
    mapped = Mapped(Path("00000000000000000000.log"), 0, len(data), data)
    with pytest.raises(
        LogDamaged, match=r"00000000000000000000.log.*byte 0.*its snapshot cannot be read"
    ):
        pasts(entry_at(mapped, 0))


@pytest.mark.parametrize("number", [0, 1, -1])
@pytest.mark.parametrize("is_walked", [True, False])
def test_segment_that_was_cut_short_is_refused(
    traffic: Traffic, number: int, is_walked: bool
) -> None:
    if not is_walked:
        checkpoint(traffic.store)
    path = segments(traffic)[number]
    path.write_bytes(path.read_bytes()[:-16])
    with pytest.raises(LogDamaged, match=rf"{path.name} has \d+ bytes.*truncated"):
        [read(traffic, subject) for subject in ("a", "b", "ab")]


def test_segment_that_is_missing_in_the_middle_is_damage_not_retention(traffic: Traffic) -> None:
    pieces = opened(traffic.folder).pieces(A, 0, traffic.end("a"), 1 << 20)
    path = segments(traffic)[1]
    path.unlink()
    with pytest.raises(
        LogDamaged, match=f"{path.name} is missing, although retention deletes only the oldest"
    ):
        rows_of(pieces, skips_lost=True)
    with pytest.raises(LogDamaged, match="a segment is missing"):
        read(traffic)


def test_log_without_segments_says_so(traffic: Traffic) -> None:
    for path in segments(traffic):
        path.unlink()
    with pytest.raises(LogDamaged, match="has no segments, but the log is committed up to"):
        read(traffic)


@pytest.mark.parametrize("harm", ["gone", "short", "zeros", "shifted", "one flipped"])
def test_a_missing_or_wrong_consume_log_is_not_used(traffic: Traffic, harm: str) -> None:
    checkpoint(traffic.store)
    for path in (traffic.folder / "consume").iterdir():
        data = path.read_bytes()
        if harm == "gone":
            path.unlink()
        elif harm == "short":
            path.write_bytes(data[:-ENTRY_BYTES])
        elif harm == "zeros":
            path.write_bytes(bytes(len(data)))
        elif harm == "shifted":
            path.write_bytes(data[8:] + data[:8])
        else:
            flip(path, 3 * ENTRY_BYTES + 12)
    for subject in ("a", "b", "ab"):
        assert read(traffic, subject) == traffic.sent[subject, 0]


def test_checkpoint_that_does_not_hold_is_passed_over(traffic: Traffic) -> None:
    for _ in range(3):
        traffic.send()
        checkpoint(traffic.store)
    mark(traffic.store)
    newest = max((traffic.folder / "checkpoint").iterdir())
    flip(newest, 40)
    assert read(traffic) == traffic.sent["a", 0]
    for path in (traffic.folder / "checkpoint").iterdir():
        path.write_bytes(b"")
    assert read(traffic) == traffic.sent["a", 0]


def test_flipped_tag_of_a_batch_without_it_does_not_hide_it_from_its_checksum(
    traffic: Traffic,
) -> None:
    pieces = opened(traffic.folder).pieces(A, 0, traffic.end("a"), 1 << 20)
    for path in segments(traffic):
        flip(path, path.stat().st_size - 1)
    with pytest.raises(LogDamaged, match="checksum is wrong"):
        rows_of(pieces, ReadSelection(tags_any=("red",)))


# --- copies ---------------------------------------------------------------------------------------


def test_copies_of_segments_are_read_with_the_mark_or_the_checkpoint_beside_them(
    traffic: Traffic,
) -> None:
    checkpoint(traffic.store)
    traffic.send("a")
    copy = traffic.data / "copies" / GROUP
    shutil.copytree(traffic.folder / "message", copy)
    shutil.copy(traffic.folder / "committed.qmm", copy)
    shutil.copy(max((traffic.folder / "checkpoint").iterdir()), copy)
    log = opened(copy)
    end = log.topology(["a"]).queues[A].end
    assert rows_of(log.pieces(A, 0, end, 1 << 20)) == [
        row for row in traffic.sent["a", 0] if row[0] < end
    ]
    (copy / "committed.qmm").unlink()
    assert opened(copy).topology(["a"]).queues[A].end == end


@pytest.mark.parametrize("has_checkpoint", [True, False])
def test_copies_of_the_newer_segments_alone_begin_where_they_do(
    traffic: Traffic, has_checkpoint: bool
) -> None:
    checkpoint(traffic.store)
    mark(traffic.store)
    copy = traffic.data / "copies" / GROUP
    shutil.copytree(traffic.folder, copy)
    for path in sorted((copy / "message").iterdir())[:2]:
        path.unlink()
    if not has_checkpoint:
        shutil.rmtree(copy / "checkpoint")
    log = opened(copy)
    for subject in ("a", "b", "ab"):
        key = QueueKey(subject, 0, GROUP)
        queue = log.topology([subject]).queues[key]
        assert 0 < queue.start < queue.end == traffic.end(subject)
        assert (
            rows_of(log.pieces(key, queue.start, queue.end, 900))
            == traffic.sent[subject, 0][queue.start :]
        )


@pytest.mark.parametrize(
    "selection", [ReadSelection(tags_any=("red", "pink")), ReadSelection(tags_all=("red",))]
)
def test_batches_that_the_consume_log_rules_out_are_not_even_touched(
    traffic: Traffic, selection: ReadSelection
) -> None:
    queue = traffic.store.open_queue("tagged", 0)
    for number, tag in enumerate(("red", "green", "red")):
        traffic.store.append([batch(queue, [tag.encode()], number, tags=[(tag,)])])
    checkpoint(traffic.store)
    entry = queue.index.entry(1)
    base = traffic.store.messages.base_of(entry.position)
    flip(traffic.folder / "message" / f"{base:020d}.log", entry.position - base + 80)
    pieces = opened(traffic.folder).pieces(QueueKey("tagged", 0, GROUP), 0, 3, 1 << 20)
    assert rows_of(pieces, selection) == [(0, b"red"), (2, b"red")]
    with pytest.raises(LogDamaged):
        rows_of(pieces)
