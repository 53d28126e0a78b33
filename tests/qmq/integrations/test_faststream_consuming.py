"""FastStream's base cases about consuming, in memory and on a node."""

import asyncio
from typing import Annotated, Any

import pytest
from pydantic import BaseModel

import qmq

faststream = pytest.importorskip(
    "faststream", reason="needs FastStream: pip install 'qmq[faststream]'"
)

from faststream import Context, Depends  # noqa: E402
from faststream.exceptions import SetupError, StopConsume  # noqa: E402
from faststream_places import Place, Seen  # noqa: E402
from support import eventually  # noqa: E402

from qmq.integrations.faststream import QmqMessage, QmqRouter  # noqa: E402
from qmq.integrations.faststream.annotations import Broker, Client, Message  # noqa: E402
from qmq.integrations.faststream.broker import ANNOTATIONS  # noqa: E402


async def test_one_handler_serves_two_subjects(place: Place, subject: str) -> None:
    broker, seen = place.broker(), Seen()

    @broker.subscriber(subject, group="g")
    @broker.subscriber(f"{subject}-2", group="g")
    def handle(body: Any) -> None:
        seen(body)

    async with place.started(broker):
        await broker.publish("one", subject)
        await broker.publish("two", f"{subject}-2")
        assert sorted(await seen.next(2)) == ["one", "two"]


async def test_each_group_gets_a_message_and_one_subscriber_of_it(
    place: Place, subject: str
) -> None:
    broker, seen = place.broker(), Seen()

    @broker.subscriber(subject, group="billing")
    @broker.subscriber(subject, group="billing")
    @broker.subscriber(subject, group="shipping")
    def handle(body: Any, by: Annotated[Any, Context("handler_")]) -> None:
        seen(by.group)

    async with place.started(broker):
        await broker.publish("one", subject)
        assert sorted(await seen.next(2)) == ["billing", "shipping"]
    assert seen.is_empty


async def test_a_subscriber_with_tags_gets_the_messages_that_have_them(
    place: Place, subject: str
) -> None:
    broker, seen = place.broker(), Seen()

    @broker.subscriber(subject, group="g", tags_any=["eu", "us"], tags_all=["paid"])
    def handle(body: Any) -> None:
        seen(body)

    async with place.started(broker):
        for body, tags in (("a", []), ("b", ["eu"]), ("c", ["paid"]), ("d", ["eu", "paid", "new"])):
            await broker.publish(body, subject, tags=tags)
        assert await seen.next() == ["d"]
    assert seen.is_empty


async def test_the_first_handler_whose_filter_fits_gets_the_message(
    place: Place, subject: str
) -> None:
    broker, seen = place.broker(), Seen()
    subscriber = broker.subscriber(subject, group="g")

    @subscriber(filter=lambda message: message.content_type == "application/json")
    async def for_json(body: Any) -> None:
        seen(("json", body))

    @subscriber
    async def for_others(body: Any) -> None:
        seen(("other", body))

    async with place.started(broker):
        await broker.publish({"id": 7}, subject)
        assert await seen.next() == [("json", {"id": 7})]
        await broker.publish("seven", subject)
        assert await seen.next() == [("other", "seven")]


async def test_without_a_serializer_values_come_as_they_are(place: Place, subject: str) -> None:
    broker, seen = place.broker(serializer=None), Seen()

    class Order(BaseModel):
        id: int

    def hundred() -> str:
        return "100"

    @broker.subscriber(subject, group="g")
    async def handle(
        order: Order, broker: Annotated[Any, Context()], amount: int = Depends(hundred)
    ) -> None:
        seen((order, amount, broker))

    async with place.started(broker):
        await broker.publish({"id": 1}, subject)
        assert await seen.next() == [({"id": 1}, "100", broker)]


