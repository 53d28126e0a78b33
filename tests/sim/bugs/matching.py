"""Bugs of finding the index where two logs diverge."""

from __future__ import annotations

from qmq_replication.core import Replica
from qmq_replication.leader import Leader, PeerProgress
from qmq_replication.ready import Append, LogReset, Mismatch

from sim.bugs.planting import in_leader, in_replica, in_step


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
