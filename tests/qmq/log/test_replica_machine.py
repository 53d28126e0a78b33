"""A master and a slave through everything that happens to their stores, in any order; the elections are played by the machine.

What must hold all the time: the slave's applied state is the master's state at that index, and the slave's files are the master's.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from random import Random

from forms import examples
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from replica_support import History, Traffic, checkpoint, files, flush, memory, opened, read_from, small, state_of
from support import ManualClock

from qmq.log import follower
from qmq.log.retention import begin_retention, end_retention
from qmq.log.store import Store
from qmq.model import SubjectConfig

CONFIG = small(retention_ms=1000)


class ReplicaMachine(RuleBasedStateMachine):
    """`resetting_until`: as the core has it; a replica that is being rebuilt has no state to speak of before that index."""

    @initialize(seed=st.integers(0, 1 << 16))
    def begin(self, seed: int) -> None:
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

    # --- the master ------------------------------------------------------------------------------------------------------

    @rule(count=st.integers(1, 6))
    def produce(self, count: int) -> None:
        for _ in range(count):
            self.traffic.produce()

    @rule(count=st.integers(1, 4))
    def consume(self, count: int) -> None:
        for _ in range(count):
            self.traffic.consume()
            self.traffic.write()

    @rule()
    def new_epoch(self) -> None:
        """The master was elected again."""
        self.epoch += 1
        self.master.append_barrier(self.epoch)

    # --- between them ----------------------------------------------------------------------------------------------------

    @rule(bytes_max=st.sampled_from([1, 200, 2_000, 1 << 20]), from_files=st.booleans())
    def feed(self, bytes_max: int, from_files: bool) -> None:
        stretch = read_from(self.master, self.slave, bytes_max, from_files=from_files)
        if stretch is None:
            self.start_over()
        elif stretch.runs:
            runs = follower.unpack_runs(memoryview(b"".join(follower.pack_runs(stretch.runs))))
            follower.take(self.slave, runs, follower.check_stretch(runs, self.slave.index, stretch.last))
        if self.slave.index >= self.resetting_until:
            self.resetting_until = 0

    def start_over(self) -> None:
        self.slave.close()
        index, epoch = self.master.start()
        follower.start_over(self.folder / "s", (self.master.messages.start, self.master.actions.start))
        self.slave = self.open("s")
        self.slave.begin_at(index, epoch)
        self.resetting_until = self.master.index

    @precondition(lambda self: not self.resetting_until)
    @rule(part=st.floats(0, 1))
    def commit(self, part: float) -> None:
        index = self.committed + int(part * max(min(self.slave.index, self.master.index) - self.committed, 0))
        self.committed = index
        self.tell_committed()

    def tell_committed(self) -> None:
        for store in (self.master, self.slave):
            store.commit(min(self.committed, store.index))

    @precondition(lambda self: not self.resetting_until)
    @rule(part=st.floats(0, 1))
    def another_master_is_elected(self, part: float) -> None:
        """The new master has what is committed and perhaps more. What follows in both logs is cut, and another history follows."""
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

    # --- each for itself -------------------------------------------------------------------------------------------------

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

    # --- what holds ------------------------------------------------------------------------------------------------------

    @invariant()
    def the_slaves_state_is_the_masters_at_that_index(self) -> None:
        if not self.resetting_until and self.slave.applied_index >= self.slave.committed_index:
            assert state_of(self.slave) == self.traffic.history.at(self.slave.applied_index)
        assert state_of(self.master) == self.traffic.history.at(self.master.index)

    @invariant()
    def epochs_are_the_masters(self) -> None:
        first = max(self.slave.start()[0], self.master.start()[0]) + 1
        for index in range(first, self.slave.index + 1):
            ours, theirs = self.slave.epoch_at(index), self.master.epoch_at(index)
            assert ours == theirs or -1 in (ours, theirs)

    def files_are_equal(self) -> None:
        theirs = files(self.folder / "m")
        for name, data in files(self.folder / "s").items():
            assert name not in theirs or theirs[name].startswith(data)


TestReplicas = ReplicaMachine.TestCase
TestReplicas.settings = settings(max_examples=examples(30), stateful_step_count=40, deadline=None)
