"""A master and a slave through everything that happens to their stores, in any order; the elections
are played by the machine.

What must hold all the time: the slave's applied state is the master's state at that index, the
slave's files are the master's, and a log begins only with a segment that was opened whole. Queues
have many producers, and a group has many parked messages; a store writes entries of at most 4 KiB
here, so that states are cut into entries and pieces as those of 16 MiB are.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import takewhile
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from replica_support import (
    History,
    Traffic,
    checkpoint,
    files,
    flush,
    memory,
    opened,
    read_from,
    small,
    state_of,
)
from support import ManualClock
from support.forms import examples
from support.retention import begin_retention, end_retention

from qmq import limits
from qmq.errors import QmqError
from qmq.log import envelopes, follower, retention
from qmq.log import store as stores
from qmq.log.envelopes import is_opened_whole, walk
from qmq.log.lane_state import GroupLaneState
from qmq.log.segments import Segments
from qmq.log.store import Store
from qmq.model import SubjectConfig
from qmq.wire.batch import Envelope, Kind

CONFIG = small(retention_ms=1000)
SIZES = (
    (limits, "BATCH_BYTES_MAX", 4_096),
    (envelopes, "SNAPSHOT_BYTES", 300),
    (envelopes, "STATE_BYTES_MAX", 1_000),
)


class ReplicaMachine(RuleBasedStateMachine):
    """`resetting_until`: as the core has it; a replica that is being rebuilt has no state to speak
    of before that index.
    """

    @initialize(seed=st.integers(0, 1 << 16))
    def begin(self, seed: int) -> None:
        self.sizes = ExitStack()
        for where, name, size in SIZES:
            self.sizes.enter_context(patch.object(where, name, size))
        self.folder = Path(tempfile.mkdtemp(dir=memory(), prefix="qmq-"))
        self.clock = ManualClock()
        self.random = Random(seed)
        self.epoch = 1
        self.resetting_until = 0
        self.committed = 0
        self.master = self.open("m")
        self.slave = self.open("s")
        self.master.append_barrier(1)
        self.traffic = Traffic(self.master, self.random, History())

    def open(self, name: str, until: int | None = None) -> Store:
        return opened(self.folder / name, CONFIG, clock=self.clock, until=until)

    def teardown(self) -> None:
        if not hasattr(self, "folder"):
            return
        try:
            self.files_are_equal()
        finally:
            self.master.close()
            self.slave.close()
            shutil.rmtree(self.folder)
            self.sizes.close()

    # --- the master -------------------------------------------------------------------------------

    @rule(count=st.integers(1, 6))
    def produce(self, count: int) -> None:
        for _ in range(count):
            self.traffic.produce()

    @rule(count=st.integers(1, 4))
    def consume(self, count: int) -> None:
        for _ in range(count):
            self.traffic.consume()
            self.traffic.write()

    @rule(count=st.integers(1, 30))
    def produce_as_new(self, count: int) -> None:
        self.traffic.produce_as_new(count)

    @rule(count=st.integers(1, 50))
    def park(self, count: int) -> None:
        self.traffic.park(count)

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.traffic.step()
            self.traffic.forward()

    @rule()
    def new_epoch(self) -> None:
        """The master was elected again."""
        self.epoch += 1
        self.master.append_barrier(self.epoch)

    # --- between them -----------------------------------------------------------------------------

    @rule(bytes_max=st.sampled_from([1, 200, 2_000, 1 << 20]), from_files=st.booleans())
    def feed(self, bytes_max: int, from_files: bool) -> None:
        stretch = read_from(self.master, self.slave, bytes_max, from_files=from_files)
        if stretch is None:
            self.start_over()
        elif stretch.runs:
            runs = follower.unpack_runs(memoryview(b"".join(follower.pack_runs(stretch.runs))))
            follower.take(
                self.slave, runs, follower.check_stretch(runs, self.slave.index, stretch.last)
            )
        if self.slave.index >= self.resetting_until:
            self.resetting_until = 0

    def start_over(self) -> None:
        self.slave.close()
        index, epoch = self.master.start()
        follower.start_over(
            self.folder / "s", (self.master.messages.start, self.master.actions.start)
        )
        self.slave = self.open("s")
        self.slave.begin_at(index, epoch)
        self.resetting_until = self.master.index

    @precondition(lambda self: not self.resetting_until)
    @rule(part=st.floats(0, 1))
    def commit(self, part: float) -> None:
        index = self.committed + int(
            part * max(min(self.slave.index, self.master.index) - self.committed, 0)
        )
        self.committed = index
        self.tell_committed()

    def tell_committed(self) -> None:
        for store in (self.master, self.slave):
            store.commit(min(self.committed, store.index))

    @precondition(lambda self: not self.resetting_until)
    @rule(part=st.floats(0, 1))
    def another_master_is_elected(self, part: float) -> None:
        """The new master has what is committed and perhaps more. What follows in both logs is cut,
        and another history follows.
        """
        index = self.committed + int(part * (self.master.index - self.committed))
        self.master.close()
        self.master = self.open("m", until=index)
        assert self.master.index == index
        self.traffic.store = self.master
        self.traffic.history.cut(index)
        self.new_epoch()
        if self.slave.index > index and not follower.truncate(self.slave, index):
            self.slave.close()
            self.slave = self.open("s", until=index)
        assert self.slave.index <= index
        self.tell_committed()

    @precondition(lambda self: not self.resetting_until and self.slave.index >= self.committed)
    @rule()
    def the_slave_becomes_master(self) -> None:
        index = self.slave.index
        self.slave, self.master = self.master, self.slave
        (self.folder / "m").rename(self.folder / "x")
        (self.folder / "s").rename(self.folder / "m")
        (self.folder / "x").rename(self.folder / "s")
        for store in (self.slave, self.master):
            store.close()
        self.master, self.slave = self.open("m"), self.open("s", until=index)
        assert self.master.index == index
        self.tell_committed()
        self.traffic.store = self.master
        self.traffic.history.cut(index)
        self.new_epoch()

    # --- each for itself --------------------------------------------------------------------------

    @rule()
    def crash_slave(self) -> None:
        self.slave.close()
        if self.resetting_until:
            self.begin_anew_from_nothing()
            return
        index = self.slave.index
        self.slave = self.open("s")
        assert (self.slave.index, self.slave.lost_tail) == (index, False)
        self.tell_committed()

    def begin_anew_from_nothing(self) -> None:
        """As a replica that was killed while it was rebuilt."""
        follower.start_over(self.folder / "s", (0, 0))
        self.slave = self.open("s")
        self.start_over()

    @rule(which=st.sampled_from(["master", "slave"]))
    def take_checkpoint(self, which: str) -> None:
        store = self.master if which == "master" else self.slave
        if store.committed_index >= store.applied_index and not self.resetting_until:
            checkpoint(store)

    @rule(which=st.sampled_from(["master", "slave"]))
    def flush(self, which: str) -> None:
        flush(self.master if which == "master" else self.slave)

    @rule(which=st.sampled_from(["master", "slave"]), is_finished=st.booleans())
    def retain(self, which: str, is_finished: bool) -> None:
        store = self.master if which == "master" else self.slave
        if self.resetting_until:
            return
        gone = begin_retention(store, SubjectConfig)
        if is_finished and store.committed_index >= store.applied_index:
            checkpoint(store)
            end_retention(gone)

    @rule(ms=st.integers(1, 1500))
    def wait(self, ms: int) -> None:
        self.clock.now_ms += ms

    # --- what holds -------------------------------------------------------------------------------

    @invariant()
    def the_slaves_state_is_the_masters_at_that_index(self) -> None:
        if not self.resetting_until and self.slave.applied_index >= self.slave.committed_index:
            assert state_of(self.slave) == self.traffic.history.at(self.slave.applied_index)
        assert state_of(self.master) == self.traffic.history.at(self.master.index)

    @invariant()
    def epochs_are_the_masters(self) -> None:
        """At each entry that the slave holds. A master's logs may begin at different indexes:
        retention has deleted entries of one log between those that the other one still has. A slave
        that started over never had them, and can only know the epoch before them.
        """
        first = max(self.slave.start()[0], self.master.start()[0]) + 1
        for index in [
            each.envelope.index for log in self.slave.logs for each in walk(log, log.start)
        ]:
            if index >= first:
                ours, theirs = self.slave.epoch_at(index), self.master.epoch_at(index)
                assert ours == theirs or -1 in (ours, theirs)

    @invariant()
    def logs_begin_with_whole_snapshots(self) -> None:
        for store in (self.master,) if self.resetting_until else (self.master, self.slave):
            for log in store.logs:
                assert log.start == 0 or log.end == log.start or is_opened_whole(log, log.start), (
                    f"{log.folder} begins with a part"
                )

    def files_are_equal(self) -> None:
        theirs = files(self.folder / "m")
        for name, data in files(self.folder / "s").items():
            assert name not in theirs or theirs[name].startswith(data)


TestReplicas = ReplicaMachine.TestCase
TestReplicas.settings = settings(max_examples=examples(30), stateful_step_count=40, deadline=None)


# --- a campaign -----------------------------------------------------------------------------------


def opening(log: Segments) -> list[Envelope]:
    """The entries with which the newest segment opens."""
    return [
        each.envelope
        for each in takewhile(
            lambda each: each.envelope.kind == Kind.SNAPSHOT, walk(log, log.bases[-1])
        )
    ]


class Campaign:
    """Leads a machine through every way in which states are written and read. Each run sees each
    planted bug, for any seed; the machine's random runs see most of them only now and then.
    """

    def __init__(self, seed: int) -> None:
        self.machine = ReplicaMachine()
        self.machine.begin(seed)

    def check(self) -> None:
        machine = self.machine
        machine.the_slaves_state_is_the_masters_at_that_index()
        machine.epochs_are_the_masters()
        machine.logs_begin_with_whole_snapshots()

    def run(self) -> None:
        try:
            self.fill()
            self.feed_slave()
            self.reopen()
            self.begin_behind_a_part()
            self.feed_slave()
            self.begin_slave_anew()
        finally:
            self.machine.teardown()

    def fill(self) -> None:
        """Opening snapshots have several entries, and the group's state has pieces."""
        machine = self.machine
        for _ in range(4):
            machine.produce_as_new(30)
            machine.park(50)
            machine.produce(6)
            machine.consume(4)
        self.check()

    def feed_slave(self) -> None:
        machine = self.machine
        while machine.slave.index < machine.master.index:
            machine.feed(1 << 20, from_files=True)
        machine.commit(1.0)
        self.check()

    def reopen(self) -> None:
        """Without a checkpoint, and with one."""
        machine = self.machine
        machine.crash_slave()
        machine.another_master_is_elected(1.0)
        self.feed_slave()
        for which in ("master", "slave"):
            machine.flush(which)
            machine.take_checkpoint(which)
        machine.crash_slave()
        self.check()

    def begin_behind_a_part(self) -> None:
        """A new master has the first entry of an opening snapshot only. Then retention wants to
        begin the log there.
        """
        machine, log = self.machine, self.machine.master.messages
        bases = list(log.bases)
        while log.bases == bases or len(opening(log)) < 2:
            machine.produce_as_new(5)
        opened_at = opening(log)[0].index
        machine.another_master_is_elected(
            (opened_at - machine.committed + 0.5) / (machine.master.index - machine.committed)
        )
        assert not is_opened_whole(machine.master.messages, machine.master.messages.bases[-1])
        machine.wait(1_500)
        machine.produce(1)
        self.feed_slave()
        machine.retain("master", is_finished=True)
        machine.retain("slave", is_finished=True)
        self.check()

    def begin_slave_anew(self) -> None:
        self.machine.start_over()
        self.feed_slave()
        self.machine.crash_slave()
        self.check()


