"""How often messages failed before they were sent again: copies of long retries carry the number (`qmq/targeted.py`)."""

from __future__ import annotations

from qmq.batch import BatchView
from qmq.batch_columns import UNREADABLE
from qmq.broker.pull_results import BatchReader
from qmq.broker.redelivery import Failures
from qmq.errors import LogDamaged
from qmq.log.consume_log import IndexEntry
from qmq.log.queue import Queue
from qmq.log.store import Store
from qmq.targeted import LOOK_INSIDE, failures


def failures_in(store: Store, queue: Queue, reader: BatchReader) -> Failures:
    """Returns a function that returns the failures for a range of the queue. Unreadable messages count as never failed: a damaged copy must
    not stop the caller.
    """

    def failures_of(sequence: int, count: int) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        end = sequence + count
        while sequence < end:
            number = reader.number_of(sequence)
            entry = reader.entry(number) if number < queue.index.count else None
            last = min(entry.next_sequence, end) if entry is not None else end
            own = _failures_inside(store, queue, entry) if entry is not None and entry.tag_bloom == LOOK_INSIDE else []
            if own and entry is not None and entry.base_sequence <= sequence:
                found += [(1, each) for each in own[sequence - entry.base_sequence : last - entry.base_sequence]]
            else:
                found.append((last - sequence, 0))
            sequence = last
        return found

    return failures_of


def _failures_inside(store: Store, queue: Queue, entry: IndexEntry) -> list[int]:
    """The failures of each message of a batch that may be directed; empty if it is not."""
    try:
        view = BatchView.parse(b"".join(store.read(queue, entry)))
        return [failures(each) for each in view.headers() or [{}] * view.count] if view.header.is_directed else []
    except (LogDamaged, *UNREADABLE):
        return []
