"""Kafka by confluent-kafka (librdkafka): acks=all, idempotent; a consumer that polls, with automatic commits."""

from __future__ import annotations

import threading
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


def _producer(address: str) -> Any:
    make_topic(address)
    return Producer({"bootstrap.servers": address, "enable.idempotence": True, "queue.buffering.max.messages": 1_000_000})


def publish(address: str, clock: Any, bodies: list[bytes]) -> int:
    producer, count = _producer(address), 0
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
    make_topic(address)
    settings = {"bootstrap.servers": address, "enable.idempotence": True, "linger.ms": 0}
    producer = Producer(settings)
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
    while True:
        message = consumer.poll(10)
        if message is None:
            break
        assert message.error() is None, message.error()
        message.value()
        if not count:
            clock.begin()
        count += 1
        if count == wanted or clock.is_over:
            break
    consumer.close()  # or the next member of the group waits for this one
    return count
