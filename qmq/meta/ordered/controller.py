"""Decides when rounds run and route changes continue, and elects the metaserver that continues
interrupted work.

The leader has the key `/qmq/meta/leader`, under that metaserver's lease. The election saves work
and is no lock: every change that the leader makes is a compare-and-swap that any metaserver may
make. So two leaders at one time, or none, do no harm.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Final

from qmq_coordination.coordination_store import NO_LEASE, CoordinationStore, Put, absent
from qmq_coordination.ordered_records import (
    LEADER,
    OrderedState,
    assignment_key,
    change_key,
    group_record_key,
    latest_key,
    route_key,
)
from qmq_coordination.view import ClusterView
from qmq_coordination.view import ViewChange as ViewChange
from qmq_ordering.lanes import GroupRecord
from qmq_ordering.routes import Change, Phase, Route

from qmq.errors import CoordinationError, LeaseNotFound, QmqError
from qmq.meta.calls import TIMING, MetaTiming, PartitionMasters, at_once
from qmq.meta.ordered.changes import RouteChanges
from qmq.meta.ordered.groups import DELETE, Members, Records, Start
from qmq.meta.ordered.placement import Forgetting, Placing
from qmq.meta.ordered.rounds import GroupRounds, RoundOutcome
from qmq.process.event_loop import Clock

log = logging.getLogger("qmq.meta")

LEASE_S: Final = 5.0


class ControllerElection:
    """Campaigns to be the leader until it is stopped."""

    def __init__(self, store: CoordinationStore, name: str, *, lease_s: float = LEASE_S) -> None:
        self._store = store
        self._name = name
        self._lease_s = lease_s
        self._lease = NO_LEASE
        self._task: asyncio.Task[None] | None = None
        self.is_leader = False

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            try:
                self.is_leader = await self.campaign()
            except CoordinationError as failure:
                self.is_leader = False
                log.debug("electing the leading metaserver failed, trying again: %s", failure)
            except Exception:
                self.is_leader = False
                log.exception("electing the leading metaserver failed, trying again")
            await asyncio.sleep(self._lease_s / 3 * random.uniform(0.8, 1.0))  # noqa: S311 - jitter

    async def campaign(self) -> bool:
        """Keep the key, or take it if there is none. Returns True if this metaserver is the leader.
        Raises CoordinationError.
        """
        found = await self._store.get(LEADER)
        if found is not None and found.lease != self._lease:
            return False
        if found is not None:
            with suppress(LeaseNotFound):
                await self._store.keep_alive(self._lease)
                return True
        lease = await self._store.grant(self._lease_s)
        if (
            await self._store.txn([absent(LEADER)], [Put(LEADER, self._name.encode(), lease)])
        ).succeeded:
            self._lease = lease
            return True
        with suppress(CoordinationError):
            await self._store.revoke(lease)
        return False

    async def stop(self) -> None:
        """Resign immediately, so that another metaserver can lead."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self.is_leader = False
        if self._lease != NO_LEASE:
            with suppress(CoordinationError):
                await self._store.revoke(self._lease)


DEBOUNCE_S: Final = 0.01
"""Events within this time are handled together."""
LOST_S: Final = 0.03
"""Longest pause after a lost swap."""
SILENT_S: Final = 0.5
"""The approximate pause before a silent broker group is called again."""
STILL_MS: Final = 1_000
"""After this time in one phase, the leader continues a change: the metaserver that began it may
have stopped.
"""
MOVED_MS: Final = 10_000
"""Other metaservers wait this long before they continue a group's move. It is longer than all calls
of a move.
"""

Pair = tuple[str, str]


def _new_id() -> str:
    return secrets.token_hex(8)


