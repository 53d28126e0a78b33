"""`TestQmqBroker`: FastStream's base cases about test brokers, and the messages that handlers get
in memory.
"""

from typing import Annotated, Any
from unittest.mock import Mock

import pytest
from pydantic import BaseModel

import qmq
from qmq.errors import InvalidArgument, InvalidName, MessageTooLarge
from qmq.integrations.local_messages import LocalMessage, chosen, local_batch

faststream = pytest.importorskip(
    "faststream", reason="needs FastStream: pip install 'qmq[faststream]'"
)

from faststream import Context, FastStream, TestApp  # noqa: E402
from faststream.asgi.factories.asyncapi.try_it_out import TryItOutProcessor  # noqa: E402
from faststream.exceptions import SetupError  # noqa: E402
from faststream_places import Place, Seen  # noqa: E402

from qmq.integrations.faststream import QmqBroker, QmqMessage, QmqRouter, TestQmqBroker  # noqa: E402
from qmq.integrations.faststream.testing import MemoryProducer  # noqa: E402


class Person(BaseModel):
    name: str
    age: int


JOHN, JANE = Person(name="John", age=19), Person(name="Jane", age=20)


async def test_mocks_of_handlers_and_publishers_show_what_they_got(
    memory: Place, subject: str
) -> None:
    broker, router = memory.broker(), QmqRouter("r-")
    returned, by_hand = (
        broker.publisher(f"{subject}-returned"),
        router.publisher(f"{subject}-by-hand"),
    )
    handled = broker.publisher(f"{subject}-handled")
    broker.include_router(router)

    @returned
    @handled
    @broker.subscriber(subject, group="g")
    async def handle(body: Any) -> str:
        await by_hand.publish("by hand")
        return "response"

    @broker.subscriber(f"{subject}-handled", group="g")
    async def handle_response(body: Any) -> None: ...

    async with TestQmqBroker(broker) as found:
        assert found is broker
        await broker.publish("hello", subject)
        handle.mock.assert_called_once_with("hello")
        returned.mock.assert_called_once_with("response")
        handled.mock.assert_called_once_with("response")
        handle_response.mock.assert_called_once_with("response")
        by_hand.mock.assert_called_once_with("by hand")


async def test_mocks_exist_only_under_a_test_broker(memory: Place, subject: str) -> None:
    broker = memory.broker()
    publisher = broker.publisher(f"{subject}-2")

    @broker.subscriber(subject, group="g")
    async def handle() -> None: ...

    for _ in range(2):
        with pytest.raises(SetupError, match="not under a test broker"):
            handle.mock.assert_not_called()
        with pytest.raises(SetupError, match="not under a test broker"):
            await publisher.assert_called_once_with()
        async with TestQmqBroker(broker):
            handle.mock.assert_not_called()
            publisher.mock.assert_not_called()


async def test_subscribers_that_are_made_for_the_test_go_with_it(
    memory: Place, subject: str
) -> None:
    broker = memory.broker()
    kept = [broker.publisher(subject), broker.publisher(f"{subject}-2")]

    @broker.subscriber(subject, group="g")
    async def handle(body: Any) -> None: ...

    for _ in range(2):
        test = TestQmqBroker(broker, connect_only=False)
        async with test:
            assert len(broker.subscribers) == 2
        assert len(broker.subscribers) == 1
    assert len(kept) == 2


@pytest.mark.parametrize("where", ["handler", "parser"])
async def test_an_exception_is_raised_where_the_message_was_published(
    memory: Place, subject: str, where: str
) -> None:
    broker = memory.broker()

    def parse(message: Any) -> Any:
        raise ValueError("parser")

    @broker.subscriber(subject, group="g", parser=parse if where == "parser" else None)
    async def handle(body: Any) -> None:
        raise ValueError("handler")

    async with TestQmqBroker(broker):
        with pytest.raises(ValueError, match=where):
            await broker.publish("hello", subject)


