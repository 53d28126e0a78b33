"""A consumer's part in its group, by long polls at any metaserver: it registers, and follows its
assignment of lanes. And a producer's load at a broker group.

    SyncMember(generation that we know)
        ──▶ another assignment, or the same one after a while ──▶ ask again immediately
    SyncMember(finished lanes), beside it
        ──▶ the group may advance; its answer is an assignment like any other

Rules:
* The consumer polls well within its lease. If a metaserver cannot be reached or hangs, the consumer
  asks the next one; reading continues meanwhile, since brokers, not metaservers, grant lanes.
* Answers to the two calls may overtake each other: an older generation is ignored, unless
  metaservers repeat it for a whole lease (their store may have been created again).
* A finished lane is reported immediately, and with each further poll while it is assigned, because
  a metaserver may die before it has done its part.
* The consumer never looks for the next partition itself: metaservers decide when a version opens,
  one step at a time.

`GroupLoad` is what one ordered producer has unanswered at one broker group. The partitions of a
group are written by one broker to one log, so a producer that keeps that broker busy gains nothing
by sending small batches to each partition in turn. Up to `messages_light` messages and
`bytes_light` bytes the group counts as lightly loaded.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, NamedTuple

from qmq_ordering.lanes import Lane

from qmq.client.connection.connection import pause_s
from qmq.errors import CallerError, ClientClosed, OrderMismatch, QmqError, StaleDelivery

log = logging.getLogger("qmq.client")

POLLS: Final = 4
"""Polls within a lease: if two metaservers hang, one after the other,
the third is still asked in time.
"""
LEAVE_S: Final = 2.0
"""How long leaving may take. Otherwise the consumer counts as lost when its lease ends."""
QUICK_S: Final = 0.1
"""If an answer comes sooner than this and says nothing new, the consumer pauses for as long."""
REFUSALS_MAX: Final = 3
"""A metaserver may learn of a new subject later than the client does."""


class Member(NamedTuple):
    """A consumer as a member of a group."""

    subject: str
    group: str
    name: str
    incarnation: str
    lease_ms: int
    start: str
    gate: str
    condition: str = ""


class Assigned(NamedTuple):
    """A metaserver's answer."""

    generation: int
    lanes: tuple[Lane, ...]


SyncMember = Callable[..., Awaitable[Assigned]]
"""`MetadataClient.sync_member`: calls SyncMember once. After a failure the next call goes to
another metaserver. Raises Unavailable, UnknownSubject, OrderMismatch, InvalidArgument;
StaleDelivery if a newer incarnation uses the consumer's name.
"""


