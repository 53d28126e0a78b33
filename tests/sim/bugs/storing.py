"""Bugs of requests to the coordination store and of their answers.

Bugs of the driver: which bytes are on disk at which time, and what the driver reports about them.

Bugs of trust: which messages a replica accepts.
"""

from __future__ import annotations

from qmq_coordination.broker_groups import BrokerGroupState, EpochClaim, group_key
from qmq_coordination.coordination_store import LeaseId, Put
from qmq_replication.coordinator import Coordinator
from qmq_replication.core import Replica
from qmq_replication.links import InboundConnection, InboundLink, InboundLinks, PeerHello
from qmq_replication.membership import ReplicaMembership
from qmq_replication.ready import DurableState, Ready

from qmq.errors import CoordinationUnknown
from qmq.wire.frame import Frame, FrameKind
from sim.bugs.planting import in_coordinator, in_leader, in_node, in_replica, in_state
from sim.node import Node


async def _believe(self: Coordinator, claim: EpochClaim) -> bool:
    return True


async def _by_epoch(self: Coordinator, claim: EpochClaim) -> bool:
    key = await self._store.get(group_key("g", "epoch"))
    return key is not None and EpochClaim.decode(key.value).epoch == claim.epoch


async def _blind(self: Coordinator, state: BrokerGroupState, claim: EpochClaim, lease: LeaseId) -> bool:
    puts = [Put(group_key("g", "epoch"), claim.encode()), Put(group_key("g", "master"), self._master(claim), lease)]
    try:
        return (await self._store.txn([], puts)).succeeded
    except CoordinationUnknown:
        return await self.is_ours(claim)


in_coordinator("take a lost answer for a success", is_ours=_believe)
in_coordinator("read a lost answer back by its epoch alone", is_ours=_by_epoch)
in_coordinator("put the epoch without comparing", _claim_epoch=_blind)


async def _change_blindly(self: Coordinator, before: ReplicaMembership, after: ReplicaMembership) -> ReplicaMembership | None:
    try:
        await self._store.txn([], [Put(group_key("g", "members"), after.encode())])
    except CoordinationUnknown:
        return None
    return after


in_coordinator("change the membership without comparing, and give up on a lost answer", change=_change_blindly)
in_leader("change the membership while a change is under way", may_change=lambda self: self.is_serving)
in_leader("change the membership before the last change has a majority", may_change=lambda self: self.change is None and self.is_serving)
in_leader("remove a voter though too few of those that stay are there", _require_majority=lambda self, after: None)
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


in_node("promise although the disk has no room for the promise", _wait_for_room=_promise_on_a_full_disk)


def _send_first(self: Node, ready: Ready) -> None:
    self._send(ready)
    ready.messages = []
    Node._do(self, ready)


in_node("send before the promise is saved", _do=_send_first)


def _forget_to_cut(self: Node, ready: Ready) -> None:
    ready.truncate = None
    Node._do(self, ready)


in_node("do not cut what diverged", _do=_forget_to_cut)
in_state("count written as stored", stored_index=lambda self: self.history.last_index)


def _keep_durable(self: Replica, index: int) -> None:
    self.state.history.truncate(index)
    self.state.ready.truncate = index


in_replica("cut entries, but still count them as stored, and cut committed ones", truncate=_keep_durable)

# --- what recovery must know -------------------------------------------------------------------------------------------


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

# --- answering ---------------------------------------------------------------------------------------------------------


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