class Controller:
    """A metaserver's background work for ordered subjects. Call `start`, then `stop`."""

    def __init__(
        self,
        store: CoordinationStore,
        view: ClusterView,
        masters: PartitionMasters,
        clock: Clock,
        *,
        new_id: Callable[[], str] = _new_id,
        timing: MetaTiming = TIMING,
    ) -> None:
        self._view = view
        self._timing = timing
        self._clock = clock
        self.records = Records(store, self._known)
        self.groups = GroupRounds(self.records, masters, gather=at_once)
        self.placing = Placing(self.records, masters)
        self.forgetting = Forgetting(self.records, self.placing, masters)
        self.changes = RouteChanges(
            store, masters, sleep=asyncio.sleep, now_ms=clock.time_ms, new_id=new_id
        )
        self.members = Members(store, clock.time_ms, clock.monotonic_ms)
        self.leader = ControllerElection(store, new_id())
        self._wanted: set[Pair] = set()
        self._rounds: dict[Pair, asyncio.Task[None]] = {}
        self._timers: dict[Pair, asyncio.TimerHandle] = {}
        self._carried: dict[tuple[str, int], asyncio.Task[Change]] = {}
        self._others: set[asyncio.Task[None]] = set()
        self._waiters: dict[Pair, dict[asyncio.Event, None]] = {}
        self._still: dict[object, int] = {}
        self._learning: asyncio.Task[None] | None = None
        self._leave: Callable[[], None] = lambda: None
        self.is_stopping = False

    def _known(self, subject: str, version: int) -> Route | None:
        state = self._view.ordered(subject)
        return None if state is None else state.routes.get(version)

    def start(self) -> None:
        self._leave = self._view.on_change(self._changed)
        self.leader.start()
        self.spawn(self._sweep_for_ever())

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a task until it is done, or until `stop`."""
        task = asyncio.create_task(work)
        self._others.add(task)
        task.add_done_callback(self._others.discard)
        return task

    async def stop(self) -> None:
        """Stop, and answer waiting callers immediately. Other metaservers continue the work."""
        self.is_stopping = True
        self._leave()
        for timer in self._timers.values():
            timer.cancel()
        tasks = [*self._others, *self._rounds.values(), *self._carried.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for events in self._waiters.values():
            for event in events:
                event.set()
        await self.leader.stop()

    # --- rounds -----------------------------------------------------------------------------------

    def _changed(self, change: ViewChange) -> None:
        for pair in self.members.pairs:
            if pair[0] in change.subjects or pair in change.consumption:
                self.poke(pair)
        for pair in sorted(change.consumption):
            for event in self._waiters.get(pair, ()):
                event.set()

    def poke(self, pair: Pair) -> None:
        """Check a group soon."""
        if self.is_stopping:
            return
        self._wanted.add(pair)
        if pair not in self._rounds:
            self._rounds[pair] = asyncio.create_task(self._run(pair))

    def _poke_later(self, pair: Pair, within_s: float) -> None:
        """Check a group within a time, unless it is checked before."""
        if pair in self._timers or self.is_stopping:
            return
        self._timers[pair] = asyncio.get_running_loop().call_later(
            within_s * random.uniform(0.2, 1.0),  # noqa: S311 - jitter
            self._poke_now,
            pair,
        )

    def _poke_now(self, pair: Pair) -> None:
        self._timers.pop(pair, None)
        self.poke(pair)

    async def _run(self, pair: Pair) -> None:
        try:
            while pair in self._wanted:
                await asyncio.sleep(DEBOUNCE_S)
                self._wanted.discard(pair)
                await self._round(pair)
        finally:
            del self._rounds[pair]

    async def _round(self, pair: Pair) -> None:
        try:
            outcome = await self.groups.round(*pair)
            if not outcome.is_ready:
                await self._make_ready(pair)
            await self._follow_up(pair, outcome)
        except QmqError as failure:
            log.warning("group %s of subject %s: %s", pair[1], pair[0], failure)
            self._poke_later(
                pair, SILENT_S if failure.retry_after_ms is None else failure.retry_after_ms / 1000
            )
        except Exception:
            log.exception("a round of group %s of subject %s failed", pair[1], pair[0])

    async def _follow_up(self, pair: Pair, outcome: RoundOutcome) -> None:
        if outcome.steps or outcome.is_assigned:
            await self._view.read_back(group_record_key(*pair), assignment_key(*pair))
        if outcome.is_lost:
            self._poke_later(pair, LOST_S)
        elif outcome.silent and pair in self.members.pairs:
            self._poke_later(pair, SILENT_S)
        if outcome.steps:
            await self._finish(pair[0])

    async def _make_ready(self, pair: Pair) -> None:
        """Continue with a group that is beginning. A group that is being moved is left alone,
        unless the metaserver that moves it has stopped.
        """
        item, record = await self.records.record(*pair)
        if record.start == DELETE:
            await self.forgetting.carry_on(*pair)
            return
        is_delicate = Start.parse(record.start).is_delicate
        if not record.is_ready and (
            not is_delicate or self._stands_still((item.key, item.mod_revision), MOVED_MS)
        ):
            await self.make_ready(pair)

    async def make_ready(self, pair: Pair) -> GroupRecord:
        """Continue with a group that is not ready, and check it again.
        Raises the errors of `placement.make_ready`.
        """
        record = await self.placing.make_ready(*pair)
        await self._view.read_back(group_record_key(*pair))
        self.poke(pair)
        return record

    # --- waiting ----------------------------------------------------------------------------------

    async def wait(self, pair: Pair, is_news: asyncio.Event, within_s: float) -> None:
        """Wait until the group has changed, or the time has ended."""
        events = self._waiters.setdefault(pair, {})
        events[is_news] = None
        try:
            async with asyncio.timeout(within_s):
                await is_news.wait()
        except TimeoutError:
            return
        finally:
            events.pop(is_news, None)
            if not events:
                self._waiters.pop(pair, None)
            is_news.clear()

    # Continue a change in the background, in one task that all callers share: await it with
    # `shield`.

    def carry_on(self, subject: str, version: int) -> asyncio.Task[Change]:
        """Continue a change in the background, in one task. The task is shared: shield it."""
        key = (subject, version)
        task = self._carried.get(key)
        if task is None:
            task = self._carried[key] = asyncio.create_task(self._carry(subject, version))
            task.add_done_callback(lambda _: self._carried.pop(key, None))
            task.add_done_callback(_log_failure)
        return task

    async def _carry(self, subject: str, version: int) -> Change:
        change = await self.changes.carry_on(subject, version)
        # The route comes before the number of the latest one, so that no reader sees a number
        # without its route.
        await self._view.read_back(
            route_key(subject, version), change_key(subject, version), latest_key(subject)
        )
        return change

    async def _finish(self, subject: str) -> None:
        """Mark published changes done that every group has passed. No caller waits for this."""
        state = self._view.ordered(subject)
        if state is None:
            return
        behind = min(
            (record.frontier.version for record in state.groups.values()), default=state.latest
        )
        for version, change in sorted(state.changes.items()):
            if change.phase is Phase.PUBLISHED and version <= behind:
                await self.changes.finish(subject, version)

    # --- stalled changes --------------------------------------------------------------------------

    async def _sweep_for_ever(self) -> None:
        while True:
            await asyncio.sleep(self._timing.sweep_s * random.uniform(0.8, 1.2))  # noqa: S311 - jitter
            self.members.forget_silent()
            oldest = self._clock.monotonic_ms() - 10 * MOVED_MS
            self._still = {what: since for what, since in self._still.items() if since > oldest}
            if not self.leader.is_leader:
                continue
            try:
                await self.sweep()
            except QmqError as failure:
                log.warning("a sweep over the ordered subjects failed: %s", failure)
            except Exception:
                log.exception("a sweep over the ordered subjects failed")

    async def sweep(self) -> None:
        """Check all ordered subjects once. Raises CoordinationError."""
        for _, state in self._view.ordered_subjects():
            self._sweep_groups(state)
            await self._sweep_changes(state)
        await self._lift_fences()

    def _sweep_groups(self, state: OrderedState) -> None:
        for group, record in state.groups.items():
            pair = (state.subject, group)
            owners = {owner for _, owner in self._view.assignment(*pair).lanes}
            if (
                record.frontier.version < state.latest
                or not record.is_ready
                or not owners <= self._view.members(*pair).keys()
            ):
                self.poke(pair)

    async def _sweep_changes(self, state: OrderedState) -> None:
        pending = state.pending
        if pending is not None and self._stands_still(
            ("change", state.subject, pending.to_version, pending.phase), STILL_MS
        ):
            self.carry_on(state.subject, pending.to_version)
        await self._finish(state.subject)
        if state.fenced and (self._learning is None or self._learning.done()):
            self._learning = self.spawn(self._learn_sealed(state))

    async def _learn_sealed(self, state: OrderedState) -> None:
        """Ask fenced groups for their seals. This is a separate task, because an unreachable group
        costs a deadline each time.
        """
        fenced = set(state.fenced)
        for version in [
            version for version, change in state.changes.items() if fenced & set(change.sources)
        ]:
            with suppress(QmqError):
                await self.changes.learn_sealed(state.subject, version)

    async def _lift_fences(self) -> None:
        """Remove the fences whose seals are known, and those that a deleted subject left."""
        for group in self._view.groups():
            for (subject, number), fence in self._view.fences(group.name).items():
                state = self._view.ordered(subject)
                change = None if state is None else state.changes.get(fence.to_version)
                if not fence.is_needed(change, number):
                    await self.changes.sealing.lift(group.name, subject, number)

    def _stands_still(self, what: object, for_ms: int) -> bool:
        """True if this state was first seen long enough ago, by our own clock: the times in a
        record are from other clocks.
        """
        now = self._clock.monotonic_ms()
        return now - self._still.setdefault(what, now) >= for_ms


def _log_failure(task: asyncio.Task[Change]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.error("continuing a change of a route failed: %s", task.exception())
