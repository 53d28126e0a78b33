"""The newest writes in memory: a slave is served from here only if nothing is missing."""

from __future__ import annotations

from random import Random

from qmq.log.recent_writes import Tail, Write, WriteRun


def write(first: int, last: int, position: int, size: int, log: int = 0) -> Write:
    return Write(first, last, WriteRun(log, 0, position, size, (bytes(size),)))


def test_what_was_written_is_read_from_any_writes_begin_on() -> None:
    tail = Tail(1000)
    writes = [write(1, 1, 0, 10), write(2, 4, 0, 20, log=1), write(5, 5, 10, 30)]
    for each in writes:
        tail.add(each)
    found = tail.read((0, 0), 0, 1000)
    assert found is not None
    assert found == (5, tuple(each.run for each in writes), (40, 20), 60)
    found = tail.read((10, 0), 1, 1000)
    assert found is not None
    assert (found.last, found.place) == (5, (40, 20))


def test_an_index_within_a_write_or_not_here_is_not_served() -> None:
    tail = Tail(1000)
    tail.add(write(2, 4, 0, 20))
    assert tail.read((0, 0), 0, 1000) is None
    assert tail.read((0, 0), 2, 1000) is None
    assert tail.read((20, 0), 4, 1000) is None


def test_a_reader_that_has_a_part_of_the_message_log_is_not_served_what_lies_before() -> None:
    tail = Tail(1000)
    for each in (
        write(1, 2, 0, 10, log=1),
        write(3, 3, 0, 20),
        write(4, 4, 10, 5, log=1),
        write(5, 5, 20, 30),
    ):
        tail.add(each)
    found = tail.read((20, 0), 0, 1000)
    assert found is not None
    assert (found.last, found.place) == (2, (20, 10))
    assert tail.read((20, 10), 2, 1000) is None
    assert tail.read((20, 10), 3, 1000) == (
        5,
        (write(4, 4, 10, 5, log=1).run, write(5, 5, 20, 30).run),
        (50, 15),
        35,
    )


def test_one_write_of_any_size_is_given_but_no_second_one_over_the_limit() -> None:
    tail = Tail(1000)
    for number in range(3):
        tail.add(write(number + 1, number + 1, 100 * number, 100))
    assert tail.read((0, 0), 0, 1)[0] == 1  # type: ignore[index]
    assert tail.read((0, 0), 0, 200)[0] == 2  # type: ignore[index]
    assert tail.read((0, 0), 0, 299)[0] == 2  # type: ignore[index]


def test_no_more_bytes_are_kept_than_allowed_and_the_newest_stay() -> None:
    random = Random(1)
    tail, kept, position = Tail(500), [], 0
    for number in range(1, 400):
        size = random.choice((10, 50, 200, 600))
        tail.add(write(number, number, position, size))
        kept.append((number, position, size))
        position += size
        while sum(each[2] for each in kept) > 500:
            kept.pop(0)
        first = kept[0][0] if kept else number + 1
        assert tail.read((0, 0), first - 2, 1 << 20) is None
        found = tail.read((kept[0][1], 0), first - 1, 1 << 20) if kept else None
        assert (found is None) == (not kept)
        if found is not None:
            assert (found.last, found.place) == (number, (position, 0))
        if random.random() < 0.02:
            tail.clear()
            kept.clear()
            assert tail.read((0, 0), number - 1, 100) is None


def test_a_store_alone_keeps_nothing() -> None:
    tail = Tail(0)
    tail.add(write(1, 1, 0, 10))
    assert tail.read((0, 0), 0, 100) is None
