"""Programs that use RocketMQ's own Python client, each in a separate process: `python
rocketmq_programs.py NAME HOST:PORT TOPIC GROUP`.

They print their results as JSON. RocketMQ's client and QMQ's gateway cannot be in one process,
since both contain RocketMQ's API.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Final

COUNT: Final = 20


def has_tls() -> bool:
    return "PROGRAM_HAS_TLS" in os.environ


def configuration(address: str) -> Any:
    from rocketmq import ClientConfiguration, Credentials

    return ClientConfiguration(address, Credentials(), request_timeout=10)


def producer_of(address: str, *topics: str, checker: Any = None) -> Any:
    from rocketmq import Producer

    found = Producer(configuration(address), topics, checker, tls_enable=has_tls())
    found.startup()
    return found


def message_of(topic: str, body: str, **parts: Any) -> Any:
    from rocketmq import Message

    found = Message()
    found.topic, found.body = topic, body.encode()
    for name, value in parts.items():
        setattr(found, name, value)
    return found


def normal_producer(address: str, topic: str, _: str) -> object:
    """Sends one by one, and without waiting."""
    producer = producer_of(address, topic)
    receipts = []
    for number in range(COUNT):
        message = message_of(
            topic,
            f"number {number}",
            tag="even" if number % 2 == 0 else "odd",
            keys=f"key-{number}",
        )
        message.add_property("number", str(number))
        receipts.append(producer.send(message))
    waiting = [
        producer.send_async(message_of(topic, f"number {COUNT + number}"))
        for number in range(COUNT)
    ]
    receipts += [each.result() for each in waiting]
    producer.shutdown()
    return [each.message_id for each in receipts]


def fifo_producer(address: str, topic: str, _: str) -> object:
    """Sends messages of three groups."""
    producer = producer_of(address, topic)
    for number in range(COUNT):
        producer.send(message_of(topic, str(number), message_group=f"group-{number % 3}"))
    producer.shutdown()
    return COUNT


def delay_producer(address: str, topic: str, _: str) -> object:
    """Sends one message with a delay of two seconds, and one of an hour, which it recalls."""
    producer = producer_of(address, topic)
    soon = producer.send(message_of(topic, "soon", delivery_timestamp=int(time.time()) + 2))
    late = producer.send(message_of(topic, "late", delivery_timestamp=int(time.time()) + 3600))
    recalled = producer.recall_message(topic, late.recall_handle)
    producer.shutdown()
    return {"soon": soon.message_id, "late": late.message_id, "recalled": recalled}


def transaction_producer(address: str, topic: str, _: str) -> object:
    """Commits one, rolls one back, and forgets one, about which it is asked."""
    from rocketmq import TransactionChecker, TransactionResolution

    checked: list[str] = []
    asked = threading.Event()

    class Checker(TransactionChecker):
        def check(self, message: Any) -> Any:
            checked.append(message.message_id)
            asked.set()
            return TransactionResolution.COMMIT

    producer = producer_of(address, topic, checker=Checker())
    ids = {}
    for what in ("commit", "rollback", "forget"):
        transaction = producer.begin_transaction()
        ids[what] = producer.send(message_of(topic, what), transaction).message_id
        if what != "forget":
            getattr(transaction, what)()
    asked.wait(60)
    time.sleep(1)  # for the answer, which the client sends after its checker has returned
    producer.shutdown()
    return {**ids, "checked": checked}


def simple_consumer(address: str, topic: str, group: str) -> object:
    """Receives until there is no message for a while. It leaves the first message invisible for a
    second, without an acknowledgement.
    """
    from rocketmq import FilterExpression, SimpleConsumer

    consumer = SimpleConsumer(
        configuration(address),
        group,
        {topic: FilterExpression()},
        await_duration=2,
        tls_enable=has_tls(),
    )
    consumer.startup()
    seen: list[dict[str, Any]] = []
    empty = 0
    while empty < 2:
        found = consumer.receive(32, 15)
        empty = 0 if found else empty + 1
        for each in found:
            if not seen:
                consumer.change_invisible_duration(each, 1)
            else:
                consumer.ack(each)
            seen.append(_told(each))
    consumer.shutdown()
    return seen


def push_consumer(address: str, topic: str, group: str) -> object:
    """Is handed messages; the first one fails once."""
    from rocketmq import ConsumeResult, FilterExpression, MessageListener, PushConsumer

    seen: list[dict[str, Any]] = []
    enough = threading.Event()

    class Listener(MessageListener):
        def consume(self, message: Any) -> Any:
            seen.append(_told(message))
            if len(seen) > COUNT:
                enough.set()
            return ConsumeResult.FAILURE if len(seen) == 1 else ConsumeResult.SUCCESS

    consumer = PushConsumer(
        configuration(address), group, Listener(), {topic: FilterExpression()}, tls_enable=has_tls()
    )
    consumer.startup()
    enough.wait(60)
    # for the last acknowledgement, which the client sends after its listener has returned
    time.sleep(0.5)
    consumer.shutdown()
    return seen


def load_producer(address: str, topic: str, what: str) -> object:
    """Sends COUNT messages of BYTES, AT_ONCE under way: for bench/gateway.py."""
    count, size, at_once = map(int, what.split(","))
    producer = producer_of(address, topic)
    body, took, room = "x" * size, [], threading.Semaphore(at_once)
    begun = time.monotonic()
    for _ in range(count):
        room.acquire()
        sent = time.monotonic()

        def stored(future: Any, sent: float = sent) -> None:
            future.result()
            took.append(time.monotonic() - sent)
            room.release()

        producer.send_async(message_of(topic, body)).add_done_callback(stored)
    for _ in range(at_once):
        room.acquire()
    seconds = time.monotonic() - begun
    took.sort()
    producer.shutdown()
    return {
        "seconds": seconds,
        "p50_us": took[count // 2] * 1e6,
        "p99_us": took[count * 99 // 100] * 1e6,
    }


def _told(message: Any) -> dict[str, Any]:
    return {
        "id": message.message_id,
        "body": message.body.decode(),
        "tag": message.tag,
        "keys": sorted(message.keys),
        "properties": dict(message.properties),
        "group": message.message_group,
        "attempt": message.delivery_attempt,
        "corrupted": message.corrupted,
    }


PROGRAMS: Final[dict[str, Callable[[str, str, str], object]]] = {
    each.__name__: each
    for each in (
        normal_producer,
        fifo_producer,
        delay_producer,
        transaction_producer,
        simple_consumer,
        push_consumer,
        load_producer,
    )
}

if __name__ == "__main__":
    sys.stdout.write("result " + json.dumps(PROGRAMS[sys.argv[1]](*sys.argv[2:])) + "\n")
    sys.stdout.flush()
