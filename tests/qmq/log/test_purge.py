"""A purged queue has no messages on every replica and after any replay; its producers, groups and
seal are unchanged.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from replica_support import checkpoint, queue_of, small_store, used_store
from support import intake
from support.retention import begin_retention

from qmq.log.checkpoint import close_store, discard
from qmq.log.queue import Queue
from qmq.log.retention import drop, purge
from qmq.log.store import Store


def used(folder: Path, partition: int = 0) -> Store:
    return used_store(folder, partition)


def is_purged(queue: Queue) -> bool:
    return (
        queue.start_sequence,
        queue.visible_sequence,
        queue.next_sequence,
        list(queue.shares),
    ) == (16, 16, 16, ["g"])


def test_a_purged_queue_knows_its_producers_still(tmp_path: Path) -> None:
    store = used(tmp_path)
    queue = queue_of(store)
    purge(store, queue)
    assert is_purged(queue)
    (again,) = store.append([intake(queue, [b"old"] * 3, number=4)])
    assert again.base_sequence == 12, "sent again, because the answer was lost before the purge"
    (new,) = store.append([intake(queue, [b"new"], number=5)])
    assert (new.base_sequence, queue.start_sequence) == (16, 16)


@pytest.mark.parametrize("end", ["kill", "checkpoint", "checkpoint is lost", "behind a checkpoint"])
def test_a_purge_holds_whatever_the_store_is_opened_from(tmp_path: Path, end: str) -> None:
    store = used(tmp_path)
    if end == "behind a checkpoint":
        checkpoint(store)
    purge(store, queue_of(store))
    store.append([intake(queue_of(store), [b"new"], number=5)])
    store.write_actions()
    if end.startswith("checkpoint"):
        close_store(store)
    else:
        store.close()
    if end == "checkpoint is lost":
        discard(tmp_path / "checkpoint")
    queue = queue_of(small_store(tmp_path))
    assert (queue.start_sequence, queue.next_sequence, list(queue.shares)) == (16, 17, ["g"])


def test_a_purged_partition_stays_sealed(tmp_path: Path) -> None:
    store = used(tmp_path, partition=1)
    queue = queue_of(store, 1)
    store.append_command(queue, "change", 2)
    purge(store, queue)
    sealed = queue.sealed
    assert sealed is not None
    close_store(store)
    discard(tmp_path / "checkpoint")
    queue = queue_of(small_store(tmp_path), 1)
    assert (queue.sealed, queue.start_sequence) == (sealed, 17)


def test_segments_that_hold_nothing_but_purged_messages_are_deleted(tmp_path: Path) -> None:
    store = small_store(tmp_path)
    queue = store.open_queue("s", 0)
    for number in range(100):
        store.append([intake(queue, [b"x" * 1000] * 3, number=number)])
    assert len(store.messages.bases) > 2
    purge(store, queue)
    begin_retention(store, lambda _: None)
    assert len(store.messages.bases) == 1


def test_a_subject_that_is_deleted_after_a_purge_is_dropped(tmp_path: Path) -> None:
    store = used(tmp_path)
    purge(store, queue_of(store))
    drop(store, queue_of(store))
    store.write_actions()
    store.close()
    queue = queue_of(small_store(tmp_path))
    assert (queue.start_sequence, queue.next_sequence, queue.shares) == (17, 17, {})
