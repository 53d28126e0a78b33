"""Streams and their partitioner against a simple model of brokers: for each key, the stored order
is always the order of sending.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from qmq_ordering.routes import LpRange, PhysicalPartition, Route
from support.forms import examples

from qmq.client.producing.ordered.stream import WINDOW, OrderedBatch, Stream, StreamPartitioner
from qmq.client.producing.receipts import BatchReceipt, SplitTicket, Ticket
from qmq.delivery.retries import PRODUCER
from qmq.delivery.window import ASK_S
from qmq.errors import (
    DeadlineExceeded,
    NotConnected,
    NotMaster,
    OrderMismatch,
    Outcome,
    OutOfSequence,
    Overloaded,
    ProducerFenced,
    QmqError,
    RouteChanged,
)
from qmq.model import begins_session, session_of
from qmq.wire.batch_columns import Columns
from qmq.wire.frame_payloads import Produced

LPS = 8
TIMEOUT_S = 60.0


@dataclass
class ModelPartition:
    """The content of a partition's log, and the rule by which it accepts batches."""

    part: PhysicalPartition
    log: list[tuple[int, int, OrderedBatch]] = field(default_factory=list)
    sequences: dict[int, int] = field(default_factory=dict)
    is_sealed: bool = False
    is_silent: bool = False
    failures: deque[QmqError] = field(default_factory=deque)

    def take(self, producer_id: int, number: int, batch: OrderedBatch) -> Produced | QmqError:
        for at, (each, its_number, _) in enumerate(self.log):
            if (each, its_number) == (producer_id, number):
                return Produced(at, 1)
        if self.is_sealed:
            return RouteChanged("sealed")
        if self.failures:
            return self.failures.popleft()
        following = self.sequences.get(producer_id, 0)
        if session_of(number) < session_of(following):
            return ProducerFenced("given up")
        if number != following and not (begins_session(number) and number > following):
            return OutOfSequence("a batch is missing")
        lps = batch.columns.logical_partitions or ()
        assert batch.is_bent or all(self.part.range.first <= lp < self.part.range.end for lp in lps)
        self.log.append((producer_id, number, batch))
        self.sequences[producer_id] = number + 1
        return Produced(len(self.log) - 1, 1)


@dataclass(eq=False, repr=False)
class Wire:
    """A connection: data that was sent and not yet read, and answers that have not arrived."""

    sent: deque[tuple[OrderedBatch, int, int, int]] = field(default_factory=deque)
    answers: deque[tuple[OrderedBatch, int, Produced | QmqError]] = field(default_factory=deque)
    owed: list[tuple[OrderedBatch, int]] = field(default_factory=list)
    is_cut: bool = False


