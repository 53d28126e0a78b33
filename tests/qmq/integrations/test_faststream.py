"""FastStream: a real application on a node, with its own injection, acknowledgement policies,
routers and AsyncAPI.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

import pytest
from pydantic import BaseModel

import qmq

faststream = pytest.importorskip(
    "faststream", reason="needs FastStream: pip install 'qmq[faststream]'"
)

from faststream import AckPolicy, Context, Depends, FastStream  # noqa: E402

from qmq.integrations.faststream import QmqBroker, QmqMessage  # noqa: E402


class Order(BaseModel):
    id: int


@asynccontextmanager
async def running(broker: QmqBroker) -> AsyncIterator[FastStream]:
    """The broker in a running application."""
    app = FastStream(broker)
    started = asyncio.Event()
    app.after_startup(started.set)
    task = asyncio.create_task(app.run(sleep_time=0.01))
    try:
        async with asyncio.timeout(60):
            await asyncio.wait(
                (task, asyncio.create_task(started.wait())), return_when=asyncio.FIRST_COMPLETED
            )
        yield app
    finally:
        app.exit()
        await task


@pytest.fixture
def broker(address: str) -> QmqBroker:
    return QmqBroker(address, state_dir=False)


@pytest.fixture
async def mq(address: str) -> AsyncIterator[qmq.Client]:
    async with qmq.connect(address, state_dir=False) as client:
        yield client


async def soon(queue: asyncio.Queue[Any]) -> Any:
    async with asyncio.timeout(30):
        return await queue.get()


async def test_a_handler_gets_its_message_parsed_and_its_dependencies(
    broker: QmqBroker, subject: str
) -> None:
    got: asyncio.Queue[Any] = asyncio.Queue()

    def shop() -> str:
        return "shop 7"

    @broker.subscriber(subject, group="g")
    async def bill(
        order: Order,
        where: Annotated[str, Depends(shop)],
        message: Annotated[Any, Context("message")],
    ) -> None:
        got.put_nowait((order, where, message))

    async with running(broker):
        receipt = await broker.publish(
            Order(id=7), subject, key="k", headers={"from": "web"}, tags=["eu"]
        )
        order, where, message = await soon(got)
        assert await broker.ping(30)
    assert (order, where) == (Order(id=7), "shop 7")
    assert isinstance(message, QmqMessage)
    assert message.message_id == str(receipt.id)
    assert message.headers["from"] == "web"
    assert message.content_type == "application/json"
    assert (message.raw_message.key, message.raw_message.tags) == ("k", ("eu",))
    assert not await broker.ping(1)


async def test_a_header_keeps_its_bytes_and_one_without_a_value_is_refused(
    broker: QmqBroker, subject: str, mq: qmq.Client
) -> None:
    await broker.connect()
    sent: dict[str, Any] = {"raw": b"\xff\x00", "text": "ä", "number": 7}
    await broker.publish(b"", subject, headers=sent)
    (message,) = [each async for each in mq.browse(subject)]
    assert {name: message.headers[name] for name in sent} == {
        "raw": b"\xff\x00",
        "text": "ä".encode(),
        "number": b"7",
    }
    for none in (None, {"a": 1}):
        with pytest.raises(qmq.errors.InvalidArgument, match="'x'"):
            await broker.publish(b"", subject, headers={"x": none})  # type: ignore[dict-item]
    await broker.stop()


async def test_a_failed_message_comes_again_and_a_rejected_one_is_a_dead_letter(
    broker: QmqBroker, subject: str, mq: qmq.Client
) -> None:
    attempts: asyncio.Queue[int] = asyncio.Queue()

    @broker.subscriber(subject, group=subject)
    async def handle(number: int, message: Annotated[Any, Context("message")]) -> None:
        attempts.put_nowait(message.raw_message.attempt)
        if number == 2:
            await message.reject()
        elif message.raw_message.attempt == 1:
            raise LookupError("not yet")

    async with running(broker):
        await broker.publish(1, subject)
        assert [await soon(attempts), await soon(attempts)] == [1, 2]
        await broker.publish(2, subject)
        async with asyncio.timeout(30):
            letter = await anext(aiter(mq.consumer(f"%dlq%{subject}", "g")))
    assert letter.body == b"2"


async def test_a_message_that_cannot_be_parsed_is_a_failed_attempt(
    broker: QmqBroker, subject: str, mq: qmq.Client
) -> None:
    @broker.subscriber(subject, group=subject, ack_policy=AckPolicy.REJECT_ON_ERROR)
    async def handle(order: Order) -> None:
        raise AssertionError(order)

    async with running(broker):
        await broker.publish("no order", subject)
        async with asyncio.timeout(30):
            letter = await anext(aiter(mq.consumer(f"%dlq%{subject}", "g")))
    assert letter.body == b"no order"


async def test_several_workers_handle_an_ordered_subject_each_key_in_order(
    broker: QmqBroker, subject: str, mq: qmq.Client
) -> None:
    await mq.metadata.create_subject(
        qmq.SubjectConfig(subject, order=qmq.Order.STRICT, logical_partitions=16), partitions=2
    )
    done: asyncio.Queue[tuple[str, int]] = asyncio.Queue()

    @broker.subscriber(subject, group="g", max_workers=4)
    async def handle(number: int, message: Annotated[Any, Context("message")]) -> None:
        await asyncio.sleep(0)
        done.put_nowait((message.raw_message.key, number))

    async with running(broker):
        for number in range(20):
            await broker.publish(number, subject, key=f"k{number % 4}")
        found = [await soon(done) for _ in range(20)]
    for key in range(4):
        assert [number for name, number in found if name == f"k{key}"] == list(range(key, 20, 4))


@pytest.mark.parametrize("is_ordered", [False, True])
async def test_a_subscriber_that_stops_finishes_its_message_and_takes_no_more(
    broker: QmqBroker, subject: str, mq: qmq.Client, is_ordered: bool
) -> None:
    if is_ordered:
        await mq.metadata.create_subject(
            qmq.SubjectConfig(subject, order=qmq.Order.STRICT, logical_partitions=16), partitions=1
        )
    begun, may_end = asyncio.Event(), asyncio.Event()
    handled: list[int] = []

    @broker.subscriber(subject, group="g", max_workers=2, ack_policy=AckPolicy.ACK)
    async def handle(number: int) -> None:
        handled.append(number)
        begun.set()
        await may_end.wait()

    await broker.start()
    await broker.publish(0, subject, key="a")
    async with asyncio.timeout(60):
        await begun.wait()
        stopping = asyncio.create_task(broker.stop())
        await asyncio.sleep(0)
        await mq.send(subject, b"1", key="b", headers={"content-type": "application/json"})
        if not is_ordered:
            async with mq.consumer(subject, "g") as other:
                message = await anext(other)
                assert (message.body, message.attempt) == (b"1", 1)
        may_end.set()
        await stopping
        assert handled == [0]
        if is_ordered:
            async with mq.ordered_consumer(subject, "g") as next_one:
                found = await anext(next_one)
                assert (found.body, found.attempt) == (b"1", 1)


@pytest.mark.parametrize("is_batch", [False, True])
async def test_an_ordered_subscriber_that_stops_gives_back_what_it_did_not_begin(
    broker: QmqBroker, subject: str, mq: qmq.Client, is_batch: bool
) -> None:
    await mq.metadata.create_subject(
        qmq.SubjectConfig(subject, order=qmq.Order.STRICT, logical_partitions=16), partitions=4
    )
    begun, may_end = asyncio.Event(), asyncio.Event()
    handled: list[int] = []

    async def handle(found: Any) -> None:
        handled.extend(found if is_batch else [found])
        begun.set()
        await may_end.wait()

    handle.__annotations__["found"] = list[int] if is_batch else int
    broker.subscriber(subject, group="g", batch=is_batch, messages_max=2, ack_policy=AckPolicy.ACK)(
        handle
    )
    for number in range(40):
        await mq.send(
            subject,
            str(number).encode(),
            key=f"k{number % 8}",
            headers={"content-type": "application/json"},
        )
    await broker.start()
    async with asyncio.timeout(60):
        await begun.wait()
        stopping = asyncio.create_task(broker.stop())
        await asyncio.sleep(0)
        may_end.set()
        await stopping
        rest: dict[str, list[int]] = {}
        async with mq.ordered_consumer(subject, "g", ack="explicit") as other:
            for _ in range(40 - len(handled)):
                message = await anext(other)
                assert message.attempt == 1
                assert message.key is not None
                rest.setdefault(message.key, []).append(int(message.body))
                message.ack_later()
    assert len(handled) <= 2
    for key in range(8):
        assert rest[f"k{key}"] == [each for each in range(key, 40, 8) if each not in handled]


def test_asyncapi_describes_subjects_handlers_and_publishers(
    broker: QmqBroker, subject: str
) -> None:
    @broker.subscriber(subject, group="g", description="bills orders")
    @broker.publisher(f"{subject}-out")
    async def bill(order: Order) -> int:
        return order.id

    app = FastStream(broker)
    for each in broker.subscribers:
        each._build_fastdepends_model()
    found = app.schema.to_specification().to_jsonable()
    assert {each["address"] for each in found["channels"].values()} == {subject, f"{subject}-out"}
    assert {each["action"] for each in found["operations"].values()} == {"receive", "send"}
    assert "Order" in found["components"]["schemas"]
    (server,) = found["servers"].values()
    assert server["protocol"] == "qmq"


async def test_before_it_is_connected_the_broker_says_what_to_do(
    broker: QmqBroker, subject: str
) -> None:
    with pytest.raises(qmq.errors.ClientClosed, match="connect"):
        await broker.publish("x", subject)
