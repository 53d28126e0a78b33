"""The clients of Kafka in `scripts/bench cluster`, by confluent-kafka (librdkafka):
`kafka_cluster.py WORK ADDRESS LOAD`. Prints the CPU time of the work.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import AdminClient, NewTopic


def _producer(address: str, load: dict[str, Any]) -> Producer:
    return Producer(
        {
            "bootstrap.servers": address,
            "enable.idempotence": True,
            "batch.num.messages": load["batch"],
            "linger.ms": 5,
            "queue.buffering.max.messages": 1_000_000,
        }
    )


def prepare(address: str, load: dict[str, Any]) -> None:
    """Create the topics, and send one message to each."""
    settings = {"min.insync.replicas": "2"}
    if load["acks"] == "flushed":
        settings["flush.messages"] = "1"
    admin = AdminClient({"bootstrap.servers": address})
    made = admin.create_topics(
        [NewTopic(name, 1, 3, config=settings) for name in load["names"]], operation_timeout=60
    )
    for each in made.values():
        each.result()
    producer = _producer(address, load)
    for name in load["names"]:
        producer.produce(name, b"first")
    assert producer.flush(60) == 0


def publish(address: str, load: dict[str, Any]) -> None:
    producer, names, batch = _producer(address, load), load["names"], load["batch"]
    bodies = [os.urandom(load["size"]) for _ in range(batch)]
    failures: list[Any] = []

    def answered(failure: Any, _: Any) -> None:
        if failure is not None:
            failures.append(failure)

    begin, sent = time.monotonic(), 0
    while sent < load["count"]:
        due = min(int((time.monotonic() - begin) * load["rate"]), load["count"])
        while sent + batch <= due:
            name = names[sent // batch % len(names)]
            for body in bodies:
                producer.produce(name, body, on_delivery=answered)
            sent += batch
        producer.poll(0)
        time.sleep(0.01)
    assert producer.flush(120) == 0
    assert not failures, failures[:1]


def consume(address: str, load: dict[str, Any]) -> None:
    """One consumer of all topics, in bulk, with automatic commits."""
    consumer = Consumer(
        {
            "bootstrap.servers": address,
            "group.id": f"g-{load['name']}",
            "auto.offset.reset": "earliest",
        }
    )
    consumer.subscribe(load["names"])
    left = load["count"] + len(load["names"])
    while left > 0:
        left -= len(consumer.consume(10_000, 0.1))
    consumer.close()
    assert left == 0, f"{-left} messages came twice"


if __name__ == "__main__":
    begin_s = time.process_time()
    {"prepare": prepare, "publish": publish, "consume": consume}[sys.argv[1]](
        sys.argv[2], json.loads(sys.argv[3])
    )
    print(time.process_time() - begin_s)
