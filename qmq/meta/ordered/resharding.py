"""The leader's changes of routes: by load, and away from a broker group without a master, so that
producers need not wait for the group or for an operator.

The leader checks the load every five seconds, and makes the changes that qmq_ordering.resharding
decides. Its state between two checks is local. A new leader begins with the time of the last
change, so the cool-down holds, and measures again for how long neighbours have been cold. The last
change and its reason are in the store, for `qmq route explain`.

A group counts as lost when it *was there and went*: this metaserver has seen it with a living
master, and it has had none for `PATIENCE_MS`, by this metaserver's clock and its view of the store.
That is longer than an election, and the lease of the lost master has ended before its key was
deleted. Then each of its partitions, of subjects that are fenced by lease, is moved to the
subject's living group with the fewest partitions, one change after another, as by `qmq route move`.
Partitions that the group cannot close any more are fenced immediately. Consumers of those ranges
wait for the group; writers continue.

A group that has not come yet is not lost: when everything starts, some groups come later than
others. A master's key proves a living master

    if it was set after this metaserver began, or if it was there at the begin, and still is after
    `RENEWED_MS`: its lease was renewed. (A lease outlives the machines that stopped with the store,
    and begins again when the store starts.)

So metaservers that all start after a group was lost do not move its partitions. They say so once;
`qmq broker drain` moves them.

Only the leader moves partitions. All metaservers watch, so that the next leader knows which groups
were there. Two leaders for a moment are harmless, because a change is prepared once. Moved
partitions do not move back when the group returns.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, fields
from typing import Any, Final

from qmq_coordination.broker_groups import Mode
from qmq_coordination.coordination_store import CoordinationStore
from qmq_coordination.ordered_records import OrderedState, decision_key, policy_key
from qmq_coordination.view import ClusterView
from qmq_ordering.changes import move
from qmq_ordering.resharding import (
    LoadHistory,
    PartitionLoad,
    ReshardDecision,
    ReshardPolicy,
    decide,
)
from qmq_ordering.routes import Change, Phase, PhysicalPartition, Route

from qmq.errors import CoordinationUnknown, InvalidArgument, QmqError, RouteConflict
from qmq.meta.calls import TIMING, MetaTiming, PartitionMasters, at_once
from qmq.meta.ordered.controller import Controller
from qmq.meta.ordered.rounds import EVERYTHING, GroupLaneProgress, with_unwritten
from qmq.model import Fencing, SubjectConfig
from qmq.process.event_loop import Clock
from qmq.proto.v1 import control_pb2 as control
from qmq.proto.v1 import meta_pb2 as pb

log = logging.getLogger("qmq.meta")


class Resharding:
    """Policies, checks, decisions."""

    def __init__(
        self,
        store: CoordinationStore,
        view: ClusterView,
        masters: PartitionMasters,
        controller: Controller,
        clock: Clock,
        *,
        timing: MetaTiming = TIMING,
    ) -> None:
        self._timing = timing
        self._store = store
        self._view = view
        self._masters = masters
        self._controller = controller
        self._clock = clock
        self._pasts: dict[str, LoadHistory] = {}

    # --- policies ---------------------------------------------------------------------------------

    async def set_policy(self, subject: str, wanted: pb.ReshardPolicy) -> pb.ReshardPolicy:
        """Replace a subject's policy. Raises InvalidArgument, CoordinationError."""
        policy = policy_of(wanted)
        key = policy_key(subject)
        try:
            await self._store.put(key, policy.encode())
        except CoordinationUnknown:
            found = await self._store.get(key)
            if found is None or found.value != policy.encode():
                raise
        await self._view.read_back(key)
        return policy_message(subject, policy)

    @staticmethod
    def policy(state: OrderedState) -> ReshardPolicy:
        """The subject's policy; off by default."""
        item = state.items.get(policy_key(state.subject))
        return ReshardPolicy() if item is None else ReshardPolicy.decode(item.value)

    # --- checking ---------------------------------------------------------------------------------

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._timing.reshard_s * random.uniform(0.9, 1.1))  # noqa: S311 - jitter
            if not self._controller.leader.is_leader:
                self._pasts.clear()
                continue
            for config, state in self._view.ordered_subjects():
                if self.policy(state).is_enabled:
                    await self._check_and_log(config, state)

    async def _check_and_log(self, config: SubjectConfig, state: OrderedState) -> None:
        try:
            await self.check(config, state)
        except QmqError as failure:
            log.warning("checking subject %s for resharding failed: %s", config.name, failure)
        except Exception:
            log.exception("checking subject %s for resharding failed", config.name)

    async def check(self, config: SubjectConfig, state: OrderedState) -> ReshardDecision | None:
        """Decide once, and make the change. None if a change is under way. Raises
        CoordinationError, RouteConflict.
        """
        route = state.route
        if route is None or state.pending is not None:
            return None
        decision, past = await self._decide(config, state, route)
        self._pasts[config.name] = past
        if decision.operation is not None:
            await self._do(config, state, route, decision)
        return decision

    async def _do(
        self, config: SubjectConfig, state: OrderedState, route: Route, decision: ReshardDecision
    ) -> None:
        operation, changes = decision.operation, self._controller.changes
        assert operation is not None
        change_id, reason = changes.new_id(), f"automatic: {decision.reasons[0]}"
        targets = {part.group for part in operation.change(route, change_id=change_id).targets}
        if drained := sorted(
            name for name in targets if self._view.group(name).mode is not Mode.READ_WRITE
        ):
            log.warning(
                (
                    "subject %s is not resharded (%s): broker group %s is drained and takes no "
                    "new partition"
                ),
                config.name,
                operation,
                drained,
            )
            return
        try:
            change = await changes.prepare(
                config.name,
                lambda found: operation.change(found, change_id=change_id, reason=reason),
                from_version=route.version,
            )
        except RouteConflict as conflict:
            log.info("subject %s is not resharded: %s", config.name, conflict)
            return
        log.info("subject %s: %s: %s", config.name, operation, " ".join(decision.reasons))
        self._controller.carry_on(config.name, change.to_version)
        record = {
            "operation": str(operation),
            "reasons": decision.reasons,
            "at_ms": self._clock.time_ms(),
        }
        with suppress(CoordinationUnknown):  # for people only
            await self._store.put(decision_key(config.name), json.dumps(record).encode())

    async def _decide(
        self, config: SubjectConfig, state: OrderedState, route: Route
    ) -> tuple[ReshardDecision, LoadHistory]:
        past = self._pasts.get(config.name) or LoadHistory(route.version, _changed_ms(state))
        loads = await self._loads(config.name, state, route)
        return decide(
            self.policy(state),
            route,
            loads,
            self._places(config, route),
            past,
            self._clock.time_ms(),
        )

    def _places(self, config: SubjectConfig, route: Route) -> list[str]:
        """The subject's groups that take partitions, those with the fewest first."""
        counts = Counter(part.group for part in route.partitions)
        names = {*config.groups, *counts}
        return sorted(
            (name for name in names if self._view.group(name).mode is Mode.READ_WRITE),
            key=lambda name: (counts[name], name),
        )

    # --- loads ------------------------------------------------------------------------------------

    async def _loads(self, subject: str, state: OrderedState, route: Route) -> list[PartitionLoad]:
        """The load of the route's partitions, as far as their masters answer."""
        names = sorted({part.group for part in route.partitions})
        answers = await at_once([self._ask(name, subject, route) for name in names])
        statuses = {
            each.partition: each
            for answer in answers
            if answer is not None
            for each in answer.partitions
        }
        backlogs = await at_once(
            [self._backlogs(names, subject, group, route) for group in sorted(state.groups)]
        )
        return [
            _load(
                part,
                statuses[part.number],
                max((each.get(part.number, 0) for each in backlogs), default=0),
            )
            for part in route.partitions
            if part.number in statuses
        ]

    async def _backlogs(
        self, names: list[str], subject: str, group: str, route: Route
    ) -> dict[int, int]:
        progress = GroupLaneProgress()
        for answer in await at_once([self._ask(name, subject, route, group) for name in names]):
            if answer is not None:
                progress.add(answer)
        return {
            part.number: round(progress.backlog(part.number, EVERYTHING))
            for part in route.partitions
        }

    async def _ask(
        self, name: str, subject: str, route: Route, group: str = ""
    ) -> control.DescribeLanesResponse | None:
        numbers = [part.number for part in route.partitions if part.group == name]
        request = control.DescribeLanesRequest(
            subject=subject, partitions=numbers, group=group, with_load=not group
        )
        try:
            return with_unwritten(await self._masters.describe_lanes(name, request), request, name)
        except QmqError:
            return None

    # --- for people -------------------------------------------------------------------------------

    async def explain(
        self, config: SubjectConfig, state: OrderedState
    ) -> pb.ExplainReshardResponse:
        """The decision that the policy would make now, and the last change."""
        route = state.route
        assert route is not None
        decision, _ = await self._decide(config, state, route)
        item = state.items.get(decision_key(config.name))
        last: dict[str, Any] = {} if item is None else json.loads(item.value)
        return pb.ExplainReshardResponse(
            policy=policy_message(config.name, self.policy(state)),
            operation="" if decision.operation is None else str(decision.operation),
            reasons=decision.reasons,
            last_operation=last.get("operation", ""),
            last_reasons=last.get("reasons", []),
            last_ms=last.get("at_ms", 0),
        )


