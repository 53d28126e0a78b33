"""The way to mastership: poll the others, win an epoch in the coordination store, fence the others
with promises of a majority. Pure.

The poll is Raft's pre-vote (Ongaro's dissertation, section 9.6): it prevents a replica that is cut
off, or behind, from disturbing a healthy group. The epoch comes from the coordination store, by
compare-and-swap, so it has one owner. Promises make it safe: a majority accepts nothing older any
more, and since every committed entry is on a majority, one of the promising replicas has it. If any
of them is ahead of this replica, this replica hands the mastership to that one (Raft, section
5.4.1).

A replica that may have lost acknowledged entries (it is not *whole*: a power cut without flushing,
or a new disk) does not count towards a majority. The election then needs a majority of whole
replicas, or all replicas, of which the most advanced leads. The poll counts as the promises will be
counted: who cannot be fenced does not campaign, so a group that cannot elect a master has none in
the coordination store, and everybody can see it.
"""

from __future__ import annotations

from collections.abc import Callable

from qmq_replication.membership import ReplicaMembership
from qmq_replication.ready import (
    Campaign,
    Probe,
    ProbeReply,
    Promise,
    PromiseRequest,
    ReplicaState,
    Resign,
    Role,
    TakeOver,
)


class Election:
    """The attempts of one replica to become master."""

    def __init__(
        self,
        state: ReplicaState,
        *,
        fence: Callable[[int, ReplicaMembership], None],
        lead: Callable[[], None],
        become_slave: Callable[..., None],
    ) -> None:
        """`fence` promises an epoch that was won, `lead` begins to lead in it, `become_slave` waits
        for a master, for the given number of milliseconds.
        """
        self._state = state
        self._fence, self._lead, self._become_slave = fence, lead, become_slave
        self._replies: dict[str, ProbeReply] = {}
        self._promises: dict[str, Promise] = {}
        self._deadline_ms = 0
        self._ask_again_ms = 0

    def tick(self) -> None:
        """Time has passed during a poll or fencing."""
        state = self._state
        if state.role is Role.POLLING and state.now_ms >= self._deadline_ms:
            self._evaluate()
        elif state.role is Role.FENCING:
            if state.now_ms >= self._deadline_ms:
                self._give_up()
            elif state.now_ms >= self._ask_again_ms:
                self._ask_promises()

    @property
    def due_ms(self) -> int:
        """When the driver must call `tick` next."""
        state = self._state
        if state.role is Role.CAMPAIGNING:
            return state.now_ms + state.timing.suspect_ms
        return (
            self._deadline_ms
            if state.role is Role.POLLING
            else min(self._deadline_ms, self._ask_again_ms)
        )

    # --- asking around ----------------------------------------------------------------------------

    def poll(self) -> None:
        """Send a Probe to the other voters."""
        state = self._state
        self._replies = {}
        self._deadline_ms = state.now_ms + state.timing.poll_ms
        state.become(Role.POLLING)
        for name in state.membership.voters:
            if name != state.name:
                state.send(name, Probe(state.promised))
        if len(state.membership.voters) == 1:
            self._evaluate()

    def replied(self, sender: str, reply: ProbeReply) -> None:
        """Handle a voter's ProbeReply."""
        state = self._state
        if state.role is not Role.POLLING:
            return
        self._replies[sender] = reply
        if self._all_replied or (
            self._is_alone() and self._could_fence() and not self._is_behind()
        ):
            self._evaluate()

    @property
    def _all_replied(self) -> bool:
        return len(self._replies) == len(self._state.membership.voters) - 1

    def _is_alone(self) -> bool:
        """True if a majority says that it hears no master. Replicas that do not answer, such as a
        dead master, do not count.
        """
        deaf = [name for name, reply in self._replies.items() if not reply.hears_master]
        return self._state.membership.is_majority([*deaf, self._state.name])

    def _could_fence(self) -> bool:
        """True if promises of those who replied would be enough."""
        if self._all_replied:
            return True
        whole = [name for name, reply in self._replies.items() if reply.is_whole]
        return self._state.membership.is_majority(
            [*whole, self._state.name] if self._state.may_count else whole
        )

    def _evaluate(self) -> None:
        state = self._state
        if state.is_store_older or not self._is_alone() or not self._could_fence():
            self._become_slave(state.timing.poll_ms * 3)
        elif self._is_behind():
            self._become_slave(state.timing.poll_ms * 2)
        else:
            self.campaign()

    def _is_behind(self) -> bool:
        """True if another voter should campaign first:
        our log is behind, or may lack acknowledged entries.
        """
        mine = self._state.history.last
        if not self._state.may_count and not self._all_replied:
            return True
        judges = [each for each in self._replies.values() if each.is_whole or self._all_replied]
        return any((each.last_epoch, each.last_index) > mine for each in judges)

    def campaign(self) -> None:
        """Ask the coordination store for an epoch."""
        self._state.become(Role.CAMPAIGNING)
        self._state.request(Campaign())

    # --- fencing ----------------------------------------------------------------------------------

    def won(self, epoch: int, membership: ReplicaMembership) -> None:
        """Ask for promises in the epoch that we won. Nothing may be written in the epoch before a
        majority has promised it.
        """
        state = self._state
        if (
            state.role is not Role.CAMPAIGNING
            or epoch <= state.promised
            or membership.version < state.membership.version
        ):
            state.request(Resign(epoch))
            if state.role is Role.CAMPAIGNING:
                self._become_slave()
            return
        self._fence(epoch, membership)
        self._deadline_ms = state.now_ms + state.timing.fence_ms
        self._promises = {state.name: Promise(epoch, *state.history.last, state.may_count)}
        self._ask_promises()
        self._decide()

    def _ask_promises(self) -> None:
        state = self._state
        self._ask_again_ms = state.now_ms + state.timing.poll_ms
        for name in state.membership.replicas:
            if name not in self._promises:
                state.send(name, PromiseRequest(state.promised))

    def promised(self, sender: str, promise: Promise) -> None:
        if self._state.role is Role.FENCING and promise.epoch == self._state.promised:
            self._promises[sender] = promise
            self._decide()

    def _decide(self) -> None:
        ahead = self.ahead()
        if ahead is not None:
            self._yield_to(ahead)
        elif self.has_quorum():
            self._lead()

    def _judges(self) -> dict[str, Promise]:
        """The promises that count: those of whole voters;
        those of all voters once all have promised.
        """
        voters = self._state.membership.voters
        found = {name: self._promises[name] for name in voters if name in self._promises}
        if len(found) == len(voters):
            return found
        return {name: promise for name, promise in found.items() if promise.is_whole}

    def has_quorum(self) -> bool:
        """True if a majority has promised."""
        return self._state.membership.is_majority(self._judges())

    def ahead(self) -> str | None:
        """The voter with the most advanced log, if that log is ahead of ours."""
        judges = {name: (each.last_epoch, each.last_index) for name, each in self._judges().items()}
        best = max(judges, key=lambda name: judges[name], default=None)
        return best if best is not None and judges[best] > self._state.history.last else None

    def _yield_to(self, name: str) -> None:
        state = self._state
        state.send(name, TakeOver(state.promised))
        state.request(Resign(state.promised))
        self._become_slave()

    def _give_up(self) -> None:
        state = self._state
        state.request(Resign(state.promised))
        self._become_slave(state.timing.suspect_ms // 2)