class LaneMembership:
    """`on_assigned` gets each new assignment;
    `on_failure` is called when another poll cannot succeed.
    """

    def __init__(
        self,
        sync: SyncMember,
        member: Member,
        on_assigned: Callable[[tuple[Lane, ...]], None],
        on_failure: Callable[[QmqError], None],
        retry_s: Sequence[float],
    ) -> None:
        self._sync, self._member, self._retry_s = sync, member, retry_s
        self._lease_s = member.lease_ms / 1000
        self._on_assigned = on_assigned
        self._on_failure = on_failure
        self._loop = asyncio.get_running_loop()
        self._generation = 0
        self._lanes: tuple[Lane, ...] = ()
        self._believed_s = self._loop.time()
        self._finished: set[Lane] = set()
        self._unreported: set[Lane] = set()
        self._poller: asyncio.Task[None] | None = None
        self._reporter: asyncio.Task[None] | None = None
        self._is_left = False

    def start(self) -> None:
        """Register the consumer and keep it registered. Harmless to repeat."""
        if not self._is_left and (self._poller is None or self._poller.done()):
            self._poller = self._loop.create_task(self._poll())

    async def _poll(self) -> None:
        wait_ms = self._member.lease_ms // POLLS
        tries = 0
        while True:
            asked_s = self._loop.time()
            try:
                assigned = await self._sync(
                    self._member, self._generation, wait_ms, tuple(sorted(self._finished))
                )
            except CallerError as failure:
                tries += 1
                if (
                    isinstance(failure, ClientClosed | OrderMismatch | StaleDelivery)
                    or tries >= REFUSALS_MAX
                ):
                    self._on_failure(failure)
                    return
            except QmqError as failure:
                log.debug("no metaserver answered with an assignment: %s", failure)
                tries += 1
            else:
                tries = 0
                if self._believe(assigned) or self._loop.time() - asked_s > QUICK_S:
                    continue
            await asyncio.sleep(_jittered(pause_s(self._retry_s, tries - 1) if tries else QUICK_S))

    def _believe(self, assigned: Assigned) -> bool:
        """Whether the assignment is new."""
        now_s = self._loop.time()
        if assigned.generation < self._generation and now_s - self._believed_s < self._lease_s:
            return False
        self._believed_s = now_s
        if (assigned.generation, assigned.lanes) == (self._generation, self._lanes):
            return False
        self._generation, self._lanes = assigned
        self._finished &= set(assigned.lanes)
        self._unreported &= self._finished
        self._on_assigned(assigned.lanes)
        return True

    # --- finished lanes ---------------------------------------------------------------------------

    def finished(self, lane: Lane) -> None:
        """The lane is settled to its end: report it, so that the group advances."""
        self._finished.add(lane)
        self._unreported.add(lane)
        if self._reporter is None or self._reporter.done():
            self._reporter = self._loop.create_task(self._report())

    async def _report(self) -> None:
        tries = 0
        while self._unreported:
            reporting = tuple(sorted(self._unreported))
            try:
                assigned = await self._sync(self._member, self._generation, 0, reporting)
            except QmqError as failure:
                log.debug(
                    "could not report to any metaserver that %s is finished: %s", reporting, failure
                )
                tries += 1
                await asyncio.sleep(_jittered(pause_s(self._retry_s, tries - 1)))
            else:
                tries = 0
                self._unreported.difference_update(reporting)
                self._believe(assigned)

    # --- the end ----------------------------------------------------------------------------------

    async def leave(self) -> None:
        """The consumer leaves for good: others get its lanes immediately,
        if a metaserver can be reached.
        """
        self._is_left = True
        tasks = [task for task in (self._poller, self._reporter) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._poller is None:
            return
        has_left = False
        try:
            async with asyncio.timeout(LEAVE_S):
                while not has_left:
                    has_left = await self._has_left()
        except TimeoutError:
            log.debug(
                "could not report to any metaserver that the consumer left: its lease will expire"
            )

    async def _has_left(self) -> bool:
        """Try once; pause after a failure."""
        try:
            await self._sync(
                self._member, self._generation, 0, tuple(sorted(self._finished)), leaves=True
            )
        except CallerError:
            return True
        except QmqError as failure:
            log.debug("%s", failure)
            await asyncio.sleep(_jittered(self._retry_s[0]))
            return False
        return True


def _jittered(pause_s: float) -> float:
    return pause_s * random.uniform(0.7, 1.3)  # noqa: S311 - jitter, not a secret


class GroupLoad:
    """Shared by the streams of one broker group. Each try of a batch is counted by `sent`, and
    again by `answered`.
    """

    def __init__(self, messages_light: int, bytes_light: int) -> None:
        self._messages_light, self._bytes_light = messages_light, bytes_light
        self.messages = 0
        self.bytes = 0

    def sent(self, messages: int, size: int) -> None:
        """A batch was sent."""
        self.messages += messages
        self.bytes += size

    def answered(self, messages: int, size: int) -> None:
        """A try was answered, or will get no answer."""
        self.messages -= messages
        self.bytes -= size

    @property
    def is_light(self) -> bool:
        """Whether another small batch would not wait long behind what is there."""
        return self.messages <= self._messages_light and self.bytes <= self._bytes_light
