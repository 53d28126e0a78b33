"""A queue of a deleted subject is empty and without groups, on every replica and after any
replay.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from replica_support import checkpoint, queue_of, small_store, used_store
from support import intake
from support.retention import begin_retention

from qmq.log.actions import Join, LaneBegin, PullAction, Pulled
from qmq.log.checkpoint import close_store, discard
from qmq.log.queue import Queue
from qmq.log.retention import drop
from qmq.log.store import Store


def used(folder: Path, partition: int = 0) -> Store:
    """A store whose queue has messages, a producer, a group that holds something and one with
    lanes.
    """
    begun = (
        Join("s", partition, "g", "c", "i", 1000, -1),
        PullAction("s", partition, "g", "c", (Pulled(0, 4, 1),)),
        LaneBegin("s", partition, "o", "", 0, 16, 0, 0),
    )
    return used_store(folder, partition, begun)


def is_empty(queue: Queue) -> bool:
    is_unread = queue.start_sequence == queue.visible_sequence == queue.next_sequence == 16
    return (
        is_unread
        and not queue.shares
        and not queue.lanes
        and queue.sealed is None
        and queue.index.first == queue.index.count
    )


def test_a_dropped_queue_is_empty_and_numbers_continue(tmp_path: Path) -> None:
    store = used(tmp_path)
    queue = queue_of(store)
    drop(store, queue)
    assert is_empty(queue)
    (new,) = store.append([intake(queue, [b"new"], number=0)])
    assert new.base_sequence == 16, (
        "the batch's number was used before the drop, and is not a duplicate"
    )


@pytest.mark.parametrize("end", ["kill", "checkpoint", "checkpoint is lost", "behind a checkpoint"])
def test_a_drop_holds_whatever_the_store_is_opened_from(tmp_path: Path, end: str) -> None:
    store = used(tmp_path)
    if end == "behind a checkpoint":
        checkpoint(store)
    drop(store, queue_of(store))
    store.write_actions()
    if end.startswith("checkpoint"):
        close_store(store)
    else:
        store.close()
    if end == "checkpoint is lost":
        discard(tmp_path / "checkpoint")
    assert is_empty(queue_of(small_store(tmp_path)))


def test_a_drop_that_a_crash_cut_in_two_can_be_done_again(tmp_path: Path) -> None:
    store = used(tmp_path)
    drop(store, queue_of(store))
    store.close()  # the action was not written
    store = small_store(tmp_path)
    queue = queue_of(store)
    assert queue.start_sequence == queue.next_sequence == 16
    assert queue.shares
    drop(store, queue)
    store.write_actions()
    store.close()
    queue = queue_of(small_store(tmp_path))
    assert (queue.start_sequence, queue.next_sequence, queue.shares, queue.lanes) == (
        17,
        17,
        {},
        {},
    )


def test_a_drop_opens_a_sealed_partition(tmp_path: Path) -> None:
    store = used(tmp_path, partition=1)
    queue = queue_of(store, 1)
    store.append_command(queue, "change", 2)
    drop(store, queue)
    assert queue.sealed is None
    close_store(store)
    discard(tmp_path / "checkpoint")
    assert queue_of(small_store(tmp_path), 1).sealed is None


def test_groups_stay_forgotten_when_retention_took_the_drop_from_the_message_log(
    tmp_path: Path,
) -> None:
    store = used(tmp_path)
    drop(store, queue_of(store))
    store.write_actions()
    other = store.open_queue("other", 0)
    for number in range(100):
        store.append([intake(other, [b"x" * 1000] * 3, number=number)])
    begin_retention(store, lambda _: None)
    for path in store.messages.drop_before(store.messages.bases[-1]):
        path.unlink()
    close_store(store)
    discard(tmp_path / "checkpoint")
    queue = queue_of(small_store(tmp_path))
    assert not queue.shares
    assert not queue.lanes
    assert queue.start_sequence == queue.next_sequence == 16
