"""A disk that fills at any write of a store: messages, actions, consume log, segments and their
indexes, checkpoints.

Nothing but DiskFull is raised, and messages can be read. When there is room again all work
continues, here and after a restart.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from support import PLENTY, FillingDisk, ManualClock, intake

from qmq.errors import DiskFull
from qmq.limits import KIB
from qmq.log.actions import Begin, Join, PullAction, Pulled, SettleAction
from qmq.log.checkpoint import begin_checkpoint, close_store, end_checkpoint
from qmq.log.disk import Disk
from qmq.log.log_config import LogConfig
from qmq.log.recovery import open_store
from qmq.log.store import Store
from qmq.wire.batch import BatchView
from qmq.wire.frame_payloads import Verdict

CONFIG = LogConfig(segment_bytes=64 * KIB, action_segment_bytes=64 * KIB)
WHERE = ("s", 0, "g")
ROUNDS = 40
"""Index entries go to a file when a checkpoint finds 16 or more."""


class User:
    """What a broker does with its store: sends, deliveries, verdicts, flushes and checkpoints."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.stored = self.settled = 0

    def begin(self) -> None:
        self.store.act(Begin(*WHERE, "", 0))
        self.store.act(Join(*WHERE, "c", "i", 1000, -1))

    def send(self) -> None:
        queue = self.store.open_queue("s", 0)
        self.store.append([intake(queue, [body(self.stored)], number=self.stored)])
        self.stored += 1

    def settle(self) -> None:
        """An action stays in memory if the disk is full, and is written with the next one."""
        if self.settled < self.stored:
            at = self.settled
            self.settled += 1
            self.store.act(PullAction(*WHERE, "c", (Pulled(at, 1, 1),)))
            self.store.act(SettleAction(*WHERE, "c", 0, ((at, at, Verdict.ACK, 0),)))
        self.store.write_actions()

    def flush(self) -> None:
        plan = self.store.begin_flush()
        plan.run()
        self.store.end_flush(plan)

    def checkpoint(self) -> None:
        plan = begin_checkpoint(self.store)
        plan.run()
        end_checkpoint(self.store, plan)

    def work(self) -> None:
        """Every kind of write, also those whose turn comes after one that the disk refuses."""
        for number in range(ROUNDS):
            for act in (
                self.send,
                self.settle,
                *((self.flush, self.checkpoint) if number % 20 in (4, 19) else ()),
            ):
                with suppress(DiskFull):
                    act()
            if number % 10 == 9:
                require_messages(self.store, self.stored)


def body(number: int) -> bytes:
    return (b"%d" % number).ljust(3000, b".")


def require_messages(store: Store, count: int) -> None:
    queue = store.queue("s", 0)
    found = []
    if queue is not None:
        for _, entry in queue.index.scan(queue.index.first):
            envelope, region = store.read(queue, entry)
            found += BatchView.parse(envelope + region).bodies()
    assert list(map(bytes, found)) == [body(number) for number in range(count)]


def opened(folder: Path, disk: Disk | None = None) -> Store:
    return open_store(folder, CONFIG, ManualClock(), disk=disk)


def use(folder: Path, room: int, refusals: int, end: str) -> int:
    """Use a store whose disk has room for so many writes, and gets more in the middle of the work.
    Returns the writes before that.
    """
    disk = FillingDisk()
    store = opened(folder, disk)
    user = User(store)
    user.begin()
    disk.room, disk.refusals = room, refusals
    user.work()
    writes = room - disk.room
    disk.room = PLENTY
    if end != "killed at once":
        user.work()
    store.write_actions()
    if end == "closed":
        close_store(store)
    else:
        store.close()
    store = opened(folder)
    require_messages(store, user.stored)
    queue = store.queue("s", 0)
    assert queue is not None
    assert queue.shares["g"].settled_before() == user.settled
    store.close()
    return writes


@pytest.mark.parametrize("end", ["closed", "killed", "killed at once"])
@pytest.mark.parametrize("refusals", [1, PLENTY], ids=["for a moment", "for long"])
def test_a_disk_that_fills_at_any_write_costs_nothing_but_time(
    tmp_path: Path, refusals: int, end: str
) -> None:
    writes = use(tmp_path / "enough", PLENTY, refusals, end)
    assert writes > 2 * ROUNDS
    for room in range(writes):
        use(tmp_path / str(room), room, refusals, end)