class World:
    """Partitions, connections, a partitioner of streams, and an account of every message."""

    def __init__(self, unknown: str = "resend", *, bends: bool = False) -> None:
        self.now = 0.0
        self.bends = bends
        ids = itertools.count(1)
        self.partitions: dict[int, ModelPartition] = {}
        self.wires: dict[int, list[Wire]] = defaultdict(list)
        rules = PRODUCER._replace(backoff_s=lambda *_: 0.01)
        self.partitioner = StreamPartitioner(
            lambda part: Stream(part, lambda: next(ids), unknown=unknown, rules=rules)
        )
        self.route = self._route(
            1,
            3,
            [PhysicalPartition(1, LpRange(0, 4), "g1"), PhysicalPartition(2, LpRange(4, 8), "g2")],
        )
        self.fenced: set[int] = set()
        self.fates: dict[tuple[int, int], list[object]] = defaultdict(list)
        self.serials = itertools.count()
        self.claims: list[SplitTicket] = []
        self.sealing: tuple[Route, set[int]] | None = None
        self.may_never_know = False
        self.hear()

    def _route(self, version: int, next_number: int, parts: list[PhysicalPartition]) -> Route:
        for part in parts:
            self.partitions.setdefault(part.number, ModelPartition(part))
        return Route(version, LPS, next_number, tuple(parts))

    # --- the producer ---

    def send(self, *keys: int) -> SplitTicket:
        bodies = [b"%d:%d" % (key, next(self.serials)) for key in keys]
        claim = SplitTicket(Ticket(), len(keys), len(keys))
        columns = Columns(bodies, keys=[b"%d" % key for key in keys], logical_partitions=list(keys))
        self.claims.append(claim)
        self.partitioner.put_cut(
            [
                OrderedBatch(
                    columns, 1, claim, range(len(keys)), size=len(keys), until=self.now + TIMEOUT_S
                )
            ]
        )
        self.pump()
        return claim

    def pump(self) -> None:
        for stream in self.partitioner.settle():
            self.note(stream)
        if self.bends:
            self.partitioner.bend(self.now)
        for number, stream in list(self.partitioner.partitions.items()):
            while (batch := stream.next(self.now)) is not None:
                wire = self.wires[number][-1]
                wire.sent.append((batch, batch.attempts, batch.producer_id, batch.number))
                wire.owed.append((batch, batch.attempts))
            assert sum(each.unanswered > 0 for each in stream.flight) <= WINDOW
            self.note(stream)

    def note(self, stream: Stream) -> None:
        for batch, result in stream.take_decided():
            for body in batch.columns.bodies:
                self.fates[message(body)].append(result)
            if isinstance(result, Produced):
                number = stream.partition.number
                assert (
                    self.partitions[number].log[result.base_sequence][2].columns.bodies
                    == batch.columns.bodies
                )
                batch.claim.stored(
                    batch.places,
                    BatchReceipt("s", number, result.base_sequence, batch.count, 1, 1, 1, "g"),
                )
            else:
                batch.claim.failed(result)

    def connect(self, number: int) -> None:
        self.wires[number].append(Wire())
        self.partitioner.partitions[number].connected()

    def stream_of(self, number: int) -> Stream | None:
        return self.partitioner.partitions.get(number)

    # --- the network ---

    def read(self, number: int, wire: Wire) -> None:
        """The broker takes one batch from a connection."""
        batch, attempt, producer_id, its_number = wire.sent.popleft()
        answer = self.partitions[number].take(producer_id, its_number, batch)
        wire.answers.append((batch, attempt, answer))

    def hear_answer(self, number: int, wire: Wire) -> None:
        batch, attempt, answer = wire.answers.popleft()
        if (batch, attempt) in wire.owed:
            wire.owed.remove((batch, attempt))
            self.answer(number, batch, attempt, answer)

    def answer(
        self, number: int, batch: OrderedBatch, attempt: int, answer: Produced | QmqError
    ) -> None:
        stream = self.stream_of(number)
        if stream is not None:
            if isinstance(answer, QmqError):
                stream.refused(batch, attempt, answer, self.now)
            else:
                stream.stored(batch, answer, self.now)
            self.note(stream)
        else:
            assert batch.is_gone

    def lose(self, number: int, wire: Wire) -> None:
        """The connection breaks; what was sent may still be read."""
        wire.is_cut = True
        stream = self.stream_of(number)
        owed, wire.owed = wire.owed, []
        for batch, attempt in owed:
            self.answer(number, batch, attempt, NotConnected("cut", outcome=Outcome.UNKNOWN))
        if stream is not None and wire is self.wires[number][-1]:
            stream.disconnected(NotConnected("cut"))

    def time_out(self, number: int, wire: Wire) -> None:
        """No answer in time."""
        owed, wire.owed = wire.owed, []
        for batch, attempt in owed:
            self.answer(
                number, batch, attempt, DeadlineExceeded("no answer", outcome=Outcome.UNKNOWN)
            )

    def leave_wire(self, number: int) -> None:
        """The client knows another master: it leaves the old connection, whose answers may still
        arrive.
        """
        stream = self.stream_of(number)
        if stream is not None and stream.is_connected:
            stream.disconnected(NotMaster("another one is"))

    # --- routes ---

    def begin_change(self, sources: list[int], cuts: list[int]) -> None:
        """Prepare: the next route, not known to anybody yet."""
        parts = [part for part in self.route.partitions if part.number not in sources]
        first = min(self.partitions[number].part.range.first for number in sources)
        end = max(self.partitions[number].part.range.end for number in sources)
        marks = [first, *sorted(cut for cut in cuts if first < cut < end), end]
        number = self.route.next_number
        for a, b in itertools.pairwise(marks):
            parts.append(PhysicalPartition(number, LpRange(a, b), f"g{number}"))
            number += 1
        parts.sort(key=lambda part: part.range)
        self.sealing = (self._route(self.route.version + 1, number, parts), set(sources))

    def seal(self, number: int) -> None:
        self.partitions[number].is_sealed = True

    def fence(self, number: int, taken: int) -> None:
        """Fence the partition: it stores `taken` more of the batches on their way, without answers,
        and then nothing more.
        """
        partition = self.partitions[number]
        for wire in self.wires[number]:
            while wire.sent:
                batch, _, producer_id, its_number = wire.sent.popleft()
                if taken > 0:
                    partition.take(producer_id, its_number, batch)
                    taken -= 1
            wire.answers.clear()
        partition.is_sealed = partition.is_silent = True
        self.fenced.add(number)

    def publish(self) -> None:
        assert self.sealing is not None
        route, sources = self.sealing
        assert all(self.partitions[number].is_sealed for number in sources)
        self.route, self.sealing = route, None

    def hear(self) -> None:
        """The producer learns the newest route."""
        self.partitioner.learn(
            self.route,
            {number for number in self.fenced if self.partitions[number].is_silent},
            self.now,
        )
        self.pump()

    def tick(self, seconds: float) -> None:
        self.now += seconds
        for stream in list(self.partitioner.partitions.values()):
            stream.tick(self.now)
            self.note(stream)
        self.pump()

    # --- the end ---

    @property
    def is_anything_sent(self) -> bool:
        return any(wire.sent for each in self.wires.values() for wire in each)

    def settle_all(self) -> None:
        """Repair everything; all batches must get an answer."""
        for partition in self.partitions.values():
            partition.is_silent = False
            partition.failures.clear()
        if self.sealing is not None:
            for number in self.sealing[1]:
                self.seal(number)
            self.publish()
        self.hear()
        for step in range(400):
            if step == 300 and self.may_never_know:
                # A broker that forgot the producer, or refused for good what it may have, cannot
                # say what became of the batches behind.
                self.tick(TIMEOUT_S)
            for number, stream in list(self.partitioner.partitions.items()):
                if not stream.is_connected:
                    self.connect(number)
            self.tick(0.02)
            for number in list(self.wires):
                for wire in self.wires[number]:
                    while wire.sent:
                        self.read(number, wire)
                    while wire.answers:
                        self.hear_answer(number, wire)
                    self.time_out(number, wire)
            self.pump()
            if (
                all(stream.is_idle for stream in self.partitioner.partitions.values())
                and not self.is_anything_sent
            ):
                break
        else:
            raise AssertionError("it never comes to an end")

    def check(self, *, is_fenced: bool) -> None:
        """Order, no message twice, every ticket decided once and truthfully."""
        stored: dict[int, list[tuple[int, int]]] = defaultdict(list)
        ids: dict[tuple[int, int], set[bytes]] = defaultdict(set)
        for number in sorted(self.partitions):
            for producer_id, its_number, batch in self.partitions[number].log:
                for place, body in enumerate(batch.columns.bodies):
                    key, serial = message(body)
                    stored[key].append((number, serial))
                    own = (
                        producer_id.to_bytes(8, "big")
                        + its_number.to_bytes(6, "big")
                        + place.to_bytes(2, "big")
                    )
                    ids[key, serial].add(
                        batch.columns.message_ids[place] if batch.columns.message_ids else own
                    )
        counts = Counter((key, serial) for key, found in stored.items() for _, serial in found)
        for each, fates in self.fates.items():
            assert len(fates) == 1, "decided once"
            (fate,) = fates
            if isinstance(fate, Produced):
                assert counts[each] >= 1
            else:
                assert isinstance(fate, QmqError)
                assert fate.outcome is not Outcome.NOT_STORED or not counts[each], (
                    "the producer reported that it is not stored"
                )
            assert counts[each] <= 1 or (is_fenced and len(ids[each]) == 1)
        for key, found in stored.items() if not self.bends else ():
            serials = [
                serial
                for _, serial in found
                if not isinstance(self.fates[key, serial][0], QmqError)
            ]
            firsts = list(dict.fromkeys(serials))
            assert firsts == sorted(firsts), f"key {key} is out of order: {found}"
            for _, group in itertools.groupby(found, key=lambda each: each[0]):
                part = [serial for _, serial in group]
                assert part == sorted(set(part)), (
                    f"key {key} is out of order in one partition: {found}"
                )
        for claim in self.claims:
            assert claim.ticket.is_done
            assert claim.pieces == 0


