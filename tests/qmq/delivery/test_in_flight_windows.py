"""Every window of the delivery core against one simple destination: nothing is lost, nothing is
stored twice, and every reported outcome is true. Features of one kind of window (routes, plans,
lookups) have separate tests.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark_qmq.sink.packets import Done, Load, PacketWindow
from pyspark_qmq.sink.row_identity import RowTarget
from qmq_ordering.routes import LpRange, PhysicalPartition
from support.forms import examples

from qmq.client.producing.batch import Batch, SenderWindow
from qmq.client.producing.ordered.stream import OrderedBatch, Stream
from qmq.client.producing.receipts import SplitTicket, Ticket
from qmq.delay.batches import DueMessage, SchedulePlace
from qmq.delay.due_window import DueBatch, DueWindow
from qmq.delay.plan_log import Draft
from qmq.delivery.retries import DELAY_SERVER, ORDERED_SINK, PRODUCER, SINK
from qmq.errors import (
    DeadlineExceeded,
    InvalidArgument,
    NotConnected,
    NotMaster,
    Outcome,
    OutOfSequence,
    Overloaded,
    ProducerFenced,
    QmqError,
)
from qmq.log.actions import PlanAction
from qmq.model import begins_session, session_of
from qmq.wire.batch_columns import Columns
from qmq.wire.frame_payloads import Produced

TIMEOUT_S = 60.0
WINDOW_MAX = 32
STORED = Produced(0, 1)
FAULT = InvalidArgument("no")
UNKNOWN = NotMaster("staged", outcome=Outcome.UNKNOWN)


class Fate(Enum):
    STORED = auto()
    NOWHERE = auto()
    """Said to be certainly not stored here: it failed, or may go elsewhere."""
    UNKNOWN = auto()


def rest(*_: object) -> float:
    return 0.01


class PipeKind:
    is_ordered = False
    is_blocking = False
    may_pardon = True
    """Whether a batch that was refused because of its content may be accepted at another try."""

    def __init__(self) -> None:
        self.window: Any = SenderWindow(8, PRODUCER._replace(backoff_s=rest))
        self.pool = deque[Batch]()
        self.found: list[tuple[int, Fate]] = []

    def put(self, serial: int, now: float) -> None:
        self.pool.append(
            Batch(Columns([b"%d" % serial]), 1, Ticket(), serial, size=1, until=now + TIMEOUT_S)
        )

    def next(self, now: float) -> Any:
        if self.window.has_retries:
            return self.window.next(now)
        if self.pool and self.window.has_room(1, now):
            self.window.send(batch := self.pool.popleft())
            return batch
        return None

    def number(self, batch: Any) -> tuple[int, int]:
        return 1, batch.sequence

    def serial(self, batch: Any) -> int:
        return int(batch.columns.bodies[0])

    def stored(self, batch: Any, now: float) -> None:
        if self.window.acknowledged(batch, now):
            self.found.append((self.serial(batch), Fate.STORED))

    def refused(self, batch: Any, attempt: int, failure: QmqError, now: float) -> None:
        self.window.refused(batch, attempt, failure, now)

    def tick(self, now: float) -> None:
        self.window.expire(now)

    def fates(self) -> Iterator[tuple[int, Fate]]:
        yield from self.found
        self.found.clear()
        for batch, failure in self.window.take_failed():
            yield self.serial(batch), fate_of(failure)
        for batch in self.window.take_requeued():
            yield self.serial(batch), Fate.NOWHERE

    @property
    def is_idle(self) -> bool:
        return not self.pool and not self.window.flight


def fate_of(failure: QmqError) -> Fate:
    return Fate.NOWHERE if failure.outcome is Outcome.NOT_STORED else Fate.UNKNOWN


class StreamKind(PipeKind):
    is_ordered = True

    def __init__(self) -> None:
        ids = itertools.count(1)
        self.window = Stream(
            PhysicalPartition(1, LpRange(0, 1), "g"),
            lambda: next(ids),
            rules=PRODUCER._replace(backoff_s=rest),
        )

    def put(self, serial: int, now: float) -> None:
        columns = Columns([b"%d" % serial], keys=[b"k"], logical_partitions=[0])
        self.window.put(
            OrderedBatch(
                columns, 1, SplitTicket(Ticket(), 1, 1), range(1), size=1, until=now + TIMEOUT_S
            )
        )

    def next(self, now: float) -> Any:
        return self.window.next(now)

    def number(self, batch: Any) -> tuple[int, int]:
        return batch.producer_id, batch.number

    def stored(self, batch: Any, now: float) -> None:
        self.window.stored(batch, STORED, now)

    def tick(self, now: float) -> None:
        self.window.tick(now)

    def fates(self) -> Iterator[tuple[int, Fate]]:
        for batch, result in self.window.take_decided():
            yield (
                self.serial(batch),
                Fate.STORED if isinstance(result, Produced) else fate_of(result),
            )

    @property
    def is_idle(self) -> bool:
        return bool(self.window.is_idle)


class PartitionedDueKind(StreamKind):
    may_pardon = False

    def __init__(self) -> None:
        self.window = DueWindow(
            "g",
            int(self.is_ordered),
            is_ordered=self.is_ordered,
            rules=DELAY_SERVER._replace(backoff_s=rest),
        )
        self.pool = deque[Batch]()
        self.ids, self.numbers = itertools.count(1), itertools.count()

    def put(self, serial: int, now: float) -> None:
        message = DueMessage(
            SchedulePlace(1, serial), 1, "s", b"%d" % serial, b"", (), {}, 1, bytes(16), 0
        )
        self.pool.append(message)  # type: ignore[arg-type]

    def next(self, now: float) -> Any:
        while self.pool and self.window.may_admit(now):
            number = (
                self.window.number(lambda: next(self.ids))
                if self.is_ordered
                else (1, next(self.numbers))
            )
            draft = Draft("s", self.window.partition, "g", *number, [self.pool.popleft()])  # type: ignore[list-item]
            self.window.flight.append(batch := DueBatch(draft, size=1))
            self.window.planned(batch, PlanAction(1, *draft[:5], ()))
        return self.window.next(now)

    def number(self, batch: Any) -> tuple[int, int]:
        return batch.producer_id, batch.draft.batch_sequence

    def serial(self, batch: Any) -> int:
        return int(batch.draft.messages[0].body)

    def fates(self) -> Iterator[tuple[int, Fate]]:
        for batch, _ in self.window.take_done():
            yield self.serial(batch), Fate.STORED
        for batch in self.window.take_void():
            yield self.serial(batch), Fate.UNKNOWN if batch.is_lost else Fate.NOWHERE

    @property
    def is_idle(self) -> bool:
        return not self.pool and not self.window.flight


class BalancedDueKind(PartitionedDueKind):
    is_ordered = False

    def tick(self, now: float) -> None:
        super().tick(now)
        if self.window.is_troubled(now):
            self.window.release()


class PartitionedPacketKind(StreamKind):
    is_blocking = True

    def __init__(self) -> None:
        rules = ORDERED_SINK if self.is_ordered else SINK
        self.window = PacketWindow(
            RowTarget("s", int(self.is_ordered), "g"), 1e9, rules=rules._replace(backoff_s=rest)
        )
        self.found: list[tuple[int, Fate]] = []

    def put(self, serial: int, now: float) -> None:
        self.window.put(Load(serial, np.array([serial]), 1), now)

    def number(self, batch: Any) -> tuple[int, int]:
        return 1, batch.number

    def serial(self, batch: Any) -> int:
        return int(batch.load.rows[0])

    def stored(self, batch: Any, now: float) -> None:
        if self.window.answered(batch, batch.attempts, None, now):
            self.found.append((self.serial(batch), Fate.STORED))

    def fates(self) -> Iterator[tuple[int, Fate]]:
        yield from self.found
        self.found.clear()

    @property
    def is_idle(self) -> bool:
        return not self.window.flight


class BalancedPacketKind(PartitionedPacketKind):
    is_ordered = False


@dataclass(eq=False)
class Wire:
    """A connection: data that was sent and not yet read, answers that have not arrived, and
    attempts that wait for one.
    """

    sent: deque[tuple[Any, int, tuple[int, int]]] = field(default_factory=deque)
    answers: deque[tuple[Any, int, QmqError | None]] = field(default_factory=deque)
    owed: list[tuple[Any, int]] = field(default_factory=list)


class World:
    """A destination, its connections, and the reported outcome of each batch."""

    LOST: ClassVar = NotConnected("cut", outcome=Outcome.UNKNOWN)

    def __init__(self, kind: Any) -> None:
        self.kind = kind
        self.now = 0.0
        self.serials = itertools.count()
        self.put_serials: list[int] = []
        self.log: dict[tuple[int, int], int] = {}
        self.following: dict[int, int] = defaultdict(int)
        self.failures = deque[tuple[QmqError, bool]]()
        self.at_fault: set[int] = set()
        self.fates: dict[int, list[Fate]] = defaultdict(list)
        self.wires = [Wire()]
        self.is_connected = False
        self.connect()

    # --- the destination ---

    def take(self, identity: tuple[int, int], serial: int) -> QmqError | None:
        if identity in self.log:
            return None
        if serial in self.at_fault:
            return FAULT
        failure, is_stored = self.failures.popleft() if self.failures else (None, True)
        if failure is not None and not is_stored:
            self.at_fault |= {serial} if failure is FAULT and not self.kind.may_pardon else set()
            return failure
        producer_id, number = identity
        following = self.following[producer_id]
        if self.kind.is_ordered and session_of(number) < session_of(following):
            return ProducerFenced("given up")
        if (
            self.kind.is_ordered
            and number != following
            and not (begins_session(number) and number > following)
        ):
            return OutOfSequence("a batch is missing")
        self.log[identity] = serial
        self.following[producer_id] = number + 1
        return failure

    def read(self, wire: Wire, count: int) -> None:
        for _ in range(min(count, len(wire.sent))):
            batch, attempt, identity = wire.sent.popleft()
            wire.answers.append((batch, attempt, self.take(identity, self.kind.serial(batch))))

    def hear(self, wire: Wire, count: int) -> None:
        for _ in range(min(count, len(wire.answers))):
            batch, attempt, failure = wire.answers.popleft()
            if (batch, attempt) in wire.owed:
                wire.owed.remove((batch, attempt))
                self.answer(batch, attempt, failure)

    def answer(self, batch: Any, attempt: int, failure: QmqError | None) -> None:
        if failure is None:
            self.kind.stored(batch, self.now)
        else:
            self.kind.refused(batch, attempt, failure, self.now)
        self.pump()

    # --- the sender ---

    def put(self, count: int) -> None:
        for serial in itertools.islice(self.serials, count):
            self.put_serials.append(serial)
            self.kind.put(serial, self.now)
        self.pump()

    def pump(self) -> None:
        if self.kind.is_blocking and self.kind.window.wants_look:
            self.look()
        while (batch := self.kind.next(self.now)) is not None:
            self.wires[-1].sent.append((batch, batch.attempts, self.kind.number(batch)))
            self.wires[-1].owed.append((batch, batch.attempts))
        # Batches, not tries: behind one that was refused for good the others leave again before
        # their first tries were answered.
        assert (
            len({id(batch) for batch, _ in self.wires[-1].owed if not batch.is_gone}) <= WINDOW_MAX
        )
        for serial, fate in self.kind.fates():
            self.fates[serial].append(fate)

    def look(self) -> None:
        """Query Spark's ordered queues for their content."""
        done = Done()
        rows = np.array(sorted(self.log.values()), np.int64)
        done.add(rows, np.zeros(len(rows), np.uint64), frozenset())
        before = [self.kind.serial(packet) for packet in self.kind.window.flight]
        self.kind.window.looked(self.following[1], done, self.now)
        left = [self.kind.serial(packet) for packet in self.kind.window.flight]
        self.kind.found += [(serial, Fate.STORED) for serial in before if serial not in left]

    def connect(self) -> None:
        if not self.is_connected:
            self.is_connected = True
            self.wires.append(Wire())
            if not self.kind.is_blocking:
                self.kind.window.connected()
            self.pump()

    def lose(self) -> None:
        """Break the connection. The server may still read what was sent, but the answers are
        lost.
        """
        if self.is_connected:
            self.is_connected = False
            wire = self.wires[-1]
            owed, wire.owed = wire.owed, []
            if self.kind.is_blocking:
                self.kind.window.broken(self.LOST, self.now)
                self.connect()
                return
            for batch, attempt in owed:
                self.kind.refused(batch, attempt, self.LOST, self.now)
            self.kind.window.disconnected(self.LOST)
            self.pump()

    def leave(self) -> None:
        """The client knows another master; answers of the old one may still arrive."""
        if self.is_connected and not self.kind.is_blocking:
            self.is_connected = False
            self.kind.window.disconnected(NotMaster("another one is"))
            self.pump()

    def time_out(self, wire: Wire) -> None:
        if not self.kind.is_blocking:
            owed, wire.owed = wire.owed, []
            for batch, attempt in owed:
                self.answer(batch, attempt, DeadlineExceeded("no answer", outcome=Outcome.UNKNOWN))

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.kind.tick(self.now)
        self.pump()

    # --- the end ---

    def settle(self) -> None:
        self.failures.clear()
        for step in range(200):
            self.connect()
            # Nobody can say what became of batches behind one that was refused for good and may be
            # stored: their time ends.
            self.pass_time(TIMEOUT_S if step == 150 else 0.02)
            for wire in self.wires:
                self.read(wire, 1_000)
                self.hear(wire, 1_000)
                self.time_out(wire)
            if self.kind.is_idle:
                break
        else:
            raise AssertionError("it never comes to an end")

    def check(self) -> None:
        stored = Counter(self.log.values())
        assert max(stored.values(), default=1) == 1, "stored twice"
        for serial in self.put_serials:
            (fate,) = self.fates[serial]
            assert fate is Fate.UNKNOWN or stored[serial] == (fate is Fate.STORED), (
                f"{serial} was reported as {fate}"
            )
        is_sure = not any(Fate.UNKNOWN in fates for fates in self.fates.values())
        if self.kind.is_ordered and is_sure:
            assert list(self.log.values()) == sorted(self.log.values()), "out of order"


