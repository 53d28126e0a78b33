"""The write lease: a master may take messages of subjects that are fenced by lease only while the lease of its master key is alive.

    the store said at t that lease L holds the key          (t is when we *asked*: the lease was renewed after that)
        L is the same as before       the right continues until t + lease - a tenth
        L is another one, or the first: the key may have been away, and our partitions may have been fenced. The fences are listed,
                                      missing command messages are appended, and then there is a right
    no answer                         the right ends by our own clock, before the lease ends at the store

A fence is only set while the key is away (docs/ORDERING.md), so a list of fences that is read *after* the key was seen has all
fences that were set before.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from qmq_coordination.coordination_store import NO_LEASE, CoordinationStore, LeaseId
from qmq_coordination.ordered_records import FENCES, Fence
from qmq_replication.coordinator import Holding

from qmq.broker.broker import Broker
from qmq.clock import Clock
from qmq.errors import CoordinationError, QmqError

log = logging.getLogger("qmq.node")

MARGIN: Final = 0.1
RETRY_S: Final = 0.1


class WriteLease:
    """The write lease of one replica. The broker calls it before each write to an ordered subject."""

    def __init__(self, broker: Broker, store: CoordinationStore, group: str, clock: Clock, *, lease_ms: Callable[[], int]) -> None:
        self._broker = broker
        self._store = store
        self._group = group
        self._clock = clock
        self._lease_ms = lease_ms
        self._lease: LeaseId = NO_LEASE
        """The lease under which the fences were listed."""
        self._epoch = 0
        self._until_ms = 0
        self._heard: tuple[int, LeaseId, int] = (0, NO_LEASE, 0)
        self._looking: asyncio.Task[None] | None = None

    def __call__(self) -> bool:
        """True if this replica may write now."""
        return self._clock.monotonic_ms() < self._until_ms

    def held(self, epoch: int, held: Holding, asked_ms: int) -> None:
        """Note that the store confirmed the key of a master of `epoch`, which asked at `asked_ms`."""
        if held.lease == NO_LEASE or held.epoch != epoch:
            return
        self._heard = epoch, held.lease, asked_ms
        if (epoch, held.lease) == (self._epoch, self._lease):
            self._until_ms = asked_ms + int(self._lease_ms() * (1 - MARGIN))
        elif self._looking is None or self._looking.done():
            self._looking = asyncio.ensure_future(self._look())

    def end(self) -> None:
        """End the mastership."""
        self._until_ms, self._lease, self._epoch = 0, NO_LEASE, 0
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None

    async def _look(self) -> None:
        """List the fences that were written after this replica got the key, and close their partitions."""
        while True:
            epoch, lease, _ = self._heard
            with suppress(CoordinationError, QmqError):
                listing = await self._store.list(f"{FENCES}{self._group}/")
                await self._close({item.key: Fence.decode(item.value) for item in listing.items})
                if self._heard[:2] == (epoch, lease):
                    self._epoch, self._lease = epoch, lease
                    self._until_ms = self._heard[2] + int(self._lease_ms() * (1 - MARGIN))
                    return
            await asyncio.sleep(RETRY_S)

    async def _close(self, fences: dict[str, Fence]) -> None:
        """Append the missing command messages. Raises QmqError if the broker does not serve, or not yet."""
        for key, fence in fences.items():
            subject, number = key[len(FENCES) + len(self._group) + 1 :].rsplit("/", 1)
            self._broker.require_serving()
            queue = self._broker.store.open_queue(subject, int(number))
            if queue.sealed is None:
                log.warning(
                    "%s was fenced while this broker group was unreachable: sealing it now for change %s", queue.id, fence.change_id
                )
                self._broker.own_writes.seal(queue, fence.change_id, fence.to_version)
