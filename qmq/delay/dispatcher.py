"""Takes due messages of all subjects, mixed, and has every batch planned in the log before it
leaves.

    dispatcher = DueDispatcher(links, plan_log, new_producer_id=ProducerIds())
    dispatcher.resume(plan, messages)      every open plan of earlier masters, in the order of their
                                           numbers, before the first put
    dispatcher.put(messages)
    ...
    await dispatcher.stop()

    waiting ──plan──▶ planned ──done──▶ out
       ▲ │               │
       │ └─withdraw─▶ out│
       └──────void───────┘ doubtful if it may be stored: then it cannot be withdrawn

Rules:
* Each subject has one dispatcher (`SubjectDispatcher`), and none waits for another.
* A separate task plans each batch: tasks begin in the order in which they are made. The plan log
  must write plans, dones and voids in the order of the calls (several may share an entry). While a
  plan is open in the log, no plan that depends on it is therefore written.
* If the plan log refuses a plan, this replica is no longer master. A halted dispatcher sends
  nothing, and writes nothing more.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol

from qmq_ordering.routes import LpRange, PhysicalPartition

from qmq import limits
from qmq.client.connection.connection import Connection
from qmq.client.connection.pool import ConnectionPool
from qmq.client.metadata.cache import Ordering
from qmq.client.producing.group_sender import MasterConnection
from qmq.client.producing.ordered.partition_sender import Keys
from qmq.delay.batches import DueMessage, SchedulePlace
from qmq.delay.due_window import (
    DueBatch,
    DueBatcher,
    DueWindow,
    Limits,
    encoded,
    size_of,
)
from qmq.delay.plan_log import Draft
from qmq.delivery.balancer import Balancer
from qmq.delivery.partitioner import Partitioner
from qmq.delivery.retries import pause_s
from qmq.errors import (
    ClientClosed,
    InvalidArgument,
    MessageTooLarge,
    Overloaded,
    QmqError,
    ReadOnly,
    RouteChanged,
    Unavailable,
)
from qmq.log.actions import PlanAction
from qmq.wire.frame_payloads import Produced

log = logging.getLogger("qmq.delay")

BATCH_MESSAGES: Final = 1_000
BATCH_BYTES: Final = 256 * limits.KIB
SUBJECTS_MAX: Final = 4_096
"""Beyond this number, subjects are kept only while they have messages."""
LOOKUPS_MAX: Final = 16
"""Subjects that are located at the same time."""


UNKNOWN_RANGE = LpRange(0, 0)
"""The range of a partition that is known only from a plan."""


class DueDestination(DueWindow):
    """The window of a broker group or a partition, and its connection. The `partition` of a group
    is 0, but that of a plan from when the subject was ordered.
    """

    def __init__(
        self,
        owner: SubjectDispatcher,
        group: str,
        partition: int,
        batcher: DueBatcher,
        *,
        is_ordered: bool,
    ) -> None:
        super().__init__(group, partition, is_ordered=is_ordered)
        self.batcher = batcher
        """The messages that wait for this partition, or for any broker group."""
        self.is_writable = is_ordered
        """Whether it takes new messages; for a broker group set by `Balancer`."""
        self.connection = DueConnection(owner, self)


class DueConnection(MasterConnection[DueBatch]):
    """The connection of a destination to the master of its broker group.

    It never gives up: while the window needs it, it tries again, with the locator's pauses, and
    with growing pauses for errors that only a change in the cluster can fix.
    """

    def __init__(self, owner: SubjectDispatcher, window: DueDestination) -> None:
        super().__init__(
            owner.dispatcher.links,
            owner.subject,
            window.group,
            window,
            self._encoded,
            lambda: owner.changed(window),
        )
        self._owner = owner
        self._destination = window

    def transmit(self, connection: Connection, batch: DueBatch) -> None:
        if batch.is_uncertain > batch.says_again:
            batch.encoded = None
        super().transmit(connection, batch)

    def _encoded(self, batch: DueBatch) -> tuple[bytes, ...]:
        """The encoded batch. Raises QmqError."""
        batch.says_again = batch.is_uncertain
        messages = batch.draft.messages
        try:
            return encoded(
                batch.draft,
                self._owner.lps(messages) if self._destination.is_ordered else None,
                is_again=batch.is_uncertain,
            )
        except QmqError:
            raise
        except MemoryError as cause:
            raise Overloaded("no memory to make the batch") from cause
        except Exception as cause:  # the messages are at fault, for any error of the library
            raise InvalidArgument(
                f"the stored messages cannot be made into a batch: {type(cause).__name__}: {cause}"
            ) from cause

    def _stored(self, batch: DueBatch, produced: Produced, now: float) -> None:
        self._destination.stored(batch, produced, now)

    @property
    def _is_needed(self) -> bool:
        window = self._destination
        return (
            not self.is_closed
            and not window.is_settled
            and (bool(window.flight) or self._owner.has_messages_for(window))
        )

    async def _gives_up(self, failure: QmqError, failures: int) -> bool:
        if isinstance(failure, ClientClosed):
            return True
        self._unreached(failure)
        await asyncio.sleep(pause_s(failures, failure))
        return False


class PlanLog(Protocol):
    """Where plans are written: of due messages (`StorePlanLog`), or of effects of steps
    (`StepPlanLog`).
    """

    async def plan(self, draft: Draft) -> PlanAction:
        """Write the plan. Returns when it is committed; only then may the batch be sent. Plans are
        written in the order of the calls. Raises NotMaster: whether it is planned is unknown, and
        this replica must send nothing more.
        """
        ...

    def done(self, plan: PlanAction, append_time_ms: int) -> None:
        """The batch is stored at its destination; the time is by the real-time broker's clock."""
        ...

    def void(self, plan: PlanAction) -> None:
        """The batch is certainly not stored, and will not be sent again under this plan: its
        messages will be planned again.
        """
        ...


