"""Checks what simulated and real groups do against Replication.tla.

What the replicas of a simulated group do, as a trace for TLC (replica_tracer.py).

A trace ends where its limit is reached, or before something that the specification leaves out: a
new disk, a LogReset, a power cut that takes back a cut of the log, a death between two writes that
are one step there.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from qmq_replication.ready import Ack, Message, Ready, Request, Timing
from sim.nemesis import Plan, draw
from sim.node import Node
from sim.replica_tracer import Line, ReplicaTracer, Trace
from sim.run import SPARES, Checks, Simulation
from sim.world import World

from specs.model_checker import TraceVerdict, check_trace

LEFT_OUT: Final = ("wipe", "retention", "outrun")
"""Faults that would end a trace immediately."""
LONGEST_MS: Final = 600_000
LINES_MAX: Final = 1_000
SPELL_MS: Final = 5_000
"""In this time a group without faults elects a master, and its slaves get in step."""


class TracedSimulation(Simulation):
    """A simulation that traces what the coordination store does."""

    def __init__(self, seed: int, trace: Trace, plan: Plan, node_class: type[Node]) -> None:
        self.trace = trace
        super().__init__(seed, node_class=node_class, plan=plan)

    def _changes(self, key: str, before: bytes, after: bytes) -> None:
        self.trace.put(key, after)
        super()._changes(key, before, after)


class NoChecks(Checks):
    """Lets a run with a planted bug go on, as only the specification judges its trace."""

    def wrote(self, *_: Any) -> None:
        pass

    def became_master(self, *_: Any) -> None:
        pass

    def commits(self, *_: Any) -> None:
        pass

    def changes(self, *_: Any) -> None:
        pass

    def acknowledges(self, *_: Any) -> None:
        pass

    def acknowledges_flushed(self, *_: Any) -> None:
        pass


class UncheckedSimulation(TracedSimulation):
    checks_class = NoChecks


class TracedNode(Node):
    """A replica that traces what it does. It is mixed into the product's node, or a planted
    bug's.
    """

    def __init__(self, simulation: TracedSimulation, name: str) -> None:
        super().__init__(simulation, name)
        self.tracer = ReplicaTracer(simulation.trace, name)

    # --- life -------------------------------------------------------------------------------------

    def start(self) -> None:
        """See Node."""
        if self.disk.folder != self._folder:
            self.tracer.ends_trace("new disk")
        self.tracer.starts()
        super().start()

    def kill(self) -> None:
        """See Node."""
        if self.is_up:
            if (
                self.disk.state.is_whole != self.tracer.is_whole
                or self.disk.state.promised != self.tracer.promised
            ):
                self.tracer.ends_trace("death between two writes")
            self.tracer.killed()
        super().kill()

    def cut_power(self) -> None:
        """See Node."""
        lost_before, self._lost_power = self._lost_power, False
        before = list(self.disk.image.entries)
        super().cut_power()
        kept = len(self.disk.image.entries)
        if self._lost_power:
            if self.disk.image.entries != before[:kept]:
                self.tracer.ends_trace("power cut that takes back a cut")
            self.tracer.lost_power(kept)
        self._lost_power |= lost_before

    # --- what comes in ----------------------------------------------------------------------------

    def receive(self, sender: str, message: Message) -> None:
        """See Node."""
        if self.core is not None and not self.is_stuck:
            self.tracer.hears(self.core, sender, message)
        super().receive(sender, message)
        if not self.is_stuck:  # an answer that waits for room on the disk comes later
            self.tracer.heard()

    # --- carrying out -----------------------------------------------------------------------------

    def _carry_out(self) -> None:
        if self.core is not None:
            self.tracer.begins_to_carry_out(self.core)
        super()._carry_out()
        # what waits for room on the disk is not shown before it is saved
        if self.core is not None and self._unsaved is None:
            self.tracer.shows(self.core)

    def _failpoint(self, weight: int = 1) -> None:
        self.tracer.saved(self.disk.state.promised)
        super()._failpoint(weight)

    def _go_on(self, ready: Ready) -> None:
        self.tracer.saved(self.disk.state.promised)
        super()._go_on(ready)

    def _change_log(self, ready: Ready) -> None:
        if ready.reset is not None:
            self.tracer.ends_trace("LogReset")
        super()._change_log(ready)
        if self.core is not None:
            self.tracer.changed_log(self.core, ready)

    def _send(self, ready: Ready) -> None:
        if self.core is not None:
            for to, message in ready.messages:
                self.tracer.sends(self.core, to, message)
        super()._send(ready)

    def _synced(self, boot: int, count: int) -> None:
        super()._synced(boot, count)
        core = self.core
        if core is not None and self.boot == boot:
            for to, message in core.state.ready.messages:
                # it is sent with the next messages, which may be of a later epoch
                if isinstance(message, Ack):
                    self.tracer.sends(core, to, message)

    def _committed(self, index: int) -> None:
        if self.core is not None and self.core.leader is not None:
            self.tracer.commits(index)
        super()._committed(index)

    def _append_own(self, value: int) -> None:
        if self.core is not None and self.core.leader is not None:
            self.tracer.writes(self.core.leader, self.disk.image.last + 1)
        super()._append_own(value)

    def _ask(self, request: Request) -> None:
        self.tracer.asks(request)
        super()._ask(request)


def trace(seed: int, lines_max: int, bug: type[Node] | None = None) -> Trace:
    """The trace of one seed, of the product or of a planted bug."""
    drawn = draw(World(seed).random, 10)
    faults = tuple(each for each in drawn.faults if each not in LEFT_OUT) or ("kill", "usurp")
    plan = replace(drawn, is_sync=False, faults=faults)
    names = tuple("abcde"[: plan.voters])
    found = Trace("g", (*names, *SPARES), names, lines_max)
    if bug is None:
        simulation = TracedSimulation(seed, found, plan, TracedNode)
    else:
        simulation = UncheckedSimulation(
            seed, found, plan, type("TracedBug", (TracedNode, bug), {})
        )
    simulation.world.after(1_000, simulation.propose_often)
    simulation.nemesis.begin()
    try:
        while not found.end and simulation.world.now < LONGEST_MS:
            simulation.world.run(simulation.world.now + 1_000)
    except Exception as cause:
        if bug is None:
            raise
        found.end = f"the bug ended the run: {cause}"
    return found


def trace_of_a_late_promise() -> tuple[Trace, list[Line], list[Line]]:
    """The trace of three replicas. One of them is cut off while a new master is elected, and its
    disk is full when it hears that master: its promise waits until there is room, and everything
    after it, too. Also its own lines while the disk is full, and those after.
    """
    names = ("a", "b", "c")
    found = Trace("g", (*names, *SPARES), names, LINES_MAX)
    plan = Plan(is_sync=False, timing=Timing(heartbeat_ms=300))
    simulation = TracedSimulation(1, found, plan, TracedNode)
    world, voters = simulation.world, [simulation.nodes[name] for name in names]
    world.run(SPELL_MS)
    master = next(node for node in voters if node.core is not None and node.core.leader is not None)
    slave = next(node for node in voters if node is not master)
    simulation.network.isolate(slave.name)
    master.kill()
    master.start()
    world.run(world.now + SPELL_MS)
    simulation.network.heal()
    slave.disk.fill(takes_state=False)
    filled = len(found.lines)
    world.run(world.now + SPELL_MS)
    slave.disk.empty()
    emptied = len(found.lines)
    world.run(world.now + SPELL_MS)
    assert not found.end, f"the trace ends early: {found.end}"
    full, after = (
        [line for line in part if line["r"] == slave.name]
        for part in (found.lines[filled:emptied], found.lines[emptied:])
    )
    return found, full, after


UNLIMITED: Final = 1_000_000
OUTSIDE: Final = {
    "acknowledge before the flush": "flush=sync",
    "count a flush that began before a cut": "flush=sync",
    "count written as stored": "flush=sync",
    "cut entries, but still count them as stored, and cut committed ones": "flush=sync",
    "count a new disk at once": "new disks",
    "forget with a new disk what was promised": "new disks",
    "leave a replica in step behind when its next entry is gone": "LogReset",
    "start over at a Reset that came twice": "LogReset",
    "say nothing to a silent peer whose next entry is gone": "LogReset",
    "answer everything that waits at any commit": "answers to clients",
    "acknowledge when the master has it": "answers to clients",
    "accept a hello without its proof": "proofs of links",
    "remove a voter though too few of those that stay are there": "who answers",
    "promise although the disk has no room for the promise": "full disks",
}
"""Planted bugs of the simulator in what the specification leaves out."""
REFUSED_AT: Final = {
    "commit entries of an older epoch by counting": 1,
    "commit without the others": 1,
    "count half as a majority": 1,
    "count learners": 2,
    "commit without a majority while the membership changes": 2,
    "count what was sent as stored": 1,
    "count acknowledgements of another epoch": 3,
    "count acknowledgements from before a peer lost its place": 3,
    "commit all that a slave has": 1,
    "let the commit position go back": 7,
    "commit before the log is known to match": 1,
    "take entries of an older epoch": 2,
    "answer a promise request without promising": 1,
    "promise without telling how far one is": 1,
    "count as in step with every new master": 1,
    "skip the promises": 1,
    "lead although another is ahead": 14,
    "two promises are always enough": 1,
    "let a replica that forgot have a say": 2,
    "let learners promise for voters": 2,
    "compare logs by length alone": 44,
    "be whole again at the first word from a master": 2,
    "be whole again before this epoch committed anything": 2,
    "match by index, not by epoch": 1,
    "cut at every sign of life that is behind": 1,
    "stream from a slave's end without looking where the logs part": 1,
    "take a lost answer for a success": 3,
    "read a lost answer back by its epoch alone": 97,
    "put the epoch without comparing": 4,
    "change the membership without comparing, and give up on a lost answer": 11,
    "change the membership while a change is under way": 2,
    "change the membership before the last change has a majority": 4,
    "change the membership before serving": 4,
    "keep promises in memory only": 1,
    "send before the promise is saved": 1,
    "do not cut what diverged": 7,
    "count at once after a power cut without flushes": 2,
    "accept messages of peers outside the group": 5,
}
"""Planted bugs of the simulator, with the first seed at which the specification does not allow what
they do (`tools/run traces --bugs`).
"""
LIMITS: Final = ("MaxEpoch", "MaxLength", "MaxMessages", "MaxChanges", "MaxKills", "MaxCuts")


def check_replicas(found: Trace, folder: Path) -> TraceVerdict:
    """Whether a trace is a behaviour of the specification."""
    constants = {
        "Replicas": set(found.replicas),
        "FirstVoters": set(found.voters),
        **dict.fromkeys(LIMITS, UNLIMITED),
    }
    return check_trace("Replication", constants, found.lines, folder)


def check_seed(
    seed: int, lines_max: int, folder: Path, bug: type[Node] | None = None
) -> TraceVerdict:
    """Whether the first lines of a seed's trace are a behaviour of the specification."""
    return check_replicas(trace(seed, lines_max, bug), folder)
