"""An event loop whose time jumps to the next timer, so that an hour passes immediately.

Due messages, and a plan log in a list. A forbidden request to the plan log fails an assertion.

A cluster without sockets, and a plan log in memory.

A `World` has subjects and broker groups. Each request that arrives at a group meets the next
*fault* of the world's script; after the script's end there are no faults. Sending a batch that is
not planned and committed in the plan log fails an assertion.
"""

from __future__ import annotations

import asyncio
import gc
import selectors
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import wraps
from typing import Any, TypeVar

from qmq_ordering.hashing import logical_partition
from qmq_ordering.routes import LpRange, PhysicalPartition
from qmq_ordering.routes import Route as OrderedRoute
from support import eventually

from qmq.client.connection.pool import ConnectionPool
from qmq.client.metadata.cache import MetadataCache, Ordering, Placement, Pushed, SubjectRoute
from qmq.delay.batches import DueMessage, SchedulePlace
from qmq.delay.dispatcher import DueDispatcher
from qmq.delay.plan_log import Draft
from qmq.errors import (
    InvalidArgument,
    MessageTooLarge,
    NotConnected,
    NotMaster,
    OrderMismatch,
    Outcome,
    OutOfSequence,
    Overloaded,
    QmqError,
    ReadOnly,
    RightLapsed,
    RouteChanged,
    UnknownSubject,
)
from qmq.log.actions import PlanAction
from qmq.model import Order
from qmq.rpc.server_name import ServerName
from qmq.wire import frame_payloads as wire
from qmq.wire.batch import ENVELOPE_BYTES, BatchView, Envelope, Kind
from qmq.wire.batch_columns import parse_header
from qmq.wire.frame import Frame, FrameKind

T = TypeVar("T")


class _Jumping(selectors.DefaultSelector):  # type: ignore[misc,valid-type]
    """A sleep that does not wait: the clock advances by its length."""

    now_s = 1_000.0

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            raise AssertionError("nothing is under way, and nothing ever will be")
        self.now_s += max(timeout, 0.0)
        return super().select(0)


class JumpingLoop(asyncio.SelectorEventLoop):
    """See the module."""

    def __init__(self) -> None:
        self.jumping = _Jumping()
        super().__init__(self.jumping)

    def time(self) -> float:
        return self.jumping.now_s


