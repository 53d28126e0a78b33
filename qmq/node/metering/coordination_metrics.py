"""The coordination store as this process sees it: a store that counts calls and passes them on."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from typing import Final, TypeVar

from qmq_coordination.coordination_store import (
    NO_LEASE,
    Compare,
    CoordinationStore,
    KeyListing,
    KeyValue,
    LeaseId,
    Operation,
    Revision,
    TxnResult,
    WatchedChanges,
)
from qmq_coordination.view import ClusterView

from qmq.errors import CoordinationUnavailable, CoordinationUnknown
from qmq.metrics.figures import COUNTER, GAUGE, HISTOGRAM, Durations, Figure, Reading, one

_METHODS: Final = ("get", "list", "put", "delete", "txn", "grant", "keep_alive", "revoke", "watch", "compact")

CALLS: Final = Figure("qmq_coordination_calls_total", COUNTER, ("method",), "Calls to the coordination store.")
FAILED: Final = Figure("qmq_coordination_failures_total", COUNTER, ("method",), "Calls to the coordination store that got no answer.")
SECONDS: Final = Figure(
    "qmq_coordination_call_seconds", HISTOGRAM, (), "Duration of calls to the coordination store, with all their attempts."
)
SILENT: Final = Figure(
    "qmq_coordination_silent_seconds", GAUGE, (), "Seconds since the coordination store last answered: normally below 3."
)

_T = TypeVar("_T")


class CountedStore:
    """A CoordinationStore that counts the calls of another one."""

    def __init__(self, store: CoordinationStore) -> None:
        self.calls = dict.fromkeys(_METHODS, 0)
        self.failures = dict.fromkeys(_METHODS, 0)
        self.durations = Durations()
        self._store = store

    async def _counted(self, method: str, call: Awaitable[_T]) -> _T:
        self.calls[method] += 1
        begin = time.perf_counter()
        try:
            return await call
        except (CoordinationUnavailable, CoordinationUnknown):
            self.failures[method] += 1
            raise
        finally:
            self.durations.note(time.perf_counter() - begin)

    async def get(self, key: str) -> KeyValue | None:
        return await self._counted("get", self._store.get(key))

    async def list(self, prefix: str, *, revision: int = 0, limit: int = 0) -> KeyListing:
        return await self._counted("list", self._store.list(prefix, revision=revision, limit=limit))

    async def put(self, key: str, value: bytes, lease: LeaseId = NO_LEASE) -> Revision:
        return await self._counted("put", self._store.put(key, value, lease))

    async def delete(self, key: str, *, is_prefix: bool = False) -> int:
        return await self._counted("delete", self._store.delete(key, is_prefix=is_prefix))

    async def txn(self, compares: Sequence[Compare], success: Sequence[Operation], failure: Sequence[Operation] = ()) -> TxnResult:
        return await self._counted("txn", self._store.txn(compares, success, failure))

    async def grant(self, ttl_s: float) -> LeaseId:
        return await self._counted("grant", self._store.grant(ttl_s))

    async def keep_alive(self, lease: LeaseId) -> float:
        return await self._counted("keep_alive", self._store.keep_alive(lease))

    async def revoke(self, lease: LeaseId) -> None:
        await self._counted("revoke", self._store.revoke(lease))

    def watch(self, prefix: str, start_revision: int) -> AsyncIterator[WatchedChanges]:
        """See `CoordinationStore`. A watch counts when it begins; the calls after it show how it ended."""
        self.calls["watch"] += 1
        return self._store.watch(prefix, start_revision)

    async def compact(self, revision: int) -> None:
        await self._counted("compact", self._store.compact(revision))

    async def close(self) -> None:
        await self._store.close()


class CoordinationSource:
    figures: Final = (CALLS, FAILED, SECONDS, SILENT)

    def __init__(self, store: CountedStore, view: ClusterView) -> None:
        self._store = store
        self._view = view

    def read(self) -> Iterator[Reading | None]:
        yield Reading(CALLS, [((method,), count) for method, count in self._store.calls.items()])
        yield Reading(FAILED, [((method,), count) for method, count in self._store.failures.items()])
        yield one(SECONDS, self._store.durations.histogram())
        yield one(SILENT, self._view.silent_ms / 1000)
