"""Load for fault tests: producers and consumers on the real client, which record everything in a
history (tests/history).

Values are unique integers; a message's body is its value. Producers send batches one after another;
consumers pull and acknowledge. The error of a send decides its line: not stored is `fail`, unknown
is `info`, never the other way round.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from pathlib import Path

from history.checkers import Report, check_all
from history.events import Ack, Note, Poll, Record, Recorder, Send, load
from system.group import Group

import qmq
from qmq.errors import Outcome, QmqError, StaleDelivery

BATCH = 20
POLL = 500
PAUSE_S = 0.002
ALONE = "alone"


class Workload:
    """Producers and consumers of one subject, until `stop`. A group `alone` has one consumer, whose
    polls must never go back or leave messages out; what several consumers of a group get says
    nothing about that.
    """

    def __init__(
        self,
        server: str,
        subject: str,
        path: Path,
        *,
        producers: int = 2,
        consumers: int = 2,
        group: str = "g",
        batch: int = BATCH,
        tls: qmq.Tls | None = None,
    ) -> None:
        self.server = server
        self.subject = subject
        self.path = path
        self.group = group
        self.acked = 0
        self.ok_ns: list[int] = []
        """When each send was acknowledged, monotonic."""
        self.recorder = Recorder(path)
        self._values = itertools.count(1)
        self._counts = (producers, consumers)
        self._batch = batch
        self._tls = tls
        self._clients: list[qmq.Client] = []
        self._producing: list[asyncio.Task[None]] = []
        self._consuming: list[asyncio.Task[None]] = []
        self._acked_values: set[int] = set()
        self._got: dict[str, set[int]] = {group: set(), ALONE: set()}
        """The values that each group got."""
        self._stops = asyncio.Event()

    async def start(self) -> None:
        """Begin. One client for each producer and consumer, as separate processes would have."""
        producers, consumers = self._counts
        for number in range(consumers):
            self._consuming.append(
                asyncio.create_task(self._consume(f"c{number}", self.group, self._client()))
            )
        self._consuming.append(asyncio.create_task(self._consume("lone", ALONE, self._client())))
        for number in range(producers):
            self._producing.append(asyncio.create_task(self._produce(f"p{number}", self._client())))

    def _client(self) -> qmq.Client:
        client = qmq.connect(self.server, tls=self._tls)
        self._clients.append(client)
        return client

    def note(self, text: str) -> None:
        """Write a fault into the history."""
        self.recorder.record(Note(process="nemesis", type="info", f="fault", text=text))

    # --- producing --------------------------------------------------------------------------------

    async def _produce(self, name: str, client: qmq.Client) -> None:
        async with client.producer(self.subject, delivery_timeout_s=60.0) as producer:
            while not self._stops.is_set():
                values = tuple(next(self._values) for _ in range(self._batch))
                await self.send(name, producer, values)
                await asyncio.sleep(PAUSE_S)

    async def send(self, name: str, producer: qmq.Producer, values: tuple[int, ...]) -> None:
        invoked = self.recorder.record(
            Send(process=name, type="invoke", subject=self.subject, values=values)
        )
        try:
            receipts = await producer.send_many([str(value).encode() for value in values])
        except QmqError as failure:
            kind = "info" if failure.outcome is Outcome.UNKNOWN else "fail"
            self.recorder.record(invoked.ended(kind))
            return
        batch = receipts.batches[0]
        assert len(receipts.batches) == 1
        queue = f"{self.subject}/0@{batch.broker_group}"
        self.recorder.record(invoked.ended("ok", queue=queue, sequence=batch.base_sequence))
        self.acked += len(values)
        self.ok_ns.append(time.monotonic_ns())
        self._acked_values.update(values)

    # --- consuming --------------------------------------------------------------------------------

    async def _consume(self, name: str, group: str, client: qmq.Client) -> None:
        async with client.consumer(
            self.subject, group, name=name, ack="explicit", lease_ms=5_000
        ) as consumer:
            while True:
                with suppress(QmqError):
                    await self.poll(name, group, consumer)

    async def poll(self, name: str, group: str, consumer: qmq.Consumer) -> None:
        invoked = self.recorder.record(Poll(process=name, type="invoke", group=group))
        found = await consumer.pull(max(POLL, 10 * self._batch), timedelta(seconds=1))
        by_queue: dict[str, list[Record]] = {}
        for message in found:
            queue = f"{self.subject}/0@{message.broker_group}"
            by_queue.setdefault(queue, []).append(
                Record(message.sequence, int(message.body), message.attempt)
            )
            self._got[group].add(int(message.body))
        if not by_queue:
            self.recorder.record(invoked.ended("ok"))
            return
        for number, (queue, records) in enumerate(by_queue.items()):
            if number:
                invoked = self.recorder.record(Poll(process=name, type="invoke", group=group))
            self.recorder.record(invoked.ended("ok", queue=queue, records=tuple(records)))
        await self._ack(name, group, found, by_queue)

    async def _ack(
        self, name: str, group: str, found: qmq.Messages, by_queue: dict[str, list[Record]]
    ) -> None:
        invoked = [
            self.recorder.record(
                Ack(
                    process=name,
                    type="invoke",
                    group=group,
                    queue=queue,
                    op=number,
                    values=tuple(each.value for each in records),
                )
            )
            for number, (queue, records) in enumerate(by_queue.items())
        ]
        try:
            await found.ack_sync()
            kind = "ok"
        except StaleDelivery:
            kind = "fail"
        except QmqError:
            kind = "info"
        for each in invoked:
            self.recorder.record(each.ended(kind))

    # --- the end ----------------------------------------------------------------------------------

    async def wait_for_acks(self, count: int, *, within_s: float = 30.0) -> None:
        """Wait for this many more acknowledged messages."""
        goal = self.acked + count
        async with asyncio.timeout(within_s):
            while self.acked < goal:
                await asyncio.sleep(0.005)
                self._raise_failures()

    def _raise_failures(self) -> None:
        for task in (*self._producing, *self._consuming):
            if task.done():
                task.result()

    async def stop(self, *, within_s: float = 240.0) -> Report:
        """Stop sending; drain; check the whole history."""
        self._stops.set()
        async with asyncio.timeout(within_s):
            await asyncio.gather(*self._producing)
            while not all(self._acked_values <= got for got in self._got.values()):
                self._raise_failures()
                await asyncio.sleep(0.05)
        for task in self._consuming:
            task.cancel()
        await asyncio.gather(*self._consuming, return_exceptions=True)
        for client in self._clients:
            await client.close()
        self.recorder.close()
        return check_all(load(self.path), drained=True)


@asynccontextmanager
async def under_load(group: Group, name: str, tmp_path: Path) -> AsyncIterator[Workload]:
    """Load during the block; afterwards everything is checked."""
    await group.settled()
    work = Workload(group.server, f"faults.{name}", tmp_path / "history.jsonl")
    await work.start()
    await work.wait_for_acks(200)
    yield work
    await work.wait_for_acks(200)
    report = await work.stop()
    assert report.ok, report
    await group.require_equal_files()
