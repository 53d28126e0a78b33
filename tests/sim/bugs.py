"""Planted bugs: each one puts a mistake into the product's classes, and the simulator must find it.

They are subclasses that replace one method of the replication core, of the coordinator, or of the
code that carries out a Ready. The product itself has no switches for this. A bug that the simulator
does not find shows a gap in the simulator. `BUGS` has them by name.

Plants a bug: a Node with one replaced class.

Bugs of counting replicas: which entries count as stored by a majority.

Bugs in promises and elections.

Bugs of finding the index where two logs diverge.

Bugs of requests to the coordination store and of their answers.

Bugs of the driver: which bytes are on disk at which time, and what the driver reports about them.

Bugs of trust: which messages a replica accepts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from qmq_coordination.broker_groups import BrokerGroupState, EpochClaim, group_key
from qmq_coordination.coordination_store import LeaseId, Put
from qmq_replication.coordinator import Coordinator
from qmq_replication.core import Replica
from qmq_replication.election import Election
from qmq_replication.leader import Leader, PeerProgress
from qmq_replication.links import InboundConnection, InboundLink, InboundLinks, PeerHello
from qmq_replication.membership import ReplicaMembership
from qmq_replication.ready import (
    Ack,
    Append,
    DurableState,
    LogReset,
    Mismatch,
    Promise,
    PromiseRequest,
    Ready,
    Refusal,
    ReplicaState,
    Role,
)

from qmq.errors import CoordinationUnknown
from qmq.wire.frame import Frame, FrameKind
from sim.node import Node

BUGS: dict[str, type[Node]] = {}


class _Buggy(Node):
    checks_places = False


def in_node(name: str, **methods: Any) -> None:
    """A bug in carrying out."""
    BUGS[name] = type("BuggyNode", (_Buggy,), methods)


def in_replica(name: str, **methods: Any) -> None:
    """A bug in the core: methods of Replica."""
    in_node(name, replica_class=type("BuggyReplica", (Replica,), methods))


def in_state(name: str, **methods: Any) -> None:
    """A bug in the state that the roles share."""
    buggy = type("BuggyState", (ReplicaState,), methods)

    def begin(self: Replica, *args: Any, **options: Any) -> None:
        Replica.__init__(self, *args, **options)
        self.state.__class__ = buggy

    in_replica(name, __init__=begin)


def in_step(name: str, message: type, handle: Callable[[Any, str, Any], None]) -> None:
    """A bug in how one message is answered."""

    def step(self: Replica, now_ms: int, sender: str, received: Any) -> None:
        if isinstance(received, message):
            self.state.now_ms = now_ms
            handle(self, sender, received)
        else:
            Replica.step(self, now_ms, sender, received)

    in_replica(name, step=step)


def in_leader(name: str, **methods: Any) -> None:
    """A bug on the master's side."""
    buggy = type("BuggyLeader", (Leader,), methods)

    def lead(self: Replica) -> None:
        Replica.lead(self)
        assert self.leader is not None
        self.leader.__class__ = buggy

    in_replica(name, lead=lead)


def in_election(name: str, **methods: Any) -> None:
    """A bug in elections."""
    buggy = type("BuggyElection", (Election,), methods)

    def begin(self: Replica, *args: Any, **options: Any) -> None:
        Replica.__init__(self, *args, **options)
        self.election.__class__ = buggy

    in_replica(name, __init__=begin)


def in_coordinator(name: str, **methods: Any) -> None:
    """A bug in the dealings with the store."""
    in_node(name, coordinator_class=type("BuggyCoordinator", (Coordinator,), methods))


in_leader("commit entries of an older epoch by counting", may_commit=lambda self, index: True)
in_leader("commit without the others", quorum_index=lambda self: self.state.stored_index)


def _held(self: Leader) -> dict[str, int]:
    return {self.state.name: self.state.stored_index} | {
        name: peer.match for name, peer in self.peers.items()
    }


def _half(self: Leader) -> int:
    held = _held(self)
    found = sorted((held.get(name, 0) for name in self.state.membership.voters), reverse=True)
    return found[max(self.state.membership.majority - 2, 0)]


