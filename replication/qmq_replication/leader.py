"""The master's side: sending entries, counting which peers have them, committing; changing the
membership; handing over. Pure.

The master keeps the progress of each peer. A peer begins in PROBE: the master sends it an Append
without entries, and the peer answers with Ack (it is in step) or with Mismatch, which contains its
log's history. From the history the master finds where the logs diverge. In REPLICATE the master
sends entries without waiting, up to a limit of unacknowledged bytes.

    PROBE      Ack: in step                       REPLICATE
    PROBE      Mismatch                           cut the entries that the master does not have
                                                  (PROBE again), or REPLICATE from the peer's end,
                                                  or Reset (PROBE)
    REPLICATE  Mismatch (the peer lost entries)   the same

Commit: an index is committed when a majority of the voters has it durably *and* its entry is of
this epoch; older epochs' entries are committed with it (Raft, section 5.4.2, figure 8). `flushed`
follows from the voters' flushed positions by the same rule: with `flush=async` it comes later than
the commit, and entries up to it survive even a power cut of all voters.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise

from qmq.errors import InvalidArgument, NoQuorum, ProtocolViolation, Unavailable
from qmq_replication.history import EpochRun, History, divergence
from qmq_replication.membership import ReplicaMembership
from qmq_replication.ready import (
    Ack,
    Append,
    LogReset,
    MembershipChange,
    Mismatch,
    Place,
    ReplicaState,
    TakeOver,
)


class PeerProgress:
    """The progress of one peer. It holds the entries up to `match` durably, and those up to
    `flushed` even after a power cut. The master sends the entries from `next` on, which lies at
    `place`."""

    __slots__ = (
        "flushed",
        "goal",
        "has_answered",
        "heard_ms",
        "inflight",
        "inflight_bytes",
        "is_in_step",
        "match",
        "next",
        "place",
        "round",
    )

    def __init__(self, now_ms: int, round: int = 0) -> None:
        self.match = self.flushed = 0
        self.goal = 0
        """A learner becomes a voter when it stores entries up to this index."""
        self.next = 0
        self.place: Place = None
        self.is_in_step = False
        self.round = round
        self.heard_ms = now_ms
        """The time of the last answer; before the first one,
        the time since which there could be one.
        """
        self.has_answered = False
        self.inflight: deque[tuple[int, int]] = deque()
        self.inflight_bytes = 0

    def note_answer(self, now_ms: int) -> None:
        """Note an answer."""
        self.heard_ms, self.has_answered = now_ms, True

    def stream_from(self, index: int, place: Place) -> None:
        """Send entries from after `index`, at `place`."""
        self.is_in_step = True
        self.next, self.place = index + 1, place
        self.clear()

    def clear(self) -> None:
        """Forget the entries in flight."""
        self.inflight.clear()
        self.inflight_bytes = 0

    def free(self, index: int) -> None:
        """Remove the entries up to `index` from those in flight: they have arrived."""
        while self.inflight and self.inflight[0][0] <= index:
            self.inflight_bytes -= self.inflight.popleft()[1]


class Leader:
    """The state that a replica has only while it is master."""

    def __init__(self, state: ReplicaState, *, step_down: Callable[[], None]) -> None:
        self.state = state
        self._step_down = step_down
        self.epoch = state.promised
        self.barrier = state.history.last_index + 1
        """The index of this epoch's first entry. When it is committed, all earlier entries are
        committed, and serving begins.
        """
        self.peers: dict[str, PeerProgress] = {}
        self._next_rounds: dict[str, int] = {}
        """The rounds of replicas that left:
        if they come back, their earlier messages do not count.
        """
        self.change: ReplicaMembership | None = None
        self.transfer_to = ""
        self.flushed = 0
        """Entries up to this index are committed, and flushed on a majority of the voters."""
        self.flush_wanted = 0
        """Requests wait for a flush of the entries up to this index."""
        self._changed_at = 0
        self._beat_ms = state.now_ms
        self._update_peers()

    def _update_peers(self) -> None:
        """Keep a PeerProgress for exactly the current peers."""
        members = [*self.state.membership.replicas, *(self.change.replicas if self.change else ())]
        for name in members:
            if name != self.state.name and name not in self.peers:
                self.peers[name] = PeerProgress(self.state.now_ms, self._next_rounds.pop(name, 0))
        for name in [each for each in self.peers if each not in members]:
            self._next_rounds[name] = self.peers.pop(name).round + 1

    @property
    def is_serving(self) -> bool:
        """True if this epoch's first entry is committed."""
        return self.state.commit >= self.barrier

    # --- time -------------------------------------------------------------------------------------

    @property
    def due_ms(self) -> int:
        """When the driver must call `tick` next."""
        return self._beat_ms + self.state.timing.heartbeat_ms

    def tick(self) -> None:
        """Send heartbeats; step down if a majority is silent; make learners voters."""
        state = self.state
        if not self.has_quorum():
            self._step_down()
            return
        if state.now_ms - self._beat_ms >= state.timing.heartbeat_ms:
            self._beat_ms = state.now_ms
            for name, peer in self.peers.items():
                self._beat(name, peer)
            self._hand_over()
        self._promote()

    def _beat(self, name: str, peer: PeerProgress) -> None:
        history = self.state.history
        if peer.is_in_step and peer.next - 1 < history.start_index:
            self._reset(name, peer)
        else:
            self._send(name, peer, peer.next - 1 if peer.is_in_step else history.last_index)

    def has_quorum(self) -> bool:
        """True if a majority answered recently."""
        state = self.state
        since_ms = state.now_ms - state.timing.quorum_ms
        heard = [name for name, peer in self.peers.items() if peer.heard_ms >= since_ms]
        return state.membership.is_majority([state.name, *heard])

    # --- sending ----------------------------------------------------------------------------------

    def appended(self, last_index: int) -> None:
        """The master's own log has entries of this epoch up to `last_index`."""
        history = self.state.history
        history.extend((EpochRun(self.epoch, history.last_index + 1),), last_index)
        for name, peer in self.peers.items():
            if peer.is_in_step:
                self._stream(name, peer)
            elif last_index == self.barrier:
                # the first message as master: get in step now, not at the next heartbeat
                self._beat(name, peer)

    def _send(self, name: str, peer: PeerProgress, index: int, *, cut: bool = False) -> None:
        """Send an Append without entries behind `index`."""
        epoch = self.state.history.epoch_at(index)
        if epoch is not None:
            message = Append(
                self.epoch,
                peer.round,
                epoch,
                index,
                (),
                index,
                self.state.commit,
                cut,
                None,
                self.flush_wanted,
            )
            self.state.send(name, message)

    def _stream(self, name: str, peer: PeerProgress) -> None:
        """Send entries while there are some and the peer may have more in flight."""
        state = self.state
        history, timing = state.history, state.timing
        while peer.next <= history.last_index and peer.inflight_bytes < timing.inflight_bytes_max:
            after = peer.next - 1
            epoch = history.epoch_at(after)
            chunk = (
                state.log.read(peer.place, after, timing.chunk_bytes_max)
                if epoch is not None
                else None
            )
            if chunk is None or epoch is None:
                self._reset(name, peer)
                return
            if chunk.last_index == after:
                return
            runs = history.between(after, chunk.last_index)
            state.send(
                name,
                Append(
                    self.epoch,
                    peer.round,
                    epoch,
                    after,
                    runs,
                    chunk.last_index,
                    state.commit,
                    False,
                    chunk.payload,
                    self.flush_wanted,
                ),
            )
            peer.next, peer.place = chunk.last_index + 1, chunk.place
            peer.inflight.append((chunk.last_index, chunk.bytes))
            peer.inflight_bytes += chunk.bytes

    def _reset(self, name: str, peer: PeerProgress) -> None:
        """Send a Reset to a peer whose missing entries are deleted here: its log starts over at the
        oldest kept entry.
        """
        start_epoch, start_index, place = self.state.log.start()
        peer.round += 1
        peer.is_in_step = False
        peer.clear()
        until = self.state.history.last_index
        self.state.send(
            name, LogReset(self.epoch, peer.round, start_epoch, start_index, place, until)
        )

    # --- what peers answer ------------------------------------------------------------------------

    def acknowledged(self, sender: str, ack: Ack) -> None:
        """Handle an Ack: the peer is in step, and reports what it stores."""
        peer = self.peers.get(sender)
        if peer is None or ack.epoch != self.epoch:
            return
        peer.note_answer(self.state.now_ms)
        if ack.round != peer.round:
            return  # sent before the peer lost its place, and may report entries that it lost, too
        last = self.state.history.last_index
        if not 0 <= ack.stored <= ack.last_index <= last:
            raise ProtocolViolation(
                f"{sender} acknowledges {ack.stored} of {ack.last_index} entries, but there "
                f"are only {last}"
            )
        if not peer.is_in_step:
            peer.stream_from(ack.last_index, ack.place)
        peer.free(ack.stored)
        if ack.stored > peer.match:
            peer.match = ack.stored
            self.advance()
            self._hand_over()
        if ack.flushed > peer.flushed:
            peer.flushed = ack.flushed
            self.advance_flushed()
        if peer.is_in_step:
            self._stream(sender, peer)

    def mismatched(self, sender: str, mismatch: Mismatch) -> None:
        """Handle a Mismatch: the peer's log does not continue at the assumed entry."""
        peer = self.peers.get(sender)
        if peer is None or mismatch.epoch != self.epoch:
            return
        peer.note_answer(self.state.now_ms)
        if mismatch.round != peer.round:
            return
        if not is_possible_log(mismatch):
            raise ProtocolViolation(
                f"{sender} describes an impossible log: {mismatch.runs[:3]} up to "
                f"{mismatch.last_index}"
            )
        peer.round += 1
        peer.match, peer.flushed = (
            min(peer.match, mismatch.last_index),
            min(peer.flushed, mismatch.last_index),
        )
        peer.is_in_step = False
        peer.clear()
        theirs = History(
            mismatch.runs, mismatch.last_index, mismatch.start_index, mismatch.start_epoch
        )
        index = divergence(self.state.history, theirs)
        if index is None:
            self._reset(sender, peer)
        elif index < mismatch.last_index:
            self._send(sender, peer, index, cut=True)
        else:
            peer.stream_from(index, mismatch.place)
            self._send(sender, peer, index)
            self._stream(sender, peer)

    # --- committing -------------------------------------------------------------------------------

    def advance(self) -> None:
        """Commit the entries that a majority stores."""
        index = self.quorum_index()
        if index > self.state.commit and self.may_commit(index):
            self.state.commit_to(index)
            self.advance_flushed()

    def advance_flushed(self) -> None:
        """Advance `flushed` to the index that a majority has flushed. Like a commit, it must reach
        an entry of our own epoch: otherwise a log of an epoch in between could win after a power
        cut of all voters."""
        held = {name: peer.flushed for name, peer in self.peers.items()}
        held[self.state.name] = self.state.flushed_index
        index = min(self._of_majority(held), self.state.commit)
        if index > self.flushed and self.may_commit(index):
            self.flushed = index
            self.state.flushed_to(index)

    def want_flush(self, index: int) -> None:
        """A request waits until everything up to `index` is flushed.
        Peers learn it with the next message.
        """
        self.flush_wanted = max(self.flush_wanted, index)

    def quorum_index(self) -> int:
        """The index that a majority stores;
        during a change, a majority of the old and of the new members.
        """
        held = {name: peer.match for name, peer in self.peers.items()}
        held[self.state.name] = self.state.stored_index
        return self._of_majority(held)

    def _of_majority(self, held: dict[str, int]) -> int:
        index = self.state.membership.quorum_index(held)
        return index if self.change is None else min(index, self.change.quorum_index(held))

    def may_commit(self, index: int) -> bool:
        """True if the entry is of this master's epoch: only such an entry commits."""
        return self.state.history.epoch_at(index) == self.epoch

    # --- membership -------------------------------------------------------------------------------

    def propose(self, after: ReplicaMembership, now_ms: int) -> None:
        """Change the membership. Raises Unavailable while another change is not finished,
        InvalidArgument for ourselves, NoQuorum if no majority of the new voters answers: then
        nothing could be committed any more, nor could the change be undone.
        """
        before = self.state.membership
        self.state.now_ms = now_ms
        if self.state.name not in after.voters:
            raise InvalidArgument(f"{self.state.name!r} is the master: transfer mastership first")
        if not self.may_change():
            raise Unavailable("a change of the group's membership is under way: try again")
        self._require_majority(after)
        self.change = after
        self._update_peers()
        self.state.request(MembershipChange(self.epoch, before, after))

    def _require_majority(self, after: ReplicaMembership) -> None:
        """Raise NoQuorum if the voters change, and no majority of the new ones has answered within
        the time after which slaves suspect a master.
        """
        since_ms = self.state.now_ms - self.state.timing.suspect_ms
        if after.voters != self.state.membership.voters:
            answering = [
                name
                for name, peer in self.peers.items()
                if peer.has_answered and peer.heard_ms >= since_ms
            ]
            after.require_majority([self.state.name, *answering])

    def may_change(self) -> bool:
        """True if no change is under way and a majority of the present voters holds all committed
        entries (dissertation, section 4.1).
        """
        return self.change is None and self.is_serving and self.quorum_index() >= self._changed_at

    def changed(self, membership: ReplicaMembership | None) -> None:
        """Handle the store's answer: the new membership,
        or None if the store did not make the change.
        """
        self.change = None
        if membership is not None:
            self._changed_at = self.state.commit
            self.state.membership = membership
        self._update_peers()
        self.advance()

    def _promote(self) -> None:
        """Make a learner a voter when it stores the entries committed at its first check: under
        load a learner always lags a little.
        """
        for name in self.state.membership.learners:
            peer = self.peers.get(name)
            if peer is None or not peer.is_in_step:
                continue
            peer.goal = peer.goal or self.state.commit
            if peer.match >= peer.goal and self.may_change():
                with suppress(NoQuorum):  # at a later tick, when more voters answer
                    self.propose(self.state.membership.with_voter(name), self.state.now_ms)
                return

    # --- handing over -----------------------------------------------------------------------------

    def transfer(self, to: str) -> None:
        """Hand the mastership to `to` when that replica stores all entries. The caller appends
        nothing until then. Raises InvalidArgument.
        """
        others = (
            ", ".join(each for each in self.state.membership.voters if each != self.state.name)
            or "none"
        )
        if to == self.state.name:
            raise InvalidArgument(
                f"{to} is the master already; the voters that can take over are: {others}"
            )
        if to not in self.state.membership.voters:
            raise InvalidArgument(
                f"{to!r} is no voter of this group; the voters that can take over are: {others}"
            )
        self.transfer_to = to
        self._hand_over()

    def _hand_over(self) -> None:
        peer = self.peers.get(self.transfer_to)
        if peer is not None and peer.match == self.state.history.last_index:
            self.state.send(self.transfer_to, TakeOver(self.epoch))


def is_possible_log(log: Mismatch) -> bool:
    """True if a log can have this shape. The oldest run may begin before the log's start."""
    if not 0 <= log.start_index <= log.last_index:
        return False
    ascend = all(
        left.epoch < right.epoch and left.first < right.first for left, right in pairwise(log.runs)
    )
    return ascend and (
        not log.runs or (log.runs[0].first >= 0 and log.runs[-1].first <= log.last_index)
    )