def _load(part: PhysicalPartition, status: control.PartitionStatus, backlog: int) -> PartitionLoad:
    lp_load = tuple(status.lp_load) if len(status.lp_load) == part.range.width else ()
    return PartitionLoad(part.number, status.messages_per_s, status.bytes_per_s, backlog, lp_load)


def _changed_ms(state: OrderedState) -> int | None:
    change = state.changes.get(state.latest)
    return None if change is None else change.times_ms.get(Phase.PUBLISHED.value)


def policy_of(message: pb.ReshardPolicy) -> ReshardPolicy:
    """A policy from a request; 0 means the default. Raises InvalidArgument."""
    names = [each.name for each in fields(ReshardPolicy)]
    given = {name: getattr(message, name) for name in names if getattr(message, name)}
    try:
        return ReshardPolicy(**given)
    except (TypeError, ValueError) as failure:
        raise InvalidArgument(f"invalid resharding policy: {failure}") from failure


def policy_message(subject: str, policy: ReshardPolicy) -> pb.ReshardPolicy:
    return pb.ReshardPolicy(subject=subject, **asdict(policy))


CHECK_S: Final = 0.1
PATIENCE_MS: Final = 500
"""The time without a master after which a group counts as lost. It is longer than an election and
than the lease of a lost master.
"""
RENEWED_MS: Final = 15_000
"""A master's key that exists for so long is renewed.
It is three times the lease of a master's key.
"""
FRESH_MS: Final = 4_000
"""After this time without news from the store,
the view is too old to tell which broker groups are lost.
"""


