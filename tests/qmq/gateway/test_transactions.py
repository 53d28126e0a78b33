"""Transactions by RocketMQ's calls: a committed message is delivered once, a rolled-back one never,
and producers are asked about undecided ones.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import grpc
import pytest
from gateway_stub import GatewayStub, gateway_on, message, seconds, signed
from support import eventually

import qmq
from qmq.client.producing.delayed import DelayedMessage
from qmq.gateway.clients import ClientKeys, GatewayCredentials
from qmq.gateway.config import GatewayConfig
from qmq.gateway.sending import CheckPlan, TransactionTiming
from qmq.model import MessageId
from qmq.process.event_loop import SystemClock, time_of
from qmq.proto.rocketmq import definition_pb2 as api
from qmq.proto.rocketmq import service_pb2 as calls
from qmq.testing import TestCluster, virtual

QUICK = TransactionTiming(first_check_ms=0, pauses_ms=(50,), look_ms=10)
CONFIG = GatewayConfig(port=0, invisible_ms_min=0, sweep_ms=10, transactions=QUICK)


@pytest.fixture
async def gateway() -> AsyncIterator[GatewayStub]:
    async with TestCluster() as cluster, gateway_on(cluster, CONFIG) as found:
        yield found


async def half(gateway: GatewayStub, topic: str, body: bytes = b"half") -> str:
    """A half message is sent; its transaction."""
    answer = await gateway.send(
        message(topic, body, kind=api.TRANSACTION, tag="t", keys=["k"], colour="blue")
    )
    assert answer.status.code == api.OK
    return str(answer.entries[0].transaction_id)


async def end(
    gateway: GatewayStub,
    topic: str,
    transaction: str,
    resolution: api.TransactionResolution.ValueType,
) -> int:
    request = calls.EndTransactionRequest(
        topic=api.Resource(name=topic), transaction_id=transaction, resolution=resolution
    )
    answer = await gateway.stub.EndTransaction(request, metadata=gateway.headers)
    return int(answer.status.code)


async def test_a_committed_message_comes_once_and_one_that_is_rolled_back_never(
    gateway: GatewayStub,
) -> None:
    committed, rolled_back = (
        await half(gateway, "orders", b"commit"),
        await half(gateway, "orders", b"rollback"),
    )
    assert not await gateway.receive("orders", wait_s=0.1)
    assert await end(gateway, "orders", rolled_back, api.ROLLBACK) == api.OK
    assert await end(gateway, "orders", committed, api.COMMIT) == api.OK
    [got] = await gateway.receive("orders")
    system = got.system_properties
    assert got.body == b"commit"
    assert system.message_type == api.TRANSACTION
    assert system.tag == "t"
    assert list(system.keys) == ["k"]
    await gateway.ack(got)
    assert await end(gateway, "orders", committed, api.COMMIT) == api.OK
    assert not await gateway.receive("orders", wait_s=0.1)


class WrongClock(SystemClock):
    """A machine's clock that is ahead by so many hours, or behind."""

    def __init__(self, hours: int) -> None:
        self._ahead_ms = hours * 3_600_000

    def time_ms(self) -> int:
        return super().time_ms() + self._ahead_ms


@pytest.mark.parametrize("hours", [24, -11])
async def test_a_gateways_wrong_clock_delays_no_committed_message(hours: int) -> None:
    async with (
        TestCluster() as cluster,
        gateway_on(cluster, CONFIG, clock=WrongClock(hours)) as gateway,
    ):
        committed = await half(gateway, "orders", b"commit")
        assert await end(gateway, "orders", committed, api.COMMIT) == api.OK
        [got] = await gateway.receive("orders")
        assert got.body == b"commit"


async def test_a_half_message_whose_limit_has_passed_is_refused_and_not_rolled_back() -> None:
    async with (
        TestCluster() as cluster,
        gateway_on(cluster, CONFIG, clock=WrongClock(-13)) as gateway,
    ):
        answer = await gateway.send(message("orders", b"half", kind=api.TRANSACTION))
        assert answer.status.code != api.OK
        assert "check the clock" in answer.status.message


def test_no_step_of_a_gateways_clock_ends_the_checks_or_hurries_them() -> None:
    plan = CheckPlan(TransactionTiming(first_check_ms=6_000, pauses_ms=(10_000,)))
    created_ms, day_ms = 1_800_000_000_000, 86_400_000
    times = time_of(created_ms + day_ms), time_of(created_ms)
    found = DelayedMessage(
        "t", "orders", MessageId(1, 1, 0), *times, None, (), {}, None, 0, "half", "", "", "d1"
    )
    now_ms = 500_000
    assert not plan.is_time(found, created_ms - day_ms, now_ms), (
        "it is new, and the clock is behind"
    )
    assert plan.is_time(found, created_ms - day_ms, now_ms + 6_000)
    plan.note_check(found, now_ms + 6_000)
    assert not plan.is_time(found, created_ms + day_ms, now_ms + 15_000), (
        "the clock was set forward"
    )
    assert plan.is_time(found, created_ms - day_ms, now_ms + 16_000), "the clock was set back"


