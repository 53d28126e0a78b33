"""A log begins only with a segment that has all of its opening snapshot: otherwise queues would
lose their numbers.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from replica_support import feed, opened, small
from support import intake
from support.retention import begin_retention, end_retention

from qmq.limits import MIB
from qmq.log.envelopes import SNAPSHOT_BYTES, is_opened_whole, walk
from qmq.log.queue import WINDOW, Producers
from qmq.log.store import Store
from qmq.model import SubjectConfig
from qmq.wire.batch import Kind

CONFIG = small()
object.__setattr__(CONFIG, "segment_bytes", 12 * MIB)


def with_large_snapshots(folder: Path) -> Store:
    """A master whose state takes several entries of a snapshot, and whose message log is about to
    begin a segment.
    """
    store = opened(folder, CONFIG)
    store.append_barrier(1)
    window = [0, 1, *(each for at in range(WINDOW) for each in (at, at, 1))]
    for number in range(7):
        queue = store.open_queue(f"{number}", 0)
        store.append([intake(queue, [b"idle"])])
        queue.producers = Producers.from_state(
            {(1 << 62) + at: window for at in range(SNAPSHOT_BYTES // 250)}
        )
    fill(store)
    return store


def fill(store: Store) -> None:
    """Fill the open segment of the message log, so that the next write begins another."""
    queue = store.open_queue("busy", 0)
    while not store.messages.must_roll(600_000):
        number = queue.next_sequence
        store.append([intake(queue, [bytes(500_000)], number=number)])


def snapshots(store: Store, base: int) -> int:
    entries = [
        each
        for each in walk(store.messages, base)
        if each.position < store.messages.segment_end(base)
    ]
    return sum([each.envelope.kind == Kind.SNAPSHOT for each in entries])


@pytest.mark.parametrize("copied", [1, 5])
def test_a_log_never_begins_with_a_part_of_a_snapshot(tmp_path: Path, copied: int) -> None:
    """The master dies while a slave has only some entries of a segment's snapshot, and the slave
    becomes the master.
    """
    master = with_large_snapshots(tmp_path / "m")
    slave = opened(tmp_path / "s", CONFIG)
    while slave.index < master.index:
        feed(master, slave, 1)
    master_busy = master.open_queue("busy", 0)
    master.append([intake(master_busy, [bytes(600_000)], number=master_busy.next_sequence)])
    base = master.messages.bases[-1]
    assert snapshots(master, base) > 6
    for _ in range(copied):
        assert feed(master, slave, 1, from_files=True)
    master.close()
    slave.commit(slave.index)
    slave.append_barrier(2)
    assert snapshots(slave, base) == copied
    for queue in slave.queues.values():
        queue.purge()
    busy = slave.open_queue("busy", 0)
    for _ in range(2):
        slave.append([intake(busy, [bytes(600_000)], number=busy.next_sequence)])
        fill(slave)
    slave.commit(slave.index)
    end_retention(begin_retention(slave, SubjectConfig))
    assert not is_opened_whole(slave.messages, base)
    assert slave.messages.start < base, "messages of this segment are the oldest that are kept"
    numbers = {queue.id.subject: queue.next_sequence for queue in slave.queues.values()}
    slave.close()
    again = opened(tmp_path / "s", CONFIG)  # there is no checkpoint: everything comes from the log
    assert {queue.id.subject: queue.next_sequence for queue in again.queues.values()} == numbers
    for queue in again.queues.values():
        queue.purge()
    end_retention(begin_retention(again, SubjectConfig))
    assert again.messages.start > base, "a later segment was opened whole"
    again.close()
