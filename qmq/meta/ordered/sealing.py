"""Closes a source of a change: its master seals it, or the coordination store fences it (docs/ORDERING.md, "Fencing a group").

A fence is put only while the group has no master key and the epoch's claim is as it was read. A master that wins, or sets its key again,
lists the fences after that: so either it sees this fence, or the transaction fails, and that master is called. A master whose key was
deleted has lost its write lease already, by its own clock. No clocks are compared here.

A fence is needed until the seal is in the change's record: then the command message is in the broker group's log. The leader removes such
a fence (`lift`). A fence is put only while its change is as read, so that a late request cannot put it again, nor after the subject is
deleted.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Final, Protocol

from qmq_coordination.broker_groups import group_key, read_group
from qmq_coordination.coordination_store import CoordinationStore, Delete, KeyValue, Put, absent, unchanged
from qmq_coordination.ordered_records import Fence, change_key, fence_key
from qmq_ordering.route import FENCED, Change, PhysicalPartition

from qmq.errors import CoordinationUnknown, QmqError, RouteConflict
from qmq.model import Fencing

FENCE_AFTER_S: Final = 1.0
"""A master that does not answer is asked again for this long before a fence is considered: usually longer than an election."""
RETRY_S: Final = 0.1

Arrow = Callable[[str], Awaitable[None]]
Sleep = Callable[[float], Awaitable[None]]


class Sealer(Protocol):
    """The calls of sealing to the masters of broker groups. Each call has a separate deadline."""

    async def seal(self, broker_group: str, subject: str, partition: int, change_id: str, to_version: int) -> int:
        """Close a partition. Returns the sequence of its command message, the same at every call. Raises RouteConflict (closed by another
        change), NotConnected, NotMaster, DeadlineExceeded, DiskFull, ...
        """
        ...

    async def probe(self, broker_group: str, subject: str, partition: int) -> None:
        """Check that the group's master answers and commits. Raises NotConnected, NotMaster, DeadlineExceeded."""
        ...


async def nowhere(_: str) -> None:
    """A hook that does nothing."""


class Sealing:
    """Closes the sources of a change. `arrow` is called before and after each step, with the step's name: a hook for tests."""

    def __init__(self, store: CoordinationStore, sealer: Sealer, *, sleep: Sleep, now_ms: Callable[[], int], arrow: Arrow) -> None:
        self._store = store
        self.sealer = sealer
        self._sleep = sleep
        self._now_ms = now_ms
        self._arrow = arrow
        self._silent_since: dict[str, int] = {}
        """The time since which each broker group has not answered a seal, so that its second partition need not wait again."""

    def know_gone(self, broker_group: str) -> None:
        """Note that the broker group was silent for long enough to be fenced."""
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

    async def close(self, subject: str, part: PhysicalPartition, change: Change, record: KeyValue, fencing: Fencing) -> int:
        """Seal a source, or fence it. `record` is the change as stored. Returns the sequence of its command message, or FENCED. If the
        record has changed, another metaserver closed the source: then the result is not to be stored. Raises RouteConflict.
        """
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
                # Call again, to learn the outcome. A broker that does not know the subject yet (CallerError) will learn of it.
                if fencing is Fencing.LEASE and await self._is_fenced(subject, part, change, record, since_ms):
                    return FENCED
            await self._sleep(RETRY_S)

    async def _is_fenced(self, subject: str, part: PhysicalPartition, change: Change, record: KeyValue, since_ms: int) -> bool:
        """Whether there is a fence, or the record has changed; puts a fence if it is time. The clock only decides when to try; the store's
        keys decide whether the fence is put.
        """
        key = fence_key(part.group, subject, part.number)
        if (now := await self._store.get(record.key)) is None or now.mod_revision != record.mod_revision:
            return True
        if _is_ours(await self._store.get(key), change):
            return True
        if self._now_ms() - since_ms < FENCE_AFTER_S * 1000:
            return False
        state = await read_group(self._store, part.group)
        if "master" in state.items:
            return False  # the master's lease has not ended, or there is a new master: call again
        epoch = state.items.get("epoch")
        epoch_as_read = absent(group_key(part.group, "epoch")) if epoch is None else unchanged(epoch)
        compares = [absent(group_key(part.group, "master")), epoch_as_read, absent(key), unchanged(record)]
        await self._arrow("before fence")
        # Unknown outcome: read back. If the transaction is executed late, its comparison held then, and the fence closes a partition that
        # this change closes anyway.
        with suppress(CoordinationUnknown):
            await self._store.txn(compares, [Put(key, Fence(change.id, change.to_version).encode())])
        await self._arrow("behind fence")
        return _is_ours(await self._store.get(key), change)

    async def lift(self, broker_group: str, subject: str, number: int) -> None:
        """Remove a fence that is not needed any more, and none other. Raises CoordinationError; the next call shows the outcome."""
        item = await self._store.get(fence_key(broker_group, subject, number))
        if item is None:
            return
        fence = Fence.decode(item.value)
        found = await self._store.get(change_key(subject, fence.to_version))
        if not fence.is_needed(None if found is None else Change.decode(found.value), number):
            await self._store.txn([unchanged(item)], [Delete(item.key)])


def _is_ours(item: KeyValue | None, change: Change) -> bool:
    return item is not None and Fence.decode(item.value).change_id == change.id
