"""The memory of the consume logs is added up when it may have reached the limit, and then
exactly.
"""

from __future__ import annotations

from collections.abc import Iterator, ValuesView
from pathlib import Path

import pytest
from support import ManualClock, intake

from qmq.broker.reading.fetches import IndexMemory
from qmq.log.checkpoint import begin_checkpoint, end_checkpoint
from qmq.log.consume_log import ENTRY_BYTES
from qmq.log.log_config import LogConfig
from qmq.log.queue import Queue
from qmq.log.recovery import open_store
from qmq.log.store import Store

LIMIT = 10 * ENTRY_BYTES


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    found = open_store(tmp_path, LogConfig(), ManualClock())
    yield found
    found.begin_flush().run()
    found.close()


class CountingQueues(dict[tuple[bytes, int], Queue]):
    """Counts how often all queues are walked through."""

    walks = 0

    def values(self) -> ValuesView[Queue]:  # type: ignore[override]
        self.walks += 1
        return super().values()


def append(store: Store, numbers: range, *, queues: int = 3) -> None:
    for number in numbers:
        store.append([intake(store.open_queue(f"s{number % queues}", 0), [b"x"], number=number)])


def test_the_limit_is_exceeded_by_the_entry_that_exceeds_it_over_all_queues(store: Store) -> None:
    memory = IndexMemory()
    for number in range(20):
        append(store, range(number, number + 1))
        assert memory.exceeds(store, LIMIT) is (number >= 10)


def test_large_batches_do_not_make_it_add_up_more_often(store: Store) -> None:
    queues = store.queues = CountingQueues()
    memory = IndexMemory()
    for number in range(10):
        store.append([intake(store.open_queue("s", 0), [bytes(100_000)], number=number)])
        assert not memory.exceeds(store, LIMIT)
    assert queues.walks == 1, (
        "at the first question; ten entries are not above the limit, however large their "
        "batches are"
    )
    append(store, range(10, 11), queues=1)
    assert memory.exceeds(store, LIMIT)
    assert queues.walks == 2


def test_it_is_added_up_again_after_entries_were_written_to_files(store: Store) -> None:
    memory = IndexMemory()
    append(store, range(20), queues=1)
    assert memory.exceeds(store, LIMIT)
    plan = begin_checkpoint(store)
    plan.run()
    end_checkpoint(store, plan)
    assert not memory.exceeds(store, LIMIT)
    append(store, range(20, 31), queues=1)
    assert memory.exceeds(store, LIMIT)


def test_another_store_is_added_up_from_the_beginning(store: Store, tmp_path: Path) -> None:
    memory = IndexMemory()
    assert not memory.exceeds(store, LIMIT)
    other = open_store(tmp_path / "other", LogConfig(), ManualClock())
    append(other, range(11))
    assert memory.exceeds(other, LIMIT)
    other.begin_flush().run()
    other.close()