def message(body: bytes) -> tuple[int, int]:
    key, serial = body.split(b":")
    return int(key), int(serial)


class Machine(RuleBasedStateMachine):
    """Random lives of a producer, with all events that may happen."""

    @initialize(
        unknown=st.sampled_from(["resend", "fail"]),
        may_expire=st.booleans(),
        bends=st.integers(0, 3),
    )
    def begin(self, unknown: str, may_expire: bool, bends: int) -> None:
        self.world = World(unknown, bends=bends == 3)
        self.may_expire = may_expire

    @rule(keys=st.lists(st.integers(0, LPS - 1), min_size=1, max_size=4), times=st.integers(1, 6))
    def send(self, keys: list[int], times: int) -> None:
        for _ in range(times):
            self.world.send(*keys)

    @rule(data=st.data())
    def connect(self, data: st.DataObject) -> None:
        missing = [
            number
            for number, stream in self.world.partitioner.partitions.items()
            if not stream.is_connected
        ]
        if missing:
            self.world.connect(data.draw(st.sampled_from(missing)))
            self.world.pump()

    def _wire(self, data: st.DataObject, kind: str) -> tuple[int, Wire] | None:
        found = [
            (number, wire)
            for number, wires in self.world.wires.items()
            for wire in wires
            if getattr(wire, kind) and not self.world.partitions[number].is_silent
        ]
        return found[data.draw(st.integers(0, len(found) - 1))] if found else None

    @rule(data=st.data(), count=st.integers(1, 40))
    def read(self, data: st.DataObject, count: int) -> None:
        if (found := self._wire(data, "sent")) is not None:
            for _ in range(min(count, len(found[1].sent))):
                self.world.read(*found)

    @rule(data=st.data(), count=st.integers(1, 40))
    def hear_answers(self, data: st.DataObject, count: int) -> None:
        if (found := self._wire(data, "answers")) is not None:
            for _ in range(min(count, len(found[1].answers))):
                self.world.hear_answer(*found)
            self.world.pump()

    @rule(data=st.data(), is_lost=st.booleans())
    def lose_connection(self, data: st.DataObject, is_lost: bool) -> None:
        connected = [
            number
            for number, stream in self.world.partitioner.partitions.items()
            if stream.is_connected
        ]
        if connected:
            number = data.draw(st.sampled_from(connected))
            if is_lost:
                self.world.lose(number, self.world.wires[number][-1])
            else:
                self.world.leave_wire(number)
            self.world.pump()

    @rule(data=st.data())
    def time_out(self, data: st.DataObject) -> None:
        found = [
            (number, wire)
            for number, wires in self.world.wires.items()
            for wire in wires
            if wire.owed
        ]
        if found:
            self.world.time_out(*found[data.draw(st.integers(0, len(found) - 1))])
            self.world.pump()

    @rule(
        data=st.data(),
        failure=st.sampled_from(
            [Overloaded("busy"), NotMaster("staged", outcome=Outcome.UNKNOWN), OrderMismatch("bad")]
        ),
    )
    def refuse_one(self, data: st.DataObject, failure: QmqError) -> None:
        number = data.draw(st.sampled_from(sorted(self.world.partitions)))
        self.world.partitions[number].failures.append(failure)
        self.world.may_never_know |= isinstance(failure, OrderMismatch)

    @rule(data=st.data())
    def forget_producer(self, data: st.DataObject) -> None:
        for number, stream in self.world.partitioner.partitions.items():
            if (
                stream.is_idle
                and not any(wire.sent for wire in self.world.wires[number])
                and data.draw(st.booleans())
            ):
                self.world.partitions[number].sequences.clear()
                self.world.may_never_know = True

    @precondition(lambda self: self.world.sealing is None and len(self.world.partitions) < 12)
    @rule(data=st.data())
    def change(self, data: st.DataObject) -> None:
        parts = self.world.route.partitions
        at = data.draw(st.integers(0, len(parts) - 1))
        sources = [part.number for part in parts[at : at + data.draw(st.integers(1, 2))]]
        self.world.begin_change(
            sources, data.draw(st.lists(st.integers(1, LPS - 1), max_size=2, unique=True))
        )

    @precondition(lambda self: self.world.sealing is not None)
    @rule(data=st.data(), is_fenced=st.integers(0, 3), taken=st.integers(0, 5))
    def close(self, data: st.DataObject, is_fenced: int, taken: int) -> None:
        assert self.world.sealing is not None
        open_ = [
            number
            for number in sorted(self.world.sealing[1])
            if not self.world.partitions[number].is_sealed
        ]
        if open_:
            number = data.draw(st.sampled_from(open_))
            if is_fenced:
                self.world.seal(number)
            else:
                self.world.fence(number, taken)
        else:
            self.world.publish()

    @rule()
    def hear_route(self) -> None:
        self.world.hear()

    @rule(data=st.data())
    def come_back(self, data: st.DataObject) -> None:
        for number in sorted(self.world.fenced):
            self.world.partitions[number].is_silent &= data.draw(st.booleans())

    @rule(seconds=st.sampled_from([0.005, 0.02, ASK_S, 10.0]))
    def pass_time(self, seconds: float) -> None:
        self.world.tick(seconds if self.may_expire or seconds < 10 else 0.5)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.settle_all()
            self.world.check(is_fenced=bool(self.world.fenced))


