"""What the replicas of a simulated group do, as a trace for TLC: the lines have the actions and values of docs/specs/ReplicationTrace.tla.

A trace ends where its limit is reached, or before something that the specification leaves out: a new disk, a LogReset, a power cut that
takes back a cut of the log, a death between two writes that are one step there.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Final

from qmq_coordination.broker_groups import EpochClaim
from qmq_replication.history import EpochRun
from qmq_replication.ready import MembershipChange, Ready, Request, Role
from qmq_replication.replica_membership import ReplicaMembership
from qmq_replication.replica_messages import Ack, Append, LogReset, Message, Mismatch, Promise

from sim.node import Node
from sim.plan import Plan, draw
from sim.run import EPOCH, MEMBERS, SPARES, Simulation
from sim.world import World

LEFT_OUT: Final = ("wipe", "retention", "outrun")
"""Faults that would end a trace immediately."""
LONGEST_MS: Final = 600_000

Line = dict[str, Any]


@dataclass(slots=True)
class Trace:
    """The lines. `owners` are those of the epochs, from the first on."""

    replicas: tuple[str, ...]
    voters: tuple[str, ...]
    lines_max: int
    lines: list[Line] = field(default_factory=list)
    owners: list[str] = field(default_factory=list)
    end: str = ""
    """Why the trace ends here."""

    def add(self, do: str, replica: str, **values: Any) -> None:
        """One more line."""
        if not self.end:
            self.lines.append({"do": do, "r": replica, **values})
            if len(self.lines) == self.lines_max:
                self.end = "limit"

    def entries(self, runs: tuple[EpochRun, ...], after: int, last: int) -> list[dict[str, Any]]:
        """The entries behind `after` as the specification has them: their epochs, and who wrote them."""
        begins = [*(run.first for run in runs[1:]), last + 1] if runs else []
        epochs = [run.epoch for run, end in zip(runs, begins, strict=True) for _ in range(max(run.first, after + 1), end)]
        return [{"epoch": epoch, "writer": self.owners[epoch - 1]} for epoch in epochs]

    def message(self, sender: str, to: str, message: Append | Ack | Mismatch | Promise) -> Line:
        """A message as the specification has it."""
        common = {"kind": type(message).__name__, "from": sender, "to": to, "epoch": message.epoch}
        if isinstance(message, Promise):
            last = {"epoch": message.last_epoch, "index": message.last_index}
            return {**common, "claim": {"last": last, "whole": message.is_whole}}
        if isinstance(message, Ack):
            return {**common, "round": message.round, "stored": message.stored}
        if isinstance(message, Mismatch):
            return {**common, "round": message.round, "log": self.entries(message.runs, message.start_index, message.last_index)}
        sent = self.entries(message.runs, message.prev_index, message.last_index)
        place = {"prev": message.prev_index, "prevEpoch": message.prev_epoch, "entries": sent}
        return {**common, **place, "commit": message.commit, "cut": message.cut, "round": message.round}


class TracedSimulation(Simulation):
    """A simulation that traces what the coordination store does."""

    def __init__(self, seed: int, trace: Trace, plan: Plan, node_class: type[Node]) -> None:
        self.trace = trace
        super().__init__(seed, node_class=node_class, plan=plan)

    def _changes(self, key: str, before: bytes, after: bytes) -> None:
        if key == MEMBERS:
            voters = set(ReplicaMembership.decode(after).voters)
            if voters != set(ReplicaMembership.decode(before).voters):
                self.trace.add("StoreChanges", "", after=voters)
        elif key == EPOCH:
            claim = EpochClaim.decode(after)
            if claim.epoch > len(self.trace.owners):
                self.trace.owners.append(claim.replica)
                self.trace.add("GiveEpoch", claim.replica, epoch=claim.epoch)
        super()._changes(key, before, after)


class TracedNode(Node):
    """A replica that traces what it does. It is mixed into the product's node, or a planted bug's."""

    def __init__(self, simulation: TracedSimulation, name: str) -> None:
        super().__init__(simulation, name)
        self.trace = simulation.trace
        self._answers: tuple[str, Append] | None = None
        self._promised = 0
        self._whole = True
        self._known_commit = 0
        self._proposed: MembershipChange | None = None
        self._peers: tuple[str, ...] = ()
        self._shown: Line = {}

    def _add(self, do: str, **values: Any) -> None:
        self.trace.add(do, self.name, **values)

    # --- life ----------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """See Node."""
        if self.disk.folder != self._folder:
            self.trace.end = self.trace.end or "new disk"
        super().start()

    def kill(self) -> None:
        """See Node."""
        if self.is_up:
            self._answers, self._known_commit, self._proposed, self._peers, self._shown = None, 0, None, (), {}
            if self.disk.state.is_whole != self._whole or self.disk.state.promised != self._promised:
                self.trace.end = self.trace.end or "death between two writes"
            self._add("Kill")
        super().kill()

    def cut_power(self) -> None:
        """See Node."""
        lost_before, self._lost_power = self._lost_power, False
        before = list(self.disk.image.entries)
        super().cut_power()
        kept = len(self.disk.image.entries)
        if self._lost_power:
            if self.disk.image.entries != before[:kept]:
                self.trace.end = self.trace.end or "power cut that takes back a cut"
            self._add("PowerCut", kept=kept)
            self._whole = False
        self._lost_power |= lost_before

    # --- what comes in -------------------------------------------------------------------------------------------------

    def receive(self, sender: str, message: Message) -> None:
        """See Node."""
        core = self.core
        if core is not None and not self.is_paused and sender in core.members:
            leader = core.leader
            if isinstance(message, Append) and message.epoch >= core.state.promised:
                self._answers = sender, message
            elif isinstance(message, Promise):
                if core.state.role is Role.FENCING and message.epoch == core.state.promised:
                    self._add("TakePromise", m=self.trace.message(sender, self.name, message))
            elif isinstance(message, Ack | Mismatch) and leader is not None and message.epoch == leader.epoch:
                peer = leader.peers.get(sender)
                if peer is not None and message.round == peer.round:
                    self._add(f"Take{type(message).__name__}", m=self.trace.message(sender, self.name, message))
        super().receive(sender, message)
        if not self.is_paused:
            self._answers = None

    # --- carrying out --------------------------------------------------------------------------------------------------

    def _carry_out(self) -> None:
        self._trace_membership()
        super()._carry_out()
        core = self.core
        if core is None:
            return
        last_epoch, last_index = core.state.history.last
        shown: Line = {
            "promised": core.state.promised,
            "last": {"epoch": last_epoch, "index": last_index},
            "commit": core.state.commit,
            "whole": core.state.may_count,
            "slave": {"inStep": core.in_step, "round": core.round, "masterCommit": core.master_commit},
            "leads": core.leader is not None,
        }
        if shown != self._shown:
            self._shown = shown
            self._add("Is", **shown)

    def _trace_membership(self) -> None:
        leader = self.core.leader if self.core is not None else None
        if leader is None:
            self._proposed, self._peers = None, ()
            return
        if self._proposed is not None and leader.change is not self._proposed.after:
            learned = leader.state.membership == self._proposed.after
            self._add("LearnChange" if learned else "ForgetChange")
            self._proposed = None
        for name in self._peers:
            if name not in leader.peers:
                self._add("ForgetPeer", peer=name)
        self._peers = tuple(leader.peers)

    def _failpoint(self, weight: int = 1) -> None:
        self._trace_promise()
        super()._failpoint(weight)

    def _trace_promise(self) -> None:
        promised = self.disk.state.promised
        if promised > self._promised:
            self._promised = promised
            do = "WinEpoch" if self.trace.owners[promised - 1] == self.name else "PromiseEpoch"
            self._add(do, epoch=promised)

    def _change_log(self, ready: Ready) -> None:
        if ready.reset is not None:
            self.trace.end = self.trace.end or "LogReset"
        super()._change_log(ready)
        if ready.truncate is not None or ready.append:
            self._trace_answer()

    def _trace_answer(self) -> None:
        """What a slave does with an Append is one step of the specification."""
        if self._answers is None or self.core is None:
            return
        sender, message = self._answers
        self._answers = None
        self._whole = self.core.state.is_whole
        self._add("AnswerAppend", m=self.trace.message(sender, self.name, message))

    def _send(self, ready: Ready) -> None:
        for to, message in ready.messages:
            if isinstance(message, LogReset):
                self.trace.end = self.trace.end or "LogReset"
            elif isinstance(message, Append):
                self._trace_commit(message.commit)
                self._add("Send", m=self.trace.message(self.name, to, message))
            elif isinstance(message, Promise):
                self._add("AnswerPromiseRequest", m=self.trace.message(self.name, to, message))
            elif isinstance(message, Ack | Mismatch):
                self._trace_answer()
                self._add("Report", m=self.trace.message(self.name, to, message))
        super()._send(ready)

    def _synced(self, boot: int, count: int) -> None:
        super()._synced(boot, count)
        for to, message in self.core.state.ready.messages if self.core is not None and self.boot == boot else ():
            if isinstance(message, Ack):  # it is sent with the next messages, which may be of a later epoch
                self._add("Report", m=self.trace.message(self.name, to, message))

    def _trace_commit(self, index: int) -> None:
        if index > self._known_commit:
            self._known_commit = index
            self._add("Commit", index=index)

    def _committed(self, index: int) -> None:
        if self.core is not None and self.core.leader is not None:
            self._trace_commit(index)
        super()._committed(index)

    def _append_own(self, value: int) -> None:
        core = self.core
        assert core is not None
        assert core.leader is not None
        if self.disk.image.last + 1 == core.leader.barrier:
            self._whole, self._known_commit = True, core.state.commit
            self._peers = tuple(core.leader.peers)
            self._add("BecomeMaster")
        else:
            self._add("Write")
        super()._append_own(value)

    def _ask(self, request: Request) -> None:
        if isinstance(request, MembershipChange) and set(request.before.voters) != set(request.after.voters):
            self._proposed = request
            self._add("Propose", after=set(request.after.voters))
        super()._ask(request)


def trace(seed: int, lines_max: int, bug: type[Node] | None = None) -> Trace:
    """The trace of one seed, of the product or of a planted bug."""
    drawn = draw(World(seed).random, 10)
    faults = tuple(each for each in drawn.faults if each not in LEFT_OUT) or ("kill", "usurp")
    plan = replace(drawn, is_sync=False, faults=faults)
    names = tuple("abcde"[: plan.voters])
    found = Trace((*names, *SPARES), names, lines_max)
    node_class = TracedNode if bug is None else type("TracedBug", (TracedNode, bug), {})
    simulation = TracedSimulation(seed, found, plan, node_class)
    simulation.world.after(1_000, simulation._load)
    simulation.nemesis.begin()
    try:
        while not found.end and simulation.world.now < LONGEST_MS:
            simulation.world.run(simulation.world.now + 1_000)
    except Exception as cause:
        if bug is None:
            raise
        found.end = f"the simulator found the bug: {cause}"
    return found
