"""Kafka by confluent-kafka (librdkafka): acks=all, idempotent; a consumer that takes lists, with automatic commits."""

from __future__ import annotations

import threading
import time
from typing import Any

from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import AdminClient, NewTopic

TOPIC = "bench"


def make_topic(address: str) -> None:
    admin = AdminClient({"bootstrap.servers": address})
    for made in admin.create_topics([NewTopic(TOPIC, num_partitions=1)]).values():
        try:
            made.result()
        except Exception as failure:
            if "exists" not in str(failure):
                raise


def _producer(address: str, **settings: Any) -> Any:
    """A producer that is connected: one message is acknowledged."""
    make_topic(address)
    producer = Producer({"bootstrap.servers": address, "enable.idempotence": True, **settings})
    producer.produce(TOPIC, b"first")
    assert producer.flush(60) == 0
    return producer


def publish(address: str, clock: Any, bodies: list[bytes]) -> int:
    producer, count = _producer(address, **{"queue.buffering.max.messages": 1_000_000}), 0
    clock.begin()
    while not clock.is_over:
        for body in bodies:
            while True:
                try:
                    producer.produce(TOPIC, body)
                    break
                except BufferError:
                    producer.poll(0.01)
        count += len(bodies)
        producer.poll(0)
    assert producer.flush(60) == 0
    return count


def awaited(address: str, clock: Any, bodies: list[bytes], tasks: int) -> int:
    """librdkafka has no tasks: so many messages are always in flight, each answered by a callback, without lingering."""
    producer = _producer(address, **{"linger.ms": 0})
    free, count = threading.Semaphore(tasks), 0

    def answered(failure: Any, _: Any) -> None:
        assert failure is None, failure
        free.release()

    clock.begin()
    while not clock.is_over:
        while not free.acquire(blocking=False):
            producer.poll(1)
        producer.produce(TOPIC, bodies[count % 1000], on_delivery=answered)
        count += 1
    producer.flush(60)
    return count


def consume(address: str, clock: Any, wanted: int) -> int:
    settings = {"bootstrap.servers": address, "group.id": "g", "auto.offset.reset": "earliest", "fetch.queue.backoff.ms": 2}
    consumer, count = Consumer(settings), 0
    consumer.subscribe([TOPIC])
    first_by_s = time.monotonic() + 10
    while not (clock.is_over if count else time.monotonic() > first_by_s):
        messages = consumer.consume(min(10_000, wanted - count) if wanted else 10_000, 0.1)
        if messages and not count:
            clock.begin()
        for message in messages:
            assert message.error() is None, message.error()
            message.value()
        count += len(messages)
        if count == wanted:
            break
    consumer.close()  # or the next member of the group waits for this one
    return count
