"""A log's reader reports where an index does not rise: such data is not the log of a group."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from qmq.errors import CorruptBatch
from qmq.log.envelopes import walk_rising
from qmq.wire.batch import Kind, wrap


def walked(indexes: Sequence[int], after: int = 0) -> list[int]:
    """The indexes that are read from a log with these."""
    entries = [
        wrap(Kind.ACTIONS, b"x", count=1, epoch=1, index=each, time_ms=1, flushed=0)
        for each in indexes
    ]
    data = b"".join(part for entry in entries for part in entry)
    return [
        each.envelope.index
        for each in walk_rising(lambda at, size: data[at : at + size], 0, len(data), after)
    ]


def test_entries_with_rising_indexes_are_read() -> None:
    assert walked([3, 4, 9], after=2) == [3, 4, 9]


@pytest.mark.parametrize("indexes", [[3, 3], [3, 4, 2], [2]])
def test_an_index_that_does_not_rise_is_refused(indexes: list[int]) -> None:
    with pytest.raises(CorruptBatch, match="and one before it has"):
        walked(indexes, after=2)
