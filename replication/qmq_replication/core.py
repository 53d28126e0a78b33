"""One replica of a broker group: the pure core. It takes messages, ticks and news, and returns what
to do next in a `Ready`.

    role          on                                          becomes
    slave         silence of the master, or a TakeOver        polling (after a TakeOver:
                                                              campaigning)
    polling       a majority hears no master, none is ahead   campaigning
    polling       anything else                               slave
    campaigning   the coordination store gives an epoch       fencing
    campaigning   the coordination store gives none           slave
    fencing       promises of a majority, none is ahead       master
    fencing       a replica is ahead, or time is up           slave; a replica that is ahead is
                                                              asked to take over
    any           a higher epoch                              slave

Its rules (docs/REPLICATION.md proves them):
* It never accepts anything older than its highest promised epoch; the promise is on disk before it
  is sent.
* It continues its log only where it matches (epoch, index). It cuts the log only after the last
  match with the master of the highest epoch, and never below a committed index. While a slave is
  `in_step`, its whole log is a prefix of the master's.
* An Ack reports only entries that are stored as durably as the flush policy requires.
* The commit position never goes back.
* It accepts a message only if the peer belongs to the group and the coordination store can have
  given the message's epoch by now. A message that no replica would send is refused
  (ProtocolViolation) before it has any effect: it ends the peer's link, never this process.

This file has the slave's side, and passes each call to the role that it concerns; `ready.py` has
the state that all roles need, `leader.py` the master's side, `election.py` the way from slave to
master.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, Final

from qmq.errors import ProtocolViolation
from qmq_replication.election import Election
from qmq_replication.history import History, follow_each_other
from qmq_replication.leader import Leader
from qmq_replication.membership import ReplicaMembership
from qmq_replication.ready import (
    EPOCH_MAX,
    Ack,
    Append,
    LogReset,
    LookUp,
    Message,
    Mismatch,
    Probe,
    ProbeReply,
    Promise,
    PromiseRequest,
    Ready,
    Refusal,
    ReplicaState,
    Role,
    TakeOver,
)

HISTORY_RUNS_MAX: Final = 200
"""A Mismatch contains this many runs. Older runs matter only if so many masters followed each other
without reaching this replica.
"""
EPOCH_SLACK: Final = 16
"""A replica accepts an epoch up to this far above the store's last answer. It asks the store first
about a higher epoch.
"""

UNKNOWN_EPOCH: Final = -1
"""No log agrees with one that begins in this epoch, not even an empty one, so a master answers with
a Reset.
"""

EXCUSES_MAX: Final = 3
"""A late slave waits this many times in a row for the master again. A machine that is always late
must suspect the master eventually.
"""


class Replica:
    """One replica of a broker group. All times are milliseconds of one monotonic clock."""

    def __init__(
        self,
        state: ReplicaState,
        *,
        random: Random,
        asks_reset: bool = False,
    ) -> None:
        """`asks_reset`: while the log is empty,
        ask a master where its log begins before it sends entries.
        """
        self.state = state
        self.random = random
        self.flush_wanted = 0
        """The master of the promised epoch waits for a report that entries up to this
        index are flushed.
        """
        self._asks_reset = asks_reset
        self.in_step = False
        self.master = ""
        """The master in the highest promised epoch, as far as known."""
        self.heard_ms = state.now_ms
        self.is_master_lost = True
        self.suspect_at_ms = 0
        self.master_commit = 0
        self.round = 0
        """The last attempt of the master to get in step with us that we know of. Our
        acknowledgements belong to this attempt.
        """
        self.known_epoch = self.state.promised if self.state.promised <= EPOCH_MAX else 0
        """The coordination store has given this epoch, or a higher one."""
        self.refused_epoch = 0
        """The highest epoch that a peer promised when it refused us. The next epoch that we win
        must be higher.
        """
        self.fork = ""
        """Not empty while the master lacks entries that this replica knows to be committed: what is
        missing where. The replica does not follow that master.
        """
        self.strangers_heard = 0
        """The number of messages ignored because the sender is no member, or because the store
        cannot have given their epoch.
        """
        self._look_up_again_ms = state.now_ms
        self._excuses = 0
        self.election = Election(
            self.state, fence=self.fence, lead=self.lead, become_slave=self.become_slave
        )
        self.leader: Leader | None = None
        self.expect_master()

    # --- calls of the driver ----------------------------------------------------------------------

    @property
    def due_ms(self) -> int:
        """When the driver must call `tick` next, unless another call comes before.
        More calls are harmless.
        """
        if self.leader is not None:
            return self.leader.due_ms
        if self.state.role is not Role.SLAVE:
            return self.election.due_ms
        return (
            self.suspect_at_ms
            if self._may_poll()
            else self.state.now_ms + self.state.timing.suspect_ms
        )

    def _may_poll(self) -> bool:
        return self.state.name in self.state.membership.voters and not self.state.resetting_until

    def take(self) -> Ready:
        """Take the work to be done now; each item is returned once."""
        ready, self.state.ready = self.state.ready, Ready()
        return ready

    def tick(self, now_ms: int, late_ms: int = 0) -> None:
        """Time has passed. `late_ms` is the delay of this call:
        the process did not get to run in time.
        """
        self.state.now_ms = now_ms
        if self.state.promised > EPOCH_MAX:
            self._look_up()
        if late_ms > self.state.timing.late_ms and self._excuses < EXCUSES_MAX:
            self._excuses += 1
            self._wait_longer()
        if self.leader is not None:
            self.leader.tick()
        elif self.state.role is not Role.SLAVE:
            self.election.tick()
        elif now_ms >= self.suspect_at_ms and self._may_poll():
            self.election.poll()

    def step(self, now_ms: int, sender: str, message: Message) -> None:
        """Handle a peer's message. Raises ProtocolViolation, without any change, for a message that
        no replica of the group would send.
        """
        self.state.now_ms = now_ms
        if not self._belongs(sender) or (
            isinstance(message, _ORDERS) and not self._can_be_given(message.epoch)
        ):
            self.strangers_heard += 1
            self._look_up()
            return
        _STEPS[type(message)](self, sender, message)

    @property
    def members(self) -> tuple[str, ...]:
        """The members of the group: as the store has them, or as we have them if we are master."""
        change = self.leader.change if self.leader is not None else None
        return (
            self.state.membership.replicas
            if change is None
            else (*self.state.membership.replicas, *change.replicas)
        )

    def _belongs(self, sender: str) -> bool:
        return sender != self.state.name and sender in self.members

    def _can_be_given(self, epoch: int) -> bool:
        """True if the store can have given the epoch to a replica."""
        return epoch <= self.known_epoch + EPOCH_SLACK

    def _look_up(self) -> None:
        """Request a look-up of the group's epoch and members in the store,
        at most once in a while.
        """
        if self.state.now_ms >= self._look_up_again_ms:
            self._look_up_again_ms = self.state.now_ms + self.state.timing.poll_ms
            self.state.request(LookUp())

    def on_lookup(
        self, now_ms: int, epoch: int, membership: ReplicaMembership | None = None
    ) -> None:
        """The coordination store has `epoch` as the highest epoch, and this membership.

        A promise beyond EPOCH_MAX is dropped: an older release accepted it from a peer outside the
        group.
        """
        self.state.now_ms = now_ms
        self.known_epoch = max(self.known_epoch, epoch)
        if membership is not None:
            self.membership_is(membership)
        if self.state.promised > EPOCH_MAX >= epoch:
            self.become_slave()
            self.promise(max(epoch, self.state.history.last_epoch))
            self.master, self.is_master_lost = "", True

    def withhold_vote(self) -> None:
        """Count in no election until `vouch` or `doubt` says whether the replica's
        folder is its latest.
        """
        self.state.is_verified = False

    def vouch(self) -> None:
        """The replica's folder is its latest."""
        self.state.is_verified = True

    def doubt(self, now_ms: int, epoch: int) -> None:
        """The replica's folder is an older copy: it may lack entries that this replica
        acknowledged. Its lost promises were to epochs up to `epoch`, the store's highest.
        """
        self.state.now_ms = now_ms
        self.known_epoch = max(self.known_epoch, epoch)
        self.become_slave()
        self.state.is_verified, self.state.is_whole = True, False
        if epoch > self.state.promised:
            self.master, self.is_master_lost = "", True
        self.promise(max(self.state.promised, epoch))

    def stored(self, index: int) -> None:
        """Entries up to `index` are as durable as the flush policy requires."""
        self.state.stored_index = max(
            self.state.stored_index, min(index, self.state.history.last_index)
        )
        if self.leader is not None:
            self.leader.advance()
        elif self.in_step:
            self._become_whole()
            self._acknowledge()

    def flushed(self, index: int) -> None:
        """Everything up to `index` survives a power cut here. A slave reports this immediately if
        the master waits for it, otherwise with its next Ack.
        """
        before = self.state.flushed_index
        self.state.flushed_index = max(before, min(index, self.state.history.last_index))
        if self.leader is not None:
            self.leader.advance_flushed()
        elif self.in_step and before < self.flush_wanted and before < self.state.flushed_index:
            self._acknowledge()

    def disconnected(self, now_ms: int, peer: str) -> None:
        """The connection to a peer has ended: if it was the master, it may be dead."""
        self.state.now_ms = now_ms
        if peer == self.master and self.state.role is Role.SLAVE:
            self.is_master_lost = True
            self._suspect_within(self.state.timing.lost_ms)

    def master_gone(self, now_ms: int) -> None:
        """The coordination store knows no master. A slave that still hears its master ignores this:
        the master will set its key again.
        """
        self.state.now_ms = now_ms
        if (
            self.state.role is Role.SLAVE
            and now_ms - self.heard_ms > 2 * self.state.timing.heartbeat_ms
        ):
            self._suspect_within(self.state.timing.lost_ms)

    def membership_is(self, membership: ReplicaMembership) -> None:
        """The coordination store has this membership. A master ignores it:
        it knows its own changes better.
        """
        self.state.is_store_older = membership.version < self.state.membership.version
        if membership.version > self.state.membership.version and self.leader is None:
            self.state.membership = membership

    def campaign_won(self, now_ms: int, epoch: int, membership: ReplicaMembership) -> None:
        """The coordination store gave us `epoch`, under this membership."""
        self.state.now_ms = now_ms
        self.known_epoch = max(self.known_epoch, epoch)
        self.election.won(epoch, membership)

    def campaign_lost(self, now_ms: int) -> None:
        self.state.now_ms = now_ms
        if self.state.role is Role.CAMPAIGNING:
            self.become_slave(self.state.timing.suspect_ms // 2)

    def superseded(self, now_ms: int, epoch: int) -> None:
        """The coordination store has a higher epoch than the one we lead in."""
        self.state.now_ms = now_ms
        self.known_epoch = max(self.known_epoch, epoch)
        if self.leader is not None and epoch > self.leader.epoch:
            self.become_slave()

    # --- state that must survive ------------------------------------------------------------------

    def promise(self, epoch: int) -> None:
        """Accept nothing older than `epoch` from now on."""
        self.state.promised = epoch
        self.in_step = False
        self.master_commit = self.round = self.flush_wanted = 0
        self.state.save()

    # --- roles ------------------------------------------------------------------------------------

    def become_slave(self, patience_ms: int | None = None) -> None:
        """Become a slave and wait for a master for the given time."""
        self.leader = None
        if self.master == self.state.name:
            self.master, self.is_master_lost = "", True
        if self.state.role is not Role.SLAVE:
            self.state.become(Role.SLAVE)
        self.expect_master(patience_ms)

    def fence(self, epoch: int, membership: ReplicaMembership) -> None:
        """The coordination store gave us `epoch` under `membership`: promise it, and have the
        others promise it.
        """
        self.state.membership = membership
        self.promise(epoch)
        self.master = self.state.name
        self.state.become(Role.FENCING)

    def lead(self) -> None:
        """Become master: a majority has promised and no peer is ahead, so this log has all
        committed entries.
        """
        if not self.state.is_whole:
            self.state.is_whole = True
            self.state.save()
        self.master, self.fork = self.state.name, ""
        self.state.become(Role.MASTER)
        self.leader = Leader(self.state, step_down=self.become_slave)
        self.state.ready.lead = self.state.promised

    def expect_master(self, patience_ms: int | None = None) -> None:
        """Give the master `patience_ms` to send."""
        patience = self.state.timing.suspect_ms if patience_ms is None else patience_ms
        self.suspect_at_ms = (
            self.state.now_ms + patience + int(self.random.random() * patience * 0.3)
        )

    def _wait_longer(self) -> None:
        """This process was late: messages of the master may be unread, so it gets its full time
        once more.
        """
        if self.state.role is Role.SLAVE and not self.is_master_lost:
            self.expect_master()

    def _suspect_within(self, ms: int) -> None:
        self.suspect_at_ms = min(
            self.suspect_at_ms, self.state.now_ms + int(ms * (0.7 + 0.6 * self.random.random()))
        )

    def hears_master(self) -> bool:
        """True if there is no reason to campaign: we lead a quorum, we are fencing, or the master
        sent a message lately.
        """
        if self.leader is not None:
            return self.leader.has_quorum()
        if self.state.role is Role.FENCING:
            return True
        return (
            bool(self.master)
            and not self.is_master_lost
            and self.state.now_ms - self.heard_ms < self.state.timing.suspect_ms
        )

    # --- asked by peers ---------------------------------------------------------------------------

    def _on_probe(self, sender: str, _: Probe) -> None:
        reply = ProbeReply(
            self.state.promised,
            self.master,
            self.hears_master(),
            *self.state.history.last,
            self.state.may_count,
        )
        self.state.send(sender, reply)

    def _on_promise_request(self, sender: str, request: PromiseRequest) -> None:
        if request.epoch < self.state.promised:
            self.state.send(sender, Refusal(self.state.promised))
            return
        if request.epoch > self.state.promised:
            self.become_slave()
            self.promise(request.epoch)
            self.master, self.is_master_lost, self.heard_ms = sender, False, self.state.now_ms
        self.state.send(
            sender, Promise(request.epoch, *self.state.history.last, self.state.may_count)
        )

    def _on_take_over(self, _: str, message: TakeOver) -> None:
        if (
            message.epoch >= self.state.promised
            and self.state.role in (Role.SLAVE, Role.POLLING)
            and self.state.may_count
        ):
            self.election.campaign()

    def _on_refusal(self, _: str, message: Refusal) -> None:
        if self.state.promised < message.epoch <= EPOCH_MAX and self.state.role in (
            Role.MASTER,
            Role.FENCING,
        ):
            self.refused_epoch = max(self.refused_epoch, message.epoch)
            self.become_slave()

    # --- the slave's side -------------------------------------------------------------------------

    def _accept_master(self, sender: str, epoch: int) -> bool:
        """True if the replica follows the master of `epoch`. Raises ProtocolViolation if that epoch
        is ours, or another replica's.
        """
        if epoch < self.state.promised:
            self.state.send(sender, Refusal(self.state.promised))
            return False
        if (
            epoch == self.state.promised
            and self.state.role in (Role.MASTER, Role.FENCING)
            and sender != self.state.name
        ):
            raise ProtocolViolation(
                f"{sender} claims to lead in epoch {epoch}, which is {self.state.name}'s"
            )
        if epoch == self.state.promised and self.master not in ("", sender, self.state.name):
            raise ProtocolViolation(
                f"{sender} claims to lead in epoch {epoch}, which is {self.master}'s"
            )
        if epoch > self.state.promised:
            self.become_slave()
            self.promise(epoch)
        elif self.state.role is not Role.SLAVE:
            self.become_slave()
        self.master, self.is_master_lost, self.heard_ms = sender, False, self.state.now_ms
        self._excuses = 0
        self.expect_master()
        return True

    def _on_append(self, sender: str, message: Append) -> None:
        epochs = message.prev_epoch, message.epoch
        if not follow_each_other(
            message.runs, after=message.prev_index, last=message.last_index, epochs=epochs
        ):
            raise ProtocolViolation(
                f"{sender} sends entries {message.prev_index + 1} to {message.last_index} "
                "that cannot follow each other in a log"
            )
        if not self._accept_master(sender, message.epoch) or not self.continues(message):
            return
        if message.last_index > self.state.history.last_index:
            self.state.history.extend(message.runs, message.last_index)
            self.state.ready.append.append(message)
        self.master_commit = max(self.master_commit, message.commit)
        self.state.commit_to(min(message.commit, self.state.history.last_index))
        self._want_flush(min(message.flush_wanted, self.state.history.last_index))
        if message.last_index == message.prev_index:
            self._become_whole()
            self._acknowledge()

    def _want_flush(self, index: int) -> None:
        self.flush_wanted = max(self.flush_wanted, index)
        if self.state.flushed_index < self.flush_wanted:
            self.state.ready.flush = self.flush_wanted

    def continues(self, message: Append) -> bool:
        """True if our log continues, or continued, with this message.
        Sends the answer otherwise.
        """
        last = self.state.history.last_index
        self.round = max(self.round, message.round)
        if self.in_step:
            if message.prev_index == last:
                return True
            if message.last_index <= last:
                self._acknowledge()
                return False
        elif self.state.history.epoch_at(message.prev_index) == message.prev_epoch and (
            message.cut or message.prev_index == last
        ):
            if message.prev_index < last:
                self.truncate(message.prev_index)
            self.in_step, self.fork = True, ""
            return True
        self._mismatch(message.round)
        return False

    def truncate(self, index: int) -> None:
        """Cut the uncommitted entries after `index`.
        Raises ProtocolViolation if one of them is committed.
        """
        self._require_committed_after(index)
        self.state.history.truncate(index)
        self.state.stored_index = min(self.state.stored_index, index)
        self.state.flushed_index, self.flush_wanted = (
            min(self.state.flushed_index, index),
            min(self.flush_wanted, index),
        )
        self.state.ready.truncate = index

    def _require_committed_after(self, index: int) -> None:
        """Raise ProtocolViolation if a master wants to replace committed entries after `index`, and
        remember that.
        """
        if index < self.state.commit:
            self.fork = (
                f"knows that the entries up to {self.state.commit} are committed, "
                f"and the master {self.master} of epoch {self.state.promised} has other entries, "
                f"or none, after {index}: acknowledged messages are missing there"
            )
            raise ProtocolViolation(
                f"{self.state.name} {self.fork}. It keeps its entries and does not follow"
            )

    def _on_reset(self, sender: str, message: LogReset) -> None:
        if not self._accept_master(sender, message.epoch):
            return
        # A log that is empty after its start is in step with any log there; only the Reset says
        # where the master's files continue.
        holds_nothing = (
            message.start_index == self.state.history.last_index == self.state.history.start_index
        )
        if (
            self.in_step
            and message.start_index <= self.state.history.last_index
            and not holds_nothing
        ):
            return
        self._require_committed_after(message.start_index)
        self.state.history = History(
            (), message.start_index, message.start_index, message.start_epoch
        )
        self.state.stored_index = self.state.commit = self.state.flushed_index = message.start_index
        self.state.is_whole, self.state.resetting_until, self._asks_reset = (
            False,
            message.until_index,
            False,
        )
        self.in_step, self.round = True, max(self.round, message.round)
        self.state.save()
        self.state.ready.reset = message
        self._acknowledge()

    def lacks_until(self, index: int) -> None:
        """Record that the log, which starts over, lacks entries up to `index`. The replica is not
        whole until it has them.
        """
        if self.state.resetting_until < index:
            self.state.resetting_until = index
            self.state.save()

    def _acknowledge(self) -> None:
        last = self.state.history.last_index
        ack = Ack(
            self.state.promised,
            self.round,
            self.state.stored_index,
            last,
            self.state.log.place(),
            min(self.state.flushed_index, last),
        )
        self.state.send(self.master, ack)

    def _mismatch(self, round: int) -> None:
        tail = self.state.history.tail(HISTORY_RUNS_MAX)
        epoch = UNKNOWN_EPOCH if self._asks_reset and tail.last_index == 0 else tail.start_epoch
        self.state.send(
            self.master,
            Mismatch(
                self.state.promised,
                round,
                tail.last_index,
                tail.start_index,
                epoch,
                tuple(tail.runs),
                self.state.log.place(),
            ),
        )

    def _become_whole(self) -> None:
        """Become whole: with all entries that the master of this epoch has committed, we lack no
        entry that we ever acknowledged.
        """
        if (self.state.is_whole and not self.state.resetting_until) or not self.master_commit:
            return
        held = self.state.stored_index
        if (
            held >= max(self.master_commit, self.state.resetting_until)
            and self.state.history.epoch_at(self.master_commit) == self.state.promised
        ):
            self.state.is_whole, self.state.resetting_until = True, 0
            self.state.save()

    # --- to the other roles -----------------------------------------------------------------------

    def _on_probe_reply(self, sender: str, reply: ProbeReply) -> None:
        self.election.replied(sender, reply)

    def _on_promise(self, sender: str, promise: Promise) -> None:
        self.election.promised(sender, promise)

    def _on_ack(self, sender: str, ack: Ack) -> None:
        if self.leader is not None:
            self.leader.acknowledged(sender, ack)

    def _on_mismatch(self, sender: str, mismatch: Mismatch) -> None:
        if self.leader is not None:
            self.leader.mismatched(sender, mismatch)


_ORDERS: Final = (PromiseRequest, Append, LogReset, TakeOver)
"""Messages that only the winner of an epoch sends."""

_STEPS: Final[dict[type, Callable[[Replica, str, Any], None]]] = {
    Probe: Replica._on_probe,
    ProbeReply: Replica._on_probe_reply,
    PromiseRequest: Replica._on_promise_request,
    Promise: Replica._on_promise,
    Append: Replica._on_append,
    Ack: Replica._on_ack,
    Mismatch: Replica._on_mismatch,
    LogReset: Replica._on_reset,
    Refusal: Replica._on_refusal,
    TakeOver: Replica._on_take_over,
}
