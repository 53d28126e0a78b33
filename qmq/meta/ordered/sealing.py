"""Closing a source of a change: its master seals it, or the coordination store fences it (docs/ORDERING.md, "Fencing a group").

A fence is put only while the group's master key is gone and the epoch's claim is as it was read. A master that wins, or sets its key
again, lists the fences behind that: so either it sees this one, or the transaction fails, and that master is asked.

A master whose key is gone has lost its right to take ordered messages already, by its own clock; no clock is compared here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Final, Protocol

from qmq_coordination.broker_groups import group_key, read_group
from qmq_coordination.coordination_store import CoordinationStore, KeyValue, Put, absent, unchanged
from qmq_coordination.ordered_records import Fence, fence_key
from qmq_ordering.route import FENCED, Change, PhysicalPartition

from qmq.errors import CoordinationUnknown, QmqError, RouteConflict
from qmq.model import Fencing

FENCE_AFTER_S: Final = 1.0
"""For so long a master that does not answer is asked again before a fence is thought of: an election is over by then, usually."""
RETRY_S: Final = 0.1

Arrow = Callable[[str], Awaitable[None]]
Sleep = Callable[[float], Awaitable[None]]


class Sealer(Protocol):
    """The masters of broker groups. Every call has a deadline of its own."""

    async def seal(self, broker_group: str, subject: str, partition: int, change_id: str, to_version: int) -> int:
        """Close a partition; the sequence of its command message, however often it is asked.

        Raises RouteConflict (closed by another change), NotConnected, NotMaster, DeadlineExceeded, DiskFull, ...
        """
        ...

    async def probe(self, broker_group: str, subject: str, partition: int) -> None:
        """Whether the group's master answers and commits. Raises NotConnected, NotMaster, DeadlineExceeded."""
        ...


async def nowhere(_: str) -> None:
    """An arrow at which nothing happens."""


class Sealing:
    """Closes sources. `arrow` is called before and behind each step, with its name."""

    def __init__(self, store: CoordinationStore, sealer: Sealer, *, sleep: Sleep, now_ms: Callable[[], int], arrow: Arrow) -> None:
        self._store = store
        self.sealer = sealer
        self._sleep = sleep
        self._now_ms = now_ms
        self._arrow = arrow
        self._silent_since: dict[str, int] = {}
        """Since when each broker group has answered no seal: the second partition that is fenced need not wait for the first one's."""

    def know_gone(self, broker_group: str) -> None:
        """Record that the broker group has been silent long enough to be fenced."""
        self._silent_since[broker_group] = self._now_ms() - int(FENCE_AFTER_S * 1000)

    async def silent_first(self, subject: str, sources: Sequence[PhysicalPartition]) -> list[PhysicalPartition]:
        """Sort sources with silent masters first, so that writers of the others can continue while a lease expires."""
        if len(sources) < 2:
            return list(sources)
        silent, well = [], []
        for part in sources:
            try:
                await self.sealer.probe(part.group, subject, part.number)
                well.append(part)
            except QmqError:
                silent.append(part)
        return silent + well

    async def close(self, subject: str, part: PhysicalPartition, change: Change, fencing: Fencing) -> int:
        """Have a source sealed, or fence it. The sequence of its command message, or FENCED. Raises RouteConflict."""
        while True:
            await self._arrow("before seal")
            try:
                sequence = await self.sealer.seal(part.group, subject, part.number, change.id, change.to_version)
                await self._arrow("behind seal")
                self._silent_since.pop(part.group, None)
                return sequence
            except RouteConflict:
                raise
            except QmqError:
                since_ms = self._silent_since.setdefault(part.group, self._now_ms())
                # Whether it was done is asked again. A broker that does not know the subject yet (CallerError) will hear of it.
                if fencing is Fencing.LEASE and await self._is_fenced(subject, part, change, since_ms):
                    return FENCED
            await self._sleep(RETRY_S)

    async def _is_fenced(self, subject: str, part: PhysicalPartition, change: Change, since_ms: int) -> bool:
        """Whether a fence is there, put now if it is time. The clock only says when to think of it; the store's keys decide."""
        key = fence_key(part.group, subject, part.number)
        if _is_ours(await self._store.get(key), change):
            return True
        if self._now_ms() - since_ms < FENCE_AFTER_S * 1000:
            return False
        state = await read_group(self._store, part.group)
        if "master" in state.items:
            return False  # its lease runs, or there is a new one: it is asked again
        epoch = state.items.get("epoch")
        epoch_as_read = absent(group_key(part.group, "epoch")) if epoch is None else unchanged(epoch)
        compares = [absent(group_key(part.group, "master")), epoch_as_read, absent(key)]
        await self._arrow("before fence")
        # Unknown: read back. If it is executed late, the comparison holds then, and the fence closes what this change closes anyway.
        with suppress(CoordinationUnknown):
            await self._store.txn(compares, [Put(key, Fence(change.id, change.to_version).encode())])
        await self._arrow("behind fence")
        return _is_ours(await self._store.get(key), change)


def _is_ours(item: KeyValue | None, change: Change) -> bool:
    return item is not None and Fence.decode(item.value).change_id == change.id