class Event(Enum):
    PUT = auto()
    READ = auto()
    HEAR = auto()
    LOSE = auto()
    LEAVE = auto()
    CONNECT = auto()
    TIME_OUT = auto()
    BUSY = auto()
    STORED_UNSAID = auto()
    LOST_UNSAID = auto()
    AT_FAULT = auto()
    PASS = auto()


def happen(world: World, event: Event, count: int) -> None:
    wire = world.wires[-1 - count % min(len(world.wires), 3)]
    match event:
        case Event.PUT:
            world.put(count)
        case Event.READ:
            world.read(wire, count)
        case Event.HEAR:
            world.hear(wire, count)
        case Event.LOSE:
            world.lose()
        case Event.LEAVE:
            world.leave()
        case Event.CONNECT:
            world.connect()
        case Event.TIME_OUT:
            world.time_out(wire)
        case Event.BUSY:
            world.failures.append((Overloaded("busy"), False))
        case Event.STORED_UNSAID:
            world.failures.append((UNKNOWN, True))
        case Event.LOST_UNSAID:
            world.failures.append((UNKNOWN, False))
        case Event.AT_FAULT if not world.kind.is_blocking:  # Spark's task fails at once
            world.failures.append((FAULT, False))
        case Event.PASS:
            world.pass_time(0.02)
        case _:
            return


