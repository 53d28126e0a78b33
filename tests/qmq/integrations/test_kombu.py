"""kombu's AMQP on QMQ: routing, verdicts, prefetch, priorities, fan-outs."""

from __future__ import annotations

import gc
import json
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

kombu = pytest.importorskip("kombu", reason="needs kombu: pip install 'qmq[celery]'")

from support import NodeProcess, eventually_sync  # noqa: E402

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
        producer.publish(
            body,
            exchange=queue.exchange,
            routing_key=queue.routing_key,
            declare=[queue],
            serializer="json",
            **options,
        )


def received(
    connection: Any, queue: Any, count: int, *, prefetch: int = 0, no_ack: bool = False
) -> list[Any]:
    """The first messages of the queue, without a verdict."""
    found: list[Any] = []
    consumer = kombu.Consumer(
        connection,
        [queue],
        on_message=found.append,
        prefetch_count=prefetch,
        no_ack=no_ack,
        accept=["json"],
    )
    consumer.consume()
    while len(found) < count:
        connection.drain_events(timeout=SOON_S)
    return found


def test_messages_arrive_on_systems_without_eventfd(
    queue: Any, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:  # macOS and the BSDs have none
    monkeypatch.delattr("os.eventfd", raising=False)
    with kombu.Connection(f"qmq://{address}") as connection:
        send(connection, queue, 1, 2, 3)
        assert [each.payload for each in received(connection, queue, 3, no_ack=True)] == [1, 2, 3]


def test_a_message_is_stored_as_other_programs_can_read_it(
    connection: Any, queue: Any, address: str
) -> None:
    send(connection, queue, {"n": 1}, headers={"color": "red"})
    with qmq.blocking.connect(address, state_dir=False) as mq:
        assert [each.json() for each in mq.browse(queue.name)] == [{"n": 1}]
    (message,) = received(connection, queue, 1)
    assert message.payload == {"n": 1}
    assert message.headers == {"color": "red"}
    assert message.delivery_info["redelivered"] is False


def test_a_property_that_neither_amqp_nor_json_has_is_left_out(connection: Any, queue: Any) -> None:
    send(connection, queue, 1, signal=object(), app_id="shop")
    (message,) = received(connection, queue, 1)
    assert message.properties["app_id"] == "shop"
    assert "signal" not in message.properties
    for fault in ({"app_id": object()}, {"headers": {"signal": object()}}):
        with pytest.raises(TypeError, match="JSON"):
            send(connection, queue, 1, **fault)


def test_an_acknowledged_message_is_gone_and_the_rest_goes_to_the_next_connection(
    connection: Any, queue: Any, address: str
) -> None:
    send(connection, queue, 1, 2, 3)
    with kombu.Connection(f"qmq://{address}") as other:
        first, *_ = received(other, queue, 3)
        first.ack()
    assert [each.payload for each in received(connection, queue, 2)] == [2, 3]


def test_a_rejected_message_is_in_the_dead_letter_queue_of_its_queue(
    connection: Any, queue: Any, address: str
) -> None:
    send(connection, queue, "poison")
    received(connection, queue, 1)[0].reject()
    connection.close()
    with qmq.blocking.connect(address, state_dir=False) as mq:
        message = next(iter(mq.consumer(f"%dlq%{queue.name}", "readers")))
        assert (message.json(), message.headers["qmq-error"]) == ("poison", b"rejected")


def test_a_message_that_is_requeued_again_and_again_ends_in_the_dead_letter_queue(
    connection: Any, queue: Any, address: str
) -> None:
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


def test_a_cancelled_consumer_keeps_what_it_works_on_and_takes_no_more(
    connection: Any, queue: Any, address: str
) -> None:
    send(connection, queue, "at work")
    found: list[Any] = []
    consumer = kombu.Consumer(connection, [queue], on_message=found.append, accept=["json"])
    consumer.consume()
    while not found:
        connection.drain_events(timeout=SOON_S)
    consumer.cancel()
    with kombu.Connection(f"qmq://{address}") as other:
        send(other, queue, "later", "latest")
        # The cancelled consumer may have been given the first one, and has given it back: then it
        # comes second.
        later, latest = sorted(received(other, queue, 2), key=lambda each: each.payload)
        assert [later.payload, latest.payload] == ["later", "latest"]
        later.ack()
    consumer.consume()  # as Celery's `add_consumer` after `cancel_consumer`
    while len(found) < 2:
        connection.drain_events(timeout=SOON_S)
    assert [each.payload for each in found] == ["at work", "latest"]
    for each in found:
        each.ack()
    connection.close()
    with kombu.Connection(f"qmq://{address}") as other:
        assert queue(other.default_channel).get() is None


def test_no_more_messages_are_handed_out_than_the_prefetch_count(
    connection: Any, queue: Any, address: str
) -> None:
    send(connection, queue, *range(4))
    assert len(received(connection, queue, 2, prefetch=2)) == 2
    with kombu.Connection(f"qmq://{address}") as other:
        assert [each.payload for each in received(other, queue, 2)] == [2, 3]


def test_a_fan_out_reaches_the_queues_that_are_bound_anywhere(
    connection: Any, address: str
) -> None:
    exchange = kombu.Exchange(f"news-{uuid4().hex}", type="fanout")
    with kombu.Connection(f"qmq://{address}") as other:
        queues = [kombu.Queue(f"{exchange.name}-{n}", exchange, auto_delete=True) for n in range(2)]
        bound = [queues[0](connection.default_channel), queues[1](other.default_channel)]
        for each in bound:
            each.declare()
        kombu.Producer(other).publish("hello", exchange=exchange, serializer="json")
        assert [
            received(*each, 1)[0].payload for each in ((connection, queues[0]), (other, queues[1]))
        ] == ["hello", "hello"]


def test_topics_are_routed_by_patterns(connection: Any) -> None:
    exchange = kombu.Exchange(f"topic-{uuid4().hex}", type="topic")
    one, other = (
        kombu.Queue(f"{exchange.name}-{key.count('#')}", exchange, routing_key=key)
        for key in ("order.*", "order.#")
    )
    producer = kombu.Producer(connection, exchange=exchange)
    for key in ("order.new", "order.new.gift", "invoice.new"):
        producer.publish(key, routing_key=key, declare=[one, other], serializer="json")
    assert [each.payload for each in received(connection, one, 1, no_ack=True)] == ["order.new"]
    assert sorted(each.payload for each in received(connection, other, 2, no_ack=True)) == [
        "order.new",
        "order.new.gift",
    ]


def test_an_expired_message_is_not_delivered(connection: Any, queue: Any) -> None:
    send(connection, queue, "late", expiration=0.001)
    send(connection, queue, "in time")
    assert [each.payload for each in received(connection, queue, 1)] == ["in time"]


def test_the_most_urgent_message_comes_first(queue: Any, address: str) -> None:
    with kombu.Connection(
        f"qmq://{address}", transport_options={"priority_steps": [0, 3, 6, 9]}
    ) as connection:
        for body, priority in (("low", 1), ("urgent", 9), ("middle", 4), ("also low", 2)):
            send(connection, queue, body, priority=priority)
        bound = queue(connection.default_channel)
        assert [bound.get(accept=["json"]).payload for _ in range(4)] == [
            "urgent",
            "middle",
            "low",
            "also low",
        ]
        assert bound.get() is None


def test_size_purge_and_deletion_of_a_queue(connection: Any, queue: Any, address: str) -> None:
    send(connection, queue, 1, 2)
    bound = queue(connection.default_channel)
    assert bound.queue_declare(passive=True).message_count == 2
    assert bound.purge() == 2
    assert bound.queue_declare(passive=True).message_count == 0
    assert bound.purge() == 0
    assert bound.get() is None
    bound.delete()
    with qmq.blocking.connect(address, state_dir=False) as mq:
        assert not [
            each for each in mq.metadata.list_subjects() if each.settings.name == queue.name
        ]
    with pytest.raises(Exception, match="NOT_FOUND"):
        bound.queue_declare(passive=True)


def test_nothing_comes_from_an_empty_queue(connection: Any, queue: Any) -> None:
    with kombu.Consumer(connection, [queue]), pytest.raises(socket.timeout):
        connection.drain_events(timeout=0.1)


def a_header(headers: dict[str, Any] | None = None, **properties: Any) -> dict[str, Any]:
    delivery = {"exchange": "", "routing_key": "q"}
    kinds = {"content-type": "application/json", "content-encoding": "utf-8"}
    return {
        **kinds,
        "headers": headers or {},
        "properties": {"delivery_info": delivery, **properties},
    }


def test_a_message_that_no_worker_can_read_is_set_aside_alone(
    connection: Any, queue: Any, address: str
) -> None:
    poison = [
        b"[]",
        b"{}",
        b'{"properties": 5}',
        b"[" * 3_000,
        json.dumps(a_header(expiration="x")).encode(),
    ]
    with qmq.blocking.connect(address, state_dir=False) as mq:
        mq.send(queue.name, b"poison")  # of another program
        for each in poison:
            mq.send(queue.name, b"poison", headers={"kombu": each.decode()})
        send(connection, queue, "from kombu")
        with pytest.warns(UserWarning, match="was not sent by kombu"):
            (message,) = received(connection, queue, 1)
        assert message.payload == "from kombu"
        with mq.consumer(f"%dlq%{queue.name}", "readers", ack="explicit") as letters:
            count = len(poison) + 1
            assert [next(iter(letters)).body for _ in range(count)] == [b"poison"] * count


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("stamped_headers", each) for each in (5, [[]], ["\ud800"])],
        *[
            ("timelimit", each)
            for each in ([10**400, None], [None, -1], [float("nan"), None], [1], 5)
        ],
        *[("retries", each) for each in (10**400, -1, "1", 1.5)],
        *[
            ("stamps", 5),
            ("group_index", {}),
            ("id", "a\0b"),
            ("root_id", []),
            ("chord", 5),
            ("errbacks", [5]),
            ("argsrepr", 5),
        ],
    ],
)
def test_a_field_that_no_worker_of_celery_can_use_is_a_reason(field: str, value: Any) -> None:
    header = json.dumps(a_header({"task": "add", "id": "1", field: value})).encode()
    with pytest.raises(envelope.NotKombu, match=field):
        envelope.unpacked(b"[[], {}, {}]", header, tag="tag", attempt=1)