async def test_only_inside_the_test_a_broker_does_without_its_node(node: Place) -> None:
    broker = node.broker()
    await broker.start()
    producer, client = broker.config.broker_config.producer, broker.config.client
    async with TestQmqBroker(broker, connect_only=False):
        assert all(isinstance(each, Mock) for each in (broker.start, broker.stop))
        assert isinstance(broker.config.broker_config.producer, MemoryProducer)
        assert broker.config.client is not client
    assert not any(isinstance(each, Mock) for each in (broker.start, broker.stop))
    assert (broker.config.broker_config.producer, broker.config.client) == (producer, client)
    assert await broker.ping(60)
    await broker.stop()


@pytest.mark.parametrize("is_ordered", [False, True], ids=["unordered", "ordered"])
async def test_with_a_real_node_mocks_show_what_came_over_it(
    node: Place, subject: str, is_ordered: bool
) -> None:
    async with qmq.connect(node.address, state_dir=False) as mq:
        if is_ordered:
            await mq.metadata.create_subject(
                qmq.SubjectConfig(f"{subject}-2", order=qmq.Order.STRICT, logical_partitions=16),
                partitions=1,
            )
        await mq.send(f"{subject}-2", b"sent before the test", key="k")
    broker = node.broker()
    publisher = broker.publisher(f"{subject}-2")
    batches = broker.publisher(f"{subject}-3", batch=True)

    @broker.subscriber(subject, group="g")
    @batches
    async def handle(body: Any) -> list[str]:
        await publisher.publish(f"response: {body}", key="k")
        return ["a", "b"]

    own, test = list(broker.subscribers), TestQmqBroker(broker, with_real=True, connect_only=False)
    async with test:
        assert not any(isinstance(each, Mock) for each in (broker.start, broker.stop))
        made, client = (
            [each for each in broker.subscribers if each not in own],
            broker.config.client,
        )
        assert [each.running for each in made] == [True, True]
        await broker.publish("hello", subject)
        await handle.wait_call(60)
        handle.mock.assert_called_once_with("hello")
        for each in made:
            await each.calls[0].handler.wait_call(60)
        publisher.mock.assert_called_once_with("response: hello")
        batches.mock.assert_called_once_with(["a", "b"])
    # A subscriber that still ran would keep its place in its group.
    assert [each.running for each in made] == [False, False]
    assert not client.consumers


async def test_assertions_describe_a_message_with_headers_and_context(
    memory: Place, subject: str
) -> None:
    broker = memory.broker()
    publisher = broker.publisher(f"{subject}-2")

    @broker.subscriber(subject, group="g")
    async def handle(body: Person) -> None:
        await publisher.publish(body, headers={"n": str(body.age)}, correlation_id=body.name)

    async with TestQmqBroker(broker):
        for each in (handle, publisher):
            with pytest.raises(AssertionError, match="was not called"):
                await each.assert_called_with("hello")
        await broker.publish(JOHN, subject, headers={"n": "19"}, correlation_id="John")
        for each in (handle, publisher):
            await each.assert_called_once_with(JOHN, headers={"n": "19"}, correlation_id="John")
        await handle.assert_called_once_with(
            {"name": "John", "age": 19},
            context={"broker": broker, "message.correlation_id": "John"},
        )
        with pytest.raises(AssertionError, match=r"(?s)body:.*headers:"):
            await handle.assert_called_once_with({"city": "Moscow"}, headers={"n": "3"})
        await broker.publish(JANE, subject, headers={"n": "20"}, correlation_id="Jane")
        for each in (handle, publisher):
            await each.assert_called_with(JANE, headers={"n": "20"})
            await each.assert_any_call(JOHN, correlation_id="John")
            with pytest.raises(AssertionError, match="Called 2 times"):
                await each.assert_called_once_with(JANE)


