"""Bugs of counting replicas: which entries count as stored by a majority."""

from __future__ import annotations

from typing import Any

from qmq_replication.core import Replica
from qmq_replication.leader import Leader
from qmq_replication.ready import Ack, Role
from qmq_replication.state import ReplicaState

from sim.bugs.planting import in_leader, in_replica, in_state

in_leader("commit entries of an older epoch by counting", may_commit=lambda self, index: True)
in_leader("commit without the others", quorum_index=lambda self: self.state.stored_index())


def _held(self: Leader) -> dict[str, int]:
    return {self.state.name: self.state.stored_index()} | {name: peer.match for name, peer in self.peers.items()}


def _half(self: Leader) -> int:
    held = _held(self)
    found = sorted((held.get(name, 0) for name in self.state.membership.voters), reverse=True)
    return found[max(self.state.membership.majority - 2, 0)]


def _learners_too(self: Leader) -> int:
    return sorted(_held(self).values(), reverse=True)[self.state.membership.majority - 1]


def _any_while_changing(self: Leader) -> int:
    held = _held(self)
    return max(held.values()) if self.change is not None else self.state.membership.quorum_index(held)


in_leader("count half as a majority", quorum_index=_half)
in_leader("count learners", quorum_index=_learners_too)
in_leader("commit without a majority while the membership changes", quorum_index=_any_while_changing)


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

# --- the commit position -----------------------------------------------------------------------------------------------


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
