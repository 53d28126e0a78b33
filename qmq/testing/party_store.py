"""The coordination store as one party sees it: all share one store, and a party that is cut off or dead cannot reach it.

The store is that of `qmq dev`, in memory. Its leases use the cluster's clock.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any, cast

from qmq_coordination.coordination_store import (
    NO_LEASE,
    Compare,
    KeyListing,
    KeyValue,
    LeaseId,
    Operation,
    Revision,
    TxnResult,
    WatchedChanges,
)
from qmq_coordination.embedded import EmbeddedStore

from qmq.errors import CoordinationUnavailable
from qmq.testing.parties import COORDINATION, PartyNetwork


class PartyStore:
    """A CoordinationStore through a party's network. Closing it does not close the shared store."""

    def __init__(self, store: EmbeddedStore, network: PartyNetwork) -> None:
        self._store = store
        self._network = network

    def _require(self) -> None:
        if not self._network.reaches(COORDINATION):
            raise CoordinationUnavailable(f"nothing passes from {self._network.party} to the coordination store")

    async def get(self, key: str) -> KeyValue | None:
        self._require()
        return await self._store.get(key)

    async def list(self, prefix: str, *, revision: int = 0, limit: int = 0) -> KeyListing:
        self._require()
        return await self._store.list(prefix, revision=revision, limit=limit)

    async def put(self, key: str, value: bytes, lease: LeaseId = NO_LEASE) -> Revision:
        self._require()
        return await self._store.put(key, value, lease)

    async def delete(self, key: str, *, is_prefix: bool = False) -> int:
        self._require()
        return await self._store.delete(key, is_prefix=is_prefix)

    async def txn(self, compares: Sequence[Compare], success: Sequence[Operation], failure: Sequence[Operation] = ()) -> TxnResult:
        self._require()
        return await self._store.txn(compares, success, failure)

    async def grant(self, ttl_s: float) -> LeaseId:
        self._require()
        return await self._store.grant(ttl_s)

    async def keep_alive(self, lease: LeaseId) -> float:
        self._require()
        return await self._store.keep_alive(lease)

    async def revoke(self, lease: LeaseId) -> None:
        self._require()
        await self._store.revoke(lease)

    async def watch(self, prefix: str, start_revision: int) -> AsyncIterator[WatchedChanges]:
        """See CoordinationStore. The watch breaks with the first change that cannot be delivered."""
        self._require()
        found: Any = self._store.watch(prefix, start_revision)
        async with aclosing(found) as changes:
            async for each in changes:
                self._require()
                yield cast(WatchedChanges, each)

    async def compact(self, revision: int) -> None:
        self._require()
        await self._store.compact(revision)

    async def close(self) -> None: ...
