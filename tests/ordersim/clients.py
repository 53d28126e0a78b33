"""Producers, consumers and operators in the simulator: the product's clients, over the simulated
network.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from qmq_ordering.hashing import logical_partition

from ordersim.loop import Process
from qmq.client.connection.pool import ConnectionPool
from qmq.client.consuming.ordered.consumer import OrderedConsumer, OrderedConsumerOptions
from qmq.client.consuming.ordered.lane import FailurePolicy
from qmq.client.consuming.ordered.message import OrderedMessage
from qmq.client.metadata.cache import MetadataCache, Pushed
from qmq.client.metadata.service import MetadataClient
from qmq.client.producing.ordered.producer import OrderedProducer
from qmq.client.producing.producer import ProducerOptions
from qmq.client.producing.receipts import Ticket
from qmq.errors import ClientClosed, Outcome, QmqError, Unavailable

if TYPE_CHECKING:
    from ordersim.run import Simulation

MESSAGES_PER_BATCH = 4
LEASE_MS = 3_000


class HandlerFailed(Exception):
    """The error that a handler raises."""


class SimMetadata(MetadataClient):
    """Metaservers over the simulated network."""

    def __init__(self, mine: Process) -> None:
        names = [f"{name}:1" for name in mine.simulation.metaserver_names]
        mine.random.shuffle(names)
        self._mine = mine
        self._all = names
        self._address = names[0]

    async def _call_once(self, method: str, request: Any, timeout_s: float) -> Any:
        address = self._address
        try:
            return await self._mine.simulation.network.call(
                self._mine, address, method, request, timeout_s
            )
        except Unavailable:
            if self._address == address:
                self.use_next_server()
            raise

    def use_next_server(self) -> None:
        """See MetadataClient."""
        self._address = self._all[(self._all.index(self._address) + 1) % len(self._all)]

    async def watch(self) -> AsyncIterator[Pushed]:
        """A hint now and then, as when a stream was resumed."""
        while True:
            await asyncio.sleep(self._mine.random.choice((0.5, 2, 20)))
            yield Pushed(is_gap=True)


class ClientProcess(Process):
    """A process with a client in it."""

    def __init__(self, simulation: Simulation, name: str) -> None:
        super().__init__(simulation, name)
        self.loop.enter(self._build)

    def _build(self) -> None:
        self.metadata = SimMetadata(self)
        self.links = ConnectionPool(
            MetadataCache(self.metadata.routes, self.metadata.watch, self.metadata.use_next_server),
            "simulated",
        )
        self.loop.create_task(self._run())

    async def _run(self) -> None:
        raise NotImplementedError


class ProducerProcess(ClientProcess):
    """One life of a producer. Its keys are its own: another life has others."""

    def __init__(self, simulation: Simulation, name: str, life: int) -> None:
        self._keys = [
            b"%s.%d-%d" % (name.encode(), life, number) for number in range(simulation.plan.keys)
        ]
        self.undecided = 0
        self.is_stopped = False
        self._producer: OrderedProducer | None = None
        super().__init__(simulation, name)

    async def _run(self) -> None:
        plan = self.simulation.plan
        producer = OrderedProducer(
            self.links,
            self.simulation.new_producer_id,
            self.simulation.subject,
            ProducerOptions(batch_messages=MESSAGES_PER_BATCH, delivery_timeout_s=plan.delivery_s),
            unknown=plan.unknown,
        )
        self._producer = producer
        while True:
            await asyncio.sleep(self.random.expovariate(1000 / plan.send_every_ms))
            pause_s = self.random.choice((0.0, 0.0, 0.001))
            for _ in range(0 if self.is_stopped else self.random.choice((1, 1, 2, 6, 14))):
                self._send(producer)
                if pause_s:
                    await asyncio.sleep(pause_s)

    def send_now(self, count: int) -> None:
        """Send more messages immediately."""
        self.loop.call_soon(self._burst, count)

    def _burst(self, count: int) -> None:
        for _ in range(0 if self.is_stopped or self._producer is None else count):
            self._send(self._producer)

    def _send(self, producer: OrderedProducer) -> None:
        key = self.random.choice(self._keys)
        checks = self.simulation.checks
        number = checks.sent[key] = checks.sent.get(key, 0) + 1
        try:
            ticket = producer.send(b"%s/%d" % (key, number), key)
            place = producer.place_of_last(ticket)
        except QmqError as failure:
            self.tell(f"cannot send {number} of {key!r}: {failure}")
            checks.refused[key, number] = None
            return
        lp = logical_partition(key, self.simulation.plan.logical_partitions)
        self.simulation.tracer.made(self, key, number, lp)
        self.undecided += 1
        self.loop.create_task(self._await(ticket, place, key, number))

    async def _await(self, ticket: Ticket, place: int, key: bytes, number: int) -> None:
        checks = self.simulation.checks
        try:
            receipt = (await ticket).receipt(place)
        except QmqError as failure:
            self.tell(f"{number} of {key!r} failed ({failure.outcome.name}): {failure}")
            (checks.refused if failure.outcome is Outcome.NOT_STORED else checks.unknown)[
                key, number
            ] = None
            self.simulation.tracer.stop("a failed message")
        else:
            self.simulation.tracer.acked(key, number, receipt.partition)
            checks.acknowledged(key, number, receipt.partition, receipt.sequence)
        self.undecided -= 1


class ConsumerProcess(ClientProcess):
    """One life of a consumer."""

    def __init__(self, simulation: Simulation, name: str, group: str, gate: str) -> None:
        self.group, self._gate = group, gate
        self.consumer: OrderedConsumer | None = None
        self._leaves = False
        super().__init__(simulation, name)

    async def _run(self) -> None:
        simulation, plan = self.simulation, self.simulation.plan
        self.consumer = consumer = OrderedConsumer(
            self.links,
            self.metadata.sync_member,
            simulation.subject,
            self.group,
            OrderedConsumerOptions(
                name=self.name,
                start=simulation.start_of(self.group),
                gate=self._gate,
                policy=FailurePolicy(plan.on_failure, 2, (300, 1_000)),
                prefetch=plan.prefetch,
                lease_ms=LEASE_MS,
            ),
        )
        try:
            if plan.concurrency > 1:
                await consumer.run(self._handle, concurrency=plan.concurrency)
            async for message in consumer:
                await self._handle_or_fail(message)
        except QmqError as failure:
            if self._leaves and isinstance(failure, ClientClosed):
                return
            self.tell(f"ends: {failure}")
            self.kill()
            simulation.nemesis.start_later(self.name)

    async def _handle_or_fail(self, message: OrderedMessage) -> None:
        try:
            await self._handle(message)
        except HandlerFailed as failure:
            message.fail(error=failure)

    async def _handle(self, message: OrderedMessage) -> None:
        simulation, random = self.simulation, self.random
        simulation.tracer.given(self.group, self.name, message.partition, message.sequence)
        simulation.checks.handed(self.group, self.name, message)
        if simulation.story is not None:
            self.tell(
                f"{self.group} handles {message.body!r} of "
                f"{message.partition}@{message.sequence} v{message.route_version}"
            )
        slow = 1 if simulation.is_calm else simulation.plan.handler_ms
        await asyncio.sleep(random.randint(0, slow if random.random() < 0.9 else slow * 10) / 1000)
        where = (self.group, message.partition, message.sequence)
        if not simulation.is_calm and random.random() < simulation.plan.handler_fails:
            simulation.checks.failed.add(where)
            raise HandlerFailed
        simulation.checks.finished.add(where)
        simulation.tracer.handled(self.group, self.name, message.partition, message.sequence)

    def leave(self) -> None:
        """Go in order."""
        if self.consumer is not None and self.is_up:
            self.tell("leaves")
            self._leaves = True
            self.loop.create_task(self._leave(self.consumer))

    async def _leave(self, consumer: OrderedConsumer) -> None:
        await consumer.close()
        self.kill()


class Operator(Process):
    """Asks metaservers to change the route, to give parked keys back."""

    async def ask(self, to: str, method: str, request: Any, timeout_s: float = 6.0) -> Any:
        """The answer; None if the request was refused or its answer was lost."""
        try:
            return await self.simulation.network.call(self, f"{to}:1", method, request, timeout_s)
        except QmqError as failure:
            self.tell(f"{method} of {to}: {type(failure).__name__}: {failure}"[:160])
            return None
