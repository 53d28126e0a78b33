"""Sends due messages of an unordered subject: each batch to any of its broker groups.

Rules:
* `Balancer` (qmq/delivery/balancer.py) says which group gets the next batch. A group that is unreachable, drained, silent or busy delays
  only what is planned there. While no group is available, nothing is planned.
* A batch that a group refused, or that was not sent, becomes void when another group can take it, or the group is drained; a batch that may
  be stored there stays there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from qmq.client.connection.pool import Links
from qmq.delay.dispatcher.batch_planner import BatchPlanner
from qmq.delay.dispatcher.due_batcher import DueBatcher, encoded
from qmq.delay.dispatcher.due_connection import Changed, DueConnection, Encode, Wants
from qmq.delay.dispatcher.due_window import DueBatch, DueWindow
from qmq.delay.dispatcher.outcomes import SubjectOutcomes
from qmq.delay.interfaces import Draft, DueMessage, SchedulePlace
from qmq.delivery.balancer import Balancer
from qmq.errors import QmqError, ReadOnly


class DueGroup(DueWindow):
    """The window of one broker group, and its connection. `partition` is for plans from when the subject was ordered."""

    def __init__(self, subject: str, group: str, partition: int, links: Links, encode: Encode, changed: Changed, wants: Wants) -> None:
        super().__init__(group, partition)
        self.is_writable = False
        self.connection = DueConnection(links, subject, self, encode, changed, wants)


class BalancedDispatcher:
    is_ordered = False

    def __init__(self, subject: str, planner: BatchPlanner, outcomes: SubjectOutcomes, resumed: Sequence[DueBatch]) -> None:
        self.subject = subject
        self._outcomes = outcomes
        self._planner = planner
        self._locator = planner.links.locator
        self._loop = asyncio.get_running_loop()
        self._batcher = DueBatcher(self._planner.limits, outcomes.suspects)
        self._groups: dict[tuple[str, int], DueGroup] = {}
        self._balancer = Balancer(self._group, lambda group, _: group.may_admit(self._loop.time()))
        self._asking: asyncio.Task[None] | None = None
        self._is_closed = False
        for batch in resumed:
            self._group(batch.draft.broker_group, batch.draft.partition).admit(batch)
        self._locator.listen(self.subject, self._rerouted)
        self._rerouted()

    # --- in ------------------------------------------------------------------------------------------------------------

    def put(self, messages: Sequence[DueMessage]) -> None:
        self._batcher.messages.extend(messages)
        self._draft()

    def put_back(self, messages: Sequence[DueMessage]) -> None:
        self._batcher.put_back(messages)

    def withdraw(self, place: SchedulePlace) -> bool:
        """Remove a message that is not planned; False if it is not here."""
        return self._batcher.withdraw(place)

    def take_waiting(self) -> list[DueMessage]:
        """Remove and return all unplanned messages, in order."""
        messages = list(self._batcher.messages)
        self._batcher.messages.clear()
        return messages

    # --- out -----------------------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Plan and send what can be planned and sent."""
        self._draft()
        for group in list(self._groups.values()):
            group.connection.pump()

    def _draft(self) -> None:
        """Plan waiting messages, as long as a group takes them."""
        batcher = self._batcher
        if batcher and not self._outcomes.is_held and not self._is_closed:
            self._locator.touch(self.subject)
            while batcher and (group := self._balancer.pick(0)) is not None:
                messages, size = batcher.take()
                draft = Draft(self.subject, 0, group.group, *self._planner.next_number(), messages)
                self._planner.plan(group, draft, size, group.connection.pump)
            if batcher:
                self._look_for_more()

    def _look_for_more(self) -> None:
        for group in self._balancer:
            if group.is_writable:
                group.connection.reach()
        if not self._balancer.is_writable and self._asking is None:
            self._asking = self._loop.create_task(self._ask())

    async def _ask(self) -> None:
        """Locate the subject again until it has a usable group; the locator keeps the pauses."""
        try:
            while self._batcher and not self._balancer.is_writable and not self._outcomes.is_held:
                try:
                    await self._locator.groups(self.subject, refresh=True)
                    self._rerouted()
                except QmqError as failure:
                    self._outcomes.hold(failure)
        finally:
            self._asking = None

    def _encode(self, batch: DueBatch) -> tuple[bytes, bytes]:
        """The batch as it travels. Raises MessageTooLarge."""
        return encoded(batch.draft, is_again=batch.is_uncertain)

    # --- what changes --------------------------------------------------------------------------------------------------

    def _changed(self, connection: DueConnection) -> None:
        """For a connection: see `due_connection.Changed`."""
        self._release(connection.window)
        self._batcher.put_back(self._outcomes.collect(connection.window))
        self._draft()
        connection.pump()

    def _release(self, window: DueWindow) -> None:
        now = self._loop.time()
        if window.flight and window.is_troubled(now):
            others = [each for each in self._balancer if each is not window and each.is_writable and not each.is_troubled(now)]
            if others or not any(each.group == window.group and each.is_writable for each in self._balancer):
                window.release()

    def _wants(self, connection: DueConnection) -> bool:
        """For a connection: whether messages wait that it could take."""
        group = self._groups[connection.window.group, connection.window.partition]
        return bool(self._batcher) and not self._outcomes.is_held and group.is_writable

    def _rerouted(self) -> None:
        """The locator has news about the subject or its groups."""
        groups = self._locator.book.groups(self.subject)
        if groups is None or self._is_closed:
            return
        self._balancer.learn(groups)
        for group in list(self._groups.values()):
            group.connection.moved()
            self._changed(group.connection)

    def _group(self, name: str, partition: int = 0) -> DueGroup:
        group = self._groups.get((name, partition))
        if group is None:
            group = DueGroup(self.subject, name, partition, self._planner.links, self._encode, self._changed, self._wants)
            self._groups[name, partition] = group
        return group

    # --- for people, and the end ---------------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Messages that are not planned."""
        return len(self._batcher)

    @property
    def is_idle(self) -> bool:
        """Whether every planned batch is decided."""
        return not any(group.flight for group in self._groups.values())

    def trouble(self) -> tuple[int, str]:
        """The messages that cannot be delivered now, and why."""
        now = self._loop.time()
        troubled = [group for group in self._groups.values() if group.is_troubled(now)]
        count = sum([len(batch.draft.messages) for group in troubled for batch in group.flight])
        why: QmqError | None = next((group.trouble for group in troubled if group.trouble is not None), None)
        if not self._balancer.is_writable:
            why = why or ReadOnly(f"all broker groups of {self.subject!r} are drained: resume one with `qmq broker resume`")
        if all(group in troubled for group in self._balancer if group.is_writable):
            count += len(self._batcher)
        return count, str(why) if why is not None else ""

    def close(self) -> None:
        """Send no more batches."""
        self._is_closed = True
        self._locator.unlisten(self.subject, self._rerouted)
        if self._asking is not None:
            self._asking.cancel()
        for group in self._groups.values():
            group.connection.close()