class Evacuation:
    """Moves partitions away from lost broker groups. `run` does not return."""

    def __init__(self, view: ClusterView, controller: Controller, clock: Clock) -> None:
        self._view = view
        self._controller = controller
        self._clock = clock
        self._began: tuple[int, int] | None = None
        """The time of the first check, and the view's revision then."""
        self._seen_living: set[str] = set()
        self._logged: set[str] = set()
        self._gone_since: dict[str, int] = {}
        self.moving: dict[str, asyncio.Task[None]] = {}
        """The subjects whose partitions are being moved, with the tasks that move them."""

    async def run(self) -> None:
        """Check repeatedly."""
        while True:
            await asyncio.sleep(CHECK_S)
            try:
                self.check()
            except Exception:
                log.exception("looking for broker groups without a master failed")

    def check(self) -> None:
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
            if (
                is_fenced
                and config.name not in self.moving
                and self._next(config, state, gone) is not None
            ):
                task = self.moving[config.name] = self._controller.spawn(self._empty(config, gone))
                task.add_done_callback(lambda _, name=config.name: self.moving.pop(name))  # type: ignore[misc]

    def _note_living(self, now_ms: int) -> None:
        """Note the groups whose master's key proves a living master."""
        if self._began is None:
            self._began = now_ms, self._view.revision
        began_ms, began_at = self._began
        for state in self._view.groups():
            item = state.items.get("master")
            if item is not None and (
                item.mod_revision > began_at or now_ms - began_ms >= RENEWED_MS
            ):
                self._seen_living.add(state.name)

    def _gone(self, now_ms: int) -> set[str]:
        missing = {
            state.name for state in self._view.groups() if state.master is None and state.members
        }
        self._gone_since = {name: self._gone_since.get(name, now_ms) for name in missing}
        gone = {name for name, since in self._gone_since.items() if now_ms - since >= PATIENCE_MS}
        for name in sorted(gone - self._seen_living - self._logged):
            self._logged.add(name)
            log.warning(
                "broker group %s has had no master since this metaserver began: "
                "its partitions stay; if it does not come back, `qmq broker drain %s` moves them",
                name,
                name,
            )
        return gone & self._seen_living

    # --- choosing ---------------------------------------------------------------------------------

    def _next(
        self, config: SubjectConfig, state: OrderedState, gone: set[str]
    ) -> tuple[PhysicalPartition, str] | None:
        """A partition on a lost group, and its new group; None if there is none, or no group to
        move it to.
        """
        route = state.route
        if route is None or state.pending is not None:
            return None
        part = next((each for each in route.partitions if each.group in gone), None)
        places = self._living(config, route)
        return (part, places[0]) if part is not None and places else None

    def _living(self, config: SubjectConfig, route: Route) -> list[str]:
        """The subject's groups that take messages now, those with the fewest partitions first."""
        counts = Counter(part.group for part in route.partitions)
        names = {*config.groups, *counts} or {
            state.name for state in self._view.groups() if state.delay is None
        }
        living = [
            name
            for name in names
            if (group := self._view.group(name)).master is not None
            and group.mode is Mode.READ_WRITE
        ]
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
                log.warning(
                    "moving partition %d of %s away from %s failed: %s",
                    found[0].number,
                    config.name,
                    found[0].group,
                    failure,
                )
                return

    async def _move(self, subject: str, part: PhysicalPartition, to: str) -> None:
        changes = self._controller.changes
        change_id = changes.new_id()
        reason = f"automatic: broker group {part.group} has no master"

        def moved(route: Route) -> Change:
            return move(route, part.number, to, change_id=change_id, reason=reason)

        change = await changes.prepare(subject, moved)
        changes.sealing.note_gone(part.group)
        log.warning(
            "moving partition %d of %s from %s, which has no master, to %s",
            part.number,
            subject,
            part.group,
            to,
        )
        await asyncio.shield(self._controller.carry_on(subject, change.to_version))