async def test_an_application_is_tested_without_a_node(memory: Place, subject: str) -> None:
    broker = memory.broker()
    app = FastStream(broker)

    @broker.subscriber(subject, group="g")
    async def handle(body: Any) -> None: ...

    @app.after_startup
    async def send() -> None:
        await broker.publish("hello", subject)

    async with TestQmqBroker(broker), TestApp(app):
        handle.mock.assert_called_once_with("hello")


async def test_a_router_is_tested_with_one_broker_after_the_other(
    memory: Place, subject: str
) -> None:
    router = QmqRouter()

    @router.subscriber(subject, group="g")
    async def handle(broker: Annotated[Any, Context()]) -> str:
        return "hello"

    for broker in (memory.broker(), memory.broker()):
        broker.include_router(router)
        async with TestQmqBroker(broker, connect_only=False):
            assert await (await broker.request({}, subject)).decode() == "hello"


async def test_the_description_of_an_application_lets_one_try_a_handler(
    memory: Place, subject: str
) -> None:
    broker = memory.broker()

    @broker.subscriber(subject, group="g")
    async def double(number: int) -> int:
        return 2 * number

    answer = await TryItOutProcessor(broker).process(
        {"channelName": f"{subject}:Double", "message": {"message": 21}}
    )
    assert (answer.status_code, answer.body) == (200, b"42")
    answer = await TryItOutProcessor(broker).process(
        {"channelName": "unknown:Double", "message": {"message": 21}}
    )
    assert answer.status_code == 404


async def test_a_broker_stops_before_it_started() -> None:
    broker = QmqBroker(state_dir=False)
    await broker.stop()
    assert not broker.running


# --- the messages of tests ------------------------------------------------------------------------


async def test_a_handler_in_memory_gets_a_message_like_one_of_a_node(
    place: Place, subject: str
) -> None:
    broker, seen = place.broker(), Seen()

    @broker.subscriber(subject, group="g")
    async def handle(message: Annotated[QmqMessage, Context()]) -> None:
        raw = message.raw_message
        seen(
            (
                raw.subject,
                raw.key,
                raw.tags,
                raw.attempt,
                raw.body,
                raw.headers["h"],
                raw.create_time_ms > 0,
                raw.append_time_ms > 0,
            )
        )
        await message.ack()
        seen(raw.is_settled)

    async with place.started(broker):
        await broker.publish("hello", subject, key="k", tags=["eu", "new"], headers={"h": "1"})
        assert await seen.next(2) == [
            (subject, "k", ("eu", "new"), 1, b"hello", b"1", True, True),
            True,
        ]


async def test_a_message_that_a_node_would_refuse_is_refused_in_memory(
    memory: Place, subject: str
) -> None:
    broker = memory.broker()
    async with TestQmqBroker(broker):
        with pytest.raises(InvalidName):
            await broker.publish("hello", "no subject")
        with pytest.raises(InvalidArgument, match="tag"):
            await broker.publish("hello", subject, tags=[""])
        with pytest.raises(MessageTooLarge):
            await broker.publish(b"x" * (4 * 1024 * 1024 + 1), subject)


async def test_local_messages_take_every_verdict_and_are_chosen() -> None:
    messages, receipts = local_batch(
        "orders", [LocalMessage(b"a", "k-1"), LocalMessage(b"b", "k-2", ["eu"])], attempt=3
    )
    assert [str(each.id) for each in messages] == [str(each.id) for each in receipts]
    assert [(each.body, each.key, each.attempt) for each in messages] == [
        (b"a", "k-1", 3),
        (b"b", "k-2", 3),
    ]
    (one,) = chosen(messages, lambda each: "eu" in each.tags)
    assert (one.body, one.id) == (b"b", messages[1].id)
    for each in (one, messages):
        await each.ack()
        await each.ack_sync()
        each.nack()
        each.reject()
        each.release()
    assert len(local_batch("orders", []).messages) == 0
    assert len(local_batch("orders", []).receipts) == 0
