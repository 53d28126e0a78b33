"""Pull consumers' calls: they read a queue from an offset on, and keep the group's offset here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from gateway_stub import GatewayStub, gateway_on, message, seconds

from qmq.gateway.messages import timestamp_of
from qmq.proto.rocketmq import definition_pb2 as api
from qmq.proto.rocketmq import service_pb2 as calls
from qmq.testing import TestCluster


@pytest.fixture
async def gateway() -> AsyncIterator[GatewayStub]:
    async with TestCluster(groups=2) as cluster, gateway_on(cluster) as found:
        yield found


async def filled(gateway: GatewayStub, count: int) -> tuple[api.MessageQueue, list[bytes]]:
    """A queue of a topic with two, and the bodies that are in it."""
    for number in range(count):
        tag = "even" if number % 2 == 0 else "odd"
        assert (
            await gateway.send(message("orders", b"%d" % number, tag=tag))
        ).status.code == api.OK
    queues = list((await gateway.route("orders")).message_queues)
    assert len(queues) == 2
    found = {
        queue.broker.name: [each.body for each in (await pull(gateway, queue, 0))[1]]
        for queue in queues
    }
    assert sorted(body for each in found.values() for body in each) == sorted(
        b"%d" % number for number in range(count)
    )
    queue = max(queues, key=lambda each: len(found[each.broker.name]))
    return queue, found[queue.broker.name]


async def pull(
    gateway: GatewayStub,
    queue: api.MessageQueue,
    offset: int,
    *,
    most: int = 100,
    wait_s: float = 0,
    tags: str = "*",
    sql: str = "",
) -> tuple[int, list[api.Message], int]:
    """The status, the messages, and the next offset."""
    wanted = (
        api.FilterExpression(type=api.SQL, expression=sql)
        if sql
        else api.FilterExpression(type=api.TAG, expression=tags)
    )
    request = calls.PullMessageRequest(
        group=api.Resource(name="G"),
        message_queue=queue,
        offset=offset,
        batch_size=most,
        filter_expression=wanted,
        long_polling_timeout=seconds(wait_s),
    )
    answers = [
        each
        async for each in gateway.stub.PullMessage(request, metadata=gateway.headers, timeout=30)
    ]
    ends = [each.next_offset for each in answers if each.HasField("next_offset")]
    return (
        answers[0].status.code,
        [each.message for each in answers if each.HasField("message")],
        ends[0] if ends else -1,
    )


async def ask(gateway: GatewayStub, call: str, request: Any) -> Any:
    return await getattr(gateway.stub, call)(request, metadata=gateway.headers)


async def query(
    gateway: GatewayStub,
    queue: api.MessageQueue,
    policy: api.QueryOffsetPolicy.ValueType,
    at_ms: int = 0,
) -> int:
    request = calls.QueryOffsetRequest(message_queue=queue, query_offset_policy=policy)
    if at_ms:
        request.timestamp.CopyFrom(timestamp_of(at_ms))
    answer = await ask(gateway, "QueryOffset", request)
    assert answer.status.code == api.OK
    return int(answer.offset)


async def test_a_queue_is_read_from_an_offset_on_page_by_page(gateway: GatewayStub) -> None:
    queue, bodies = await filled(gateway, 20)
    offset, found = 0, []
    while True:
        code, messages, offset = await pull(gateway, queue, offset, most=3)
        if code == api.MESSAGE_NOT_FOUND:
            break
        assert len(messages) <= 3
        found += messages
    assert [each.body for each in found] == bodies
    assert [each.system_properties.queue_offset for each in found] == list(range(len(bodies)))
    assert offset == len(bodies) == await query(gateway, queue, api.END)


async def test_what_a_subscription_does_not_want_is_passed_over(gateway: GatewayStub) -> None:
    queue, bodies = await filled(gateway, 20)
    even = [each for each in bodies if int(each) % 2 == 0]
    assert [each.body for each in (await pull(gateway, queue, 0, tags="even"))[1]] == even
    assert [each.body for each in (await pull(gateway, queue, 0, sql="TAGS = 'even'"))[1]] == even
    assert await pull(gateway, queue, 0, tags="none") == (api.MESSAGE_NOT_FOUND, [], len(bodies))


async def test_offsets_are_found_at_the_ends_and_by_time(gateway: GatewayStub) -> None:
    queue, bodies = await filled(gateway, 20)
    stored = (await pull(gateway, queue, 0))[1][-1].system_properties.store_timestamp
    assert await query(gateway, queue, api.BEGINNING) == 0
    assert await query(
        gateway, queue, api.TIMESTAMP, stored.seconds * 1000 + stored.nanos // 1_000_000
    ) < len(bodies)
    assert await query(gateway, queue, api.TIMESTAMP, (stored.seconds + 3600) * 1000) == len(bodies)


async def test_a_groups_offset_is_kept_and_is_its_progress(gateway: GatewayStub) -> None:
    queue, bodies = await filled(gateway, 20)
    get = calls.GetOffsetRequest(group=api.Resource(name="G"), message_queue=queue)
    assert (await ask(gateway, "GetOffset", get)).status.code == api.OFFSET_NOT_FOUND
    for offset in (2, len(bodies), 1):
        update = calls.UpdateOffsetRequest(
            group=api.Resource(name="G"), message_queue=queue, offset=offset
        )
        assert (await ask(gateway, "UpdateOffset", update)).status.code == api.OK
        answer = await ask(gateway, "GetOffset", get)
        assert (answer.status.code, answer.offset) == (api.OK, offset)
    progress = {
        each.broker_group: each.settled_before
        for each in await gateway.mq.metadata.describe_groups("orders", "G")
    }
    assert progress[queue.broker.name] == 1
    beyond = calls.UpdateOffsetRequest(
        group=api.Resource(name="G"), message_queue=queue, offset=len(bodies) + 1
    )
    assert (await ask(gateway, "UpdateOffset", beyond)).status.code == api.ILLEGAL_OFFSET


async def test_a_long_poll_ends_with_the_next_message(gateway: GatewayStub) -> None:
    queue, bodies = await filled(gateway, 4)

    async def send_until_there() -> None:
        while await query(gateway, queue, api.END) == len(bodies):
            await gateway.send(message("orders", b"next"))

    waiting = asyncio.create_task(pull(gateway, queue, len(bodies), wait_s=20))
    await send_until_there()
    code, messages, _ = await waiting
    assert (code, {each.body for each in messages}) == (api.OK, {b"next"})


async def test_what_cannot_be_pulled_is_refused(gateway: GatewayStub) -> None:
    queue, _ = await filled(gateway, 4)
    assert (await pull(gateway, queue, -1))[0] == api.ILLEGAL_OFFSET
    assert (await pull(gateway, queue, 0, most=0))[0] == api.BAD_REQUEST
    elsewhere = api.MessageQueue(topic=queue.topic, broker=api.Broker(name="elsewhere"))
    assert (await pull(gateway, elsewhere, 0))[0] == api.BAD_REQUEST
    assert (await pull(gateway, api.MessageQueue(topic=api.Resource(name="nothing")), 0))[
        0
    ] == api.TOPIC_NOT_FOUND
    await gateway.send(message("inorder", kind=api.FIFO, group="k"))
    (inorder,) = (await gateway.route("inorder")).message_queues
    assert (await pull(gateway, inorder, 0))[0] == api.UNSUPPORTED


async def test_an_answer_is_bounded_in_bytes(gateway: GatewayStub) -> None:
    """Bodies that are small on disk are large when they are decompressed."""
    async with gateway.mq.producer("zeros", compression="zstd") as producer:
        for _ in range(12):
            await producer.send(bytes(2 << 20))
    read = 0
    for queue in (await gateway.route("zeros")).message_queues:
        offset, status = 0, int(api.OK)
        while status == api.OK:
            status, messages, offset = await pull(gateway, queue, offset)
            sizes = [len(each.body) for each in messages]
            assert sizes == [2 << 20] * len(sizes)
            assert len(sizes) <= 4
            read += len(sizes)
    assert read == 12
