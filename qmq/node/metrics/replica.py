"""The metrics of a replica's role in its broker group, and of the others' lag while it is master.
`qmq dev` is always master. Those of the coordination store, as this process sees it, come from a
store that counts calls and passes them on.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
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

from qmq.errors import CoordinationUnavailable, CoordinationUnknown, Unavailable
from qmq.metrics.figures import COUNTER, GAUGE, HISTOGRAM, Durations, Figure, Reading, one
from qmq.proto.v1 import control_pb2 as pb

_OF: Final = ("broker_group",)
_PEER: Final = ("broker_group", "replica")

INFO: Final = Figure(
    "qmq_replica_info",
    GAUGE,
    (*_OF, "replica", "role"),
    "Always 1; the labels name the replica and its role in its broker group.",
)
SERVING: Final = Figure(
    "qmq_serving", GAUGE, _OF, "1 while this replica is master and serves clients."
)
EPOCH: Final = Figure("qmq_epoch", GAUGE, _OF, "The highest epoch that this replica knows of.")
ROLES: Final = Figure(
    "qmq_role_changes_total",
    COUNTER,
    (*_OF, "role"),
    "Changes of this replica to a role; master: elections that it won.",
)
REFUSED: Final = Figure(
    "qmq_replication_refused_total",
    COUNTER,
    (*_OF, "kind"),
    (
        "Refused on connections of replicas: hellos, proofs, messages of non-members or of "
        "epochs that no replica won, violations."
    ),
)
LAST: Final = Figure(
    "qmq_last_index", GAUGE, _OF, "Index of the last entry that this replica has written."
)
COMMITTED: Final = Figure(
    "qmq_commit_index",
    GAUGE,
    _OF,
    "Index up to which this replica knows all entries to be committed.",
)
WHOLE: Final = Figure(
    "qmq_whole",
    GAUGE,
    _OF,
    "0 if this replica may lack entries that it acknowledged: it does not count in elections.",
)
MEMBERS: Final = Figure(
    "qmq_members", GAUGE, (*_OF, "kind"), "Replicas of the broker group: voters and learners."
)
LAG: Final = Figure(
    "qmq_replication_lag_entries",
    GAUGE,
    _PEER,
    "Entries of the master that the other replica does not have yet; only the master reports it.",
)
IN_STEP: Final = Figure(
    "qmq_replication_in_step",
    GAUGE,
    _PEER,
    "1 if the other replica is in step; only the master reports it.",
)
SILENT: Final = Figure(
    "qmq_replication_silent_seconds",
    GAUGE,
    _PEER,
    "Seconds since the last message of the other replica; only the master reports it.",
)


class ReplicaSource:
    """`describe` raises Unavailable while the replica starts; `roles` counts the roles it took."""

    figures: Final = (
        INFO,
        SERVING,
        EPOCH,
        ROLES,
        REFUSED,
        LAST,
        COMMITTED,
        WHOLE,
        MEMBERS,
        LAG,
        IN_STEP,
        SILENT,
    )

    def __init__(
        self,
        group: str,
        describe: Callable[[], pb.ReplicaStatus],
        roles: Mapping[str, int] | None = None,
        refused: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        self._group = group
        self._describe = describe
        self._roles = roles if roles is not None else {}
        self._refused = refused

    def read(self) -> Iterator[Reading | None]:
        group = self._group
        try:
            info = self._describe()
        except Unavailable:
            return
        yield one(INFO, 1, group, info.replica, info.role)
        yield one(SERVING, int(info.is_serving), group)
        yield one(EPOCH, info.epoch, group)
        yield Reading(
            ROLES, [((group, role), count) for role, count in sorted(self._roles.items())]
        )
        yield Reading(
            REFUSED, [((group, what), count) for what, count in sorted(self._refused().items())]
        )
        yield one(LAST, info.last_index, group)
        yield one(COMMITTED, info.commit_index, group)
        yield one(WHOLE, int(info.is_whole), group)
        yield Reading(
            MEMBERS,
            [((group, "voter"), len(info.voters)), ((group, "learner"), len(info.learners))],
        )
        peers = sorted(info.peers, key=lambda each: each.replica)
        yield Reading(
            LAG,
            [((group, each.replica), max(info.last_index - each.match_index, 0)) for each in peers],
        )
        yield Reading(IN_STEP, [((group, each.replica), int(each.in_step)) for each in peers])
        yield Reading(SILENT, [((group, each.replica), each.silent_ms / 1000) for each in peers])


_METHODS: Final = (
    "get",
    "list",
    "put",
    "delete",
    "txn",
    "grant",
    "keep_alive",
    "revoke",
    "watch",
    "compact",
)

CALLS: Final = Figure(
    "qmq_coordination_calls_total", COUNTER, ("method",), "Calls to the coordination store."
)
FAILED: Final = Figure(
    "qmq_coordination_failures_total",
    COUNTER,
    ("method",),
    "Calls to the coordination store that got no answer.",
)
SECONDS: Final = Figure(
    "qmq_coordination_call_seconds",
    HISTOGRAM,
    (),
    "Duration of calls to the coordination store, with all their attempts.",
)
ETCD_SILENT: Final = Figure(
    "qmq_coordination_silent_seconds",
    GAUGE,
    (),
    "Seconds since the coordination store last answered: normally below 3.",
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

    async def txn(
        self,
        compares: Sequence[Compare],
        success: Sequence[Operation],
        failure: Sequence[Operation] = (),
    ) -> TxnResult:
        return await self._counted("txn", self._store.txn(compares, success, failure))

    async def grant(self, ttl_s: float) -> LeaseId:
        return await self._counted("grant", self._store.grant(ttl_s))

    async def keep_alive(self, lease: LeaseId) -> float:
        return await self._counted("keep_alive", self._store.keep_alive(lease))

    async def revoke(self, lease: LeaseId) -> None:
        await self._counted("revoke", self._store.revoke(lease))

    def watch(self, prefix: str, start_revision: int) -> AsyncIterator[WatchedChanges]:
        """See `CoordinationStore`. A watch counts when it begins;
        the calls after it show how it ended.
        """
        self.calls["watch"] += 1
        return self._store.watch(prefix, start_revision)

    async def compact(self, revision: int) -> None:
        await self._counted("compact", self._store.compact(revision))

    async def close(self) -> None:
        await self._store.close()


class CoordinationSource:
    figures: Final = (CALLS, FAILED, SECONDS, ETCD_SILENT)

    def __init__(self, store: CountedStore, view: ClusterView) -> None:
        self._store = store
        self._view = view

    def read(self) -> Iterator[Reading | None]:
        yield Reading(CALLS, [((method,), count) for method, count in self._store.calls.items()])
        yield Reading(
            FAILED, [((method,), count) for method, count in self._store.failures.items()]
        )
        yield one(SECONDS, self._store.durations.histogram())
        yield one(ETCD_SILENT, self._view.silent_ms / 1000)
