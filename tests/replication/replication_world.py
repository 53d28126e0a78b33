"""A broker group of bare cores for unit tests: messages wait until the test delivers them, disks
are lists, epochs come from a counter.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from qmq_replication.core import Replica
from qmq_replication.history import EpochRun, History
from qmq_replication.membership import ReplicaMembership
from qmq_replication.ready import (
    Ack,
    Campaign,
    DurableState,
    LogChunk,
    MembershipChange,
    Message,
    Mismatch,
    Ready,
    ReplicaState,
    Request,
    TakeOver,
    Timing,
)

Letter = tuple[str, str, Any]
"""From, to, message."""


class ListLog:
    """A log in memory: epochs of the entries after `start_index`. A place is an index."""

    def __init__(self, epochs: tuple[int, ...] = (), read_max: int = 100) -> None:
        self.epochs = list(epochs)
        self.start_index = 0
        self.start_epoch = 0
        self.read_max = read_max

    @property
    def last(self) -> int:
        """Index of the last entry."""
        return self.start_index + len(self.epochs)

    def place(self) -> int:
        """The end of the log."""
        return self.last

    def read(self, place: int, after: int, bytes_max: int) -> LogChunk | None:
        """Entries after `after`."""
        assert place == after
        if after < self.start_index:
            return None
        found = tuple(self.epochs[after - self.start_index :][: self.read_max])
        return LogChunk(after + len(found), found, after + len(found), len(found))

    def start(self) -> tuple[int, int, int]:
        """The position after everything in the log."""
        return self.start_epoch, self.start_index, self.start_index

    def forget_to(self, index: int) -> None:
        """Retention."""
        self.start_epoch = self.epochs[index - self.start_index - 1]
        del self.epochs[: index - self.start_index]
        self.start_index = index

    def history(self) -> History:
        """Its shape."""
        runs: list[EpochRun] = []
        for index, epoch in enumerate(self.epochs, self.start_index + 1):
            if not runs or runs[-1].epoch != epoch:
                runs.append(EpochRun(epoch, index))
        return History(runs, self.last, self.start_index, self.start_epoch)


class Group:
    """Replicas by name. `queue` holds what is on its way, `cut` the (from, to) pairs that let
    nothing through.
    """

    def __init__(
        self,
        names: str = "abc",
        *,
        logs: dict[str, tuple[int, ...]] | None = None,
        doubtful: str = "",
        epoch: int = 0,
        timing: Timing | None = None,
        read_max: int = 100,
        voters: str = "",
        asking: str = "",
    ) -> None:
        self.asking = asking
        """Replicas that ask for a Reset while their logs are empty."""
        self.membership = ReplicaMembership(1, tuple(voters or names))
        self.timing = timing or Timing()
        self.now_ms = 0
        self.epoch = max([epoch, *(max(log, default=0) for log in (logs or {}).values())])
        self.queue: list[Letter] = []
        self.cut: set[tuple[str, str]] = set()
        self.requests: list[tuple[str, Request]] = []
        self.flushes = dict.fromkeys(names, True)
        self.log = {name: ListLog((logs or {}).get(name, ()), read_max) for name in names}
        self.disk = {name: DurableState(self.epoch, name not in doubtful) for name in names}
        self.core: dict[str, Replica] = {}
        for name in names:
            self.start(name)

    # --- one replica ------------------------------------------------------------------------------

    def start(self, name: str) -> None:
        """Boot from the disk."""
        log = self.log[name]
        state = ReplicaState(
            name,
            self.membership,
            self.disk[name],
            log.history(),
            log,
            timing=self.timing,
            now_ms=self.now_ms,
            commit=log.start_index,
        )
        self.core[name] = Replica(state, random=Random(1), asks_reset=name in self.asking)

    def step(self, sender: str, to: str, message: Message) -> list[Message]:
        """Give one message by hand; what `to` answers to `sender`, which is not queued."""
        self.core[to].step(self.now_ms, sender, message)
        before = len(self.queue)
        self.carry_out(to)
        said = self.queue[before:]
        self.queue = self.queue[:before] + [each for each in said if each[1] != sender]
        return [message for _, receiver, message in said if receiver == sender]

    def carry_out(self, name: str) -> None:
        """Do what the core wants. Requests to the coordination store wait in `requests`."""
        core = self.core[name]
        while core.state.ready:
            ready = core.take()
            self._store(name, ready)
            place = self.log[name].place()
            for to, message in ready.messages:
                self.queue.append(
                    (
                        name,
                        to,
                        message._replace(place=place)
                        if isinstance(message, Ack | Mismatch)
                        else message,
                    )
                )
            self.requests += [(name, request) for request in ready.requests]
            if ready.lead is not None and core.leader is not None:
                self.append(name, 1)

    def _store(self, name: str, ready: Ready) -> None:
        log = self.log[name]
        if ready.save is not None:
            self.disk[name] = ready.save
        if ready.reset is not None:
            log.epochs, log.start_index, log.start_epoch = (
                [],
                ready.reset.start_index,
                ready.reset.start_epoch,
            )
        if ready.truncate is not None:
            del log.epochs[ready.truncate - log.start_index :]
        for append in ready.append:
            assert append.prev_index == log.last
            log.epochs.extend(append.payload)
        if ready.append and self.flushes[name]:
            self.core[name].stored(log.last)

    def append(self, name: str, count: int) -> None:
        """The master writes entries."""
        leader = self.core[name].leader
        assert leader is not None
        self.log[name].epochs.extend([leader.epoch] * count)
        leader.appended(self.log[name].last)
        if self.flushes[name]:
            self.core[name].stored(self.log[name].last)
        self.carry_out(name)

    # --- everybody --------------------------------------------------------------------------------

    def deliver(self, wanted: Callable[[Letter], bool] = lambda letter: True) -> int:
        """Deliver what is on its way, in order, once; returns the number. Messages that the test
        excludes wait.
        """
        now, self.queue = (
            [each for each in self.queue if wanted(each)],
            [each for each in self.queue if not wanted(each)],
        )
        for sender, to, message in now:
            if (sender, to) not in self.cut and to in self.core:
                self.core[to].step(self.now_ms, sender, message)
                self.carry_out(to)
        return len(now)

    def settle(self) -> None:
        """Let everything arrive and be answered, by the coordination store too, until it is
        quiet.
        """
        while self.queue or self.requests:
            self.deliver()
            for name, request in self._taken_requests():
                self.answer(name, request)

    def _taken_requests(self) -> list[tuple[str, Request]]:
        taken, self.requests = self.requests, []
        return taken

    def answer(self, name: str, request: Request) -> None:
        """The coordination store's answer."""
        core = self.core[name]
        if isinstance(request, Campaign):
            self.epoch += 1
            core.campaign_won(self.now_ms, self.epoch, self.membership)
        elif isinstance(request, MembershipChange) and core.leader is not None:
            self.membership = request.after
            core.leader.changed(request.after)
        self.carry_out(name)

    def campaign(self, name: str) -> None:
        """Have a replica win an epoch; the promises are asked for, not given."""
        core = self.core[name]
        other = next((each for each in core.state.membership.replicas if each != name), "")
        core.step(self.now_ms, other, TakeOver(core.state.promised))
        self.carry_out(name)
        for each, request in self._taken_requests():
            self.answer(each, request)

    def elect(self, name: str) -> None:
        """Have a replica become master, and everybody that it reaches follow."""
        self.campaign(name)
        self.settle()
        self.beat()

    def pass_time(self, ms: int, *names: str) -> None:
        """Advance the clock; the replicas named (or all) notice."""
        self.now_ms += ms
        for name in names or self.core:
            self.core[name].tick(self.now_ms)
            self.carry_out(name)

    def beat(self) -> None:
        """Time for one sign of life, and its answers."""
        self.pass_time(
            self.timing.heartbeat_ms,
            *(name for name, core in self.core.items() if core.leader is not None),
        )
        self.settle()

    def isolate(self, name: str) -> None:
        """Cut a replica off from all others."""
        self.cut |= {(name, other) for other in self.core} | {(other, name) for other in self.core}

    def heal(self) -> None:
        """Restore all links."""
        self.cut.clear()

    @property
    def master(self) -> str:
        """The master of the highest epoch."""
        leaders = [name for name, core in self.core.items() if core.leader is not None]
        return max(leaders, key=lambda name: self.core[name].state.promised, default="")