ALWAYS = [Event.PUT, Event.READ, Event.HEAR, Event.CONNECT, Event.PASS]
events = st.lists(
    st.tuples(st.sampled_from([*Event, *ALWAYS]), st.integers(1, 4)), min_size=15, max_size=40
)


@pytest.mark.parametrize(
    "kind",
    [
        PipeKind,
        StreamKind,
        PartitionedDueKind,
        BalancedDueKind,
        PartitionedPacketKind,
        BalancedPacketKind,
    ],
)
@given(history=events)
@settings(max_examples=examples(300), deadline=None)
def test_each_batch_is_stored_at_most_once_and_its_outcome_is_reported_truly(
    kind: type[PipeKind], history: list[tuple[Event, int]]
) -> None:
    world = World(kind())
    for event, count in history:
        happen(world, event, count)
    world.settle()
    world.check()


def test_no_window_is_exceeded_by_batches_that_leave_again_at_once() -> None:
    """A batch that may be stored is refused for good; 17 later batches leave again while their
    earlier attempts have no answers.
    """
    world = World(StreamKind())
    happen(world, Event.LOST_UNSAID, 1)
    for _ in range(18):
        happen(world, Event.PUT, 1)
    happen(world, Event.LEAVE, 1)
    for event in (Event.BUSY, Event.BUSY, Event.AT_FAULT):
        happen(world, event, 1)
    world.read(world.wires[-1], 3)
    happen(world, Event.CONNECT, 1)
    world.read(world.wires[-1], 3)
    world.settle()
    world.check()