def test_other_programs_may_use_the_names_of_a_tasks_fields(connection: Any, queue: Any) -> None:
    send(connection, queue, {"task": ["resize"], "id": 5})
    (message,) = received(connection, queue, 1)
    assert message.payload == {"task": ["resize"], "id": 5}


def test_an_event_without_a_routing_key_ends_no_monitor(connection: Any, address: str) -> None:
    """Celery's monitors bind their queues with a pattern, with which a channel compares the routing
    key of each event.
    """
    exchange = kombu.Exchange(f"celeryev.{uuid4().hex}", type="topic")
    monitor = kombu.Queue(
        f"monitor-{uuid4().hex}", exchange, routing_key="worker.#", auto_delete=True
    )
    found: list[Any] = []
    with kombu.Consumer(
        connection,
        [monitor],
        callbacks=[lambda body, _: found.append(body)],
        no_ack=True,
        accept=["json"],
    ):
        with qmq.blocking.connect(address, state_dir=False) as mq:
            header = a_header()
            header["properties"]["delivery_info"] = {"exchange": exchange.name, "routing_key": None}
            mq.send(
                envelope.name_of(f"kombu.exchange.{exchange.name}"),
                b"{}",
                headers={"kombu": json.dumps(header)},
            )
        kombu.Producer(connection).publish(
            "good", exchange=exchange, routing_key="worker.online", serializer="json"
        )
        while not found:
            connection.drain_events(timeout=SOON_S)
    assert found == ["good"]


