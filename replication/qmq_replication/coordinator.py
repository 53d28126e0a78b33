"""A replica's operations on the coordination store: win an epoch, keep the master's key, change the
membership.

Answers may be lost, so each operation has a way to find its outcome:

* *campaign*: the epoch's Claim carries the attempt's number. The replica reads the Claim back: it
  owns the epoch only if the Claim has this attempt's number. An attempt that is given up first
  revokes its lease, so that a transaction still on its way fails; if it succeeds all the same, an
  epoch is unused, which is harmless.
* *change*: a compare-and-swap that cannot happen twice; it is repeated until its outcome is
  certain. If this master was superseded in the meantime, the outcome stays open, because the master
  will commit nothing more.
* *renew*: a lost lease does not end the mastership, because a majority of the group decides that.
  The key is set again under a new lease, if the Claim is still this replica's and there is no other
  master.

The functions await only the store and the given `sleep`, so the simulator can run them.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from qmq_coordination.broker_groups import (
    BrokerGroupState,
    EpochClaim,
    MasterRecord,
    group_key,
    read_group,
)
from qmq_coordination.coordination_store import (
    NO_LEASE,
    Compare,
    CompareTarget,
    CoordinationStore,
    LeaseId,
    Put,
    absent,
    unchanged,
)

from qmq.errors import CoordinationError, CoordinationUnknown, InvariantBroken, LeaseNotFound
from qmq_replication.membership import ReplicaMembership
from qmq_replication.ready import EPOCH_MAX

LEASE_S: Final = 5.0
RETRY_S: Final = 0.2
SECRET: Final = "secret"  # noqa: S105 - the key's name
SECRET_BYTES: Final = 32

Sleep = Callable[[float], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Holding:
    """The state of our mastership in the store. `lease` holds the master's key now; it is NO_LEASE
    if the key is not ours.

    While the lease is the same, the key has always existed: it is deleted only with the lease, or
    overwritten by the next master.
    """

    epoch: int
    lease: LeaseId


@dataclass(frozen=True, slots=True)
class WonEpoch:
    """An epoch that we won, and the membership at that moment."""

    epoch: int
    membership: ReplicaMembership


async def found_group(
    store: CoordinationStore,
    group: str,
    voters: tuple[str, ...],
    also: Mapping[str, bytes] = MappingProxyType({}),
) -> ReplicaMembership:
    """The group's membership. If there is no group, create it with `voters` and the group's keys in
    `also`, in one transaction.

    Raises CoordinationError.
    """
    key = group_key(group, "members")
    while True:
        found = await store.get(key)
        if found is not None:
            return ReplicaMembership.decode(found.value)
        puts = [Put(group_key(group, what), value) for what, value in also.items()]
        with suppress(CoordinationUnknown):
            await store.txn([absent(key)], [Put(key, ReplicaMembership(1, voters).encode()), *puts])


def new_secret() -> bytes:
    """Make a new group secret, in its stored form."""
    return secrets.token_hex(SECRET_BYTES).encode()


async def find_secret(store: CoordinationStore, group: str) -> bytes:
    """The group's secret. If there is none, make one. Raises CoordinationError."""
    key = group_key(group, SECRET)
    while True:
        found = await store.get(key)
        if found is not None:
            return found.value
        await store.txn([absent(key)], [Put(key, new_secret())])


