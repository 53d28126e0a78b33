"""What a broker remembers of readers that report themselves: their rate, when they are silent and
forgotten, and how many at most.
"""

from __future__ import annotations

import pytest
from support import ManualClock

from qmq.broker.reading.readers import KEPT_MS, RATE_MS, READERS_MAX, SILENT_MS, Readers
from qmq.errors import InvalidName
from qmq.model import QueueId

QUEUE, OTHER = QueueId("s", 0), QueueId("t", 0)
SECOND_MS = 1_000


def names(readers: Readers) -> list[str]:
    return [each.name for _, each in readers.kept()]


def test_the_rate_is_that_of_the_last_one_to_two_minutes() -> None:
    clock = ManualClock()
    readers = Readers(clock)
    for second in range(301):
        done = 100 * second if second < 100 else 10_000 + 10 * (second - 100)
        readers.note(QUEUE, "copy", done, 0)
        clock.now_ms += SECOND_MS
    ((_, reader),) = readers.kept()
    assert reader.messages_per_s(clock.monotonic_ms()) == pytest.approx(10, rel=0.05)
    clock.now_ms += 10 * RATE_MS
    assert reader.messages_per_s(clock.monotonic_ms()) < 2, "a reader that hangs has no rate"


def test_a_reader_that_goes_back_has_no_negative_rate() -> None:
    clock = ManualClock()
    readers = Readers(clock)
    readers.note(QUEUE, "copy", 1_000, 0)
    clock.now_ms += SECOND_MS
    readers.note(QUEUE, "copy", 10, 0)
    ((_, reader),) = readers.kept()
    assert (reader.done, reader.messages_per_s(clock.monotonic_ms())) == (10, 0)


def test_a_reader_without_reports_becomes_silent_and_is_forgotten() -> None:
    clock = ManualClock()
    readers = Readers(clock)
    readers.note(QUEUE, "copy", 5, 0)
    readers.note(OTHER, "copy", 5, 0)
    ((_, reader), _) = readers.kept()
    clock.now_ms += SILENT_MS
    assert not reader.is_silent(clock.monotonic_ms())
    clock.now_ms += 1
    assert reader.is_silent(clock.monotonic_ms())
    readers.note(OTHER, "copy", 6, 0)
    clock.now_ms += KEPT_MS
    assert [queue for queue, _ in readers.kept()] == [OTHER]


def test_a_reader_that_reports_rarely_is_kept_for_longer() -> None:
    clock = ManualClock()
    readers = Readers(clock)
    for done in range(3):
        readers.note(QUEUE, "hourly", done, 0)
        clock.now_ms += 3600 * SECOND_MS
    ((_, reader),) = readers.kept()
    assert not reader.is_silent(clock.monotonic_ms())
    clock.now_ms += 3600 * SECOND_MS + 1
    assert names(readers) == []


def test_a_queue_has_a_bounded_number_of_readers() -> None:
    readers = Readers(ManualClock())
    for number in range(READERS_MAX):
        readers.note(QUEUE, f"r{number}", 0, 0)
    readers.note(QUEUE, "r0", 1, 0)
    readers.note(QUEUE, "new", 0, 0)
    found = names(readers)
    assert len(found) == READERS_MAX
    assert {"r0", "new"} <= set(found)
    assert "r1" not in found, "it was silent for longest"


def test_a_name_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidName):
        Readers(ManualClock()).note(QUEUE, "a\nb", 0, 0)
