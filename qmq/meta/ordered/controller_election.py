"""Elects the metaserver that continues interrupted work: the key `/qmq/meta/leader`, under that metaserver's lease. The election saves work
and is no lock: every change that the leader makes is a compare-and-swap that any metaserver may make. So two leaders at one time, or none,
do no harm.
"""

from __future__ import annotations

import asyncio
import logging
import random
from contextlib import suppress
from typing import Final

from qmq_coordination.coordination_store import NO_LEASE, CoordinationStore, Put, absent
from qmq_coordination.ordered_records import LEADER

from qmq.errors import CoordinationError, LeaseNotFound

log = logging.getLogger("qmq.meta")

LEASE_S: Final = 5.0


class ControllerElection:
    """Campaigns to be the leader until it is stopped."""

    def __init__(self, store: CoordinationStore, name: str, *, lease_s: float = LEASE_S) -> None:
        self._store = store
        self._name = name
        self._lease_s = lease_s
        self._lease = NO_LEASE
        self._task: asyncio.Task[None] | None = None
        self.is_leader = False

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            try:
                self.is_leader = await self.look()
            except CoordinationError as failure:
                self.is_leader = False
                log.debug("electing the leading metaserver failed, trying again: %s", failure)
            except Exception:
                self.is_leader = False
                log.exception("electing the leading metaserver failed, trying again")
            await asyncio.sleep(self._lease_s / 3 * random.uniform(0.8, 1.0))  # noqa: S311 - jitter

    async def look(self) -> bool:
        """Keep the key, or take it if there is none. Returns True if this metaserver is the leader. Raises CoordinationError."""
        found = await self._store.get(LEADER)
        if found is not None and found.lease != self._lease:
            return False
        if found is not None:
            with suppress(LeaseNotFound):
                await self._store.keep_alive(self._lease)
                return True
        lease = await self._store.grant(self._lease_s)
        if (await self._store.txn([absent(LEADER)], [Put(LEADER, self._name.encode(), lease)])).succeeded:
            self._lease = lease
            return True
        with suppress(CoordinationError):
            await self._store.revoke(lease)
        return False

    async def stop(self) -> None:
        """Resign immediately, so that another metaserver can lead."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self.is_leader = False
        if self._lease != NO_LEASE:
            with suppress(CoordinationError):
                await self._store.revoke(self._lease)
