"""etcd with watches, and an unreliable connection to it for each process: `sim.store` for event loops.

A lease lives a little shorter or longer than requested: the margin of a master's write lease (a tenth) must be enough.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Any

from qmq_coordination.coordination_store import (
    NO_LEASE,
    Compare,
    Delete,
    KeyValue,
    LeaseId,
    Operation,
    Put,
    Revision,
    TxnResult,
    WatchedChanges,
    WatchEvent,
)
from sim.store import LATE_MS, TIMEOUT_MS, AskedStore, Etcd
from sim.world import World

from qmq.errors import Compacted, CoordinationUnavailable, CoordinationUnknown, LeaseNotFound

if TYPE_CHECKING:
    from ordersim.process import Process

KEPT = 400
"""Revisions that a watch may still begin from."""


class WatchedEtcd(Etcd):
    """The store, with the changes of each revision."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.history: list[WatchedChanges] = []
        self.watchers: dict[Callable[[], None], None] = {}
        self.on_revision: Callable[[WatchedChanges, dict[str, KeyValue]], None] = lambda changes, before: None
        """Told of each change, and of what was there before."""

    def txn(self, compares: Sequence[Compare], success: Sequence[Operation]) -> TxnResult:
        """Compare, then put or delete."""
        if not all(self._holds(each) for each in compares):
            return TxnResult(False, Revision(self.revision), ())
        for each in success:
            if isinstance(each, Put) and each.lease and each.lease not in self.leases:
                raise LeaseNotFound(f"lease {each.lease} has ended")
        revision = self.revision + 1
        events = [event for each in success for event in self._events(each, revision)]
        self._apply(events)
        return TxnResult(True, Revision(self.revision), tuple(() for _ in success))

    def _events(self, operation: Operation, revision: int) -> list[WatchEvent]:
        if isinstance(operation, Put):
            before = self.items.get(operation.key)
            created, version = (before.create_revision, before.version + 1) if before else (revision, 1)
            item = KeyValue(operation.key, operation.value, created, revision, version, operation.lease)
            return [WatchEvent(operation.key, revision, item)]
        assert isinstance(operation, Delete)
        return [WatchEvent(operation.key, revision, None)] if operation.key in self.items else []

    def _apply(self, events: list[WatchEvent]) -> None:
        if not events:
            return
        self.revision += 1
        before = {event.key: self.items[event.key] for event in events if event.key in self.items}
        for event in events:
            if event.now is None:
                self.items.pop(event.key, None)
            else:
                self.items[event.key] = event.now
        changes = WatchedChanges(Revision(self.revision), tuple(events))
        self.history.append(changes)
        del self.history[:-KEPT]
        self.on_revision(changes, before)
        for wake in list(self.watchers):
            wake()

    def grant(self, ttl_s: float) -> LeaseId:
        """A lease, a little shorter or longer."""
        return super().grant(ttl_s * self.world.random.choice((0.93, 1.0, 1.0, 1.3)))

    def end(self, lease: int) -> None:
        """End a lease now; its keys go."""
        if self.leases.pop(lease, None) is None:
            raise LeaseNotFound(f"lease {lease} has ended")
        keys = sorted(key for key, item in self.items.items() if item.lease == lease)
        self._apply([WatchEvent(key, self.revision + 1, None) for key in keys])


class Store(AskedStore):
    """A CoordinationStore whose network is bad."""

    def __init__(self, etcd: WatchedEtcd, mine: Process) -> None:
        super().__init__(etcd)
        self._changing = etcd
        self._mine = mine
        self._world = mine.world
        self._network = mine.simulation.network

    @property
    def _is_cut(self) -> bool:
        return not self._network.reaches(self._mine.name, "etcd") or self._mine.name in self._mine.simulation.nemesis.etcd_cut

    def _is_lost(self) -> bool:
        return self._is_cut or (not self._network.is_calm and self._world.random.random() < self._mine.simulation.plan.etcd_loss)

    async def _ask(self, do: Callable[..., Any], *args: Any, is_change: bool) -> Any:
        world, loop = self._world, self._mine.loop
        future: asyncio.Future[Any] = loop.create_future()
        is_late = not self._network.is_calm and world.random.random() < self._mine.simulation.plan.etcd_late
        delay_ms = world.random.randint(500, LATE_MS) if is_late else world.random.randint(1, 6)
        world.after(delay_ms, self._arrive, future, do, args)
        failure = (CoordinationUnknown if is_change else CoordinationUnavailable)("no answer (simulated)")
        timer = loop.call_later(TIMEOUT_MS / 1000, _set, future, None, failure)
        try:
            return await future
        finally:
            timer.cancel()

    def _arrive(self, future: asyncio.Future[Any], do: Callable[..., Any], args: tuple[Any, ...]) -> None:
        if self._is_lost():
            return
        try:
            result, error = do(*args), None
        except LeaseNotFound as cause:
            result, error = None, cause
        self._world.after(self._world.random.randint(1, 6), self._answered, future, result, error)

    def _answered(self, future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
        if not self._is_lost():
            self._mine.loop.call_soon(_set, future, result, error)

    # --- CoordinationStore -----------------------------------------------------------------------------------------------

    async def put(self, key: str, value: bytes, lease: LeaseId = NO_LEASE) -> Revision:
        """See CoordinationStore."""
        return (await self.txn((), [Put(key, value, lease)])).revision

    async def delete(self, key: str, *, is_prefix: bool = False) -> int:
        """See CoordinationStore."""
        assert not is_prefix
        await self.txn((), [Delete(key)])
        return 1

    async def watch(self, prefix: str, start_revision: int) -> AsyncIterator[WatchedChanges]:
        """See CoordinationStore. Breaks while the store cannot be reached, and now and then."""
        at = start_revision
        news = asyncio.Event()
        wake = lambda: self._mine.loop.call_soon(news.set)  # noqa: E731
        self._changing.watchers[wake] = None
        try:
            while True:
                await asyncio.sleep(self._network.delay_ms() / 1000)
                if self._is_cut or (not self._network.is_calm and self._world.random.random() < self._mine.simulation.plan.etcd_loss / 4):
                    await asyncio.sleep(0.5)
                    raise CoordinationUnavailable("the watch broke (simulated)")
                news.clear()
                if self._changing.history and self._changing.history[0].revision > at and self._changing.revision >= at:
                    raise Compacted("too old (simulated)")
                for changes in [each for each in self._changing.history if each.revision >= at]:
                    at = changes.revision + 1
                    yield changes
                await news.wait()
        finally:
            self._changing.watchers.pop(wake, None)

    async def compact(self, revision: int) -> None:
        """See CoordinationStore."""
        raise NotImplementedError

    async def close(self) -> None:
        """See CoordinationStore."""


def _set(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
