"""Sends due messages of an ordered subject: each to the partition that holds its key when the message is due, and each key in order.

    put ─▶ by logical partition ─▶ partition: batcher ─planned─▶ window ─▶ broker group
                  ▲                                      │ settled after a change of the route
                  └──────────── newest route ────────────┘ messages that are not stored there, then messages that wait after them

`Partitioner` (qmq/delivery/partitioner.py) says which partition a logical partition belongs to, through changes of the route. In addition:
* Plans of an earlier master go first. If the newest route lacks their partition, the logical partitions of their messages wait for them.
* When a partition refuses as if it were sealed, the route is requested until it is newer.
* A message without a key cannot be sent here: it is set aside.

Worked example: partition 1 holds [0, 8) and is split into 2 and 3 while three batches are on their way: the first is stored, the others
are refused. The route of version 2 lacks partition 1, and the refused batches are certainly not stored: void. Their messages, and then the
messages that waited after them, go to the batchers of 2 and 3, in order, and 2 and 3 take all later messages.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from qmq_ordering.routes import LpRange, PhysicalPartition

from qmq.client.connection.pool import Links
from qmq.client.metadata.cache import Ordering
from qmq.client.producing.ordered.partition_sender import Keys
from qmq.delay.dispatcher.batch_planner import BatchPlanner
from qmq.delay.dispatcher.due_batcher import DueBatcher, encoded
from qmq.delay.dispatcher.due_connection import Changed, DueConnection, Encode, Wants
from qmq.delay.dispatcher.due_window import DueBatch, DueWindow
from qmq.delay.dispatcher.outcomes import SubjectOutcomes
from qmq.delay.interfaces import Draft, DueMessage, SchedulePlace
from qmq.delivery.partitioner import Partitioner
from qmq.errors import InvalidArgument, QmqError, RouteChanged

UNKNOWN_RANGE = LpRange(0, 0)
"""The range of a partition that is known only from a plan."""


class DuePartition(DueWindow):
    """The window of one partition, the messages that wait for it, and its connection."""

    def __init__(
        self, subject: str, part: PhysicalPartition, batcher: DueBatcher, links: Links, encode: Encode, changed: Changed, wants: Wants
    ) -> None:
        super().__init__(part.group, part.number, is_ordered=True)
        self.batcher = batcher
        self.connection = DueConnection(links, subject, self, encode, changed, wants)


class PartitionedDispatcher:
    is_ordered = True

    def __init__(
        self, subject: str, planner: BatchPlanner, outcomes: SubjectOutcomes, ordering: Ordering, resumed: Sequence[DueBatch]
    ) -> None:
        self.subject = subject
        self._outcomes = outcomes
        self._planner = planner
        self._locator = planner.links.locator
        self._loop = asyncio.get_running_loop()
        self._keys = Keys(ordering.route.logical_partitions)
        self._partitioner = Partitioner(self._make)
        self._following: asyncio.Task[None] | None = None
        self._is_closed = False
        self._begin(ordering, resumed)

    def _begin(self, ordering: Ordering, resumed: Sequence[DueBatch]) -> None:
        self._partitioner.learn(ordering.route, ordering.fenced, self._loop.time())
        for batch in resumed:
            draft = batch.draft
            part = PhysicalPartition(draft.partition, UNKNOWN_RANGE, draft.broker_group)
            self._partitioner.resume(part, self._lps(draft.messages)).admit(batch)
        self._locator.listen(self.subject, self._rerouted)
        self._learn(ordering)

    def _make(self, part: PhysicalPartition) -> DuePartition:
        batcher = DueBatcher(self._planner.limits, self._outcomes.suspects)
        return DuePartition(self.subject, part, batcher, self._planner.links, self._encode, self._changed, self._wants)

    def _lps(self, messages: Sequence[DueMessage]) -> list[int]:
        return self._keys.of_many([message.key for message in messages])

    @property
    def _partitions(self) -> list[DuePartition]:
        return list(self._partitioner.partitions.values())

    # --- in ------------------------------------------------------------------------------------------------------------

    def put(self, messages: Sequence[DueMessage]) -> None:
        messages = self._with_key(messages)
        by_lp, touched = self._partitioner.by_lp, dict[int, DuePartition]()
        for message, lp in zip(messages, self._lps(messages), strict=True):
            partition = by_lp[lp]
            partition.batcher.messages.append(message)
            touched[partition.partition] = partition
        for partition in touched.values():
            self._draft(partition)

    def _with_key(self, messages: Sequence[DueMessage]) -> Sequence[DueMessage]:
        if all([message.key for message in messages]):  # noqa: C419 - faster than a generator
            return messages
        why = InvalidArgument(f"subject {self.subject!r} is ordered, and the message has no key")
        for message in messages:
            if not message.key:
                self._outcomes.set_aside(message, why)
        return [message for message in messages if message.key]

    def put_back(self, messages: Sequence[DueMessage]) -> None:
        messages = self._with_key(messages)
        by_lp = self._partitioner.by_lp
        for message, lp in reversed(list(zip(messages, self._lps(messages), strict=True))):
            by_lp[lp].batcher.messages.appendleft(message)

    def withdraw(self, place: SchedulePlace) -> bool:
        """Remove a message that is not planned; False if it is not here."""
        return any(partition.batcher.withdraw(place) for partition in self._partitions)

    def take_waiting(self) -> list[DueMessage]:
        """Remove and return all unplanned messages, in the order of each key."""
        messages = [message for partition in self._partitions for message in partition.batcher.messages]
        for partition in self._partitions:
            partition.batcher.messages.clear()
        return messages

    # --- out -----------------------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Plan and send what can be planned and sent."""
        for partition in self._partitions:
            self._draft(partition)
            partition.connection.pump()

    def _draft(self, partition: DuePartition) -> None:
        """Plan the messages that wait for a partition, as long as its broker group takes them."""
        batcher, connection = partition.batcher, partition.connection
        if not batcher or self._outcomes.is_held or self._is_closed:
            return
        self._locator.touch(self.subject)
        while batcher and partition.may_admit(self._loop.time()):
            messages, size = batcher.take()
            draft = Draft(self.subject, partition.partition, partition.group, *partition.number(self._planner.new_id), messages)
            self._planner.plan(partition, draft, size, lambda: self._planned(connection))
        if batcher:
            connection.reach()

    def _planned(self, connection: DueConnection) -> None:
        if not connection.is_closed:
            self._changed(connection)

    def _encode(self, batch: DueBatch) -> tuple[bytes, bytes]:
        """The batch as it travels. Raises MessageTooLarge."""
        return encoded(batch.draft, self._lps(batch.draft.messages), is_again=batch.is_uncertain)

    # --- what changes --------------------------------------------------------------------------------------------------

    def _changed(self, connection: DueConnection) -> None:
        """For a connection: see `due_connection.Changed`."""
        partition = self._partitioner.partitions[connection.window.partition]
        if partition.is_settled:
            self._settle()
            return
        self.put_back(self._outcomes.collect(partition))
        self._draft(partition)
        connection.pump()
        if partition.wants_route and self._following is None and not self._is_closed:
            self._following = self._loop.create_task(self._follow())

    def _wants(self, connection: DueConnection) -> bool:
        """For a connection: whether messages wait that could be planned for its partition."""
        partition = self._partitioner.partitions.get(connection.window.partition)
        return partition is not None and bool(partition.batcher) and not partition.is_left and not self._outcomes.is_held

    # --- routes --------------------------------------------------------------------------------------------------------

    def _rerouted(self) -> None:
        """The locator has news about the subject or its groups."""
        ordering = self._locator.book.ordering(self.subject)
        if ordering is not None and not self._is_closed:
            self._learn(ordering)

    def _learn(self, ordering: Ordering) -> None:
        if ordering.route.version >= self._partitioner.version:
            self._partitioner.learn(ordering.route, ordering.fenced, self._loop.time())
            self._settle()
            for partition in self._partitions:
                partition.connection.moved()

    def _settle(self) -> None:
        """Settled partitions hand over their messages by the newest route: those not stored there first, then those that waited."""
        for partition in self._partitioner.settle():
            partition.settle()
            partition.connection.close()
            waiting = [*self._outcomes.collect(partition), *partition.batcher.messages]
            for message, lp in zip(waiting, self._lps(waiting), strict=True):
                self._partitioner.by_lp[lp].batcher.messages.append(message)
        self.pump()

    async def _follow(self) -> None:
        """Ask for the route until it is newer; the locator keeps the pauses."""
        try:
            while self._partitioner.wants_route and not self._outcomes.is_held:
                try:
                    await self._locator.ordering(self.subject, refresh=True)
                except QmqError as failure:
                    self._outcomes.hold(failure)
        finally:
            self._following = None

    # --- for people, and the end ---------------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Messages that are not planned."""
        return sum([len(partition.batcher) for partition in self._partitions])

    @property
    def is_idle(self) -> bool:
        """Whether no planned batch is undecided."""
        return not any(partition.flight for partition in self._partitions)

    def trouble(self) -> tuple[int, str]:
        """The messages that cannot be delivered now, and why."""
        now, count, why = self._loop.time(), 0, None
        for partition in self._partitions:
            if partition.is_troubled(now) or partition.is_left or partition.wants_route:
                held = len(partition.batcher) + sum([len(batch.draft.messages) for batch in partition.flight])
                count += held
                if held and why is None:
                    why = partition.trouble or RouteChanged(f"earlier messages to partition {partition.partition} are not settled yet")
        return count, str(why) if why is not None else ""

    def close(self) -> None:
        """Send no more batches."""
        self._is_closed = True
        self._locator.unlisten(self.subject, self._rerouted)
        if self._following is not None:
            self._following.cancel()
        for partition in self._partitions:
            partition.connection.close()
