"""What the replicas of one group do, as a trace for TLC: the lines have the actions and values of
docs/specs/ReplicationTrace.tla.

The coordination store gives each change to `Trace.put`. Each replica's process, simulated or real,
tells its `ReplicaTracer` what it does, at the moment at which it does it. The tracer only reads,
and judges nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from qmq_coordination.broker_groups import EpochClaim, group_key
from qmq_replication.core import Replica
from qmq_replication.history import EpochRun
from qmq_replication.leader import Leader
from qmq_replication.membership import ReplicaMembership
from qmq_replication.ready import (
    Ack,
    Append,
    LogReset,
    MembershipChange,
    Message,
    Mismatch,
    Promise,
    Ready,
    Request,
    Role,
)

Line = dict[str, Any]


@dataclass(slots=True)
class Trace:
    """The lines. `owners` are those of the epochs, from the first on."""

    group: str
    replicas: tuple[str, ...]
    voters: tuple[str, ...]
    """The voters at the beginning."""
    lines_max: int
    lines: list[Line] = field(default_factory=list)
    owners: list[str] = field(default_factory=list)
    end: str = ""
    """Why the trace ends here."""
    _voters: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        self._voters = frozenset(self.voters)

    def add(self, do: str, replica: str, **values: Any) -> Line:
        """One more line."""
        line = {"do": do, "r": replica, **values}
        if not self.end:
            self.lines.append(line)
            if len(self.lines) == self.lines_max:
                self.end = "limit"
        return line

    def put(self, key: str, value: bytes) -> None:
        """The coordination store has a new value."""
        if key == group_key(self.group, "members"):
            voters = frozenset(ReplicaMembership.decode(value).voters)
            if voters != self._voters:
                self._voters = voters
                self.add("StoreChanges", "", after=voters)
        elif key == group_key(self.group, "epoch"):
            claim = EpochClaim.decode(value)
            if claim.epoch > len(self.owners):
                self.owners.append(claim.replica)
                self.add("GiveEpoch", claim.replica, epoch=claim.epoch)

    def entries(self, runs: tuple[EpochRun, ...], after: int, last: int) -> list[dict[str, Any]]:
        """The entries behind `after` as the specification has them: their epochs, and who wrote
        them.
        """
        begins = [*(run.first for run in runs[1:]), last + 1] if runs else []
        epochs = [
            run.epoch
            for run, end in zip(runs, begins, strict=True)
            for _ in range(max(run.first, after + 1), end)
        ]
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
            return {
                **common,
                "round": message.round,
                "log": self.entries(message.runs, message.start_index, message.last_index),
            }
        sent = self.entries(message.runs, message.prev_index, message.last_index)
        place = {"prev": message.prev_index, "prevEpoch": message.prev_epoch, "entries": sent}
        return {
            **common,
            **place,
            "commit": message.commit,
            "cut": message.cut,
            "round": message.round,
        }


class ReplicaTracer:
    """The lines of one replica, over all its processes. What a process does after its death is not
    traced.
    """

    def __init__(self, trace: Trace, name: str) -> None:
        self.trace = trace
        self._name = name
        self._is_up = False
        self._death: Line | None = None
        self._led = False
        """Whether it was master when it died."""
        self.promised = 0
        """The highest promise that has a line."""
        self.is_whole = True
        """Whether the replica is whole after its last line."""
        self._last = 0
        self._answers: tuple[str, Append] | None = None
        self._known_commit = 0
        self._proposed: MembershipChange | None = None
        self._peers: tuple[str, ...] = ()
        self._shown: Line = {}

    def _add(self, do: str, **values: Any) -> Line | None:
        return self.trace.add(do, self._name, **values) if self._is_up else None

    # --- life -------------------------------------------------------------------------------------

    def starts(self, core: Replica | None = None) -> None:
        """A process starts. `core` is what it recovered, if that may differ from what the last
        lines show: the process before it may have written entries as master that it did not come to
        report, and this one may know of fewer committed entries.
        """
        self._is_up = True
        if core is None or self._death is None:
            return
        self._death["commit"] = core.state.commit
        if self._led:
            lines = self.trace.lines
            at = next((at for at, line in enumerate(lines) if line is self._death), len(lines))
            lines[at:at] = [
                {"do": "Write", "r": self._name}
                for _ in range(core.state.history.last_index - self._last)
            ]

    def killed(self) -> None:
        """The process is killed."""
        if self._is_up:
            self._led = bool(self._peers)
            self._death = self._add("Kill", commit=0)
            self._ends()

    def lost_power(self, kept: int) -> None:
        """The machine of a killed process lost power: of the log `kept` entries are left."""
        self._is_up = True
        self._add("PowerCut", kept=kept)
        self.is_whole = False
        self._ends()

    def _ends(self) -> None:
        self._is_up = False
        self._answers, self._known_commit, self._proposed, self._peers, self._shown = (
            None,
            0,
            None,
            (),
            {},
        )

    # --- what comes in ----------------------------------------------------------------------------

    def hears(self, core: Replica, sender: str, message: Message) -> None:
        """A message comes in; `heard` follows when the core has handled it."""
        if sender not in core.members:
            return
        leader = core.leader
        if isinstance(message, Append):
            if message.epoch >= core.state.promised:
                self._answers = sender, message
        elif isinstance(message, Promise):
            if core.state.role is Role.FENCING and message.epoch == core.state.promised:
                self._add("TakePromise", m=self.trace.message(sender, self._name, message))
        elif (
            isinstance(message, Ack | Mismatch)
            and leader is not None
            and message.epoch == leader.epoch
        ):
            peer = leader.peers.get(sender)
            if peer is not None and message.round == peer.round:
                self._add(
                    f"Take{type(message).__name__}",
                    m=self.trace.message(sender, self._name, message),
                )

    def heard(self) -> None:
        self._answers = None

    # --- carrying out -----------------------------------------------------------------------------

    def begins_to_carry_out(self, core: Replica) -> None:
        """The core may have work. What became of a proposed change comes before it."""
        leader = core.leader
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

    def saved(self, promised: int) -> None:
        """The state is on disk."""
        if promised > self.promised:
            self.promised = promised
            do = "WinEpoch" if self.trace.owners[promised - 1] == self._name else "PromiseEpoch"
            self._add(do, epoch=promised)

    def changed_log(self, core: Replica, ready: Ready) -> None:
        """The log is cut and extended as `ready` requests."""
        if ready.truncate is not None or ready.append:
            self._answered(core)

    def _answered(self, core: Replica) -> None:
        """What a slave does with an Append is one step of the specification."""
        if self._answers is not None:
            sender, message = self._answers
            self._answers = None
            self.is_whole = core.state.is_whole
            self._add("AnswerAppend", m=self.trace.message(sender, self._name, message))

    def sends(self, core: Replica, to: str, message: Message) -> None:
        if isinstance(message, LogReset):
            self.ends_trace("LogReset")
        elif isinstance(message, Append):
            self.commits(message.commit)
            self._add("Send", m=self.trace.message(self._name, to, message))
        elif isinstance(message, Promise):
            self._add("AnswerPromiseRequest", m=self.trace.message(self._name, to, message))
        elif isinstance(message, Ack | Mismatch):
            self._answered(core)
            self._add("Report", m=self.trace.message(self._name, to, message))

    def ends_trace(self, why: str) -> None:
        """What comes next is not in the specification."""
        self.trace.end = self.trace.end or why

    def commits(self, index: int) -> None:
        """A master has committed the entries up to `index`."""
        if index > self._known_commit:
            self._known_commit = index
            self._add("Commit", index=index)

    def writes(self, leader: Leader, last: int) -> None:
        """The master's log has own entries up to `last`; the core is told next."""
        for index in range(leader.state.history.last_index + 1, last + 1):
            if index == leader.barrier:
                self.is_whole, self._known_commit = True, leader.state.commit
                self._peers = tuple(leader.peers)
                self._add("BecomeMaster")
            else:
                self._add("Write")

    def asks(self, request: Request) -> None:
        """A request to the coordination store begins."""
        if isinstance(request, MembershipChange) and set(request.before.voters) != set(
            request.after.voters
        ):
            self._proposed = request
            self._add("Propose", after=set(request.after.voters))

    def shows(self, core: Replica) -> None:
        """All work is done: what can be seen of the replica now, if it differs from what was seen
        last.
        """
        last_epoch, self._last = core.state.history.last
        peers = core.leader.peers if core.leader is not None else {}
        shown: Line = {
            "promised": core.state.promised,
            "last": {"epoch": last_epoch, "index": self._last},
            "commit": core.state.commit,
            "whole": core.state.is_whole
            and not core.state.resetting_until,  # what is on disk, be it verified or not
            "slave": {
                "inStep": core.in_step,
                "round": core.round,
                "masterCommit": core.master_commit,
            },
            "leads": core.leader is not None,
            "peers": [
                {"name": name, "inStep": peer.is_in_step, "match": peer.match, "round": peer.round}
                for name, peer in peers.items()
            ],
        }
        if shown != self._shown:
            self._shown = shown
            self._add("Is", **shown)
