"""Registers a replica in the coordination store, and detects there an older copy of its folder (qmq_replication/identity.py).

    1. read the replica's record        an older copy of the folder: the replica is in doubt, and promises the store's highest epoch
    2. save the next generation
    3. put it into the record           from now on every copy of the folder that was made before is older
    4. take part                        the first acknowledgements and promises of this generation

    dies after 2                        the folder is ahead by one, which is no sign of a copy
    dies after 3                        folder and record agree

While the replica works, 2 and 3 are repeated once a minute if its log or promise has changed, so a copy of a folder in use is older after
a minute. If the store cannot be reached at the start, the replica takes part without it, as it always did, but counts in no election
until the store has answered: without the store no replica can win one.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Final

from qmq_coordination.access_records import ensure_server_token
from qmq_coordination.broker_groups import Registration, ReplicaRecord, ensure_cluster, read_group, replica_key
from qmq_coordination.coordination_store import CoordinationStore
from qmq_replication.coordinator import find_secret
from qmq_replication.core import EPOCH_MAX
from qmq_replication.driver import Driver
from qmq_replication.identity import require_cluster
from qmq_replication.membership import ReplicaMembership

from qmq.errors import CoordinationError, DiskFull, WrongServer
from qmq.node.process import NodeTiming

log = logging.getLogger("qmq.node")

RETRY_S: Final = 1.0


class ReplicaRegistering:
    def __init__(self, store: CoordinationStore, driver: Driver, record: ReplicaRecord, timing: NodeTiming) -> None:
        self._store = store
        self._driver = driver
        self._record = record
        self._timing = timing
        self._registration = Registration(store, record)
        self._registered = 0
        """The generation that the store has."""
        self.older_store = ""
        """Not empty if the store has forgotten something of this replica or its group."""
        self._task: asyncio.Task[None] | None = None
        driver.core.withhold_vote()

    async def start(self) -> None:
        """Register. If the store does not answer in time, this continues in the background."""
        registered = asyncio.Event()
        self._task = asyncio.create_task(self._run(registered))
        waiting = asyncio.create_task(registered.wait())
        await asyncio.wait([waiting, self._task], timeout=self._timing.known_wait_s, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()

    async def stop(self) -> None:
        """Delete the keys under the lease."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._registration.stop()

    async def _run(self, registered: asyncio.Event) -> None:
        while True:
            try:
                await self._register()
                break
            except (CoordinationError, DiskFull, WrongServer) as failure:
                log.warning("registering this replica failed, trying again: %s", failure)
                await asyncio.sleep(RETRY_S)
        registered.set()
        seen = self._state()
        while True:
            await asyncio.sleep(self._timing.generation_s)
            now = self._state()
            if now != seen and await self._grow():
                seen = now

    async def _register(self) -> None:
        driver, group = self._driver, self._record.group
        cluster = await ensure_cluster(self._store, driver.identity.cluster)
        require_cluster(driver.identity, cluster)
        await ensure_server_token(self._store)
        driver.know_secret(await find_secret(self._store, group))
        found = await self._store.get(replica_key(group, self._record.replica))
        known = ReplicaRecord("", "", "", "") if found is None else ReplicaRecord.decode(found.value)
        state = await read_group(self._store, group)
        epoch, members = state.claim.epoch, state.members
        if found is not None:
            self._judge(known, epoch)
        self.older_store = self._forgotten(known, epoch, members)
        if self.older_store:
            log.critical("the data of the coordination store was put back: %s. docs/BACKUP.md says what to do", self.older_store)
        driver.grow(replace(driver.identity.grown(known.folder, known.generation), cluster=cluster))
        self._registration = Registration(self._store, self._present())
        await self._registration.start()
        self._registered = driver.identity.generation
        driver.tell("generation", lambda _: driver.core.vouch())

    def _judge(self, known: ReplicaRecord, epoch: int) -> None:
        identity = self._driver.identity
        if identity.is_older_than(known.folder, known.generation):
            what = f"its generation is {identity.generation}, and {known.generation} is registered"
            if known.folder != identity.folder:
                what = "another folder is registered for it"
            log.warning(
                "the folder of %s is an older copy, or a new one (%s): it does not vote before it has caught up", identity.replica, what
            )
            self._driver.doubt(epoch)

    def _forgotten(self, known: ReplicaRecord, epoch: int, members: bytes | None) -> str:
        """What the store has forgotten of this replica's group, by the replica's folder; empty if nothing."""
        identity = self._driver.identity
        mine = identity.members()
        version = 0 if members is None else ReplicaMembership.decode(members).version
        if epoch < identity.promised <= EPOCH_MAX:
            return f"the highest epoch of {identity.group} was {identity.promised}, and is {epoch}"
        if mine is not None and version < mine.version:
            return f"the membership of {identity.group} had version {mine.version}, and has {version}"
        if identity.shows_older_store(known.folder, known.generation):
            return f"{identity.replica} had registered generation {identity.registered}, and {known.generation} is registered"
        return ""

    def _present(self) -> ReplicaRecord:
        return replace(self._record, generation=self._driver.identity.generation)

    def _state(self) -> tuple[int, int]:
        core = self._driver.core.state
        return core.promised, core.history.last_index

    async def _grow(self) -> bool:
        identity = self._driver.identity
        try:
            self._driver.grow(identity.grown(identity.folder, self._registered))
            await self._registration.update(self._present())
        except (CoordinationError, DiskFull) as failure:
            log.warning("registering the next generation of %s failed, trying again: %s", identity.replica, failure)
            return False
        self._registered = self._driver.identity.generation
        return True
