"""Bugs of counting replicas: which entries count as stored by a majority.

Bugs in promises and elections.

Bugs of finding the index where two logs diverge.
"""

from __future__ import annotations

from typing import Any

from qmq_replication.core import Replica
from qmq_replication.election import Election
from qmq_replication.leader import Leader, PeerProgress
from qmq_replication.ready import Ack, Append, LogReset, Mismatch, Promise, PromiseRequest, Refusal, ReplicaState, Role

from sim.bugs.planting import in_election, in_leader, in_replica, in_state, in_step

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


def _obey_anyone(self: Replica, sender: str, epoch: int) -> bool:
    if epoch >= self.state.promised:
        return Replica._heed(self, sender, epoch)
    self.become_slave()
    self.master, self.is_master_lost, self.heard_ms = sender, False, self.state.now_ms
    self.expect_master()
    return True


in_replica("take entries of an older epoch", _heed=_obey_anyone)


def _promise_everyone(self: Replica, sender: str, request: PromiseRequest) -> None:
    if request.epoch < self.state.promised:
        self.state.send(sender, Refusal(self.state.promised))
    else:
        self.state.send(sender, Promise(request.epoch, *self.state.history.last, self.state.may_count))


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


in_election("let a replica that forgot have a say", _judges=_judge_all, _could_fence=lambda self: True)
in_election("let learners promise for voters", has_quorum=lambda self: len(self._promises) >= self._state.membership.majority)
in_election("compare logs by length alone", ahead=_by_length)


def _whole_at_first_word(self: Replica) -> None:
    if not self.state.may_count:
        self.state.is_whole, self.state.resetting_until = True, 0
        self.state.save()


def _whole_by_old_commit(self: Replica) -> None:
    if not self.state.may_count and self.state.stored_index() >= max(self.master_commit, self.state.resetting_until):
        _whole_at_first_word(self)


in_replica("be whole again at the first word from a master", _become_whole=_whole_at_first_word)
in_replica("be whole again before this epoch committed anything", _become_whole=_whole_by_old_commit)


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

# --- what is gone at the master ----------------------------------------------------------------------------------------


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