TestStreams = Machine.TestCase
TestStreams.settings = settings(
    max_examples=examples(200),
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


# --- single steps ---------------------------------------------------------------------------------


def in_flight(world: World, number: int) -> list[tuple[OrderedBatch, int]]:
    """Batches that were sent over the connection in use and are not answered."""
    return list(world.wires[number][-1].owed)


STORED = Produced(0, 1)


def answer(
    world: World, number: int, sent: tuple[OrderedBatch, int], result: Produced | QmqError
) -> None:
    world.wires[number][-1].owed.remove(sent)
    if isinstance(result, Produced):
        result = world.partitions[number].take(sent[0].producer_id, sent[0].number, sent[0])
    world.answer(number, *sent, result)
    world.pump()


def test_the_first_certain_refusal_of_a_left_partition_settles_everything_behind_it() -> None:
    world = World()
    world.connect(1)
    for _ in range(3):
        world.send(0)
    seven, eight, _ = in_flight(world, 1)
    world.begin_change([1], [])
    answer(world, 1, seven, STORED)
    world.seal(1)
    world.publish()
    world.hear()
    assert 1 in world.partitioner.partitions, "the second may be stored"
    answer(world, 1, eight, DeadlineExceeded("lost", outcome=Outcome.UNKNOWN))
    world.tick(0.02)
    question = in_flight(world, 1)[-1]
    assert question[0] is eight[0], "it is asked about where it may be"
    answer(world, 1, question, RouteChanged("sealed"))
    assert 1 not in world.partitioner.partitions
    assert [batch.columns.bodies for batch in world.partitioner.partitions[3].waiting] == [
        [b"0:1"],
        [b"0:2"],
    ]


def test_a_late_batch_says_not_stored_only_if_no_try_may_have_stored_it() -> None:
    world = World()
    world.connect(1)
    lost, behind, sure = world.send(0), world.send(0), world.send(4)
    for sent in in_flight(world, 1):
        world.partitions[1].take(sent[0].producer_id, sent[0].number, sent[0])
    world.lose(1, world.wires[1][-1])
    world.connect(1)
    world.pump()
    answer(
        world,
        1,
        in_flight(world, 1)[0],
        RouteChanged("no route has the partition any more", outcome=Outcome.UNKNOWN),
    )
    world.tick(TIMEOUT_S)
    for each in (lost, behind):
        failure = each.ticket.decided
        assert isinstance(failure, DeadlineExceeded)
        assert failure.outcome is Outcome.UNKNOWN
        assert failure.message.startswith("it is not known whether the messages are stored")
    failure = sure.ticket.decided
    assert isinstance(failure, DeadlineExceeded)
    assert failure.outcome is Outcome.NOT_STORED
    assert failure.message.startswith("not stored")


@pytest.mark.parametrize("unknown", ["resend", "fail"])
def test_a_fenced_partition_is_asked_for_a_second_and_no_longer(unknown: str) -> None:
    world = World(unknown)
    world.connect(1)
    stored, lost = world.send(0), world.send(0)
    world.begin_change([1], [])
    world.fence(1, taken=1)
    world.publish()
    world.hear()
    behind = world.send(0)
    world.tick(ASK_S - 0.01)
    assert 1 in world.partitioner.partitions
    world.tick(0.02)
    assert 1 not in world.partitioner.partitions
    assert stored.ticket.is_done == lost.ticket.is_done == (unknown == "fail")
    waiting = world.partitioner.partitions[3].waiting
    assert [bool(batch.columns.message_ids) for batch in waiting] == (
        [True, True, False] if unknown == "resend" else [False]
    )
    world.settle_all()
    world.check(is_fenced=True)
    assert behind.ticket.is_done