def _learners_too(self: Leader) -> int:
    return sorted(_held(self).values(), reverse=True)[self.state.membership.majority - 1]


def _any_while_changing(self: Leader) -> int:
    held = _held(self)
    return (
        max(held.values()) if self.change is not None else self.state.membership.quorum_index(held)
    )


in_leader("count half as a majority", quorum_index=_half)
in_leader("count learners", quorum_index=_learners_too)
in_leader(
    "commit without a majority while the membership changes", quorum_index=_any_while_changing
)


def _sent_is_stored(self: Leader, sender: str, ack: Ack) -> None:
    """The end of the peer's log goes along, since the master refuses an Ack of more than that."""
    peer = self.peers.get(sender)
    if peer is not None and ack.epoch == self.epoch and peer.is_in_step:
        ack = ack._replace(stored=peer.next - 1, last_index=max(ack.last_index, peer.next - 1))
    Leader.acknowledged(self, sender, ack)


def _any_epoch(self: Leader, sender: str, ack: Ack) -> None:
    """The round would give most of them away."""
    peer = self.peers.get(sender)
    if peer is not None:
        Leader.acknowledged(self, sender, ack._replace(epoch=self.epoch, round=peer.round))


def _any_round(self: Leader, sender: str, ack: Ack) -> None:
    peer = self.peers.get(sender)
    if peer is not None:
        Leader.acknowledged(self, sender, ack._replace(round=peer.round))


in_leader("count what was sent as stored", acknowledged=_sent_is_stored)
in_leader("count acknowledgements of another epoch", acknowledged=_any_epoch)
in_leader("count acknowledgements from before a peer lost its place", acknowledged=_any_round)

# --- the commit position --------------------------------------------------------------------------


def _commit_all(self: ReplicaState, index: int) -> None:
    if self.role is Role.MASTER:
        ReplicaState.commit_to(self, index)
    else:
        self.commit = self.ready.commit = max(self.commit, self.history.last_index)


def _go_back(self: ReplicaState, index: int) -> None:
    if index and index != self.commit:
        self.commit = self.ready.commit = index


in_state("commit all that a slave has", commit_to=_commit_all)
in_state("let the commit position go back", commit_to=_go_back)


def _believe_the_commit(self: Replica, message: Any) -> bool:
    self.state.commit_to(min(message.commit, self.state.history.last_index))
    return Replica.continues(self, message)


in_replica("commit before the log is known to match", continues=_believe_the_commit)


def _obey_anyone(self: Replica, sender: str, epoch: int) -> bool:
    if epoch >= self.state.promised:
        return Replica._accept_master(self, sender, epoch)
    self.become_slave()
    self.master, self.is_master_lost, self.heard_ms = sender, False, self.state.now_ms
    self.expect_master()
    return True


in_replica("take entries of an older epoch", _accept_master=_obey_anyone)


def _promise_everyone(self: Replica, sender: str, request: PromiseRequest) -> None:
    if request.epoch < self.state.promised:
        self.state.send(sender, Refusal(self.state.promised))
    else:
        self.state.send(
            sender, Promise(request.epoch, *self.state.history.last, self.state.may_count)
        )


def _brag(self: Replica, sender: str, request: PromiseRequest) -> None:
    if request.epoch >= self.state.promised:
        self.become_slave()
        self.promise(request.epoch)
        self.state.send(sender, Promise(request.epoch, 0, 0, self.state.may_count))


in_step("answer a promise request without promising", PromiseRequest, _promise_everyone)
in_step("promise without telling how far one is", PromiseRequest, _brag)


def _stay_in_step(self: Replica, epoch: int) -> None:
    self.state.promised = epoch
    self.state.save()


in_replica("count as in step with every new master", promise=_stay_in_step)
in_election("skip the promises", has_quorum=lambda self: True)
in_election("lead although another is ahead", ahead=lambda self: None)
in_election("two promises are always enough", has_quorum=lambda self: len(self._judges()) >= 2)


def _judge_all(self: Election) -> dict[str, Promise]:
    voters = self._state.membership.voters
    return {name: promise for name, promise in self._promises.items() if name in voters}


