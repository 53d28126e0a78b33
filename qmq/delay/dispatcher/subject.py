"""Sends the due messages of one subject: finds out how the subject is ordered, and sends by the dispatcher for that order.

    put ─▶ unlocated ─located─▶ BalancedDispatcher or PartitionedDispatcher ─▶ broker groups
             ▲                 │
             │                 ├ a faulty message (too large, not a valid message) ─▶ set aside, tried again after rising pauses
             └ another order ──┴ refused for good (OrderMismatch ...) ─▶ nothing new is planned until a rising pause ends

Rules:
* Errors that an operator has to repair (the subject is deleted, its messages are refused) are retried after pauses that rise to 30 s.
* A batch that is refused because of its content is halved until the messages at fault are alone. Only those wait, and the log names them.
* After the pause the subject is located again. If it has another order now, it gets the other dispatcher, once nothing is on its way.

Of an unordered subject, each batch goes to any of its broker groups:

* `Balancer` (qmq/delivery/balancer.py) says which group gets the next batch. A group that is unreachable, drained, silent or busy delays
  only what is planned there. While no group is available, nothing is planned.
* A batch that a group refused, or that was not sent, becomes void when another group can take it, or the group is drained; a batch that may
  be stored there stays there.

Each message of an ordered subject goes to the partition that holds its key when the message is due, and each key in order:

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
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from qmq_ordering.routes import LpRange, PhysicalPartition

from qmq.client.connection.connection import Connection
from qmq.client.connection.pool import Links
from qmq.client.metadata.cache import Ordering
from qmq.client.producing.master_connection import MasterConnection
from qmq.client.producing.ordered.partition_sender import Keys
from qmq.delay.dispatcher.due_batcher import DueBatcher, encoded
from qmq.delay.dispatcher.due_window import DueBatch, DueWindow
from qmq.delay.interfaces import Draft, DueMessage, SchedulePlace
from qmq.delivery.balancer import Balancer
from qmq.delivery.partitioner import Partitioner
from qmq.delivery.retries import pause_s
from qmq.errors import ClientClosed, InvalidArgument, MessageTooLarge, Overloaded, QmqError, ReadOnly, RouteChanged, Unavailable
from qmq.wire.frame_payloads import Produced

if TYPE_CHECKING:
    from qmq.delay.dispatcher.dispatcher import BatchPlanner, Withdraw

log = logging.getLogger("qmq.delay")

UNKNOWN_RANGE = LpRange(0, 0)
"""The range of a partition that is known only from a plan."""
Encode = Callable[[DueBatch], tuple[bytes, bytes]]
"""Returns the encoded batch. Raises QmqError."""
Changed = Callable[["DueConnection"], None]
"""Batches were decided, or the window's state changed: do what is needed, and `pump`."""
Wants = Callable[["DueConnection"], bool]
"""Whether messages wait that could be planned for the connection's window."""


class DueConnection(MasterConnection[DueBatch]):
    def __init__(self, links: Links, subject: str, window: DueWindow, encode: Encode, changed: Changed, wants: Wants) -> None:
        super().__init__(links, subject, window.group, window, lambda: changed(self))
        self.window = window
        self._encode_batch = encode
        self._wants = wants

    def _transmit(self, connection: Connection, batch: DueBatch) -> None:
        if batch.is_uncertain > batch.says_again:
            batch.encoded = None
        super()._transmit(connection, batch)

    def _encode(self, batch: DueBatch) -> tuple[bytes, ...]:
        batch.says_again = batch.is_uncertain
        try:
            return self._encode_batch(batch)
        except QmqError:
            raise
        except Exception as cause:
            raise _unencodable(cause) from cause

    def _stored(self, batch: DueBatch, produced: Produced, now: float) -> None:
        self.window.stored(batch, produced, now)

    @property
    def _is_needed(self) -> bool:
        window = self.window
        return not self.is_closed and not window.is_settled and (bool(window.flight) or self._wants(self))

    async def _gives_up(self, failure: QmqError, failures: int) -> bool:
        if isinstance(failure, ClientClosed):
            return True
        self._unreached(failure)
        await asyncio.sleep(pause_s(failures, failure))
        return False


def _unencodable(cause: Exception) -> QmqError:
    """The error for a batch that cannot be encoded: its messages are at fault, for any error of the library."""
    if isinstance(cause, MemoryError):
        return Overloaded("no memory to make the batch")
    return InvalidArgument(f"the stored messages cannot be made into a batch: {type(cause).__name__}: {cause}")


class _Aside(NamedTuple):
    message: DueMessage
    why: QmqError
    timer: asyncio.TimerHandle


