"""Scenarios of RocketMQ's integration tests of its gRPC API, run against a gateway by the same
stub. Those about large bodies, dead letters and order: test_gateway_calls.py.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import gateway_stub
import pytest
from gateway_stub import GatewayStub, gateway_on, message, receive_request, seconds

from qmq.gateway.config import GatewayConfig
from qmq.gateway.sending import TransactionTiming
from qmq.proto.rocketmq import definition_pb2 as api
from qmq.proto.rocketmq import service_pb2 as calls
from qmq.testing import TestCluster, virtual

QUICK = TransactionTiming(first_check_ms=0, pauses_ms=(50,), look_ms=10)
CONFIG = GatewayConfig(port=0, invisible_ms_min=0, sweep_ms=10, transactions=QUICK)
GROUPS = 2


@pytest.fixture
async def gateway() -> AsyncIterator[GatewayStub]:
    async with TestCluster(groups=GROUPS) as cluster, gateway_on(cluster, CONFIG) as found:
        yield found


async def assignments(gateway: GatewayStub, topic: str) -> list[api.MessageQueue]:
    request = calls.QueryAssignmentRequest(
        topic=api.Resource(name=topic), group=api.Resource(name="G"), endpoints=gateway.endpoints
    )
    answer = await gateway.stub.QueryAssignment(request, metadata=gateway.headers)
    assert answer.status.code == api.OK
    return [each.message_queue for each in answer.assignments]


async def route_is_queried(gateway: GatewayStub) -> None:
    await gateway.send(message("orders"))
    answer = await gateway.route("orders")
    assert answer.status.code == api.OK
    assert {each.broker.endpoints.addresses[0].port for each in answer.message_queues} == {
        gateway.gateway.port
    }
    assert len(answer.message_queues) == GROUPS


async def assignment_is_queried(gateway: GatewayStub) -> None:
    await gateway.send(message("orders"))
    assert {each.broker.name for each in await assignments(gateway, "orders")} == {
        "group-1",
        "group-2",
    }


async def test_query_fifo_assignment(gateway: GatewayStub) -> None:
    """Every queue is assigned to every consumer, as RocketMQ's proxy does; an ordered topic has one
    here.
    """
    await gateway.send(message("inorder", kind=api.FIFO, group="k"))
    route = (await gateway.route("inorder")).message_queues
    assert [each.broker.name for each in await assignments(gateway, "inorder")] == [
        each.broker.name for each in route
    ]


async def transaction_is_checked_and_then_committed(gateway: GatewayStub) -> None:
    stream = await gateway.produce("orders")
    sent = await gateway.send(message("orders", b"half", kind=api.TRANSACTION))
    while not (command := await stream.read()).HasField("recover_orphaned_transaction_command"):
        pass
    asked = command.recover_orphaned_transaction_command
    assert asked.transaction_id == sent.entries[0].transaction_id
    request = calls.EndTransactionRequest(
        topic=asked.message.topic,
        message_id=asked.message.system_properties.message_id,
        transaction_id=asked.transaction_id,
        resolution=api.COMMIT,
        source=api.SOURCE_SERVER_CHECK,
    )
    assert (
        await gateway.stub.EndTransaction(request, metadata=gateway.headers)
    ).status.code == api.OK
    assert [each.body for each in await gateway.receive("orders")] == [b"half"]
    stream.cancel()


async def test_a_delayed_message_is_received_within_two_seconds_of_its_time() -> None:
    async with TestCluster(clock=virtual()) as cluster, gateway_on(cluster) as gateway:
        due_ms = cluster.clock.time_ms() + 10_000
        await gateway.send(message("orders", kind=api.DELAY, due_ms=due_ms))
        await cluster.clock.advance(seconds=9)
        assert not await gateway.receive("orders", wait_s=0.1)
        await cluster.clock.advance(seconds=3)
        (got,) = await gateway.receive("orders")
        stored = got.system_properties.store_timestamp
        assert due_ms <= stored.seconds * 1000 + stored.nanos // 1_000_000 <= due_ms + 2_000


async def delayed_message_is_recalled(gateway: GatewayStub) -> None:
    due_ms = time.time_ns() // 1_000_000 + 3_600_000
    sent = message("orders", kind=api.DELAY, due_ms=due_ms)
    receipt = (await gateway.send(sent)).entries[0]
    request = calls.RecallMessageRequest(
        topic=api.Resource(name="orders"), recall_handle=receipt.recall_handle
    )
    answer = await gateway.stub.RecallMessage(request, metadata=gateway.headers)
    assert (answer.status.code, answer.message_id) == (api.OK, sent.system_properties.message_id)
    assert [each async for each in gateway.mq.delayed.list("orders")] == []


async def changed_handle_is_valid_and_the_one_before_is_not(gateway: GatewayStub) -> None:
    await gateway.send(message("orders"))
    (got,) = await gateway.receive("orders")
    changed = await gateway.change(got, 30)
    assert changed.status.code == api.OK
    valid = api.Message(topic=got.topic, system_properties=got.system_properties)
    valid.system_properties.receipt_handle = changed.receipt_handle
    answer = await gateway.ack(got, valid)
    assert answer.status.code == api.MULTIPLE_RESULTS
    assert [each.status.code for each in answer.entries] == [api.INVALID_RECEIPT_HANDLE, api.OK]


async def test_every_call_is_answered_as_the_page_says(gateway: GatewayStub) -> None:
    """One call of each, which is the stub's column of docs/reference/rocketmq_clients.md."""
    stub, headers = gateway.stub, gateway.headers
    await changed_handle_is_valid_and_the_one_before_is_not(gateway)
    await gateway.send(message("letters"))
    (got,) = await gateway.receive("letters")
    await gateway.forward(got)
    await transaction_is_checked_and_then_committed(gateway)
    await delayed_message_is_recalled(gateway)
    await route_is_queried(gateway)
    await assignment_is_queried(gateway)
    queue = (await gateway.route("orders")).message_queues[0]
    group = api.Resource(name="P")
    pull = calls.PullMessageRequest(
        group=group, message_queue=queue, batch_size=1, long_polling_timeout=seconds(0)
    )
    assert [each async for each in stub.PullMessage(pull, metadata=headers)]
    for name, request in (
        ("Heartbeat", calls.HeartbeatRequest(client_type=api.PRODUCER)),
        ("UpdateOffset", calls.UpdateOffsetRequest(group=group, message_queue=queue, offset=0)),
        ("GetOffset", calls.GetOffsetRequest(group=group, message_queue=queue)),
        ("QueryOffset", calls.QueryOffsetRequest(message_queue=queue)),
        ("SyncLiteSubscription", calls.SyncLiteSubscriptionRequest()),
        ("NotifyClientTermination", calls.NotifyClientTerminationRequest()),
    ):
        await getattr(stub, name)(request, metadata=headers)
    empty = [
        each
        async for each in stub.ReceiveMessage(receive_request("empty", wait_s=0), metadata=headers)
    ]
    assert [each.status.code for each in empty] == [api.MESSAGE_NOT_FOUND]
    gateway_stub.check_column(gateway.gateway.counters.counts, "")


def test_the_page_of_calls_has_every_call_and_every_client() -> None:
    columns = gateway_stub.read_page()
    assert set(columns) == set(gateway_stub.CLIENTS.values())
    assert all(set(column) == set(gateway_stub.ROWS) for column in columns.values())
    assert gateway_stub.page_of(columns) == gateway_stub.PAGE.read_text()
