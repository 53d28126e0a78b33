"""Bugs in changes of routes and in how groups advance.

Bugs in leases and fences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import qmq_ordering.lanes as advancing
from qmq_coordination.broker_groups import read_group
from qmq_coordination.coordination_store import Put, absent
from qmq_coordination.ordered_records import Fence, change_key, fence_key
from qmq_ordering.changes import PhaseEvent, step
from qmq_ordering.lanes import Frontier, FrontierPiece
from qmq_ordering.routes import FENCED

from ordersim.bugs.planting import plant
from qmq.errors import CoordinationUnknown
from qmq.log.queue import Queue
from qmq.meta.ordered import changes, rounds
from qmq.meta.ordered.changes import RouteChanges, Sealing
from qmq.meta.ordered.controller import Controller
from qmq.meta.ordered.groups import Records
from qmq.meta.ordered.rounds import GroupRounds
from qmq.node.replica import status
from qmq.node.replica.status import WriteLease

# --- changes -------------------------------------------------------------------------------------------------------------


async def _publish_first(self: RouteChanges, subject: str, item: Any, change: Any) -> None:
    after = change
    for number in change.sources:
        after = step(after, PhaseEvent.SOURCE_SEALED, number=number, sequence=FENCED)
    after = step(after, PhaseEvent.ALL_SEALED, now_ms=self._now_ms())
    await self._store.txn([changes.unchanged(item)], [Put(item.key, after.encode())])


async def _prepare_blindly(self: RouteChanges, subject: str, latest: Any, change: Any) -> None:
    try:
        await self._store.txn([], [Put(change_key(subject, change.to_version), change.encode())])
    except CoordinationUnknown:
        return


class _AnyTime:
    """A store whose transactions do not compare."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def txn(self, _compares: Any, success: Any) -> Any:
        return await self._store.txn([], success)


def _blind(method: Callable[..., Any]) -> Any:
    async def blindly(self: RouteChanges, subject: str, item: Any, change: Any) -> None:
        store, self._store = self._store, _AnyTime(self._store)  # type: ignore[assignment]
        try:
            await method(self, subject, item, change)
        finally:
            self._store = store

    return blindly


plant("publish before the sources are sealed", (RouteChanges, "_seal", _publish_first))
plant("prepare a change without comparing the latest version", (RouteChanges, "_put_prepared", _prepare_blindly))
plant("call a change sealed without comparing", (RouteChanges, "_seal", _blind(RouteChanges._seal)))
plant("publish without comparing", (RouteChanges, "_publish", _blind(RouteChanges._publish)))

# --- groups --------------------------------------------------------------------------------------------------------------

_advance = advancing.advance
_is_finished = Queue.is_finished


def _on_first_source(frontier: Frontier, gate: Any, routes: Any, latest: int, finished: Any, cuts: Any = None) -> Frontier:
    """As soon as one source of a change is finished, all sources count as finished."""

    def any_finished(number: int, lps: Any) -> bool:
        if finished(number, lps):
            return True
        versions = [version for version, route in routes.items() if route.partition(number) is not None]
        before, after = routes[max(versions)], routes.get(max(versions) + 1)
        if after is None:
            return False
        here = {part.number for part in after.partitions}
        closed = [part for part in before.partitions if part.number not in here]
        return any(finished(part.number, part.range) for part in closed)

    return _advance(frontier, gate, routes, latest, any_finished, cuts)


def _by_any_range(frontier: Frontier, gate: Any, routes: Any, latest: int, finished: Any, cuts: Any = None) -> Frontier:
    """A range opens when any range of its source is finished."""

    def some_finished(number: int, lps: Any) -> bool:
        return finished(number, lps) or any(each.end < 1 << 20 and finished(number, each) for each in cuts(number))

    return _advance(frontier, gate, routes, latest, some_finished, cuts)


def _two_at_once(frontier: Frontier, gate: Any, routes: Any, latest: int, finished: Any, cuts: Any = None) -> Frontier:
    after = _advance(frontier, gate, routes, latest, finished, cuts)
    if after == frontier or after.newest >= latest:
        return after
    return Frontier(tuple(advancing._joined([FrontierPiece(each.range, min(each.version + 1, latest)) for each in after.pieces])))


def _missing_is_done(self: Queue, share: Any, lps: Any) -> bool:
    if self.sealed is not None and (share is None or not share.progress):
        return True
    return _is_finished(self, share, lps)


async def _put_blindly(self: Records, item: Any, record: Any) -> Any:
    try:
        done = await self.store.txn([], [Put(item.key, record.encode())])
    except CoordinationUnknown:
        return None
    return replace(item, value=record.encode(), mod_revision=done.revision)


plant("advance when the first of several sources is finished", (rounds, "advance", _on_first_source))
plant("open a range when another one of its source is finished", (rounds, "advance", _by_any_range))
plant("skip a version", (rounds, "advance", _two_at_once))
plant("take progress that is missing for done", (Queue, "is_finished", _missing_is_done))
plant("put a frontier without comparing", (Records, "swap", _put_blindly))


async def _leave_parked(self: GroupRounds, looked: Any, after: Any) -> bool:
    return True


plant("leave parked keys behind when a group moves on", (GroupRounds, "_hand_on", _leave_parked))


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