async def test_what_was_decided_cannot_be_decided_otherwise(gateway: GatewayStub) -> None:
    for first, then in ((api.COMMIT, api.ROLLBACK), (api.ROLLBACK, api.COMMIT)):
        transaction = await half(gateway, "orders")
        assert await end(gateway, "orders", transaction, first) == api.OK
        assert await end(gateway, "orders", transaction, then) == api.INVALID_TRANSACTION_ID
        assert await end(gateway, "orders", transaction, first) == api.OK


async def test_a_transaction_of_another_topic_or_none_is_refused(gateway: GatewayStub) -> None:
    transaction = await half(gateway, "orders")
    assert await end(gateway, "other", transaction, api.COMMIT) == api.INVALID_TRANSACTION_ID
    assert await end(gateway, "orders", "nonsense", api.COMMIT) == api.INVALID_TRANSACTION_ID
    assert (
        await end(gateway, "orders", transaction, api.TRANSACTION_RESOLUTION_UNSPECIFIED)
        == api.BAD_REQUEST
    )
    receipt = await gateway.send(
        message("orders", kind=api.DELAY, due_ms=int(time.time() * 1000) + 3_600_000)
    )
    assert receipt.entries[0].transaction_id == ""


async def test_a_producer_is_asked_about_a_transaction_that_it_forgot(gateway: GatewayStub) -> None:
    transaction = await half(gateway, "orders", b"forgotten")
    async with aclosing(asking(gateway)) as questions:
        asked = [await anext(questions) for _ in range(2)]
    assert {each.transaction_id for each in asked} == {transaction}
    found = asked[0].message
    assert found.topic.name == "orders"
    assert found.body == b"forgotten"
    assert dict(found.user_properties) == {"colour": "blue"}
    assert await end(gateway, "orders", asked[0].transaction_id, api.COMMIT) == api.OK
    [got] = await gateway.receive("orders")
    assert got.body == b"forgotten"


async def test_an_undecided_transaction_is_rolled_back_without_any_gateway() -> None:
    async with TestCluster(clock=virtual()) as cluster:
        async with gateway_on(cluster, GatewayConfig(port=0)) as gateway:
            transaction = await half(gateway, "orders")
        mq = cluster.client()
        await cluster.clock.advance(hours=11)
        assert (await mq.delayed.show(transaction)).state == "half"
        await cluster.clock.advance(hours=2)
        while (await mq.delayed.show(transaction)).state == "half":
            await cluster.clock.advance(seconds=3)
        async with gateway_on(cluster, GatewayConfig(port=0)) as gateway:
            assert (
                await end(gateway, "orders", transaction, api.COMMIT) == api.INVALID_TRANSACTION_ID
            )
            assert await end(gateway, "orders", transaction, api.ROLLBACK) == api.OK
            assert not await gateway.receive("orders", wait_s=0.1)


async def test_a_producer_that_never_knows_is_asked_so_often_and_no_more() -> None:
    timing = TransactionTiming(first_check_ms=0, pauses_ms=(1,), checks_max=3, look_ms=10)
    config = GatewayConfig(port=0, transactions=timing)
    async with TestCluster() as cluster, gateway_on(cluster, config) as gateway:
        transaction = await half(gateway, "orders")
        async with aclosing(asking(gateway)) as asked:
            for _ in range(3):
                await anext(asked)
            while (await gateway.mq.delayed.show(transaction)).state != "cancelled":
                await asyncio.sleep(0.01)
        assert await end(gateway, "orders", transaction, api.COMMIT) == api.INVALID_TRANSACTION_ID


async def test_another_gateway_decides_and_asks_when_the_first_one_is_gone() -> None:
    async with TestCluster() as cluster:
        async with gateway_on(cluster, CONFIG) as one:
            first, second = await half(one, "orders", b"1"), await half(one, "orders", b"2")
        async with gateway_on(cluster, CONFIG) as two:
            assert await end(two, "orders", first, api.COMMIT) == api.OK
            async with aclosing(asking(two)) as asked:
                assert (await anext(asked)).transaction_id == second
                assert [each.body for each in await two.receive("orders")] == [b"1"]