class SetAside(NamedTuple):
    """A message that is set aside."""

    message: DueMessage
    why: QmqError
    timer: asyncio.TimerHandle


class SubjectDispatcher:
    """Sends the due messages of one subject, ordered or not. Here is decided which broker group or
    partition gets the next batch.

        put ─▶ waiting ──planned──▶ at a destination ──stored──▶ done
                 ▲ ▲                  │
                 │ └───── void ◀──────┤ not stored there, and not to be sent there again
                 │                    └ void, and a message that is alone is at fault ─▶ set aside
                 └───────────────────── tried again after a rising pause ◀──────────────────┘

        state        messages wait       next batch goes to      planned batches become void when
        not located  in one line         nobody
        unordered    in one line         the broker group that   another group is free or theirs
                                         `Balancer` picks        drained, and they are not stored
        ordered      at the partition    that partition, if it   the newest route lacks it, and
                     of their key        has room                they are not stored

    In any state planning may be *held*: an operator has to repair something (the subject is
    deleted, its messages are refused). Then nothing new is planned until the subject is located
    again, after a pause that rises to 30 s. If it has another order now, it changes its state once
    nothing is on its way.

    A batch that is refused because of its content is halved until the messages at fault are alone.
    Only those are set aside, and the log names them. A message without a key is at fault on an
    ordered subject.

    Unordered: a group that is unreachable, drained, silent or busy delays only what is planned
    there, and a batch that may be stored there stays there. While no group is available, nothing is
    planned.

    Ordered: `Partitioner` (qmq/delivery/partitioner.py) says which partition a logical partition
    belongs to, through changes of the route. In addition:
    * Plans of an earlier master go first. If the newest route lacks their partition, the logical
      partitions of their messages wait for them. Plans from when the subject was unordered are
      void: it was deleted since then. Their messages are planned again, before those that wait.
    * When a partition refuses as if it were sealed, the route is requested until it is newer.

    Worked example: partition 1 holds [0, 8) and is split into 2 and 3 while three batches are on
    their way: the first is stored, the others are refused. The route of version 2 lacks partition
    1, and the refused batches are certainly not stored: void. Their messages, and then the messages
    that waited after them, go to the batchers of 2 and 3, in order, and 2 and 3 take all later
    messages.
    """

    def __init__(self, subject: str, dispatcher: DueDispatcher) -> None:
        self.subject = subject
        self.dispatcher = dispatcher
        self._locator = dispatcher.links.locator
        self._loop = asyncio.get_running_loop()
        self._suspects: dict[
            SchedulePlace, int
        ] = {}  # how many messages may share a batch with each
        self._batcher = DueBatcher(
            dispatcher.limits, self._suspects
        )  # empty while each partition has its own
        self._resumed: list[DueBatch] = []
        self._way: Balancer[DueDestination] | Partitioner[DueDestination] | None = (
            None  # None: not located
        )
        self._keys = Keys()
        self._destinations: dict[tuple[str, int], DueDestination] = {}
        self._finding: asyncio.Task[None] | None = None
        self._asking: asyncio.Task[None] | None = None
        self._refusal: QmqError | None = None  # why planning is held
        self._refusals = 0
        self._tries: dict[SchedulePlace, int] = {}
        self._is_closed = False
        self.aside: dict[SchedulePlace, SetAside] = {}
        """Messages that cannot be delivered as they are."""

    # --- in ---------------------------------------------------------------------------------------

    def put(self, messages: Sequence[DueMessage]) -> None:
        """Add due messages, in order."""
        self._add(messages)
        if self._way is None:
            self._find(0.0)

    def resume(self, batch: DueBatch) -> None:
        """Take over a plan of an earlier master. Call it before the first `put`."""
        self._resumed.append(batch)
        self._find(0.0)

    def withdraw(self, place: SchedulePlace) -> bool:
        """Remove a message that waits; False if it does not wait here."""
        aside = self.aside.pop(place, None)
        if aside is not None:
            aside.timer.cancel()
        elif not any(batcher.withdraw(place) for batcher in self._batchers):
            return False
        self._forget([place])
        return True

    # --- messages that wait -----------------------------------------------------------------------

    @property
    def _batchers(self) -> list[DueBatcher]:
        if isinstance(self._way, Partitioner):
            return [partition.batcher for partition in self._destinations.values()]
        return [self._batcher]

    def lps(self, messages: Sequence[DueMessage]) -> list[int]:
        """The logical partitions of messages with keys."""
        return self._keys.of_many([message.key for message in messages])

    def _add(self, messages: Sequence[DueMessage]) -> None:
        """Add messages behind all others, and plan what can be planned."""
        way = self._way
        if not isinstance(way, Partitioner):
            self._batcher.messages.extend(messages)
            self._draft(None)
            return
        messages = self._with_key(messages)
        touched: dict[int, DueDestination] = {}
        for message, lp in zip(messages, self.lps(messages), strict=True):
            partition = way.by_lp[lp]
            partition.batcher.messages.append(message)
            touched[partition.partition] = partition
        for partition in touched.values():
            self._draft(partition)

    def _put_back(self, messages: Sequence[DueMessage]) -> None:
        """Add messages before all others, in order."""
        way = self._way
        if not isinstance(way, Partitioner):
            self._batcher.put_back(messages)
            return
        messages = self._with_key(messages)
        for message, lp in reversed(list(zip(messages, self.lps(messages), strict=True))):
            way.by_lp[lp].batcher.messages.appendleft(message)

    def _with_key(self, messages: Sequence[DueMessage]) -> Sequence[DueMessage]:
        if all([message.key for message in messages]):  # noqa: C419 - faster than a generator
            return messages
        why = InvalidArgument(f"subject {self.subject!r} is ordered, and the message has no key")
        for message in messages:
            if not message.key:
                self._set_aside(message, why)
        return [message for message in messages if message.key]

    # --- the state --------------------------------------------------------------------------------

    def _find(self, wait_s: float, *, refresh: bool = False) -> None:
        if self._finding is None and not self._is_closed:
            self._finding = self._loop.create_task(self._locate(wait_s, refresh))

    async def _locate(self, wait_s: float, refresh: bool) -> None:
        failures = 0
        while True:
            if wait_s:
                await asyncio.sleep(wait_s)
            try:
                async with self.dispatcher.lookups:
                    ordering = await self._locator.ordering(self.subject, refresh=refresh)
                break
            except ClientClosed:
                return
            except QmqError as failure:
                refusal = failure
            except Exception as cause:
                log.exception("locating subject %r failed: trying again", self.subject)
                refusal = QmqError(
                    f"subject {self.subject!r} cannot be located: {type(cause).__name__}: {cause}"
                )
            failures += 1
            self._refusal, refresh = refusal, True
            wait_s = 0.0 if isinstance(refusal, Unavailable) else pause_s(failures, refusal)
        self._finding = None
        self._refusal = None
        if self._way is None or isinstance(self._way, Partitioner) != (ordering is not None):
            if any(each.flight for each in self._destinations.values()):
                self._hold(
                    QmqError(
                        f"subject {self.subject!r} changed its order while batches are under way"
                    )
                )
                return
            self._begin(ordering)
        self._pump()

    def _begin(self, ordering: Ordering | None) -> None:
        """Send by this order from now on. Nothing is on its way."""
        waiting = [message for batcher in self._batchers for message in batcher.messages]
        self._batcher.messages.clear()
        for each in self._destinations.values():
            each.connection.close()
        self._destinations.clear()
        resumed, self._resumed = self._resumed, []
        if ordering is None:
            self._way = Balancer(
                self._destination, lambda group, _: group.may_admit(self._loop.time())
            )
            for batch in resumed:
                destination = self._destination(batch.draft.broker_group, batch.draft.partition)
                destination.flight.append(batch)
        else:
            self._keys = Keys(ordering.route.logical_partitions)
            self._way = way = Partitioner(lambda part: self._destination(part.group, part.number))
            way.learn(ordering.route, ordering.fenced, self._loop.time())
            for batch in resumed:
                if number := batch.draft.partition:
                    part = PhysicalPartition(number, UNKNOWN_RANGE, batch.draft.broker_group)
                    way.resume(part, self.lps(batch.draft.messages)).flight.append(batch)
            unordered = [batch for batch in resumed if not batch.draft.partition]
            waiting = [*self._given_up(unordered), *waiting]
        self._locator.listen(self.subject, self._rerouted)
        self._rerouted()
        self._add(waiting)

    def _given_up(self, unordered: Sequence[DueBatch]) -> list[DueMessage]:
        """The messages of plans from when the subject was unordered. It was deleted since then, as
        a subject does not change its order, and no broker can say what became of them.
        """
        for batch in unordered:
            batch.is_lost = True
        self.dispatcher.void(self, unordered)
        return [message for batch in unordered for message in batch.draft.messages]

    def _destination(self, group: str, partition: int = 0) -> DueDestination:
        found = self._destinations.get((group, partition))
        if found is None:
            is_ordered = isinstance(self._way, Partitioner)
            batcher = (
                DueBatcher(self.dispatcher.limits, self._suspects) if is_ordered else self._batcher
            )
            found = self._destinations[group, partition] = DueDestination(
                self, group, partition, batcher, is_ordered=is_ordered
            )
        return found

    def _rerouted(self) -> None:
        """The locator has news about the subject or its groups."""
        way, book = self._way, self._locator.book
        if self._is_closed:
            return
        if isinstance(way, Partitioner) and (ordering := book.ordering(self.subject)) is not None:
            way.learn(ordering.route, ordering.fenced, self._loop.time())
        elif isinstance(way, Balancer) and (groups := book.groups(self.subject)) is not None:
            way.learn(groups)
        else:
            return
        for each in self._destinations.values():
            each.connection.moved()
        self._pump()

    def _ask(self) -> None:
        if self._asking is None and not self._is_closed:
            self._asking = self._loop.create_task(self._ask_for_more())

    async def _ask_for_more(self) -> None:
        """Locate the subject again until it has a usable group, or a newer route; the locator keeps
        the pauses.
        """
        try:
            while self._has_nowhere and self._refusal is None:
                try:
                    await self._locator.ordering(self.subject, refresh=True)
                    self._rerouted()
                except QmqError as failure:
                    self._hold(failure)
        finally:
            self._asking = None

    @property
    def _has_nowhere(self) -> bool:
        way = self._way
        if isinstance(way, Balancer):
            return bool(self._batcher) and not way.is_writable
        return way is not None and way.wants_route

    # --- out --------------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Record, plan and send what can be recorded, planned and sent."""
        self._settle()
        for each in list(self._destinations.values()):
            self._advance(each)
        if isinstance(self._way, Balancer):
            self._draft(None)  # there may be no destination at all

    def changed(self, destination: DueDestination) -> None:
        """For the connection: batches were decided, or the state of the window changed."""
        if destination.connection.is_closed:
            return
        if destination.is_settled:
            self._pump()
        else:
            self._advance(destination)

    def planned(self, destination: DueDestination) -> None:
        """For the dispatcher of all subjects: a batch for this destination may be sent."""
        if destination.is_ordered:
            self.changed(
                destination
            )  # what can never be stored becomes void only when all of it is planned
        else:
            # without `_release`, which would take back what was never tried
            destination.connection.pump()

    def _advance(self, destination: DueDestination) -> None:
        if not destination.is_ordered:
            self._release(destination)
        self._put_back(self._collect(destination))
        self._draft(destination if destination.is_ordered else None)
        destination.connection.pump()
        if destination.wants_route:
            self._ask()

    def _draft(self, partition: DueDestination | None) -> None:
        """Plan what waits for a partition, or (None) for any broker group,
        as long as there is room.
        """
        way, batcher = self._way, self._batcher if partition is None else partition.batcher
        if way is None or not batcher or self._refusal is not None or self._is_closed:
            return
        self._locator.touch(self.subject)
        while batcher and (taker := self._taker(partition)) is not None:
            messages, size = batcher.take()
            number = (
                self.dispatcher.next_number()
                if partition is None
                else partition.number(self.dispatcher.new_producer_id)
            )
            draft = Draft(self.subject, taker.partition, taker.group, *number, messages)
            self.dispatcher.plan(self, taker, draft, size)
        if batcher:
            for each in list(self._destinations.values()) if partition is None else [partition]:
                each.connection.reach()
            if isinstance(way, Balancer) and not way.is_writable:
                self._ask()

    def _taker(self, partition: DueDestination | None) -> DueDestination | None:
        """Who gets the next batch of what waits for a partition, or for any broker group; None if
        nobody has room.
        """
        if isinstance(self._way, Balancer):
            return self._way.pick(0)
        return (
            partition if partition is not None and partition.may_admit(self._loop.time()) else None
        )

    def has_messages_for(self, destination: DueDestination) -> bool:
        """For the connection: whether messages wait that it could take."""
        return (
            bool(destination.batcher)
            and destination.is_writable
            and not destination.is_left
            and self._refusal is None
        )

    def _release(self, window: DueDestination) -> None:
        """Make refused batches of a troubled group void if another group can take them, or their
        group is drained.
        """
        now = self._loop.time()
        if window.flight and window.is_troubled(now):
            groups = [each for each in self._destinations.values() if each.is_writable]
            is_free = any(each is not window and not each.is_troubled(now) for each in groups)
            if is_free or all(each.group != window.group for each in groups):
                window.release()

    def _settle(self) -> None:
        """Settled partitions hand over their messages by the newest route: those not stored there
        first, then those that waited.
        """
        for partition in self._way.settle() if isinstance(self._way, Partitioner) else []:
            partition.settle()
            partition.connection.close()
            del self._destinations[partition.group, partition.partition]
            self._add([*self._collect(partition), *partition.batcher.messages])

    # --- outcomes ---------------------------------------------------------------------------------

    def _hold(self, failure: QmqError) -> None:
        """Plan nothing for a while, then locate the subject again."""
        if self._refusal is None:
            self._refusal = failure
            self._refusals += 1
            self._find(pause_s(self._refusals, failure), refresh=True)

    def _collect(self, window: DueWindow) -> list[DueMessage]:
        """Record what was decided. Returns the messages to be planned again, in order."""
        for batch, produced in window.take_done():
            self.dispatcher.done(batch, produced)
            self._refusals = 0
            self._forget([message.place for message in batch.draft.messages])
        void = window.take_void()
        if not void:
            return []
        self.dispatcher.void(self, void)
        return [message for batch in void for message in self._again(batch)]

    def _forget(self, places: Sequence[SchedulePlace]) -> None:
        """These messages are stored, or withdrawn."""
        if self._suspects or self._tries:
            for place in places:
                self._suspects.pop(place, None)
                self._tries.pop(place, None)

    def _again(self, batch: DueBatch) -> Sequence[DueMessage]:
        messages, fault = batch.draft.messages, batch.fault
        if isinstance(fault, MessageTooLarge | InvalidArgument):
            if len(messages) == 1:
                self._set_aside(messages[0], fault)
                return []
            self._suspects.update(
                dict.fromkeys([message.place for message in messages], len(messages) // 2)
            )
        elif fault is not None:
            self._hold(fault)
        return messages

    def _set_aside(self, message: DueMessage, why: QmqError) -> None:
        """The message cannot be delivered now; it is retried later, alone."""
        place = message.place
        self._suspects[place] = 1
        tries = self._tries[place] = self._tries.get(place, 0) + 1
        if tries == 1:
            log.error(
                (
                    "message %s to %r cannot be delivered and is set aside; it will be tried "
                    "again from time to time: %s"
                ),
                message.message_id.hex(),
                self.subject,
                why,
            )
        self.aside[place] = SetAside(
            message, why, self._loop.call_later(pause_s(tries, why), self._try_again, place)
        )

    def _try_again(self, place: SchedulePlace) -> None:
        self._put_back([self.aside.pop(place).message])
        self._pump()

    # --- for people, and the end ------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether no message waits and no batch is in flight."""
        is_waiting = any(self._batchers) or self._resumed or self.aside
        return not is_waiting and not any(each.flight for each in self._destinations.values())

    def trouble(self) -> tuple[int, str]:
        """The messages that cannot be delivered now, and why; (0, "") if there are none."""
        way, now, why = self._way, self._loop.time(), self._refusal
        if isinstance(way, Partitioner):
            troubled = [
                each
                for each in self._destinations.values()
                if each.is_troubled(now) or each.is_left or each.wants_route
            ]
            troubled = [each for each in troubled if each.batcher or each.flight]
            count = sum([len(each.batcher) for each in troubled])
            if troubled:
                first = troubled[0]
                why = (
                    why
                    or first.trouble
                    or RouteChanged(
                        f"earlier messages to partition {first.partition} are not settled yet"
                    )
                )
        else:
            troubled = [each for each in self._destinations.values() if each.is_troubled(now)]
            why = why or next((each.trouble for each in troubled if each.trouble is not None), None)
            if way is not None and not way.is_writable:
                why = why or ReadOnly(
                    f"all broker groups of {self.subject!r} are drained: resume one with "
                    "`qmq broker resume`"
                )
            is_stuck = way is None or all(group in troubled for group in way if group.is_writable)
            count = len(self._batcher) if is_stuck else 0
        batches = self._resumed + [batch for each in troubled for batch in each.flight]
        count += sum([len(batch.draft.messages) for batch in batches]) + len(self.aside)
        why = why or next((each.why for each in self.aside.values()), None)
        return (count, str(why)) if count and why is not None else (0, "")

    def close(self) -> None:
        """Stop sending immediately."""
        self._is_closed = True
        self._locator.unlisten(self.subject, self._rerouted)
        for task in (self._finding, self._asking):
            if task is not None:
                task.cancel()
        for aside in self.aside.values():
            aside.timer.cancel()
        for each in self._destinations.values():
            each.connection.close()


class DueDispatcher:
    """Sends due messages of all subjects during one term of a master. The locator of `links` must
    not create subjects, so that a deleted subject stays deleted.
    """

    def __init__(
        self,
        links: ConnectionPool,
        plan_log: PlanLog,
        *,
        batch_messages: int = BATCH_MESSAGES,
        batch_bytes: int = BATCH_BYTES,
        new_producer_id: Callable[[], int],
    ) -> None:
        self.links = links
        self.limits = Limits(batch_messages, batch_bytes)
        self.new_producer_id = new_producer_id
        self.lookups = asyncio.Semaphore(LOOKUPS_MAX)
        self.planned = 0
        """Messages that are planned (or about to be) and undecided."""
        self.resent = 0
        """Messages sent again although they may be stored: their partition was fenced before it
        answered, or forgot their producer.
        """
        self._plan_log = plan_log
        self._subjects: dict[str, SubjectDispatcher] = {}
        self._kept = SUBJECTS_MAX
        self._waiting: dict[SchedulePlace, SubjectDispatcher] = {}
        self._doubtful: set[SchedulePlace] = set()
        self._producer_id = 0
        self._numbers = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_halted = False

    # --- in ---------------------------------------------------------------------------------------

    def resume(self, plan: PlanAction, messages: Sequence[DueMessage]) -> None:
        """An open plan of an earlier master, and its messages in order: sent again under its own
        number, before newer messages of its keys. Plans come in the order of their numbers, all of
        them before the first `put`.
        """
        if self._is_halted:
            return
        draft = Draft(
            plan.subject,
            plan.partition,
            plan.broker_group,
            plan.producer_id,
            plan.batch_sequence,
            messages,
        )
        size = sum([size_of(message) for message in messages])
        self.planned += len(messages)
        self._subject(plan.subject).resume(DueBatch(draft, plan, size=size, is_uncertain=True))

    def put(self, messages: Sequence[DueMessage]) -> None:
        """Due messages in order, all subjects mixed. They wait here until they are planned."""
        if self._is_halted:
            return
        by_subject: dict[str, list[DueMessage]] = {}
        for message in messages:
            found = by_subject.get(message.subject)
            if found is None:
                found = by_subject[message.subject] = []
            found.append(message)
        for subject, its in by_subject.items():
            dispatcher = self._subject(subject)
            self._wait(dispatcher, its)
            dispatcher.put(its)

    def withdraw(self, place: SchedulePlace) -> bool:
        """Remove a message that is cancelled or moved; False if it is planned, may be delivered, or
        is not here.
        """
        dispatcher = self._waiting.get(place)
        if dispatcher is None or place in self._doubtful or not dispatcher.withdraw(place):
            return False
        del self._waiting[place]
        return True

    def _wait(self, dispatcher: SubjectDispatcher, messages: Sequence[DueMessage]) -> None:
        self._waiting.update(dict.fromkeys([message.place for message in messages], dispatcher))

    def _subject(self, subject: str) -> SubjectDispatcher:
        dispatcher = self._subjects.get(subject)
        if dispatcher is None:
            if len(self._subjects) >= self._kept:
                self._close_idle()
            dispatcher = self._subjects[subject] = SubjectDispatcher(subject, self)
        return dispatcher

    def _close_idle(self) -> None:
        for subject, dispatcher in list(self._subjects.items()):
            if dispatcher.is_idle:
                dispatcher.close()
                del self._subjects[subject]
        self._kept = max(SUBJECTS_MAX, 2 * len(self._subjects))

    # --- plans, for the dispatchers of subjects ---------------------------------------------------

    def next_number(self) -> tuple[int, int]:
        """(producer id, number) of the next batch to an unordered subject:
        all of them share one producer.
        """
        if not self._producer_id:
            self._producer_id = self.new_producer_id()
        return self._producer_id, next(self._numbers)

    def plan(
        self, dispatcher: SubjectDispatcher, destination: DueDestination, draft: Draft, size: int
    ) -> None:
        """Admit a batch to a destination and have it planned;
        the dispatcher is told when it may be sent.
        """
        batch = DueBatch(draft, size=size)
        destination.flight.append(batch)
        self.planned += len(draft.messages)
        for message in draft.messages:
            del self._waiting[message.place]
        task = asyncio.create_task(self._plan(dispatcher, destination, batch))
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    async def _plan(
        self, dispatcher: SubjectDispatcher, destination: DueDestination, batch: DueBatch
    ) -> None:
        if self._is_halted:
            return
        try:
            plan = await self._plan_log.plan(batch.draft)
        except QmqError as failure:
            log.info("this delay server stops delivering messages: %s", failure)
            self.halt()
            return
        if not self._is_halted:
            destination.planned(batch, plan)
            dispatcher.planned(destination)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Report an unexpected failure of a plan immediately,
        not when its task is garbage-collected.
        """
        self._tasks.discard(task)
        failure = None if task.cancelled() else task.exception()
        if failure is not None:
            text = "due messages were not planned"
            asyncio.get_running_loop().call_exception_handler(
                {"message": text, "exception": failure, "task": task}
            )

    def done(self, batch: DueBatch, produced: Produced) -> None:
        if not self._is_halted and batch.plan is not None:
            self.planned -= len(batch.draft.messages)
            if self._doubtful:
                self._doubtful.difference_update(
                    [message.place for message in batch.draft.messages]
                )
            self._plan_log.done(batch.plan, produced.append_time_ms)

    def void(self, dispatcher: SubjectDispatcher, batches: Sequence[DueBatch]) -> None:
        """These batches will not be sent again: their messages wait again. Written from the last to
        the first (see `DueWindow`).
        """
        for batch in [] if self._is_halted else reversed(batches):
            assert batch.plan is not None
            messages: Sequence[DueMessage] = batch.draft.messages
            self.planned -= len(messages)
            self._wait(dispatcher, messages)
            if batch.is_lost:
                self.resent += len(messages)
                self._doubtful.update([message.place for message in messages])
            self._plan_log.void(batch.plan)

    # --- how it stands ----------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Messages put and not planned."""
        return len(self._waiting)

    @property
    def subjects(self) -> int:
        """The subjects for which something is kept:
        those with messages, and some that had any lately.
        """
        return len(self._subjects)

    @property
    def set_aside(self) -> int:
        """Messages that cannot be delivered; the log names them."""
        return sum([len(each.aside) for each in self._subjects.values()])

    def stuck(self, subject: str) -> int:
        """Waiting messages of the subject that cannot be delivered now; 0 if all can."""
        dispatcher = self._subjects.get(subject)
        return 0 if dispatcher is None else dispatcher.trouble()[0]

    def troubles(self) -> list[tuple[str, int, str]]:
        """(subject, waiting messages, reason) of subjects with messages that
        cannot be delivered now.
        """
        found = [(subject, *each.trouble()) for subject, each in self._subjects.items()]
        return [each for each in found if each[1]]

    # --- the end ----------------------------------------------------------------------------------

    def halt(self) -> None:
        """Send no more batches, and write no more to the plan log."""
        self._is_halted = True
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        for dispatcher in self._subjects.values():
            dispatcher.close()

    async def stop(self) -> None:
        """This replica lost the mastership, or the process ends: stop immediately."""
        self.halt()
        await asyncio.gather(*self._tasks, return_exceptions=True)