def _by_length(self: Election) -> str | None:
    judges = {name: each.last_index for name, each in self._judges().items()}
    best = max(judges, key=lambda name: judges[name], default=None)
    return best if best is not None and judges[best] > self._state.history.last_index else None


in_election(
    "let a replica that forgot have a say", _judges=_judge_all, _could_fence=lambda self: True
)
in_election(
    "let learners promise for voters",
    has_quorum=lambda self: len(self._promises) >= self._state.membership.majority,
)
in_election("compare logs by length alone", ahead=_by_length)


def _whole_at_first_word(self: Replica) -> None:
    if not self.state.may_count:
        self.state.is_whole, self.state.resetting_until = True, 0
        self.state.save()


def _whole_by_old_commit(self: Replica) -> None:
    if not self.state.may_count and self.state.stored_index >= max(
        self.master_commit, self.state.resetting_until
    ):
        _whole_at_first_word(self)


in_replica("be whole again at the first word from a master", _become_whole=_whole_at_first_word)
in_replica(
    "be whole again before this epoch committed anything", _become_whole=_whole_by_old_commit
)


def _by_index(self: Replica, message: Append) -> bool:
    if message.prev_index == self.state.history.last_index:
        self.in_step = True
        return True
    return Replica.continues(self, message)


def _cut_always(self: Replica, message: Append) -> bool:
    if self.state.commit <= message.prev_index < self.state.history.last_index and not message.runs:
        self.truncate(message.prev_index)
    return Replica.continues(self, message)


in_replica("match by index, not by epoch", continues=_by_index)
in_replica("cut at every sign of life that is behind", continues=_cut_always)


def _skip_ahead(self: Leader, sender: str, mismatch: Mismatch) -> None:
    peer = self.peers.get(sender)
    if peer is not None and mismatch.epoch == self.epoch and mismatch.round == peer.round:
        peer.round += 1
        peer.stream_from(mismatch.last_index, mismatch.place)
        self._send(sender, peer, mismatch.last_index)
        self._stream(sender, peer)


in_leader("stream from a slave's end without looking where the logs part", mismatched=_skip_ahead)

# --- what is gone at the master -------------------------------------------------------------------


def _no_reset_in_step(self: Replica, sender: str, message: LogReset) -> None:
    if not self.in_step or message.epoch != self.state.promised:
        Replica._on_reset(self, sender, message)


def _reset_without_looking(self: Replica, sender: str, message: LogReset) -> None:
    self.in_step = False
    Replica._on_reset(self, sender, message)


def _say_nothing(self: Leader, name: str, peer: PeerProgress) -> None:
    self._send(name, peer, peer.next - 1 if peer.is_in_step else self.state.history.last_index)


in_step("leave a replica in step behind when its next entry is gone", LogReset, _no_reset_in_step)
in_step("start over at a Reset that came twice", LogReset, _reset_without_looking)
in_leader("say nothing to a silent peer whose next entry is gone", _beat=_say_nothing)


async def _believe(self: Coordinator, claim: EpochClaim) -> bool:
    return True


async def _by_epoch(self: Coordinator, claim: EpochClaim) -> bool:
    key = await self._store.get(group_key("g", "epoch"))
    return key is not None and EpochClaim.decode(key.value).epoch == claim.epoch


async def _blind(
    self: Coordinator, state: BrokerGroupState, claim: EpochClaim, lease: LeaseId
) -> bool:
    puts = [
        Put(group_key("g", "epoch"), claim.encode()),
        Put(group_key("g", "master"), self._master(claim), lease),
    ]
    try:
        return (await self._store.txn([], puts)).succeeded
    except CoordinationUnknown:
        return await self.is_ours(claim)


in_coordinator("take a lost answer for a success", is_ours=_believe)
in_coordinator("read a lost answer back by its epoch alone", is_ours=_by_epoch)
in_coordinator("put the epoch without comparing", _claim_epoch=_blind)


async def _change_blindly(
    self: Coordinator, before: ReplicaMembership, after: ReplicaMembership
) -> ReplicaMembership | None:
    try:
        await self._store.txn([], [Put(group_key("g", "members"), after.encode())])
    except CoordinationUnknown:
        return None
    return after


