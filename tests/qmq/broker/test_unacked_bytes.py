"""The bytes that a consumer holds at its broker: counted right, and counted seldom."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from qmq.broker.dispatch import pull
from qmq.broker.dispatch.pull import UnackedBytes, bytes_of
from qmq.log.consume_log import ConsumeLog, IndexEntry
from qmq.log.disk import Disk
from qmq.log.group_state import HeldMessages, ShareHolder
from qmq.model import QueueId


def index_of(folder: Path, batches: list[tuple[int, int]], first: int = 0) -> ConsumeLog:
    """Batches of (messages, bytes), one after the other; those before number `first` are
    deleted.
    """
    index = ConsumeLog(Disk(), folder, QueueId("s", 0))
    sequence = total = 0
    for count, size in batches:
        index.append(IndexEntry(sequence, total, 1, 1, 1, 0, total, size, count))
        sequence, total = sequence + count, total + size
    index.first = first
    return index


@pytest.mark.parametrize("seed", range(5))
def test_any_ranges_are_counted_as_message_by_message(tmp_path: Path, seed: int) -> None:
    """Of more batches than one look at the index finds."""
    draw = random.Random(seed)
    batches = [(draw.randint(1, 20), draw.randint(1, 10_000)) for _ in range(10_000)]
    gone = draw.randint(0, 5_000)
    sizes = [
        size / count if number >= gone else 0.0
        for number, (count, size) in enumerate(batches)
        for _ in range(count)
    ]
    index = index_of(tmp_path, batches, gone)
    for _ in range(40):
        marks = sorted(draw.sample(range(len(sizes) + 1), 2 * draw.randint(1, 15)))
        held = [HeldMessages(a, a, b - a, 1) for a, b in zip(marks[::2], marks[1::2], strict=True)]
        draw.shuffle(held)
        wanted = sum(sum(sizes[each.first : each.first + each.count]) for each in held)
        assert abs(bytes_of(index, held) - wanted) <= 1


class Counted:
    """Counts how often there is a look at all ranges."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.times = 0
        original = pull.bytes_of

        def counted(index: ConsumeLog, held: list[HeldMessages]) -> int:
            self.times += 1
            return original(index, held)

        monkeypatch.setattr(pull, "bytes_of", counted)


def holder_of(count: int) -> ShareHolder:
    return ShareHolder("1", 30_000, count, [HeldMessages(0, 0, count, 1)] if count else [], count)


def test_far_from_the_limit_nothing_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted, index = Counted(monkeypatch), index_of(tmp_path, [(1000, 100_000)])
    found = UnackedBytes(50_000)
    assert found.room(holder_of(0), index) == 50_000
    for pulls in range(10):
        found.delivered(4_000)
        assert found.room(holder_of(40 * (pulls + 1)), index) == 50_000 - 4_000 * (pulls + 1)
    assert counted.times == 0
    assert found.room(holder_of(0), index) == 50_000


def test_a_session_that_takes_up_what_another_left_counts_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted, index = Counted(monkeypatch), index_of(tmp_path, [(1000, 100_000)])
    found = UnackedBytes(50_000)
    assert [found.room(holder_of(100), index) for _ in range(3)] == [40_000] * 3
    assert counted.times == 1


def test_at_the_limit_it_waits_until_a_part_is_settled_and_then_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted, index = Counted(monkeypatch), index_of(tmp_path, [(1000, 100_000)])
    found = UnackedBytes(50_000)
    held = 640
    assert found.room(holder_of(held), index) == 50_000 - 64_000
    while found.room(holder_of(held), index) <= 0:
        held -= 1
    assert 490 <= held < 500
    assert counted.times < 20
    found.delivered(2_000)
    assert found.room(holder_of(held + 20), index) <= 0
    while held:
        held -= 1
        found.room(holder_of(held), index)
    assert found.room(holder_of(0), index) == 50_000


def test_a_single_message_over_the_byte_limit_is_still_handed_out(tmp_path: Path) -> None:
    index = index_of(tmp_path, [(1, 100_000)] * 3)
    found = UnackedBytes(50_000)
    assert found.room(holder_of(0), index) == 50_000
    found.delivered(100_000)
    assert found.room(holder_of(1), index) <= 0
    assert found.room(holder_of(0), index) == 50_000
