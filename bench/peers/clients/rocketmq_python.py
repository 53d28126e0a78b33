"""RocketMQ 5 by rocketmq-python-client: `send_async` with 1,000 in flight; a simple consumer in 4 threads that acknowledges each one.

Topics and groups are made when the server starts: `servers.ROCKETMQ_TOPICS`, `servers.ROCKETMQ_GROUPS`.
"""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

from phases import Run
from rocketmq import ClientConfiguration, Credentials, FilterExpression, Message, Producer, SimpleConsumer

IN_FLIGHT, THREADS, HIDDEN_S = 1_000, 4, 60


class Client:
    def __init__(self, address: str, settings: dict[str, Any]) -> None:
        self._address = address
        self._producers: dict[str, Any] = {}

    def _configuration(self) -> Any:
        return ClientConfiguration(self._address, Credentials(), request_timeout=10)

    def _producer(self, topic: str) -> Any:
        if topic not in self._producers:
            self._producers[topic] = Producer(self._configuration(), (topic,))
            self._producers[topic].startup()
        return self._producers[topic]

    async def open(self) -> None:
        pass

    async def make(self, run: Run) -> None:
        run.begin()

    async def publish(self, run: Run) -> None:
        self._send(run, IN_FLIGHT)

    async def awaited(self, run: Run) -> None:
        self._send(run, run.phase.tasks)

    def _send(self, run: Run, in_flight: int) -> None:
        """Keep this number of messages in flight."""
        producer, free = self._producer(run.phase.topic), threading.Semaphore(in_flight)

        def answered(sent: Any) -> None:
            sent.result()
            free.release()

        run.begin()
        while run.may_send:
            free.acquire()
            producer.send_async(self._message(run.phase.topic, run.next())).add_done_callback(answered)
        for _ in range(in_flight):
            free.acquire()

    async def paced(self, run: Run) -> None:
        producer = self._producer(run.phase.topic)
        run.begin()
        sent = []
        while run.may_send:
            await asyncio.sleep(max(run.due_s(), 0))
            sent.append(producer.send_async(self._message(run.phase.topic, run.stamped())))
        for each in sent:
            each.result()

    def _message(self, topic: str, body: bytes) -> Any:
        message = Message()
        message.topic, message.body = topic, body
        return message

    async def consume(self, run: Run) -> None:
        phase = run.phase
        consumers = []
        for group in phase.group_names:
            for _ in range(phase.consumers):
                consumer = SimpleConsumer(self._configuration(), group, {phase.topic: FilterExpression()}, 10)
                consumer.startup()
                consumers.append(consumer)
        run.begin()
        work = [threading.Thread(target=self._take, args=(each, run)) for each in consumers for _ in range(THREADS)]
        for thread in work:
            thread.start()
        await asyncio.to_thread(lambda: [thread.join() for thread in work])

    def _take(self, consumer: Any, run: Run) -> None:
        counts = run.another()
        while not run.is_over:
            try:
                messages = consumer.receive(32, HIDDEN_S) or ()
            except Exception as failure:
                if "settings" not in str(failure):  # the proxy has not read what the client sent in the background
                    raise
                time.sleep(0.05)
                continue
            for message in messages:
                if run.phase.per_s:
                    run.arrived(message.body)
                else:
                    counts[message.body[:8]] += 1
                consumer.ack(message)