async def asking(
    gateway: GatewayStub,
) -> AsyncGenerator[calls.RecoverOrphanedTransactionCommand, None]:
    """What a producer of `orders` is asked, in order."""
    stream = await producing(gateway, "orders")
    try:
        while True:
            command = await stream.read()
            if command.HasField("recover_orphaned_transaction_command"):
                yield command.recover_orphaned_transaction_command
    finally:
        stream.cancel()


async def recoverable(gateway: GatewayStub, after_s: float) -> calls.SendResultEntry:
    """The entry of a half message that says when to ask about it first."""
    half = message("orders", kind=api.TRANSACTION)
    half.system_properties.orphaned_transaction_recovery_duration.CopyFrom(seconds(after_s))
    entry: calls.SendResultEntry = (await gateway.send(half)).entries[0]
    return entry


async def test_a_message_says_when_its_transaction_is_asked_about_first() -> None:
    config = GatewayConfig(port=0, transactions=TransactionTiming(look_ms=10))
    async with TestCluster(clock=virtual()) as cluster, gateway_on(cluster, config) as gateway:
        late, soon = await recoverable(gateway, 3600), await recoverable(gateway, 0.5)
        neither = await recoverable(gateway, 0)
        async with aclosing(asking(gateway)) as asked:
            first = asyncio.ensure_future(anext(asked))
            await cluster.clock.advance(seconds=1)
            assert (await first).transaction_id == soon.transaction_id
            assert await end(gateway, "orders", soon.transaction_id, api.ROLLBACK) == api.OK
            second = asyncio.ensure_future(anext(asked))
            await cluster.clock.advance(seconds=6)
            assert (await second).transaction_id == neither.transaction_id
            assert await end(gateway, "orders", neither.transaction_id, api.ROLLBACK) == api.OK
            third = asyncio.ensure_future(anext(asked))
            await cluster.clock.advance(seconds=3600)
            assert (await third).transaction_id == late.transaction_id


async def test_a_first_check_after_a_transactions_end_is_refused(gateway: GatewayStub) -> None:
    for after_s in (-1, 12 * 3600):
        refused = await recoverable(gateway, after_s)
        assert (refused.status.code, refused.transaction_id) == (api.BAD_REQUEST, "")


async def producing(gateway: GatewayStub, topic: str) -> Any:
    """The stream of a producer of the topic. It has read the gateway's settings, and nothing
    more.
    """
    stream = await gateway.produce(topic)
    assert (await stream.read()).HasField("settings")
    return stream


async def test_questions_that_a_producer_does_not_read_are_no_checks_and_its_stream_is_cut() -> (
    None
):
    timing = TransactionTiming(first_check_ms=0, pauses_ms=(1,), checks_max=50, look_ms=10)
    async with (
        TestCluster() as cluster,
        gateway_on(cluster, GatewayConfig(port=0, transactions=timing)) as gateway,
    ):
        transactions = [await half(gateway, "orders", bytes(1 << 20)) for _ in range(16)]
        stream = await producing(gateway, "orders")
        await eventually(lambda: not gateway.gateway.parts.sessions.published)
        while await stream.read() is not grpc.aio.EOF:
            pass
        assert [await end(gateway, "orders", each, api.COMMIT) for each in transactions] == [
            api.OK
        ] * len(transactions)


class StuckDelayed:
    """The delayed messages of a cluster that does not answer."""

    async def list(self, *_: object, **__: object) -> AsyncIterator[DelayedMessage]:
        await asyncio.Event().wait()
        raise AssertionError("it waits for ever")
        yield


class StuckClient:
    """A client whose delayed messages cannot be listed."""

    def __init__(self, client: qmq.Client) -> None:
        self._client, self.delayed = client, StuckDelayed()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


async def test_an_identity_whose_look_does_not_end_delays_no_others_questions() -> None:
    keys = {name: ClientKeys(name, f"secret of {name}", name) for name in ("stuck", "shop")}
    async with TestCluster() as cluster:

        def connect(token: str) -> Any:
            return StuckClient(cluster.client()) if token == "stuck" else cluster.client()

        async with gateway_on(
            cluster, CONFIG, credentials=GatewayCredentials(keys), connect=connect
        ) as gateway:
            stuck = replace(gateway, signed=signed("stuck", "secret of stuck"))
            shop = replace(gateway, signed=signed("shop", "secret of shop"))
            other = await producing(stuck, "orders")
            async with aclosing(asking(shop)) as asked:
                for _ in range(3):
                    transaction = await half(shop, "orders")
                    while (await anext(asked)).transaction_id != transaction:
                        pass  # an earlier one, whose question was under way
                    assert await end(shop, "orders", transaction, api.ROLLBACK) == api.OK
            other.cancel()
