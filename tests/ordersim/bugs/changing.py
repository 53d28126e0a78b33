"""Bugs in changes of routes and in how groups advance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import qmq_ordering.lanes as advancing
from qmq_coordination.coordination_store import Put
from qmq_coordination.ordered_records import change_key
from qmq_ordering.changes import PhaseEvent, step
from qmq_ordering.lanes import Frontier, FrontierPiece
from qmq_ordering.routes import FENCED

from ordersim.bugs.planting import plant
from qmq.errors import CoordinationUnknown
from qmq.log.queue import Queue
from qmq.meta.ordered import changes, rounds
from qmq.meta.ordered.changes import RouteChanges
from qmq.meta.ordered.groups import Records
from qmq.meta.ordered.rounds import GroupRounds

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