class Coordinator:
    """One replica's operations on the store. `record` returns how clients find the replica as
    master; it is called whenever the key is written. `new_attempt` returns numbers that are never
    used twice.
    """

    def __init__(
        self,
        store: CoordinationStore,
        group: str,
        record: Callable[[], MasterRecord],
        new_attempt: Callable[[], str],
        *,
        sleep: Sleep = asyncio.sleep,
        lease_s: float = LEASE_S,
    ) -> None:
        self._store = store
        self._group = group
        self._record = record
        self._new_attempt = new_attempt
        self._sleep = sleep
        self._lease_s = lease_s
        self._lease: LeaseId = NO_LEASE
        self._claim: EpochClaim | None = None
        self._is_campaigning = False
        self._seen_epoch = 0
        """The highest epoch of another replica that our campaigns have seen."""

    def _key(self, what: str) -> str:
        return group_key(self._group, what)

    # --- epochs -----------------------------------------------------------------------------------

    async def look_up(self) -> tuple[int, ReplicaMembership | None]:
        """Read the group's highest epoch and its membership. Raises CoordinationError."""
        state = await read_group(self._store, self._group)
        return state.claim.epoch, None if state.members is None else ReplicaMembership.decode(
            state.members
        )

    async def campaign(self, promised: int | None = None, *, above: int = 0) -> WonEpoch | None:
        """Try once to win the next epoch, even if there is a master. None if another replica won
        it, the outcome is unknown, or another try is under way.

        The epoch is also above `promised` and `above`, which replicas have promised. If the store
        does not know these epochs, it lost data or a replica promised a forged epoch, and replicas
        would always refuse an epoch below them. Epochs may have gaps.

        The call does not try if another replica has won an epoch since `promised`, the highest that
        our replica promised: that winner may be about to ask for our promise, and a higher epoch
        would cost the group a second election. The next call does not wait again.
        """
        if self._is_campaigning:
            return None
        self._is_campaigning = True
        try:
            return await self._campaign(promised, above)
        finally:
            self._is_campaigning = False

    async def _campaign(self, promised: int | None, above: int) -> WonEpoch | None:
        lease = NO_LEASE
        try:
            state = await read_group(self._store, self._group)
            if promised is not None and state.claim.epoch > max(promised, self._seen_epoch):
                self._seen_epoch = state.claim.epoch
                return None
            if (
                state.members is None
                or self._record().replica not in ReplicaMembership.decode(state.members).voters
            ):
                return None
            lease = await self._store.grant(self._lease_s)
            highest = max(state.claim.epoch, min(max(promised or 0, above), EPOCH_MAX))
            claim = EpochClaim(highest + 1, self._record().replica, self._new_attempt())
            if await self._claim_epoch(state, claim, lease):
                self._claim, self._lease = claim, lease
                return WonEpoch(claim.epoch, ReplicaMembership.decode(state.members))
        except CoordinationError:
            pass
        await self._drop(lease)
        return None

    async def _claim_epoch(
        self, state: BrokerGroupState, claim: EpochClaim, lease: LeaseId
    ) -> bool:
        epoch_key, master_key = self._key("epoch"), self._key("master")
        items = state.items
        compares = [
            unchanged(items["epoch"]) if "epoch" in items else absent(epoch_key),
            unchanged(items["master"]) if "master" in items else absent(master_key),
            unchanged(items["members"]),
        ]
        puts = [Put(epoch_key, claim.encode()), Put(master_key, self._master(claim), lease)]
        try:
            return (await self._store.txn(compares, puts)).succeeded
        except CoordinationUnknown:
            return await self.is_ours(claim)

    async def is_ours(self, claim: EpochClaim) -> bool:
        """True if the store's highest epoch belongs to this claim. Raises CoordinationError."""
        return (await read_group(self._store, self._group)).claim == claim

    def _master(self, claim: EpochClaim) -> bytes:
        return replace(self._record(), epoch=claim.epoch, attempt=claim.attempt).encode()

    async def _drop(self, lease: LeaseId) -> None:
        if lease != NO_LEASE:
            with suppress(CoordinationError):
                await self._store.revoke(lease)

    # --- keeping the key --------------------------------------------------------------------------

    @property
    def lease_s(self) -> float:
        """The lifetime of a lease without a keep-alive, in seconds."""
        return self._lease_s

    async def renew_key(self) -> Holding:
        """Renew the lease of the master's key, or set the key again. If the highest epoch is not
        ours, we were superseded. Call this only while an epoch is won and not given back. Raises
        CoordinationError if the state is unknown; the master continues to serve, because the
        group's majority decides.
        """
        claim = self._claim
        if claim is None:
            raise InvariantBroken("no epoch was won, or it was given back")
        try:
            await self._store.keep_alive(self._lease)
        except LeaseNotFound:
            await self._set_again(claim)
        state = await read_group(self._store, self._group)
        if "master" not in state.items and state.claim == claim and self._claim is claim:
            # Our lease is alive and the key is missing: the transaction that should have set it
            # never arrived.
            await self._put_key(claim)
            state = await read_group(self._store, self._group)
        lease = self._lease
        item = state.items.get("master")
        is_ours = item is not None and item.lease == lease and state.claim == claim
        return Holding(state.claim.epoch, lease if is_ours else NO_LEASE)

    async def _set_again(self, claim: EpochClaim) -> None:
        self._lease = await self._store.grant(self._lease_s)
        await self._put_key(claim)

    async def _put_key(self, claim: EpochClaim) -> None:
        """Set the key under our lease if there is none, and read back if this succeeded."""
        key = self._key("master")
        compares = [
            Compare(self._key("epoch"), CompareTarget.VALUE, "=", claim.encode()),
            absent(key),
        ]
        with suppress(CoordinationUnknown):
            await self._store.txn(compares, [Put(key, self._master(claim), self._lease)])

    async def resign(self, epoch: int) -> None:
        """Delete the key of `epoch`, if it is ours. A failure is harmless: the lease expires."""
        if self._claim is not None and self._claim.epoch == epoch:
            lease, self._lease, self._claim = self._lease, NO_LEASE, None
            await self._drop(lease)

    # --- membership -------------------------------------------------------------------------------

    async def change(
        self, before: ReplicaMembership, after: ReplicaMembership
    ) -> ReplicaMembership | None:
        """Replace the membership. None if the change was not made and never will be, because we are
        not master any more.
        """
        claim, key = self._claim, self._key("members")
        if claim is None:
            return None
        compares = [
            Compare(self._key("epoch"), CompareTarget.VALUE, "=", claim.encode()),
            Compare(key, CompareTarget.VALUE, "=", before.encode()),
        ]
        while True:
            try:
                if (await self._store.txn(compares, [Put(key, after.encode())])).succeeded:
                    return after
                return await self._changed(after)
            except CoordinationError:
                await self._sleep(RETRY_S)

    async def _changed(self, after: ReplicaMembership) -> ReplicaMembership | None:
        """Read the membership after a failed comparison: an earlier try may have succeeded."""
        found = await self._store.get(self._key("members"))
        return (
            after if found is not None and ReplicaMembership.decode(found.value) == after else None
        )