def test_a_task_whose_body_no_worker_can_read_is_set_aside(
    connection: Any, queue: Any, address: str
) -> None:
    """Celery's worker reads the body in the callback, where nothing catches what it raises."""
    tasks: list[Any] = []

    def read(message: Any) -> None:
        arguments, _, _ = message.payload
        tasks.append(arguments)
        message.ack()

    header = json.dumps(a_header({"task": "add", "id": "1"}))
    with qmq.blocking.connect(address, state_dir=False) as mq:
        for body in (b"5", b"no JSON", b"[[1, 2], {}, {}]"):
            mq.send(queue.name, body, headers={"kombu": header})
        with kombu.Consumer(connection, [queue], on_message=read, accept=["json"]):
            while not tasks:
                connection.drain_events(timeout=SOON_S)
        assert tasks == [[1, 2]]
        with mq.consumer(f"%dlq%{queue.name}", "readers", ack="explicit") as letters:
            assert sorted(next(iter(letters)).body for _ in range(2)) == [b"5", b"no JSON"]


def test_what_the_application_raises_reaches_it(connection: Any, queue: Any) -> None:
    def fail(message: Any) -> None:
        raise LookupError(message.payload)

    send(connection, queue, "payload")
    with (
        kombu.Consumer(connection, [queue], on_message=fail, accept=["json"]),
        pytest.raises(LookupError, match="payload"),
    ):
        connection.drain_events(timeout=SOON_S)


