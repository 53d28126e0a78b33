"""Bugs in promises and elections."""

from __future__ import annotations

from qmq_replication.core import Replica
from qmq_replication.election import Election
from qmq_replication.ready import Promise, PromiseRequest, Refusal

from sim.bugs.planting import in_election, in_replica, in_step


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