class SubjectOutcomes:
    """`locate_again` is called with a pause in seconds when planning is held. `put_back` takes a message that was set aside, to be sent
    before all others. `withdraw` removes a waiting message of the subject.
    """

    def __init__(
        self,
        subject: str,
        planner: BatchPlanner,
        locate_again: Callable[[float], None],
        put_back: Callable[[DueMessage], None],
        withdraw: Withdraw,
    ) -> None:
        self.suspects: dict[SchedulePlace, int] = {}
        """Messages of batches that were refused because of their content, and how many may share a batch with each."""
        self.refusal: QmqError | None = None
        """Why planning is held."""
        self._subject = subject
        self._planner = planner
        self._locate_again = locate_again
        self._put_back = put_back
        self._withdraw = withdraw
        self._loop = asyncio.get_running_loop()
        self._aside: dict[SchedulePlace, _Aside] = {}
        self._tries: dict[SchedulePlace, int] = {}
        self._refusals = 0

    # --- held ----------------------------------------------------------------------------------------------------------

    @property
    def is_held(self) -> bool:
        """Whether planning is paused."""
        return self.refusal is not None

    def hold(self, failure: QmqError) -> None:
        """Plan nothing for a while, then locate the subject again."""
        if self.refusal is None:
            self.refusal = failure
            self._refusals += 1
            self._locate_again(pause_s(self._refusals, failure))

    def not_located(self, failure: QmqError) -> None:
        """Locating the subject failed: planning is held until it succeeds."""
        self.refusal = failure

    def located(self) -> None:
        """The subject is located: continue planning."""
        self.refusal = None

    # --- decided -------------------------------------------------------------------------------------------------------

    def collect(self, window: DueWindow) -> list[DueMessage]:
        """Record what was decided. Returns the messages to be planned again, in order."""
        for batch, produced in window.take_done():
            self._planner.done(batch, produced)
            self._refusals = 0
            self.forget([message.place for message in batch.draft.messages])
        void = window.take_void()
        if not void:
            return []
        self._planner.void(void, self._withdraw)
        return [message for batch in void for message in self._again(batch)]

    def forget(self, places: Sequence[SchedulePlace]) -> None:
        """These messages are stored, or withdrawn."""
        if self.suspects or self._tries:
            for place in places:
                self.suspects.pop(place, None)
                self._tries.pop(place, None)

    def _again(self, batch: DueBatch) -> Sequence[DueMessage]:
        messages, fault = batch.draft.messages, batch.fault
        if isinstance(fault, MessageTooLarge | InvalidArgument):
            if len(messages) == 1:
                self.set_aside(messages[0], fault)
                return []
            self.suspects.update(dict.fromkeys([message.place for message in messages], len(messages) // 2))
        elif fault is not None:
            self.hold(fault)
        return messages

    # --- set aside -----------------------------------------------------------------------------------------------------

    def set_aside(self, message: DueMessage, why: QmqError) -> None:
        """The message cannot be delivered now; it is retried later, alone."""
        place = message.place
        self.suspects[place] = 1
        tries = self._tries[place] = self._tries.get(place, 0) + 1
        if tries == 1:
            log.error(
                "message %s to %r cannot be delivered and is set aside; it will be tried again from time to time: %s",
                message.message_id.hex(),
                self._subject,
                why,
            )
        self._aside[place] = _Aside(message, why, self._loop.call_later(pause_s(tries, why), self._try_again, place))

    def _try_again(self, place: SchedulePlace) -> None:
        self._put_back(self._aside.pop(place).message)

    def take_aside(self, place: SchedulePlace) -> bool:
        """Remove a message that is set aside; False if it is not."""
        aside = self._aside.pop(place, None)
        if aside is not None:
            aside.timer.cancel()
        return aside is not None

    @property
    def aside_messages(self) -> int:
        """Messages that no partition accepts as they are."""
        return len(self._aside)

    @property
    def why_aside(self) -> str:
        """Why one of the messages that are set aside is not accepted; empty without any."""
        return str(next(iter(self._aside.values())).why) if self._aside else ""

    def close(self) -> None:
        """Try nothing again."""
        for aside in self._aside.values():
            aside.timer.cancel()


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
        """For a connection: see `Changed`."""
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
        """For a connection: see `Changed`."""
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


class LocatedDispatcher(Protocol):
    """Sends the messages of a located subject."""

    is_ordered: bool

    @property
    def waiting(self) -> int:
        """Messages that are not planned."""
        ...

    def put(self, messages: Sequence[DueMessage]) -> None: ...

    def put_back(self, messages: Sequence[DueMessage]) -> None: ...

    def pump(self) -> None:
        """Plan and send what can be planned and sent."""
        ...

    def withdraw(self, place: SchedulePlace) -> bool:
        """Remove a message that is not planned; False if it is not here."""
        ...

    def take_waiting(self) -> list[DueMessage]:
        """Remove and return all unplanned messages, in order."""
        ...

    @property
    def is_idle(self) -> bool:
        """Whether no planned batch is undecided."""
        ...

    def trouble(self) -> tuple[int, str]:
        """The messages that cannot be delivered now, and why."""
        ...

    def close(self) -> None:
        """Send no more batches."""
        ...


class SubjectDispatcher:
    def __init__(self, subject: str, planner: BatchPlanner) -> None:
        self.subject = subject
        self._planner = planner
        self._outcomes = SubjectOutcomes(subject, planner, self._find_again, self._put_back, self.withdraw)
        self._loop = asyncio.get_running_loop()
        self._unlocated: deque[DueMessage] = deque()
        self._resumed: list[DueBatch] = []
        self._located: LocatedDispatcher | None = None
        self._finding: asyncio.Task[None] | None = None
        self._is_closed = False

    # --- in ------------------------------------------------------------------------------------------------------------

    def put(self, messages: Sequence[DueMessage]) -> None:
        """Add due messages, in order."""
        self._planner.waiting.update(dict.fromkeys([message.place for message in messages], self.withdraw))
        if self._located is None:
            self._unlocated.extend(messages)
            self._find(0.0)
        else:
            self._located.put(messages)

    def resume(self, batch: DueBatch) -> None:
        """Take over the plans of an earlier master. Call it before the first `put`."""
        self._resumed.append(batch)
        self._planner.resume([batch])
        self._find(0.0)

    def withdraw(self, place: SchedulePlace) -> bool:
        """Remove a message that waits; False if it does not wait here."""
        if not self._outcomes.take_aside(place) and (self._located is None or not self._located.withdraw(place)):
            kept = [message for message in self._unlocated if message.place != place]
            if len(kept) == len(self._unlocated):
                return False
            self._unlocated = deque(kept)
        self._outcomes.forget([place])
        del self._planner.waiting[place]
        return True

    # --- which way ---------------------------------------------------------------------------------------------------------

    def _find(self, wait_s: float, *, refresh: bool = False) -> None:
        if self._finding is None and not self._is_closed:
            self._finding = self._loop.create_task(self._locate(wait_s, refresh))

    def _find_again(self, wait_s: float) -> None:
        self._find(wait_s, refresh=True)

    async def _locate(self, wait_s: float, refresh: bool) -> None:
        planner, failures = self._planner, 0
        while True:
            if wait_s:
                await asyncio.sleep(wait_s)
            try:
                async with planner.lookups:
                    ordering = await planner.links.locator.ordering(self.subject, refresh=refresh)
                break
            except ClientClosed:
                return
            except QmqError as failure:
                self._outcomes.not_located(failure)
                failures += 1
                wait_s, refresh = 0.0 if isinstance(failure, Unavailable) else pause_s(failures, failure), True
            except Exception as cause:
                log.exception("locating subject %r failed: trying again", self.subject)
                refusal = QmqError(f"subject {self.subject!r} cannot be located: {type(cause).__name__}: {cause}")
                self._outcomes.not_located(refusal)
                failures += 1
                wait_s, refresh = pause_s(failures, refusal), True
        self._finding = None
        self._outcomes.located()
        self._go(ordering)

    def _go(self, ordering: Ordering | None) -> None:
        located = self._located
        if located is not None and located.is_ordered != (ordering is not None):
            if not located.is_idle:
                self._outcomes.hold(QmqError(f"subject {self.subject!r} changed its order while batches are under way"))
                return
            self._unlocated.extend(located.take_waiting())
            located.close()
            located = None
        if located is None:
            resumed, self._resumed = self._resumed, []
            located = self._make(ordering, resumed)
            self._located = located
            unlocated, self._unlocated = self._unlocated, deque()
            if unlocated:
                located.put(unlocated)
        located.pump()

    def _make(self, ordering: Ordering | None, resumed: Sequence[DueBatch]) -> LocatedDispatcher:
        if ordering is None:
            return BalancedDispatcher(self.subject, self._planner, self._outcomes, resumed)
        return PartitionedDispatcher(self.subject, self._planner, self._outcomes, ordering, resumed)

    def _put_back(self, message: DueMessage) -> None:
        """A message that was set aside is tried again."""
        if self._located is None:
            self._unlocated.appendleft(message)
        else:
            self._located.put_back([message])
            self._located.pump()

    # --- for people ----------------------------------------------------------------------------------------------------

    @property
    def set_aside_messages(self) -> int:
        """Messages that no partition accepts as they are."""
        return self._outcomes.aside_messages

    @property
    def is_idle(self) -> bool:
        """Whether no message waits and no batch is in flight."""
        located = self._located
        is_waiting = self._unlocated or self._resumed or self._outcomes.aside_messages
        return not is_waiting and (located is None or (located.is_idle and not located.waiting))

    def trouble(self) -> tuple[int, str]:
        """The messages that cannot be delivered now, and why; (0, "") if there are none."""
        if self._located is None:
            count, why = len(self._unlocated) + sum([len(each.draft.messages) for each in self._resumed]), ""
        else:
            count, why = self._located.trouble()
        if self._outcomes.refusal is not None:
            why = str(self._outcomes.refusal)
        count += self._outcomes.aside_messages
        why = why or self._outcomes.why_aside
        return (count, why) if why and count else (0, "")

    def close(self) -> None:
        """Stop sending immediately."""
        self._is_closed = True
        if self._finding is not None:
            self._finding.cancel()
        self._outcomes.close()
        if self._located is not None:
            self._located.close()
