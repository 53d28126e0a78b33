"""A replica's status for operators, handing over, and changes of membership."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from qmq_replication.driver import Driver
from qmq_replication.leader import Leader
from qmq_replication.replica_membership import ReplicaMembership

from qmq.broker.broker import Broker
from qmq.clock import Clock
from qmq.errors import InvalidArgument, NotMaster, Outcome, Unavailable
from qmq.model import check_name
from qmq.node import replica_repair
from qmq.node.write_hold import WriteHold
from qmq.proto.v1 import control_pb2 as pb

TRANSFER_S: Final = 2.0
CHANGE_S: Final = 10.0
_POLL_S: Final = 0.005


class ReplicaStatus:
    """See qmq.broker.group_status.GroupStatus."""

    def __init__(self, broker: Broker, driver: Driver, clock: Clock) -> None:
        self._broker = broker
        self._driver = driver
        self._clock = clock
        self._hold = WriteHold(broker, driver)
        self.older_store: Callable[[], str] = str
        """Tells what the coordination store has forgotten; empty if nothing."""

    def _leader(self) -> Leader:
        core = self._driver.core
        leader = core.leader
        if leader is None or not leader.is_serving:
            raise NotMaster(f"{self._broker.config.name} is not its group's master: ask {core.master or 'the metaserver'}")
        return leader

    # --- reading -------------------------------------------------------------------------------------------------------

    def describe(self) -> pb.ReplicaStatus:
        """The current status."""
        core, store = self._driver.core, self._broker.store
        members = core.state.membership
        return pb.ReplicaStatus(
            replica=core.state.name,
            role=core.state.role.value,
            epoch=core.state.promised,
            master=core.master,
            last_index=core.state.history.last_index,
            stored_index=core.state.stored_index(),
            commit_index=core.state.commit,
            message_position=store.messages.end,
            action_position=store.actions.end,
            is_whole=core.state.may_count,
            membership_version=members.version,
            voters=members.voters,
            learners=members.learners,
            peers=self._peers(core.leader),
            is_serving=self._broker.is_serving,
            fork=core.fork,
            older_store=self.older_store(),
        )

    def _peers(self, leader: Leader | None) -> list[pb.Peer]:
        now_ms = self._clock.monotonic_ms()
        return [
            pb.Peer(replica=name, match_index=peer.match, in_step=peer.is_in_step, silent_ms=max(now_ms - peer.heard_ms, 0))
            for name, peer in (leader.peers.items() if leader is not None else ())
        ]

    def read_log(self, log: int, position: int, bytes_max: int) -> bytes:
        """Read entries for another replica. Raises LogDamaged, InvalidArgument, Unavailable."""
        if self._driver.is_opening:
            raise Unavailable(f"{self._broker.config.name} is reopening its log: try again in a moment")
        return replica_repair.read_log(self._broker.store, log, position, bytes_max)

    # --- holding writes -----------------------------------------------------------------------------------------------

    async def hold(self, token: str, hold_ms: int) -> None:
        """Hold new requests for a time. Raises NotMaster, InvalidArgument, Unavailable."""
        await self._hold.begin(self._leader(), token, hold_ms)

    async def held_logs(self, token: str) -> pb.HeldLogs:
        """The ends of the logs; everything before them is committed. Raises NotMaster, Unavailable."""
        return await self._hold.describe(token)

    def release(self, token: str) -> None:
        """End a hold. Raises NotMaster, Unavailable."""
        self._hold.release(token)

    # --- handing over --------------------------------------------------------------------------------------------------

    async def transfer(self, to: str) -> pb.TransferResponse:
        """Accept nothing new, wait until `to` has everything, let it campaign. Raises NotMaster, InvalidArgument, Unavailable."""
        leader, driver = self._leader(), self._driver
        target = to or _most_advanced(leader)
        if self._hold.is_held:
            raise Unavailable("a backup holds the writes of this master for a moment: try again")
        begin_ms = self._clock.monotonic_ms()
        self._broker.pause()
        try:
            driver.act(lambda _: leader.transfer(target))
            async with asyncio.timeout(TRANSFER_S):
                while driver.core.master != target:  # noqa: ASYNC110
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            text = f"{target} did not take over within {TRANSFER_S} s: is it up to date and reachable?"
            raise Unavailable(text, outcome=Outcome.UNKNOWN) from None
        finally:
            leader.transfer_to = ""
            if driver.core.leader is leader:
                self._broker.resume()
        return pb.TransferResponse(master=target, epoch=driver.core.state.promised, refused_ms=self._clock.monotonic_ms() - begin_ms)

    # --- membership ----------------------------------------------------------------------------------------------------

    async def change(self, *, add: str = "", remove: str = "") -> pb.ChangeReplicasResponse:
        """Add a replica (first as a learner, which becomes a voter automatically), or remove one. Raises NotMaster, InvalidArgument,
        NoQuorum, Unavailable.
        """
        leader, driver = self._leader(), self._driver
        if bool(add) == bool(remove):
            raise InvalidArgument("name the replica to add or to remove")
        before = driver.core.state.membership
        after = before.with_learner(check_name("replica", add)) if add else before.without(remove)
        driver.act(lambda now_ms: leader.propose(after, now_ms))
        await self._until_changed(driver, leader, after)
        members = driver.core.state.membership
        return pb.ChangeReplicasResponse(membership_version=members.version, voters=members.voters, learners=members.learners)

    async def _until_changed(self, driver: Driver, leader: Leader, after: ReplicaMembership) -> None:
        try:
            async with asyncio.timeout(CHANGE_S):
                while driver.core.state.membership.version < after.version:
                    if driver.core.leader is not leader:
                        raise NotMaster(
                            "the mastership was lost during the change: check whether the change was made, then ask again",
                            outcome=Outcome.UNKNOWN,
                        )
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            text = "the coordination store did not take the change in time: it may still be made"
            raise Unavailable(text, outcome=Outcome.UNKNOWN) from None


def _most_advanced(leader: Leader) -> str:
    voters = [name for name in leader.state.membership.voters if name in leader.peers]
    if not voters:
        raise InvalidArgument("this group has no other voter to hand over to")
    return max(voters, key=lambda name: (leader.peers[name].is_in_step, leader.peers[name].match))