def play(scene: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine to its end in time that jumps."""
    loop, wrong = JumpingLoop(), list[dict[str, Any]]()
    loop.set_exception_handler(lambda _, context: wrong.append(context))
    try:
        result = loop.run_until_complete(asyncio.wait_for(scene(), 36_000))
    finally:
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.close()
    gc.collect(1)
    assert not wrong, "in a callback or a task"
    return result


def played(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A test in time that jumps."""

    @wraps(test)
    def run(*given: Any, **named: Any) -> None:
        play(lambda: test(*given, **named))

    return run


async def until(condition: Callable[[], bool], within_s: float = 600.0) -> None:
    """Wait, in time that jumps."""
    await eventually(condition, within_s=within_s, look_s=0.005)


def due(ordinal: int, subject: str = "s", **fields: Any) -> DueMessage:
    """A message whose body is its number."""
    found = {
        "place": SchedulePlace(7, ordinal),
        "due_ms": 1_000 + ordinal,
        "subject": subject,
        "body": b"%d" % ordinal,
        "key": b"",
        "tags": (),
        "headers": {},
        "create_time_ms": 5,
        "message_id": ordinal.to_bytes(16, "big"),
        "flags": 0,
    }
    return DueMessage(**(found | fields))


class Line:
    """First in, first out: timers with equal times fire in any order."""

    def __init__(self) -> None:
        self._last_s = 0.0

    def at(self, after_s: float) -> float:
        self._last_s = max(self._last_s + 1e-6, asyncio.get_running_loop().time() + after_s)
        return self._last_s

    async def wait(self, after_s: float) -> None:
        loop = asyncio.get_running_loop()
        done = loop.create_future()
        loop.call_at(self.at(after_s), lambda: done.done() or done.set_result(None))
        await done


class MemoryLedger:
    """A log of plans, dones and voids, in the order of the calls. Entries are committed a little
    later.
    """

    def __init__(self, log: Sequence[tuple[str, PlanAction]] = (), commit_s: float = 0.003) -> None:
        self.log: list[tuple[str, PlanAction]] = []
        self.commit_s = commit_s
        self._line = Line()
        self.is_deposed = False
        self.is_closed = False
        """Whether the dispatcher were stopped: they must not call any more."""
        self.states: dict[SchedulePlace, str] = {}
        """Of each message that was ever planned: planned, done or pending."""
        self._open: dict[int, PlanAction] = {}
        self._at: dict[tuple[int, int], int] = {}
        for what, plan in log:
            self._add(what, plan)
        self.committed = len(self.log)
        self._next = 1 + max([plan.number for _, plan in self.log], default=0)

    async def plan(self, draft: Draft) -> PlanAction:
        assert not self.is_closed
        items = tuple(
            (message.place.bucket, message.place.ordinal.to_bytes(4, "little"))
            for message in draft.messages
        )
        plan = PlanAction(
            self._next,
            draft.subject,
            draft.partition,
            draft.broker_group,
            draft.producer_id,
            draft.batch_sequence,
            items,
        )
        self._next += 1
        self._add("plan", plan)
        end = len(self.log)
        await self._line.wait(self.commit_s)
        if self.is_deposed:
            raise NotMaster("deposed", outcome=Outcome.UNKNOWN)
        self.committed = max(self.committed, end)
        return plan

    def done(self, plan: PlanAction, append_time_ms: int) -> None:
        assert append_time_ms > 0
        assert not self.is_closed
        self._add("done", plan)

    def void(self, plan: PlanAction) -> None:
        assert not self.is_closed
        self._add("void", plan)

    def _add(self, what: str, plan: PlanAction) -> None:
        its = places(plan)
        if what == "plan":
            assert all(self.states.get(place, "pending") == "pending" for place in its), (
                "planned twice"
            )
            self._open[plan.number] = plan
            self._at[plan.producer_id, plan.batch_sequence] = len(self.log)
        else:
            assert self._open.pop(plan.number, None) == plan, (
                f"{what}, but it is decided already, or was never planned"
            )
        self.states.update(
            dict.fromkeys(its, {"plan": "planned", "done": "done", "void": "pending"}[what])
        )
        self.log.append((what, plan))

    def open(self) -> list[PlanAction]:
        """Plans that are neither done nor void."""
        return list(self._open.values())

    def is_committed(self, producer_id: int, number: int) -> bool:
        """Whether there is such a plan."""
        return self._at.get((producer_id, number), self.committed) < self.committed


def places(plan: PlanAction) -> list[SchedulePlace]:
    """The plan's messages."""
    return [
        SchedulePlace(bucket, int.from_bytes(ordinal, "little")) for bucket, ordinal in plan.items
    ]


LPS = 8
WAY_S = 0.002
"""From one end of a connection to the other."""


# --- brokers --------------------------------------------------------------------------------------


class Fault(Enum):
    """The fate of a request."""

    NONE = auto()
    BUSY = auto()
    REFUSED = auto()
    """With `World.refusal`."""
    UNKNOWN = auto()
    """Stored, but answered as unknown."""
    UNKNOWN_NOT = auto()
    """Not stored, but answered as unknown."""
    CUT = auto()
    """Stored, and the connection breaks before the answer."""
    CUT_NOT = auto()
    """The connection breaks before it arrives."""
    SILENT = auto()
    """Stored, and never answered."""
    DEPOSED = auto()
    """The master is another one from now on."""
    LATE = auto()
    """Answered late."""


@dataclass
class Stored:
    """A batch in a queue."""

    producer_id: int
    number: int
    view: BatchView


@dataclass
class FakeQueue:
    """The content of a subject's partition on a group, and the rules by which it accepts
    batches.
    """

    part: PhysicalPartition | None
    log: list[Stored] = field(default_factory=list)
    is_sealed: bool = False
    bases: dict[tuple[int, int], int] = field(default_factory=dict)

    def take(self, view: BatchView, body_bytes_max: int) -> int:
        """Raises as a broker does."""
        key = (view.header.producer_id, view.header.batch_sequence)
        if any(len(body) > body_bytes_max for body in view.bodies()):
            raise MessageTooLarge("a body is too large")
        if self.part is not None:
            lps = view.logical_partitions()
            if lps is None or view.keys() is None:
                raise OrderMismatch("keys are missing")
            if not all(self.part.range.first <= lp < self.part.range.end for lp in lps):
                raise InvalidArgument("another partition's")
        if key in self.bases:
            return self.bases[key]
        if self.is_sealed:
            raise RouteChanged("sealed")
        if self.part is not None and key[1] and (key[0], key[1] - 1) not in self.bases:
            raise OutOfSequence("an earlier batch is missing")
        self.bases[key] = sum(each.view.count for each in self.log)
        self.log.append(Stored(*key, view))
        return self.bases[key]


class FakeGroup:
    """A broker group. `address` is its master's; it may be away, drained, or silent."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.epoch = 1
        self.is_away = False
        self.is_drained = False
        self.is_silent = False
        self.failure: QmqError | None = None
        """What everything new is refused with."""
        self.queues: dict[tuple[str, int], FakeQueue] = {}
        self.arrived: list[BatchView] = []

    @property
    def address(self) -> str:
        return f"{self.name}:{self.epoch}"


class FakeStream:
    is_writable = True


class FakeConnection:
    """The parts of `Connection` that a connection of the dispatcher uses."""

    def __init__(self, world: World, group: FakeGroup) -> None:
        self.world, self.group, self.epoch = world, group, group.epoch
        self.is_open = True
        self.inflight_bytes_max = 1 << 24
        self.produce_bytes = 0
        self.stream = FakeStream()
        self.on_closed: dict[Callable[[], None], None] = {}
        self.on_writable: dict[Callable[[], None], None] = {}
        self._pending: dict[int, Callable[[Frame | QmqError], None]] = {}
        self._next = 0
        self._line = Line()

    def request(
        self,
        kind: int,
        on_answer: Callable[[Frame | QmqError], None],
        *buffers: bytes,
        timeout_s: float,
    ) -> None:
        assert kind == FrameKind.PRODUCE
        loop = asyncio.get_running_loop()
        self._next += 1
        number = self._next
        self._pending[number] = on_answer
        if not self.is_open:
            loop.call_soon(self.answer, number, NotConnected("it ended", outcome=Outcome.UNKNOWN))
            return
        loop.call_at(self._line.at(WAY_S), self.world.arrive, self, number, b"".join(buffers))
        loop.call_later(
            timeout_s,
            self.answer,
            number,
            NotConnected("no answer in time", outcome=Outcome.UNKNOWN),
        )

    def answer(self, number: int, answer: wire.Produced | QmqError) -> None:
        on_answer = self._pending.pop(number, None)
        if on_answer is not None:
            if isinstance(answer, QmqError):
                on_answer(answer)
            else:
                on_answer(
                    Frame(FrameKind.PRODUCED, number, 0, memoryview(wire.pack_produced([answer])))
                )

    def cut(self) -> None:
        if self.is_open:
            self.is_open = False
            for number in list(self._pending):
                self.answer(number, NotConnected("it ended", outcome=Outcome.UNKNOWN))
            for each in list(self.on_closed):
                each()


class FakeLinks(ConnectionPool):
    """The real class, with fake connections."""

    def __init__(self, world: World) -> None:
        super().__init__(MetadataCache(world.locate, world.watch), "test")
        self._world = world
        self.opened: dict[str, FakeConnection] = {}

    async def _open(self, place: tuple[str, ServerName]) -> Any:
        address, _ = place
        await asyncio.sleep(WAY_S)
        name, _, epoch = address.partition(":")
        group = self._world.groups[name]
        if group.is_away or int(epoch) != group.epoch:
            raise NotConnected(f"nobody answers at {address}")
        found = self.opened.get(address)
        if found is None or not found.is_open:
            found = self.opened[address] = FakeConnection(self._world, group)
            self._world.connections.append(found)
        return found


class FakeSubject:
    """The location of a subject. `route` is None for an unordered one."""

    def __init__(self, name: str, groups: Sequence[FakeGroup], *, is_ordered: bool) -> None:
        self.name, self.groups = name, list(groups)
        self.body_bytes_max = 1 << 20
        self.route: OrderedRoute | None = None
        self.fenced: set[int] = set()
        if is_ordered:
            width = LPS // len(groups)
            parts = [
                PhysicalPartition(at + 1, LpRange(at * width, (at + 1) * width), each.name)
                for at, each in enumerate(groups)
            ]
            self.route = OrderedRoute(1, LPS, len(parts) + 1, tuple(parts))


class World:
    """See the module."""

    def __init__(self, groups: int = 2, faults: Sequence[Fault] = ()) -> None:
        self.groups = {name: FakeGroup(name) for name in (f"g{number}" for number in range(groups))}
        self.subjects: dict[str, FakeSubject] = {}
        self.faults = deque(faults)
        self.connections: list[FakeConnection] = []
        self.plan_log = MemoryLedger()
        self.refusal: QmqError = RightLapsed("lapsed")
        self.located: list[str] = []
        self._ids = 100
        self._pushes: list[asyncio.Queue[Pushed]] = []

    def add(
        self, name: str = "s", *, is_ordered: bool = False, groups: Sequence[str] | None = None
    ) -> FakeSubject:
        """Add a subject, on all groups by default."""
        its = [self.groups[each] for each in groups or self.groups]
        subject = self.subjects[name] = FakeSubject(name, its, is_ordered=is_ordered)
        self._open(subject)
        return subject

    def _open(self, subject: FakeSubject) -> None:
        if subject.route is None:
            for group in subject.groups:
                group.queues.setdefault((subject.name, 0), FakeQueue(None))
        else:
            for part in subject.route.partitions:
                self.groups[part.group].queues.setdefault(
                    (subject.name, part.number), FakeQueue(part)
                )

    def dispatcher(self, **options: int) -> DueDispatcher:
        """A life of a master."""
        self.links = FakeLinks(self)
        return DueDispatcher(self.links, self.plan_log, new_producer_id=self.new_id, **options)

    def new_id(self) -> int:
        self._ids += 1
        return self._ids

    # --- changes ---

    def seal(self, subject: str, *numbers: int) -> None:
        """Partitions are closed."""
        for number in numbers:
            self.queue(subject, number).is_sealed = True

    def publish(
        self,
        subject: str,
        sources: Sequence[int],
        targets: Sequence[tuple[int, int, str]],
        *,
        fenced: bool = False,
    ) -> None:
        """Publish the next route without telling the clients. The sources are sealed now, unless
        they are fenced.
        """
        its = self.subjects[subject]
        route = its.route
        assert route is not None
        if not fenced:
            self.seal(subject, *sources)
        made = [
            PhysicalPartition(route.next_number + at, LpRange(first, end), group)
            for at, (first, end, group) in enumerate(targets)
        ]
        parts = sorted(
            [part for part in route.partitions if part.number not in sources] + made,
            key=lambda part: part.range,
        )
        its.route = OrderedRoute(
            route.version + 1, LPS, route.next_number + len(made), tuple(parts)
        )
        its.fenced.update(sources if fenced else ())
        self._open(its)

    def push(self, **changed: Sequence[str]) -> None:
        """Tell who watches."""
        for queue in self._pushes:
            queue.put_nowait(Pushed(**changed))

    def depose(self, group: FakeGroup) -> None:
        """Another replica becomes master; the connections to the old one stay open."""
        group.epoch += 1

    def away(self, name: str) -> None:
        """The group is gone; its connections break."""
        group = self.groups[name]
        group.is_away = True
        for connection in self.connections:
            if connection.group is group:
                connection.cut()

    def back(self, name: str) -> None:
        """Return with another master, which closes fenced partitions before it serves."""
        self.groups[name].epoch += 1
        self.groups[name].is_away = False
        for (subject, number), queue in self.groups[name].queues.items():
            queue.is_sealed |= number in self.subjects[subject].fenced

    # --- what the dispatcher ask ---

    def watch(self) -> AsyncIterator[Pushed]:
        queue: asyncio.Queue[Pushed] = asyncio.Queue()
        self._pushes.append(queue)

        async def pushed() -> AsyncIterator[Pushed]:
            while True:
                yield await queue.get()

        return pushed()

    def locate(self, subject: str) -> Awaitable[Placement]:
        return self._locate(subject)

    async def _locate(self, name: str) -> Placement:
        self.located.append(name)
        await asyncio.sleep(WAY_S)
        subject = self.subjects.get(name)
        if subject is None:
            raise UnknownSubject(f"there is no subject {name!r}")
        routes = [
            SubjectRoute(
                each.name, "" if each.is_away else each.address, each.epoch, not each.is_drained
            )
            for each in subject.groups
        ]
        if subject.route is None:
            return Placement(routes)
        return Placement(routes, Ordering(Order.STRICT, subject.route, frozenset(subject.fenced)))

    def arrive(self, connection: FakeConnection, number: int, payload: bytes) -> None:
        """A request arrives at a broker."""
        group, loop = connection.group, asyncio.get_running_loop()
        view = BatchView(_placed(payload), payload[ENVELOPE_BYTES:])
        assert self.plan_log.is_committed(view.header.producer_id, view.header.batch_sequence), (
            "sent, and not planned"
        )
        if group.is_away or not connection.is_open or group.is_silent:
            return
        group.arrived.append(view)
        fault = self.faults.popleft() if self.faults else Fault.NONE
        if fault is Fault.DEPOSED:
            self.depose(group)
        if fault is Fault.CUT_NOT:
            connection.cut()
            return
        answer = self._answer(connection, view, fault)
        if fault is Fault.CUT:
            connection.cut()
        elif fault is not Fault.SILENT:
            loop.call_later(
                0.7 if fault is Fault.LATE else WAY_S, connection.answer, number, answer
            )

    def _answer(
        self, connection: FakeConnection, view: BatchView, fault: Fault
    ) -> wire.Produced | QmqError:
        group = connection.group
        if connection.epoch != group.epoch:
            return NotMaster("not the master")
        if fault is Fault.BUSY:
            return Overloaded("busy")
        if fault is Fault.REFUSED:
            return self.refusal
        if fault is Fault.UNKNOWN_NOT:
            return NotMaster("staged", outcome=Outcome.UNKNOWN)
        try:
            base = self._store(group, view)
        except QmqError as failure:
            return failure
        return (
            NotMaster("written", outcome=Outcome.UNKNOWN)
            if fault is Fault.UNKNOWN
            else wire.Produced(base, 1)
        )

    def _store(self, group: FakeGroup, view: BatchView) -> int:
        subject = self.subjects.get(view.subject)
        if subject is None:
            raise UnknownSubject("it is gone")
        partition = view.header.partition
        if subject.route is not None and partition == 0:
            raise OrderMismatch("the subject is ordered")
        if subject.route is None and partition:
            raise InvalidArgument("only partition 0")
        queue = group.queues.get((view.subject, partition))
        if queue is None:
            raise RouteChanged("not known here")
        is_known = (view.header.producer_id, view.header.batch_sequence) in queue.bases
        if group.is_drained and not is_known and queue.part is None:
            raise ReadOnly("drained")
        if group.failure is not None and not is_known:
            raise group.failure
        return queue.take(view, subject.body_bytes_max)

    # --- what is stored ---

    def queue(self, subject: str, partition: int = 0, group: str | None = None) -> FakeQueue:
        """The only queue of that name, or the group's."""
        groups = [each for each in self.groups.values() if group in (None, each.name)]
        return next(
            each.queues[subject, partition]
            for each in groups
            if (subject, partition) in each.queues
        )

    def stored(self, subject: str = "s") -> list[bytes]:
        """All bodies, partition by partition in the order of their numbers."""
        return [body for view in self.views(subject) for body in view.bodies()]

    def views(self, subject: str = "s") -> list[BatchView]:
        """All batches, partition by partition."""
        queues = [
            (number, queue)
            for each in self.groups.values()
            for (name, number), queue in each.queues.items()
            if name == subject
        ]
        return [
            stored.view
            for _, queue in sorted(queues, key=lambda each: each[0])
            for stored in queue.log
        ]

    def per_key(self, subject: str = "s") -> dict[bytes, list[int]]:
        """For each key the stored messages, in the order in which they are read."""
        found: dict[bytes, list[int]] = {}
        for view in self.views(subject):
            for key, body in zip(view.keys() or [], view.bodies(), strict=True):
                found.setdefault(key, []).append(int(body))
        return found


def _placed(payload: bytes) -> Envelope:
    parse_header(payload[ENVELOPE_BYTES:])
    return Envelope(Kind.DATA, len(payload), 0, 0, 1, 1, 1, 0)


def lp(key: bytes) -> int:
    """Its logical partition."""
    return logical_partition(key, LPS)


KEYS = [b"key-%d" % number for number in range(24)]


def keyed(count: int, *, begin: int = 0, keys: list[bytes] = KEYS) -> list[DueMessage]:
    """Messages with keys, one after another."""
    return [due(number, key=keys[number % len(keys)]) for number in range(begin, begin + count)]


def expected(messages: list[DueMessage]) -> dict[bytes, list[int]]:
    """The numbers of each key, in order."""
    found: dict[bytes, list[int]] = {}
    for message in messages:
        found.setdefault(message.key, []).append(int(message.body))
    return found


def all_done(world: World, count: int) -> bool:
    """Whether so many messages were planned, and all of them are stored."""
    states = list(world.plan_log.states.values())
    return len(states) == count and set(states) == {"done"}