in_coordinator(
    "change the membership without comparing, and give up on a lost answer", change=_change_blindly
)
in_leader(
    "change the membership while a change is under way", may_change=lambda self: self.is_serving
)
in_leader(
    "change the membership before the last change has a majority",
    may_change=lambda self: self.change is None and self.is_serving,
)
in_leader(
    "remove a voter though too few of those that stay are there",
    _require_majority=lambda self, after: None,
)
in_leader("change the membership before serving", may_change=lambda self: self.change is None)


def _stored_at_once(self: Node) -> None:
    self._tell_stored(self.disk.image.last)
    Node._written(self)


in_node("acknowledge before the flush", _written=_stored_at_once)
in_node("count a flush that began before a cut", _written_again_from=lambda self, index: None)


def _promise_in_memory(self: Node, ready: Ready) -> None:
    state, ready.save = self.disk.state, None
    Node._do(self, ready)
    self.disk.state = state


in_node("keep promises in memory only", _do=_promise_in_memory)


def _promise_on_a_full_disk(self: Node, ready: Ready) -> None:
    self._go_on(ready)


in_node(
    "promise although the disk has no room for the promise", _wait_for_room=_promise_on_a_full_disk
)


def _send_first(self: Node, ready: Ready) -> None:
    self._send(ready)
    ready.messages = []
    Node._do(self, ready)


in_node("send before the promise is saved", _do=_send_first)


def _forget_to_cut(self: Node, ready: Ready) -> None:
    ready.truncate = None
    Node._do(self, ready)


in_node("do not cut what diverged", _do=_forget_to_cut)
in_state(
    "count written as stored",
    stored_index=property(lambda self: self.history.last_index, lambda self, index: None),
)


def _keep_durable(self: Replica, index: int) -> None:
    self.state.history.truncate(index)
    self.state.ready.truncate = index


in_replica(
    "cut entries, but still count them as stored, and cut committed ones", truncate=_keep_durable
)

# --- what recovery must know ----------------------------------------------------------------------


async def _new_disk_is_whole(self: Node) -> None:
    is_new = self.disk.folder != self._folder
    await Node._recover(self)
    if is_new:
        self.disk.state = self.disk.state._replace(is_whole=True)


async def _new_disk_forgets_promises(self: Node) -> None:
    self._folder = self.disk.folder
    if self.disk.state == DurableState():
        self.disk.state = DurableState(0, is_whole=False)
    await Node._recover(self)


async def _trust_the_disk(self: Node) -> None:
    self._lost_power = False
    await Node._recover(self)


in_node("count a new disk at once", _recover=_new_disk_is_whole)
in_node("forget with a new disk what was promised", _recover=_new_disk_forgets_promises)
in_node("count at once after a power cut without flushes", _recover=_trust_the_disk)

# --- answering ------------------------------------------------------------------------------------


def _answer_all(self: Node, index: int) -> None:
    Node._committed(self, index)
    while self._waiting:
        at, _, value = self._waiting.popleft()
        self.simulation.checks.acknowledges(self.name, at, value)


def _serve_at_once(self: Node, value: int) -> bool:
    core = self.core
    if core is None or self.is_paused or core.leader is None:
        return False
    self._append_own(value)
    self.simulation.checks.acknowledges(self.name, self.disk.image.last, value)
    return True


in_node("answer everything that waits at any commit", _committed=_answer_all)
in_node("acknowledge when the master has it", propose=_serve_at_once)


class _Credulous(InboundLink):
    def _check_proof(self, frame: Frame) -> None:
        assert frame.kind == FrameKind.REPLICA_HELLO


class _Open(InboundLinks):
    def accept(self, first: Frame, connection: InboundConnection) -> InboundLink:
        return _Credulous(self, PeerHello.unpack(first.payload), connection)


def _belongs(self: Replica, sender: str) -> bool:
    return True


in_node("accept a hello without its proof", arrivals_class=_Open)
in_replica("accept messages of peers outside the group", _belongs=_belongs)
