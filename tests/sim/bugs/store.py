"""Bugs of requests to the coordination store and of their answers."""

from __future__ import annotations

from qmq_coordination.broker_groups import BrokerGroupState, EpochClaim, group_key
from qmq_coordination.coordination_store import LeaseId, Put
from qmq_replication.coordinator import Coordinator
from qmq_replication.membership import ReplicaMembership

from qmq.errors import CoordinationUnknown
from sim.bugs.planting import in_coordinator, in_leader


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