# --- planted bugs ---------------------------------------------------------------------------------


def by_count(states: Iterable[Sequence[object]]) -> tuple[list[bytes], int]:
    """Two hundred states in an entry, of any size, as release 0.2 did it."""
    found = list(states)
    return [
        msgspec.msgpack.encode(found[at : at + 200]) for at in range(0, max(len(found), 1), 200)
    ], len(found)


def without_the_second(state: Sequence[object]) -> Iterator[bytes]:
    for number, item in enumerate(ITEMS(state)):
        if number != 1:
            yield item


def without_parked(state: list[Any]) -> GroupLaneState:
    return FROM_STATE([*state[:4], {}, *state[5:]])


ITEMS = envelopes.items_of
FROM_STATE = GroupLaneState.from_state
BUGS: dict[str, tuple[Any, str, Any]] = {
    "cut a snapshot by its states, not by their bytes": (stores, "to_payloads", by_count),
    "leave a piece of a long state out": (envelopes, "items_of", without_the_second),
    "read a group's state without what is parked": (
        GroupLaneState,
        "from_state",
        staticmethod(without_parked),
    ),
    "begin a log with a part of a snapshot": (
        retention,
        "_may_begin",
        lambda _, kept_from: kept_from,
    ),
}


@given(seed=st.integers(0, 1 << 16))
@settings(max_examples=examples(2), deadline=None)
def test_a_campaign_without_a_bug_ends_well(seed: int) -> None:
    Campaign(seed).run()


def has_found(seed: int) -> bool:
    try:
        Campaign(seed).run()
    except (AssertionError, msgspec.DecodeError, QmqError):
        return True
    return False


@pytest.mark.parametrize("name", BUGS)
@given(seed=st.integers(0, 1 << 16))
@settings(max_examples=examples(2), deadline=None, phases=[Phase.generate], database=None)
def test_a_planted_bug_is_found_within_five_campaigns(name: str, seed: int) -> None:
    with patch.object(*BUGS[name]):
        assert any(has_found(each) for each in range(seed, seed + 5))