async def test_a_message_is_not_asked_for_beside_a_handler(place: Place, subject: str) -> None:
    broker = place.broker()
    subscriber = broker.subscriber(subject, group="g")

    @subscriber
    async def handle(body: Any) -> None: ...

    async with place.started(broker):
        with pytest.raises(AssertionError, match="handlers"):
            await subscriber.get_one(timeout=0)


async def test_two_brokers_handle_and_publish_for_each_other(place: Place, subject: str) -> None:
    one, other, seen = place.broker(), place.broker(), Seen()

    @one.subscriber(subject, group="g")
    @other.publisher(f"{subject}-2")
    def pass_on(body: Any) -> Any:
        return body

    @one.subscriber(f"{subject}-2", group="g")
    def handle(body: Any) -> None:
        seen(body)

    async with place.started(one, other):
        await one.publish("hello", subject)
        assert await seen.next() == ["hello"]


async def test_a_handler_asks_for_message_broker_and_client_by_hints(
    place: Place, subject: str
) -> None:
    broker, seen = place.broker(), Seen()

    @broker.subscriber(subject, group="g")
    async def handle(body: Any, message: Message, by: Broker, mq: Client) -> None:
        seen((body, message.body, by, mq))

    async with place.started(broker):
        await broker.publish("hello", subject)
        assert await seen.next() == [("hello", b"hello", broker, broker.config.client)]


@pytest.mark.parametrize(
    "hint",
    [
        qmq.Message,
        qmq.OrderedMessage,
        QmqMessage,
        qmq.Client,
        qmq.Client | None,
        Annotated[qmq.Client, "doc"],
        Annotated[qmq.Client, "doc"] | None,
    ],
    ids=[
        "message",
        "ordered",
        "faststream-message",
        "client",
        "optional",
        "annotated",
        "optional-annotated",
    ],
)
async def test_a_class_that_is_not_in_the_body_is_refused_with_the_hint_to_use(
    memory: Place, subject: str, hint: Any
) -> None:
    def dependency(of_dependency: hint) -> None: ...

    async def direct(of_handler: hint) -> None: ...

    async def behind(value: Annotated[None, Depends(dependency)]) -> None: ...

    for handler, owner in (
        (direct, "`of_handler`"),
        (behind, "`of_dependency` of dependency `dependency`"),
    ):
        router = QmqRouter()
        router.subscriber(subject, group="g")(handler)
        with pytest.raises(
            SetupError, match=f"{owner} is annotated.*(?s:.)*from {ANNOTATIONS} import"
        ):
            async with memory.started(memory.broker(routers=[router])):
                pass
    unchecked = memory.broker(apply_types=False)
    unchecked.subscriber(subject, group="g")(direct)
    async with memory.started(unchecked):
        pass


# --- what there is on a node only: FastStream's in-memory brokers hand messages to handlers only --


async def test_one_message_is_asked_for_or_none_is_there(node: Place, subject: str) -> None:
    broker = node.broker()
    subscriber = broker.subscriber(subject, group="g")
    async with node.started(broker):
        assert await subscriber.get_one(timeout=1e-24) is None
        asked = asyncio.create_task(subscriber.get_one(timeout=60))
        await broker.publish("hello", subject)
        message = await asked
        assert await message.decode() == "hello"
        await message.ack()


async def test_a_handler_stops_its_own_subscriber(node: Place, subject: str) -> None:
    broker, seen = node.broker(), Seen()
    subscriber = broker.subscriber(subject, group="g", max_workers=2)

    @subscriber
    def handle(body: Any) -> None:
        seen(body)
        raise StopConsume

    async with node.started(broker):
        await broker.publish("hello", subject)
        assert await seen.next() == ["hello"]
        await eventually(lambda: not subscriber.running and not broker.config.client.consumers)
        await broker.publish("again", subject)
        again = broker.subscriber(subject, group="g")
        bodies = {await (await again.get_one(timeout=60)).decode() for _ in range(2)}
    assert bodies == {"hello", "again"}
    assert seen.is_empty
