"""A real cluster that is traced: what its drivers commit, and what its coordination store is told,
goes to a tracer in that order. Brokers, files, sockets, elections and clients are those of
production, in one event loop, so nothing lies between a step and its observation.

A real broker group that is traced: its drivers and disks tell a tracer what they do, and its
coordination store what it is told.

Files, sockets, elections and clients are those of production, in one event loop, so nothing lies
between a step and its line.

A run of a real cluster with an ordered subject: its partitions are split, merged and moved under
load, and a master is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Container, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from ordersim.checks import CommittedLogs
from ordersim.tracer import Tracer
from qmq_coordination.coordination_store import Compare, Operation, Put, TxnResult
from qmq_coordination.embedded import EmbeddedStore
from qmq_ordering.hashing import logical_partition
from qmq_replication import wire
from qmq_replication.driver import Driver
from qmq_replication.ready import Message, Ready
from sim.replica_tracer import ReplicaTracer, Trace

import qmq
from qmq import OrderedMessage, OrderedProducer
from qmq.errors import DiskFull, QmqError
from qmq.proto.v1 import meta_pb2 as pb
from qmq.testing import TestCluster
from qmq.testing.machine import MortalDisk, ReplicaMachine
from qmq.wire.frame import Frame


class TracedStore(EmbeddedStore):
    """A coordination store that shows what it stores."""

    def __init__(
        self,
        monotonic_s: Callable[[], float],
        show: Callable[[str, bytes, Callable[[str], bool]], None],
    ) -> None:
        """`show` gets each key, its new value, and what says whether the store has a key."""
        super().__init__(monotonic_s=monotonic_s)
        self._show = show

    async def txn(
        self,
        compares: Sequence[Compare],
        success: Sequence[Operation],
        failure: Sequence[Operation] = (),
    ) -> TxnResult:
        result = await super().txn(compares, success, failure)  # it never waits
        for operation in success if result.succeeded else failure:
            if isinstance(operation, Put):
                self._show(operation.key, operation.value, self._has)
        return result

    def _has(self, key: str) -> bool:
        return bool(self._rows.select(key, is_prefix=False, revision=self._revision()))


class TracedDriver(Driver):
    """A driver that shows what its group commits, at the moment at which the first replica knows
    it.
    """

    def __init__(self, *args: Any, logs: CommittedLogs, tracer: Tracer, **options: Any) -> None:
        super().__init__(*args, **options)
        self._committed_logs, self._tracer = logs, tracer

    def _handle(self, ready: Ready) -> None:
        super()._handle(ready)
        if ready.commit is not None and not self.is_waiting:
            for entry in self._committed_logs.read(
                self.identity.group, self.host.store, ready.commit
            ):
                self._tracer.entry(entry)


def traced_cluster(tracer: Tracer, *, brokers: int, groups: int) -> TestCluster:
    """A cluster without a delay group, whose ordered subject `tracer` watches."""
    logs = CommittedLogs()

    def show(key: str, value: bytes, has: Callable[[str], bool]) -> None:
        tracer.put(key, value, at_ms=int(time.time() * 1000), has=has)

    return TestCluster(
        brokers=brokers,
        groups=groups,
        delay=False,
        make_driver=lambda *args, **options: TracedDriver(
            *args, logs=logs, tracer=tracer, **options
        ),
        make_store=lambda monotonic_s: TracedStore(monotonic_s, show),
    )


GROUP = "group-1"
REPLICAS = ("broker-1", "broker-2", "broker-3")
LINES_MAX = 20_000


class TracedDisk(MortalDisk):
    """A disk that shows the death of its process. While `is_full()`, it has no room for the
    replica's state.
    """

    def __init__(self, tracer: ReplicaTracer, is_full: Callable[[], bool]) -> None:
        super().__init__()
        self._tracer, self._is_full = tracer, is_full

    def rewrite(self, path: Path, data: bytes) -> None:
        if self._is_full():
            raise DiskFull("there is no room (a fault that the test asked for)")
        super().rewrite(path, data)

    def die(self) -> None:
        self._tracer.killed()
        super().die()


class TracingDriver(Driver):
    """A driver that shows each step at the moment at which it is done."""

    def __init__(self, *args: Any, tracers: dict[str, ReplicaTracer], **options: Any) -> None:
        super().__init__(*args, **options)
        self._tracer = tracers[self.identity.replica]
        self._tracer.starts(self.core)

    def _on_message(self, sender: str, frame: Frame) -> None:
        if not self.is_waiting:
            self._tracer.hears(self.core, sender, wire.unpack(frame.payload))
        super()._on_message(sender, frame)
        if not self.is_waiting:  # an answer that waits comes later
            self._tracer.heard()

    def _carry_out(self) -> None:
        self._tracer.begins_to_carry_out(self.core)
        super()._carry_out()
        if not self.is_waiting:
            self._tracer.shows(self.core)

    def _saved(self) -> bool:
        is_saved = super()._saved()
        if is_saved:
            self._tracer.saved(self.identity.promised)
        return is_saved

    def _handle(self, ready: Ready) -> None:
        if ready.reset is not None:
            self._tracer.ends_trace("LogReset")
        super()._handle(ready)
        if self.is_waiting:
            return
        if ready.commit is not None and self.core.leader is not None:
            self._tracer.commits(ready.commit)
        for request in ready.requests:
            self._tracer.asks(request)

    def _send(self, to: str, message: Message) -> None:
        self._tracer.sends(self.core, to, message)
        super()._send(to, message)

    def _written(self, index: int) -> None:
        if self.core.leader is not None:
            self._tracer.writes(self.core.leader, index)
        super()._written(index)


def traced_group(trace: Trace, full: Container[str]) -> TestCluster:
    """A cluster of one broker group, which tells `trace` what it does. The disks of the replicas in
    `full` have no room for their state.
    """
    tracers = {name: ReplicaTracer(trace, name) for name in trace.replicas}
    return TestCluster(
        brokers=len(trace.replicas),
        delay=False,
        make_disk=lambda name: TracedDisk(tracers[name], lambda: name in full),
        make_driver=lambda *args, **options: TracingDriver(*args, tracers=tracers, **options),
        make_store=lambda monotonic_s: TracedStore(
            monotonic_s, lambda key, value, _has: trace.put(key, value)
        ),
    )


def commits_of(cluster: TestCluster, names: Iterable[str]) -> set[tuple[int, int]]:
    """How far the replicas know their logs to be committed, and the ends of their logs. Equal
    replicas share one item.
    """
    cores = [
        each.node.driver.core
        for each in map(cluster.machine, names)
        if isinstance(each, ReplicaMachine) and each.node is not None
    ]
    return {(core.state.commit, core.state.history.last_index) for core in cores}


async def until_equal(cluster: TestCluster) -> None:
    """Wait until all replicas have the same entries and know them to be committed."""
    async with asyncio.timeout(60):
        while len(found := commits_of(cluster, REPLICAS)) > 1 or any(
            commit != last for commit, last in found
        ):
            await asyncio.sleep(0.005)


async def until_it_waits_for_room(cluster: TestCluster, name: str) -> None:
    """Wait until a replica has something to do for which its disk has no room."""
    machine = cluster.machine(name)
    assert isinstance(machine, ReplicaMachine)
    assert machine.node is not None
    driver = machine.node.driver
    async with asyncio.timeout(60):
        while driver.is_opening or not driver.is_waiting:
            await asyncio.sleep(0.005)


async def a_replicated_run(rounds: int = 5) -> Trace:
    """What a group does under load: its master is killed and starts again, the next one is cut off
    with an entry that nobody else has, and has no room on its disk when it hears its successor.
    """
    trace = Trace(GROUP, REPLICAS, REPLICAS, LINES_MAX)
    full: set[str] = set()
    async with traced_group(trace, full) as cluster:
        mq = cluster.client()

        async def send(what: str) -> None:
            for number in range(rounds):
                await mq.send("orders", f"{what} {number}".encode())

        await send("first")
        killed = cluster.master()
        sending = asyncio.create_task(send("while the master dies"))
        async with asyncio.timeout(60):
            while all(commit == last for commit, last in commits_of(cluster, [killed])):
                await asyncio.sleep(0)
        await cluster.kill(killed)
        await cluster.until_master(other_than=killed)
        await sending
        await cluster.restart(killed)
        await until_equal(cluster)
        old = await cluster.until_master()
        beside = cluster.client(at=old)
        await beside.send("orders", b"from its machine")
        async with cluster.partition(old):
            ticket = beside.producer("orders", delivery_timeout_s=1.5).send(b"nobody else has it")
            await cluster.until_master(other_than=old)
            await send("while one is cut off")
            with contextlib.suppress(QmqError):  # it may also be sent again and stored later
                await ticket
            full.add(old)
        await until_it_waits_for_room(cluster, old)
        full.clear()
        await send("last")
        await until_equal(cluster)
        trace.end = "the run is over"
    return trace


KEYS: Final = tuple(b"k%d" % number for number in range(6))
LOGICAL: Final = 8
ROUNDS: Final = 12
"""Messages of each key."""


class Application:
    """A producer and two consumers of one subject, which show the tracer what they send, are told
    and get.
    """

    def __init__(self, mq: qmq.Client, tracer: Tracer) -> None:
        self._mq = mq
        self._tracer = tracer
        self.handled: set[bytes] = set()
        self.is_whole = asyncio.Event()

    async def send(self, producer: OrderedProducer, number: int) -> None:
        """The next message of each key, acknowledged."""
        await asyncio.gather(*[self._send(producer, key, number) for key in KEYS])

    async def _send(self, producer: OrderedProducer, key: bytes, number: int) -> None:
        ticket = producer.send(b"%s/%d" % (key, number), key)
        place = producer.place_of_last(ticket)
        self._tracer.made(producer, key, number, logical_partition(key, LOGICAL))
        receipt = (await ticket).receipt(place)
        self._tracer.acked(key, number, receipt.partition)

    async def consume(self, name: str) -> None:
        """Handle messages until cancelled."""

        async def handle(message: OrderedMessage) -> None:
            self._tracer.given("g", name, message.partition, message.sequence)
            await asyncio.sleep(0)
            self._tracer.handled("g", name, message.partition, message.sequence)
            self.handled.add(message.body)
            if len(self.handled) == len(KEYS) * ROUNDS:
                self.is_whole.set()

        async with self._mq.ordered_consumer("s", "g", name=name) as consumer:
            await consumer.run(handle)


async def change(mq: qmq.Client, number: int) -> None:
    """A split, a merge, a move to the other broker group, and another split."""
    described = await mq.metadata.describe_route("s")
    parts = list(described.route.partitions)
    first, last = parts[0], parts[-1]
    if number == 1:
        await mq.metadata.change_route(
            "s", merge=pb.MergeOperation(partitions=[first.number, parts[1].number])
        )
    elif number == 2:
        other = "group-2" if last.broker_group == "group-1" else "group-1"
        await mq.metadata.change_route(
            "s", move=pb.MoveOperation(partition=last.number, broker_group=other)
        )
    else:
        middle = (first.lps.first + first.lps.end) // 2
        await mq.metadata.change_route(
            "s", split=pb.SplitOperation(partition=first.number, at=[middle])
        )


async def an_ordered_run() -> Tracer:
    """What is seen of four changes and an election, under load, until everything is handled."""
    tracer = Tracer("s", "g", 10_000, lambda body: int(body.rpartition(b"/")[2]))
    async with traced_cluster(tracer, brokers=3, groups=2) as cluster, cluster.client() as mq:
        config = qmq.SubjectConfig("s", order=qmq.Order.STRICT, logical_partitions=LOGICAL)
        await mq.metadata.create_subject(config, partitions=2)
        application = Application(mq, tracer)
        consumers = [asyncio.create_task(application.consume(name)) for name in ("r1", "r2")]
        async with mq.ordered_producer("s") as producer:
            for number in range(1, ROUNDS + 1):
                beside = [application.send(producer, number)]
                if number % 3 == 0:
                    beside.append(change(mq, number // 3))
                if number == ROUNDS // 2 + 1:
                    beside.append(cluster.kill(cluster.master("group-1")))
                await asyncio.gather(*beside)
        await application.is_whole.wait()
        for task in consumers:
            task.cancel()
        await asyncio.gather(*consumers, return_exceptions=True)
    return tracer
