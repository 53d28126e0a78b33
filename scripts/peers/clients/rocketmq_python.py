"""RocketMQ 5 by rocketmq-python-client: `send_async` with 1,000 in flight; a simple consumer in 4 threads that acknowledges each one."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rocketmq import ClientConfiguration, Credentials, FilterExpression, Message, Producer, SimpleConsumer

TOPIC, GROUP, THREADS, HIDDEN_S = "bench", "g", 4, 60


def _configuration(address: str) -> Any:
    return ClientConfiguration(address, Credentials(), request_timeout=10)


def _producer(address: str) -> Any:
    producer = Producer(_configuration(address), (TOPIC,))
    producer.startup()
    producer.send(_message(b"first"))
    return producer


def _message(body: bytes) -> Any:
    message = Message()
    message.topic, message.body = TOPIC, body
    return message


def publish(address: str, clock: Any, bodies: list[bytes]) -> int:
    return awaited(address, clock, bodies, 1_000)


def awaited(address: str, clock: Any, bodies: list[bytes], tasks: int) -> int:
    """Keep this number of messages in flight."""
    producer, free, count = _producer(address), threading.Semaphore(tasks), 0

    def answered(sent: Any) -> None:
        sent.result()
        free.release()

    clock.begin()
    while not clock.is_over:
        free.acquire()
        producer.send_async(_message(bodies[count % 1000])).add_done_callback(answered)
        count += 1
    for _ in range(tasks):
        free.acquire()
    return count


def _wait_until_known(consumer: Any) -> None:
    """The proxy refuses to deliver until it has read the settings that the client sent in the background."""
    for _ in range(50):
        try:
            consumer.receive(1, 10)
            return
        except Exception as failure:
            if "settings" not in str(failure):
                raise
            time.sleep(0.2)


def consume(address: str, clock: Any, wanted: int) -> int:
    consumer = SimpleConsumer(_configuration(address), GROUP, {TOPIC: FilterExpression()}, 10)
    consumer.startup()
    _wait_until_known(consumer)
    lock, count, is_over = threading.Lock(), 0, threading.Event()

    def receive() -> None:
        nonlocal count
        while not is_over.is_set():
            for message in consumer.receive(32, HIDDEN_S) or ():
                with lock:
                    if not count:
                        clock.begin()
                    count += 1
                consumer.ack(message)
                if (wanted and count >= wanted) or clock.is_over:
                    is_over.set()

    with ThreadPoolExecutor(THREADS) as pool:
        for each in [pool.submit(receive) for _ in range(THREADS)]:
            each.result()
    return count
