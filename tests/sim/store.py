"""Simulated etcd: one linearizable store with leases, and an unreliable connection to it for each replica.

A request may be lost (nothing happened), its answer may be lost (it happened), and both may be late. Leases may end early: etcd
promises nothing better to a client that it does not hear.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from qmq_coordination.coordination_store import (
    Compare,
    CompareTarget,
    Delete,
    Get,
    KeyListing,
    KeyValue,
    LeaseId,
    Operation,
    Put,
    Revision,
    TxnResult,
)

from qmq.errors import CoordinationUnavailable, CoordinationUnknown, LeaseNotFound
from sim.world import Future, World

TIMEOUT_MS = 1_000
LATE_MS = 6_000


class Etcd:
    """The store itself: what happens when a request arrives."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.items: dict[str, KeyValue] = {}
        self.revision = 1
        self.leases: dict[int, tuple[int, int]] = {}
        self._next_lease = 1
        self.on_change: Callable[[str, bytes, bytes], None] = lambda key, before, after: None

    def txn(self, compares: Sequence[Compare], success: Sequence[Operation]) -> TxnResult:
        """Compare, then put or delete."""
        if not all(self._holds(each) for each in compares):
            return TxnResult(False, Revision(self.revision), ())
        for each in success:
            if isinstance(each, Put) and each.lease and each.lease not in self.leases:
                raise LeaseNotFound(f"lease {each.lease} has ended")
        self.revision += 1
        for each in success:
            if isinstance(each, Put):
                before = self.items.get(each.key)
                self.on_change(each.key, before.value if before else b"", each.value)
                created = before.create_revision if before else self.revision
                version = before.version + 1 if before else 1
                self.items[each.key] = KeyValue(each.key, each.value, created, self.revision, version, each.lease)
            elif isinstance(each, Delete):
                self.items.pop(each.key, None)
        return TxnResult(True, Revision(self.revision), tuple(() for _ in success))

    def _holds(self, compare: Compare) -> bool:
        found = self.items.get(compare.key)
        if compare.target is CompareTarget.VALUE:
            return found is not None and found.value == compare.value
        actual = 0 if found is None else getattr(found, compare.target.value)
        return bool(actual == compare.value)

    def list(self, prefix: str) -> KeyListing:
        """Keys under a prefix."""
        items = tuple(self.items[key] for key in sorted(self.items) if key.startswith(prefix))
        return KeyListing(Revision(self.revision), items)

    def grant(self, ttl_s: float) -> LeaseId:
        """A lease."""
        lease = self._next_lease
        self._next_lease += 1
        self.leases[lease] = (self.world.now + int(ttl_s * 1000), int(ttl_s * 1000))
        self.world.after(int(ttl_s * 1000) + 1, self._expire, lease)
        return LeaseId(lease)

    def keep_alive(self, lease: LeaseId) -> float:
        """Start the lease's time again."""
        if lease not in self.leases:
            raise LeaseNotFound(f"lease {lease} has ended")
        ttl_ms = self.leases[lease][1]
        self.leases[lease] = (self.world.now + ttl_ms, ttl_ms)
        self.world.after(ttl_ms + 1, self._expire, lease)
        return ttl_ms / 1000

    def _expire(self, lease: int) -> None:
        if lease in self.leases and self.leases[lease][0] <= self.world.now:
            self.end(lease)

    def end(self, lease: int) -> None:
        """End a lease now; its keys go."""
        if self.leases.pop(lease, None) is None:
            raise LeaseNotFound(f"lease {lease} has ended")
        for key in [key for key, item in self.items.items() if item.lease == lease]:
            self.revision += 1
            del self.items[key]


class AskedStore:
    """The requests of a CoordinationStore to the simulated etcd. `_ask` brings a request there and the answer back."""

    def __init__(self, etcd: Etcd) -> None:
        self._etcd = etcd

    async def _ask(self, do: Callable[..., Any], *args: Any, is_change: bool) -> Any:
        raise NotImplementedError

    async def get(self, key: str) -> KeyValue | None:
        """See CoordinationStore."""
        found: KeyValue | None = await self._ask(self._etcd.items.get, key, is_change=False)
        return found

    async def list(self, prefix: str, *, revision: int = 0, limit: int = 0) -> KeyListing:
        """See CoordinationStore."""
        found: KeyListing = await self._ask(self._etcd.list, prefix, is_change=False)
        return found

    async def txn(self, compares: Sequence[Compare], success: Sequence[Operation], failure: Sequence[Operation] = ()) -> TxnResult:
        """See CoordinationStore."""
        assert not any(isinstance(each, Get) for each in success)
        found: TxnResult = await self._ask(self._etcd.txn, compares, success, is_change=True)
        return found

    async def grant(self, ttl_s: float) -> LeaseId:
        """See CoordinationStore."""
        found: LeaseId = await self._ask(self._etcd.grant, ttl_s, is_change=False)
        return found

    async def keep_alive(self, lease: LeaseId) -> float:
        """See CoordinationStore."""
        found: float = await self._ask(self._etcd.keep_alive, lease, is_change=False)
        return found

    async def revoke(self, lease: LeaseId) -> None:
        """See CoordinationStore."""
        await self._ask(self._etcd.end, lease, is_change=True)


class Store(AskedStore):
    """One replica's way to etcd: a CoordinationStore whose network is bad."""

    def __init__(self, etcd: Etcd, is_cut: Callable[[], bool], loss: float, late: float) -> None:
        super().__init__(etcd)
        self._is_cut = is_cut
        self._loss = loss
        self._late = late

    async def _ask(self, do: Callable[..., Any], *args: Any, is_change: bool) -> Any:
        world = self._etcd.world
        future = Future()
        delay_ms = world.random.randint(1, 20) if world.random.random() >= self._late else world.random.randint(500, LATE_MS)
        world.after(delay_ms, self._arrive, future, do, args)
        failure = CoordinationUnknown if is_change else CoordinationUnavailable
        world.after(TIMEOUT_MS, future.set, None, failure("no answer (simulated)"))
        return await future

    def _arrive(self, future: Future, do: Callable[..., Any], args: tuple[Any, ...]) -> None:
        world = self._etcd.world
        if self._is_cut() or world.random.random() < self._loss:
            return
        try:
            result, error = do(*args), None
        except LeaseNotFound as cause:
            result, error = None, cause
        if world.random.random() >= self._loss:
            world.after(world.random.randint(1, 20), future.set, result, error)
