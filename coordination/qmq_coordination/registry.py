"""Which brokers are there: each keeps `/qmq/brokers/GROUP` under a lease, so that it goes when the broker does."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from dataclasses import asdict, dataclass
from typing import Final

from qmq.errors import CoordinationError, DiskFull, LeaseNotFound
from qmq_coordination.store import CoordinationStore, LeaseId

log = logging.getLogger("qmq.coordination")

PREFIX: Final = "/qmq/brokers/"
LEASE_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class BrokerRecord:
    """A broker that serves its group: where its data port and its control port are."""

    group: str
    data_address: str
    control_address: str
    epoch: int


async def brokers(store: CoordinationStore) -> list[BrokerRecord]:
    """All brokers that are there now."""
    return [BrokerRecord(**json.loads(item.value)) for item in (await store.list(PREFIX)).items]


class Registration:
    """Keeps a broker's record alive; registers again if the lease was lost."""

    def __init__(self, store: CoordinationStore, record: BrokerRecord, lease_s: float = LEASE_S) -> None:
        self._store = store
        self._record = record
        self._lease_s = lease_s
        self._lease = LeaseId(0)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Register, then keep alive."""
        await self._register()
        self._task = asyncio.create_task(self._keep_alive())

    async def _register(self) -> None:
        self._lease = await self._store.grant(self._lease_s)
        value = json.dumps(asdict(self._record)).encode()
        await self._store.put(PREFIX + self._record.group, value, self._lease)

    async def _keep_alive(self) -> None:
        while True:
            await asyncio.sleep(self._lease_s / 3)
            try:
                await self._store.keep_alive(self._lease)
            except LeaseNotFound:
                log.warning("broker %s: the registration's lease was lost; registering again", self._record.group)
                await self._register()

    async def stop(self) -> None:
        """Take the record away."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        with contextlib.suppress(CoordinationError, DiskFull):
            await self._store.revoke(self._lease)
