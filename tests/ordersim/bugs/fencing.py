"""Bugs in leases and fences."""

from __future__ import annotations

from typing import Any

from qmq_coordination.broker_groups import read_group
from qmq_coordination.coordination_store import Put, absent
from qmq_coordination.ordered_records import Fence, fence_key

from ordersim.bugs.planting import plant
from qmq.errors import CoordinationUnknown
from qmq.meta.ordered.changes import Sealing
from qmq.meta.ordered.controller import Controller
from qmq.node.replica import status
from qmq.node.replica.status import WriteLease


async def _fence(self: Sealing, subject: str, part: Any, change: Any, record: Any, began_ms: int, *, looks: bool) -> bool:
    key = fence_key(part.group, subject, part.number)
    if looks:
        if self._now_ms() - began_ms < 1_000 or "master" in (await read_group(self._store, part.group)).items:
            return False
        await self._arrow("before fence")
    try:
        await self._store.txn([absent(key)], [Put(key, Fence(change.id, change.to_version).encode())])
    except CoordinationUnknown:
        return False
    return await self._store.get(key) is not None


async def _at_once(self: Sealing, subject: str, part: Any, change: Any, record: Any, began_ms: int) -> bool:
    return await _fence(self, subject, part, change, record, began_ms, looks=False)


async def _without_comparing(self: Sealing, subject: str, part: Any, change: Any, record: Any, began_ms: int) -> bool:
    return await _fence(self, subject, part, change, record, began_ms, looks=True)


async def _look_at_nothing(self: WriteLease) -> None:
    self._epoch, self._lease = self._heard[:2]
    self._until_ms = self._heard[2] + int(self._lease_ms() * (1 - status.MARGIN))


async def _lift_nothing(self: Controller) -> None:
    pass


plant("fence without waiting for the lease", (Sealing, "_is_fenced", _at_once))
plant("fence without comparing the master's key", (Sealing, "_is_fenced", _without_comparing))
plant("leave a fence in the store for ever", (Controller, "_lift_fences", _lift_nothing))
plant("remove a fence before its seal is known", (Fence, "is_needed", lambda *_: False))
plant("never end the right by the clock", (WriteLease, "__call__", lambda self: self._until_ms > 0))
plant("keep the right for longer than the lease", (status, "MARGIN", -0.5))
plant("do not list the fences under a new lease", (WriteLease, "_look", _look_at_nothing))
