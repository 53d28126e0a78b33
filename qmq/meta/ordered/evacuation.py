"""Moves partitions away from a broker group without a master, so that producers need not wait for the group or for an operator.

A group counts as lost when it *was there and went*: this metaserver has seen it with a living master, and it has had none for
`PATIENCE_MS`, by this metaserver's clock and its view of the store. That is longer than an election, and the lease of the lost master has
ended before its key was deleted. Then each of its partitions, of subjects that are fenced by lease, is moved to the subject's living group
with the fewest partitions, one change after another, as by `qmq route move`. Partitions that the group cannot close any more are fenced
immediately. Consumers of those ranges wait for the group; writers continue.

A group that has not come yet is not lost: when everything starts, some groups come later than others. A master's key proves a living master

    if it was set after this metaserver began, or
    if it was there at the begin, and still is after `RENEWED_MS`: its lease was renewed. (A lease outlives the machines that stopped with
    the store, and begins again when the store starts.)

So metaservers that all start after a group was lost do not move its partitions. They say so once; `qmq broker drain` moves them.

Only the leader moves partitions. All metaservers watch, so that the next leader knows which groups were there. Two leaders for a moment are
harmless, because a change is prepared once. Moved partitions do not move back when the group returns.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import Final

from qmq_coordination.broker_groups import Mode
from qmq_coordination.ordered_records import OrderedState
from qmq_coordination.view import ClusterView
from qmq_ordering.algebra import move
from qmq_ordering.route import Change, PhysicalPartition, Route

from qmq.clock import Clock
from qmq.errors import QmqError
from qmq.meta.ordered.controller import Controller
from qmq.model import Fencing, SubjectConfig

log = logging.getLogger("qmq.meta")

LOOK_S: Final = 0.1
PATIENCE_MS: Final = 500
"""The time without a master after which a group counts as lost. It is longer than an election and than the lease of a lost master."""
RENEWED_MS: Final = 15_000
"""A master's key that exists for so long is renewed. It is three times the lease of a master's key."""
FRESH_MS: Final = 4_000
"""After this time without news from the store, the view is too old to tell which broker groups are lost."""


class Evacuation:
    """Moves partitions away from lost broker groups. `run` does not return."""

    def __init__(self, view: ClusterView, controller: Controller, clock: Clock) -> None:
        self._view = view
        self._controller = controller
        self._clock = clock
        self._began: tuple[int, int] | None = None
        """The time of the first look, and the view's revision then."""
        self._was_there: set[str] = set()
        self._said: set[str] = set()
        self._gone_since: dict[str, int] = {}
        self._moving: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Check repeatedly."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                self.look()
            except Exception:
                log.exception("looking for broker groups without a master failed")

    def look(self) -> None:
        """Check once, and begin to move partitions of lost groups."""
        now_ms = self._clock.monotonic_ms()
        is_fresh = self._view.silent_ms <= FRESH_MS
        if is_fresh:
            self._note_living(now_ms)
        if not is_fresh or not self._controller.leader.is_leader:
            self._gone_since.clear()
            return
        gone = self._gone(now_ms)
        for config, state in self._view.ordered_subjects() if gone else ():
            is_fenced = config.fencing is Fencing.LEASE
            if is_fenced and config.name not in self._moving and self._next(config, state, gone) is not None:
                task = self._moving[config.name] = self._controller.spawn(self._empty(config, gone))
                task.add_done_callback(lambda _, name=config.name: self._moving.pop(name))  # type: ignore[misc]

    def _note_living(self, now_ms: int) -> None:
        """Note the groups whose master's key proves a living master."""
        if self._began is None:
            self._began = now_ms, self._view.revision
        began_ms, began_at = self._began
        for state in self._view.groups():
            item = state.items.get("master")
            if item is not None and (item.mod_revision > began_at or now_ms - began_ms >= RENEWED_MS):
                self._was_there.add(state.name)

    def _gone(self, now_ms: int) -> set[str]:
        missing = {state.name for state in self._view.groups() if state.master is None and state.members}
        self._gone_since = {name: self._gone_since.get(name, now_ms) for name in missing}
        gone = {name for name, since in self._gone_since.items() if now_ms - since >= PATIENCE_MS}
        for name in sorted(gone - self._was_there - self._said):
            self._said.add(name)
            log.warning(
                "broker group %s has had no master since this metaserver began: its partitions stay; if it does not come back, "
                "`qmq broker drain %s` moves them",
                name,
                name,
            )
        return gone & self._was_there

    # --- choosing --------------------------------------------------------------------------------------------------------

    def _next(self, config: SubjectConfig, state: OrderedState, gone: set[str]) -> tuple[PhysicalPartition, str] | None:
        """A partition on a lost group, and its new group; None if there is none, or no group to move it to."""
        route = state.route
        if route is None or state.pending is not None:
            return None
        part = next((each for each in route.partitions if each.group in gone), None)
        places = self._living(config, route)
        return (part, places[0]) if part is not None and places else None

    def _living(self, config: SubjectConfig, route: Route) -> list[str]:
        """The subject's groups that take messages now, those with the fewest partitions first."""
        counts = Counter(part.group for part in route.partitions)
        names = {*config.groups, *counts} or {state.name for state in self._view.groups() if state.delay is None}
        living = [name for name in names if (group := self._view.group(name)).master is not None and group.mode is Mode.READ_WRITE]
        return sorted(living, key=lambda name: (counts[name], name))

    async def _empty(self, config: SubjectConfig, gone: set[str]) -> None:
        """Move one partition after another, until the group has none or is back."""
        while True:
            still_gone = {name for name in gone if self._view.group(name).master is None}
            state = self._view.ordered(config.name)
            found = self._next(config, state, still_gone) if state is not None else None
            if found is None:
                return
            try:
                await self._move(config.name, *found)
            except QmqError as failure:
                log.warning("moving partition %d of %s away from %s failed: %s", found[0].number, config.name, found[0].group, failure)
                return

    async def _move(self, subject: str, part: PhysicalPartition, to: str) -> None:
        changes = self._controller.changes
        change_id = changes.new_id()
        reason = f"automatic: broker group {part.group} has no master"

        def moved(route: Route) -> Change:
            return move(route, part.number, to, change_id=change_id, reason=reason)

        change = await changes.prepare(subject, moved)
        changes.know_gone(part.group)
        log.warning("moving partition %d of %s from %s, which has no master, to %s", part.number, subject, part.group, to)
        await asyncio.shield(self._controller.carry_on(subject, change.to_version))