@pytest.mark.parametrize(
    ("url", "options", "told"),
    [
        ("qmq://localhost/app2", {}, "prefix"),
        ("qmq://token@localhost", {}, "qmq://:TOKEN@host"),
        (
            "qmq://localhost",
            {"transport_options": {"visibility_timeout": 3600}},
            "visibility_timeout",
        ),
        ("qmq://localhost", {"transport_options": {"lease": 30}}, "lease is a timedelta"),
        (
            "qmq://localhost",
            {"transport_options": {"queue_order_strategy": "sorted"}},
            "no transport options queue_order_strategy",
        ),
        (
            "qmq://localhost",
            {"transport_options": {"client_properties": {}}},
            "no transport options client_properties",
        ),
        (
            "qmq://localhost",
            {"transport_options": {"confirm_publish": False}},
            "confirms every publish",
        ),
        (
            "qmq://localhost",
            {"transport_options": {"stream_exchanges": "celeryev"}},
            "are a list of str, not str",
        ),
        (
            "qmq://localhost",
            {"transport_options": {"priority_steps": "0369"}},
            "priority_steps is a list of numbers",
        ),
        (
            "qmq://localhost",
            {"transport_options": {"priority_steps": [0, 256]}},
            "priority_steps is a list of numbers",
        ),
        ("qmq://localhost", {"transport_options": {"prefix": 5}}, "prefix is a text"),
        (
            "qmq://localhost",
            {"transport_options": {"delivery_timeout": timedelta(0)}},
            "delivery_timeout is a timedelta longer than 0",
        ),
        ("qmq://localhost", {"ssl": True}, "qmq.Tls"),
    ],
)
def test_a_setting_that_would_be_ignored_is_refused(url: str, options: Any, told: str) -> None:
    with pytest.raises(qmq.errors.InvalidArgument, match=told):
        kombu.Connection(url, **options).connect()


def test_an_address_of_ipv6_is_reached() -> None:
    with socket.socket(socket.AF_INET6) as listening:
        listening.bind(("::1", 0))
        listening.listen()
        with pytest.raises(qmq.errors.NotConnected):
            kombu.Connection(
                f"qmq://[::1]:{listening.getsockname()[1]}", connect_timeout=0.5
            ).connect()
        listening.settimeout(SOON_S)
        listening.accept()[0].close()


def test_a_message_that_cannot_be_stored_is_an_error_within_the_transports_time(
    queue: Any, tmp_path: Path
) -> None:
    node = NodeProcess(tmp_path)
    options = {"delivery_timeout": timedelta(milliseconds=100)}
    with kombu.Connection(f"qmq://{node.start()}", transport_options=options) as made:
        try:
            send(made, queue, 1)
        finally:
            node.kill()
        with pytest.raises(qmq.errors.Unavailable):
            send(made, queue, 2)


def test_a_task_is_cancelled_beside_delayed_messages_whose_keys_are_no_text(
    connection: Any, queue: Any, address: str
) -> None:
    with qmq.blocking.connect(address, state_dir=False) as mq:
        for key in (b"\xff\x00", b"task-1"):
            mq.send(queue.name, b"0", key=key, delay=timedelta(days=1))
        channel = connection.default_channel
        assert channel.link.cancel(["task-1"]) == 1
        assert [each.key_bytes for each in mq.delayed.list(queue.name)] == [b"\xff\x00"]
        channel.link.cancel_all(queue.name)


def test_a_dead_address_is_an_error_of_the_connection() -> None:
    with (
        pytest.raises(kombu.exceptions.OperationalError),
        kombu.Connection("qmq://127.0.0.1:1") as connection,
    ):
        connection.ensure_connection(max_retries=1, timeout=1)


def test_a_connection_that_is_dropped_ends_its_threads(queue: Any, address: str) -> None:
    before = set(threading.enumerate())

    def new_threads() -> list[str]:
        found = [each.name for each in set(threading.enumerate()) - before]
        return [each for each in found if each.startswith("qmq-")]

    dropped = kombu.Connection(f"qmq://{address}")
    send(dropped, queue, 1)
    assert new_threads()
    del dropped
    gc.collect()
    eventually_sync(lambda: not new_threads())


def test_a_queue_name_becomes_a_subject_that_no_other_queue_has() -> None:
    assert envelope.name_of("celery") == "celery"
    names = [
        envelope.name_of(each)
        for each in ("a@b", "a-b", "a/b", "a b", ".a", "", "x" * 300, "x" * 301)
    ]
    assert len(set(names)) == len(names)
    assert all(qmq.SubjectConfig(each).name == each for each in names)


@pytest.mark.parametrize("eta", ["2026-11-25T10:00:00+00:00", "2026-11-25T10:00:00"])
def test_the_eta_of_a_task_is_its_due_time(eta: str) -> None:
    due = envelope.due_of({"headers": {"task": "t", "eta": eta}})
    assert due is not None
    assert due.utcoffset() == timedelta(0)
    assert envelope.due_of({"headers": {"eta": eta}}) is None
