"""Kafka by confluent-kafka (librdkafka): acks=all, idempotent, delivery callbacks; `consume(n)`,
with automatic commits.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import AdminClient, NewTopic
from phases import KEYS, Run

LARGEST = 2_097_152


def make_topic(address: str, topic: str, partitions: int, flushed: bool) -> None:
    config = {"max.message.bytes": str(LARGEST), **({"flush.messages": "1"} if flushed else {})}
    admin = AdminClient({"bootstrap.servers": address})
    made = admin.create_topics([NewTopic(topic, num_partitions=max(partitions, 1), config=config)])
    made[topic].result()


class Client:
    def __init__(self, address: str, settings: dict[str, Any]) -> None:
        self._address = address
        settings = {
            "bootstrap.servers": address,
            "enable.idempotence": True,
            "message.max.bytes": LARGEST,
        }
        self._producer = Producer(
            {
                **settings,
                "queue.buffering.max.messages": 1_000_000,
                "queue.buffering.max.kbytes": 262_144,
            }
        )
        self._at_once = Producer({**settings, "linger.ms": 0})

    async def open(self) -> None:
        for producer in (self._producer, self._at_once):
            producer.list_topics(timeout=30)

    async def make(self, run: Run) -> None:
        make_topic(self._address, run.phase.topic, run.phase.partitions, run.phase.flushed)
        for producer in (self._producer, self._at_once):
            producer.list_topics(run.phase.topic, timeout=30)
        run.begin()

    async def publish(self, run: Run) -> None:
        producer, topic = self._producer, run.phase.topic
        keys = KEYS if run.phase.ordered else [None] * len(run.bodies)
        run.begin()
        while run.may_send:
            for body, key in zip(run.lap(), keys, strict=False):
                while True:
                    try:
                        producer.produce(topic, body, key)
                        break
                    except BufferError:
                        producer.poll(0.01)
            producer.poll(0)
        assert producer.flush(120) == 0

    async def awaited(self, run: Run) -> None:
        """librdkafka has no tasks: so many messages are always in flight, each answered by a
        callback, without lingering.
        """
        producer, free = self._at_once, threading.Semaphore(run.phase.tasks)

        def answered(failure: Any, _: Any) -> None:
            assert failure is None, failure
            free.release()

        run.begin()
        while run.may_send:
            while not free.acquire(blocking=False):
                producer.poll(1)
            producer.produce(run.phase.topic, run.next(), on_delivery=answered)
        assert producer.flush(60) == 0

    async def paced(self, run: Run) -> None:
        run.begin()
        while run.may_send:
            ahead_s = run.due_s()
            if ahead_s > 0:
                self._at_once.poll(ahead_s)
                continue
            self._at_once.produce(run.phase.topic, run.stamped())
        assert self._at_once.flush(60) == 0

    async def consume(self, run: Run) -> None:
        phase = run.phase
        settings = {
            "bootstrap.servers": self._address,
            "auto.offset.reset": "earliest",
            "fetch.queue.backoff.ms": 2,
            "fetch.wait.max.ms": 10,
        }
        consumers = [
            Consumer({**settings, "group.id": group})
            for group in phase.group_names
            for _ in range(phase.consumers)
        ]
        begun, ready = threading.Event(), [threading.Event() for _ in consumers]
        work = [
            threading.Thread(target=self._take, args=(each, run, has, begun))
            for each, has in zip(consumers, ready, strict=True)
        ]
        for thread in work:
            thread.start()
        for has in ready:
            await asyncio.to_thread(has.wait)
        run.begin()
        begun.set()
        await asyncio.to_thread(lambda: [thread.join() for thread in work])
        for each in consumers:
            each.close()

    def _take(
        self, consumer: Any, run: Run, has_partitions: threading.Event, begun: threading.Event
    ) -> None:
        """Join the group, and fetch nothing before the row begins: it is balanced by then."""

        def assigned(_: Any, partitions: list[Any]) -> None:
            consumer.assign(partitions)
            if not begun.is_set():
                consumer.pause(partitions)

        consumer.subscribe([run.phase.topic], on_assign=assigned)
        while not begun.is_set():
            consumer.poll(0.02)
            if consumer.assignment():
                has_partitions.set()
        counts, timed = run.another(), run.phase.per_s
        consumer.resume(consumer.assignment())
        while not run.is_over:
            messages = consumer.consume(1 if timed else 10_000, 0.05)
            if timed:
                for message in messages:
                    run.arrived(message.value())
            elif run.phase.each:
                for message in messages:
                    counts[message.value()[:8]] += 1
            else:
                counts.update([message.value()[:8] for message in messages])
