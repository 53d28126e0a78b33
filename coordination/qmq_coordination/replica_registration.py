"""Registers a replica: puts keys under a lease, which the store deletes when the replica's process ends.

    /qmq/presence/GROUP/REPLICA     under the lease
    /qmq/replicas/GROUP/REPLICA     stays, so that a group's slaves know the address of a replica that will come back

`Registration` keeps these keys and the caller's other keys alive under one lease: a node of one process is always the master, so it adds
the group's master key. While the store cannot be reached, the keys stay until their lease ends. The registration writes them again when the
store is back, and after this process was suspended for longer than its lease.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Mapping
from typing import Final

from qmq.errors import CoordinationError, DiskFull, LeaseNotFound
from qmq_coordination.broker_groups import ReplicaRecord, presence_key, replica_key
from qmq_coordination.coordination_store import NO_LEASE, CoordinationStore, Put

log = logging.getLogger("qmq.coordination")

LEASE_S: Final = 10.0
RETRY_S: Final = 1.0


class Registration:
    """Keeps a replica's keys alive, and registers again if the lease was lost."""

    def __init__(
        self, store: CoordinationStore, record: ReplicaRecord, *, also: Mapping[str, bytes] | None = None, lease_s: float = LEASE_S
    ) -> None:
        self._store = store
        self._record = record
        self._also = dict(also or {})
        self._lease_s = lease_s
        self._lease = NO_LEASE
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Register, then renew the lease in the background. Raises CoordinationError, DiskFull; nothing is registered then."""
        await self._register()
        self._task = asyncio.create_task(self._keep_alive())

    async def _register(self) -> None:
        """Register once. Each try has a separate lease, so that the lease of a try with a lost answer expires. Putting the same keys
        again is harmless.
        """
        lease = await self._store.grant(self._lease_s)
        self._lease = lease
        name, group = self._record.replica, self._record.group
        leased = {presence_key(group, name): self._record.encode(), **self._also}
        puts = [Put(key, value, lease) for key, value in leased.items()]
        await self._store.txn([], [Put(replica_key(group, name), self._record.encode()), *puts])

    async def update(self, record: ReplicaRecord) -> None:
        """Replace the record under the present lease. Raises CoordinationError; the next registration then has the new record."""
        self._record = record
        presence = Put(presence_key(record.group, record.replica), record.encode(), self._lease)
        await self._store.txn([], [Put(replica_key(record.group, record.replica), record.encode()), presence])

    async def _keep_alive(self) -> None:
        while True:
            await asyncio.sleep(self._lease_s / 3)
            try:
                await self._store.keep_alive(self._lease)
                if not await self._is_there():
                    raise LeaseNotFound("the keys are deleted, or belong to an earlier lease")
            except LeaseNotFound as failure:
                log.warning("%s: its registration was lost, registering again: %s", self._record.replica, failure)
                await self._register_surely()
            except (CoordinationError, DiskFull) as failure:
                log.warning("%s: keeping the registration alive failed: %s", self._record.replica, failure)

    async def _is_there(self) -> bool:
        """True if the keys exist under our lease. A late try with a lost answer may have put them under another lease, which is not
        renewed.
        """
        found = await self._store.get(presence_key(self._record.group, self._record.replica))
        return found is not None and found.lease == self._lease

    async def _register_surely(self) -> None:
        while True:
            try:
                await self._register()
                return
            except (CoordinationError, DiskFull) as failure:
                log.warning("%s: registering failed, trying again: %s", self._record.replica, failure)
                await asyncio.sleep(RETRY_S * random.uniform(0.5, 1.5))  # noqa: S311 - jitter

    async def stop(self) -> None:
        """Delete the keys under the lease."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._lease == NO_LEASE:
            return
        with contextlib.suppress(CoordinationError, DiskFull):
            await self._store.revoke(self._lease)
