"""kombu's AMQP on QMQ: routing, verdicts, prefetch, priorities, fan-outs."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest

kombu = pytest.importorskip("kombu", reason="needs kombu: pip install 'qmq[celery]'")

import qmq.blocking  # noqa: E402
import qmq.integrations.kombu  # noqa: E402
from qmq.integrations.kombu import envelope  # noqa: E402

SOON_S = 20


@pytest.fixture
def queue() -> Any:
    name = f"queue-{uuid4().hex}"
    return kombu.Queue(name, kombu.Exchange(name, type="direct"), routing_key=name)


@pytest.fixture
def connection(address: str) -> Iterator[Any]:
    with kombu.Connection(f"qmq://{address}") as made:
        yield made


def send(connection: Any, queue: Any, *bodies: object, **options: Any) -> None:
    producer = kombu.Producer(connection)
    for body in bodies:
        producer.publish(body, exchange=queue.exchange, routing_key=queue.routing_key, declare=[queue], serializer="json", **options)


def received(connection: Any, queue: Any, count: int, *, prefetch: int = 0, no_ack: bool = False) -> list[Any]:
    """The first messages of the queue, without a verdict."""
    found: list[Any] = []
    consumer = kombu.Consumer(connection, [queue], on_message=found.append, prefetch_count=prefetch, no_ack=no_ack, accept=["json"])
    consumer.consume()
    while len(found) < count:
        connection.drain_events(timeout=SOON_S)
    return found


def test_a_message_is_stored_as_other_programs_can_read_it(connection: Any, queue: Any, address: str) -> None:
    send(connection, queue, {"n": 1}, headers={"color": "red"})
    with qmq.blocking.connect(address, state_dir=False) as mq:
        assert [each.json() for each in mq.browse(queue.name)] == [{"n": 1}]
    (message,) = received(connection, queue, 1)
    assert (message.payload, message.headers, message.delivery_info["redelivered"]) == ({"n": 1}, {"color": "red"}, False)


def test_an_acknowledged_message_is_gone_and_the_rest_goes_to_the_next_connection(connection: Any, queue: Any, address: str) -> None:
    send(connection, queue, 1, 2, 3)
    with kombu.Connection(f"qmq://{address}") as other:
        first, *_ = received(other, queue, 3)
        first.ack()
    assert [each.payload for each in received(connection, queue, 2)] == [2, 3]


def test_a_rejected_message_is_in_the_dead_letter_queue_of_its_queue(connection: Any, queue: Any, address: str) -> None:
    send(connection, queue, "poison")
    received(connection, queue, 1)[0].reject()
    connection.close()
    with qmq.blocking.connect(address, state_dir=False) as mq:
        message = next(iter(mq.consumer(f"%dlq%{queue.name}", "readers")))
        assert (message.json(), message.headers["qmq-error"]) == ("poison", b"rejected")


def test_a_message_that_is_requeued_again_and_again_ends_in_the_dead_letter_queue(connection: Any, queue: Any, address: str) -> None:
    send(connection, queue, "poison")
    found: list[Any] = []
    consumer = kombu.Consumer(connection, [queue], on_message=found.append, accept=["json"])
    consumer.consume()
    for attempt in range(1, 6):
        while len(found) < attempt:
            connection.drain_events(timeout=SOON_S)
        assert found[-1].delivery_info["redelivered"] is (attempt > 1)
        found[-1].requeue()
    with qmq.blocking.connect(address, state_dir=False) as mq:
        message = next(iter(mq.consumer(f"%dlq%{queue.name}", "readers")))
        assert message.headers["qmq-attempt"] == b"5"


def test_no_more_messages_are_handed_out_than_the_prefetch_count(connection: Any, queue: Any, address: str) -> None:
    send(connection, queue, *range(4))
    assert len(received(connection, queue, 2, prefetch=2)) == 2
    with kombu.Connection(f"qmq://{address}") as other:
        assert [each.payload for each in received(other, queue, 2)] == [2, 3]


def test_a_fan_out_reaches_the_queues_that_are_bound_anywhere(connection: Any, address: str) -> None:
    exchange = kombu.Exchange(f"news-{uuid4().hex}", type="fanout")
    with kombu.Connection(f"qmq://{address}") as other:
        queues = [kombu.Queue(f"{exchange.name}-{n}", exchange, auto_delete=True) for n in range(2)]
        bound = [queues[0](connection.default_channel), queues[1](other.default_channel)]
        for each in bound:
            each.declare()
        kombu.Producer(other).publish("hello", exchange=exchange, serializer="json")
        assert [received(*each, 1)[0].payload for each in ((connection, queues[0]), (other, queues[1]))] == ["hello", "hello"]


def test_topics_are_routed_by_patterns(connection: Any) -> None:
    exchange = kombu.Exchange(f"topic-{uuid4().hex}", type="topic")
    one, other = (kombu.Queue(f"{exchange.name}-{key.count('#')}", exchange, routing_key=key) for key in ("order.*", "order.#"))
    producer = kombu.Producer(connection, exchange=exchange)
    for key in ("order.new", "order.new.gift", "invoice.new"):
        producer.publish(key, routing_key=key, declare=[one, other], serializer="json")
    assert [each.payload for each in received(connection, one, 1, no_ack=True)] == ["order.new"]
    assert sorted(each.payload for each in received(connection, other, 2, no_ack=True)) == ["order.new", "order.new.gift"]


def test_an_expired_message_is_not_delivered(connection: Any, queue: Any) -> None:
    send(connection, queue, "late", expiration=0.001)
    send(connection, queue, "in time")
    assert [each.payload for each in received(connection, queue, 1)] == ["in time"]


def test_the_most_urgent_message_comes_first(queue: Any, address: str) -> None:
    with kombu.Connection(f"qmq://{address}", transport_options={"priority_steps": [0, 3, 6, 9]}) as connection:
        for body, priority in (("low", 1), ("urgent", 9), ("middle", 4), ("also low", 2)):
            send(connection, queue, body, priority=priority)
        bound = queue(connection.default_channel)
        assert [bound.get(accept=["json"]).payload for _ in range(4)] == ["urgent", "middle", "low", "also low"]
        assert bound.get() is None


def test_size_purge_and_deletion_of_a_queue(connection: Any, queue: Any, address: str) -> None:
    send(connection, queue, 1, 2)
    bound = queue(connection.default_channel)
    assert bound.queue_declare(passive=True).message_count == 2
    assert bound.purge() == 2
    assert bound.get() is None
    bound.delete()
    with qmq.blocking.connect(address, state_dir=False) as mq:
        assert not [each for each in mq.metadata.list_subjects() if each.settings.name == queue.name]
    with pytest.raises(Exception, match="NOT_FOUND"):
        bound.queue_declare(passive=True)


def test_nothing_comes_from_an_empty_queue(connection: Any, queue: Any) -> None:
    with kombu.Consumer(connection, [queue]), pytest.raises(socket.timeout):
        connection.drain_events(timeout=0.1)


def test_a_message_of_another_program_goes_to_the_dead_letter_queue(connection: Any, queue: Any, address: str) -> None:
    with qmq.blocking.connect(address, state_dir=False) as mq:
        mq.send(queue.name, b"not from kombu")
        send(connection, queue, "from kombu")
        with pytest.warns(UserWarning, match="was not sent by kombu"):
            (message,) = received(connection, queue, 1)
        assert message.payload == "from kombu"
        assert next(iter(mq.consumer(f"%dlq%{queue.name}", "readers"))).body == b"not from kombu"


def test_a_dead_address_is_an_error_of_the_connection() -> None:
    with pytest.raises(kombu.exceptions.OperationalError), kombu.Connection("qmq://127.0.0.1:1") as connection:
        connection.ensure_connection(max_retries=1, timeout=1)


def test_a_queue_name_becomes_a_subject_that_no_other_queue_has() -> None:
    assert envelope.name_of("celery") == "celery"
    names = [envelope.name_of(each) for each in ("a@b", "a-b", "a/b", "a b", ".a", "", "x" * 300, "x" * 301)]
    assert len(set(names)) == len(names)
    assert all(qmq.SubjectConfig(each).name == each for each in names)


@pytest.mark.parametrize("eta", ["2026-11-25T10:00:00+00:00", "2026-11-25T10:00:00"])
def test_the_eta_of_a_task_is_its_due_time(eta: str) -> None:
    due = envelope.due_of({"headers": {"task": "t", "eta": eta}})
    assert due is not None
    assert due.utcoffset() == timedelta(0)
    assert envelope.due_of({"headers": {"eta": eta}}) is None
