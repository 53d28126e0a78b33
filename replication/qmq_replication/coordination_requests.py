"""Carries out the core's requests to the coordination store, and passes the answers to the core. Each driver has one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Final

from qmq.clock import Clock
from qmq.errors import CoordinationError
from qmq_replication.coordinator import Coordinator, Holding
from qmq_replication.core import Replica
from qmq_replication.ready import Campaign, MembershipChange, Request, Resign, Role

log = logging.getLogger("qmq.replication")

HOLD_S: Final = 1.5


class CoordinationRequests:
    def __init__(
        self,
        core: Replica,
        coordinator: Coordinator,
        clock: Clock,
        *,
        tell: Callable[[Callable[[int], object]], None],
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        on_held: Callable[[int, Holding, int], None],
    ) -> None:
        """`clock` is the clock of the leases. `tell` passes news to the core, with the time. `spawn` runs a job until the driver stops."""
        self._core = core
        self._coordinator = coordinator
        self._clock = clock
        self._tell = tell
        self._spawn = spawn
        self._on_held = on_held
        self._looking: asyncio.Task[None] | None = None

    def begin(self, request: Request) -> None:
        """Begin to carry out the request."""
        if isinstance(request, Campaign):
            self._spawn(self.campaign())
        elif isinstance(request, Resign):
            self._spawn(self._coordinator.resign(request.epoch))
        elif isinstance(request, MembershipChange):
            self._spawn(self._change(request))
        elif self._looking is None or self._looking.done():
            self._looking = self._spawn(self._look_up())

    async def _look_up(self) -> None:
        try:
            epoch, membership = await self._coordinator.look_up()
        except CoordinationError as failure:
            log.debug("reading the epoch from the coordination store failed: %s", failure)
            return
        self._tell(lambda now_ms: self._core.looked_up(now_ms, epoch, membership))

    async def campaign(self) -> None:
        """Ask for a new epoch, if the core still campaigns."""
        if self._core.state.role is not Role.CAMPAIGNING:
            return  # requested before an earlier campaign won: winning again would lose that epoch's claim
        won = await self._coordinator.campaign(self._core.state.promised, above=self._core.refused_epoch)
        if won is None:
            self._tell(lambda now_ms: self._core.campaign_lost(now_ms))
        else:
            epoch, membership = won.epoch, won.membership
            self._tell(lambda now_ms: self._core.campaign_won(now_ms, epoch, membership))

    async def _change(self, request: MembershipChange) -> None:
        done = await self._coordinator.change(request.before, request.after)
        leader = self._core.leader
        if leader is not None and leader.epoch == request.epoch:
            self._tell(lambda _: leader.changed(done))

    async def hold(self, epoch: int) -> None:
        """Keep the master's key as long as the core leads in this epoch."""
        while True:
            leader = self._core.leader
            if leader is None or leader.epoch != epoch:
                return
            asked_ms = self._clock.monotonic_ms()
            try:
                held = await self._coordinator.hold()
            except CoordinationError as failure:
                log.warning("the coordination store does not answer, the group continues without it: %s", failure)
            else:
                self._on_held(epoch, held, asked_ms)
                self._tell(lambda now_ms, highest=held.epoch: self._core.superseded(now_ms, highest))  # type: ignore[misc]
            await asyncio.sleep(HOLD_S)
