"""The pulls of a consumer's lanes are written together, while other lanes have messages."""

from __future__ import annotations

from qmq.client.consuming.ordered.lane_reader import PullWrites


class Stream:
    def __init__(self) -> None:
        self.writes = 0

    def flush(self) -> None:
        self.writes += 1


def test_the_pull_of_a_single_lane_is_written_at_once() -> None:
    stream, writes = Stream(), PullWrites(lambda: 1)
    writes.add(stream.flush)
    writes.add(stream.flush)
    assert stream.writes == 2


def test_the_pulls_of_half_of_the_lanes_are_one_write_for_each_connection() -> None:
    first, second = Stream(), Stream()
    writes = PullWrites(lambda: 8)
    for stream in (first, first, second):
        writes.add(stream.flush)
    assert (first.writes, second.writes) == (0, 0)
    writes.add(first.flush)
    assert (first.writes, second.writes) == (1, 1)
    for _ in range(4):
        writes.add(second.flush)
    assert (first.writes, second.writes) == (1, 2)
