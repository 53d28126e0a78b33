"""RocketMQ's calls against a gateway, by its own stub: the scenarios of RocketMQ's gRPC integration
class, and what they leave out.
"""

from __future__ import annotations

import gzip
import time
import zlib
from collections import defaultdict
from collections.abc import AsyncIterator

import grpc
import pytest
from gateway_stub import CONFIG, GatewayStub, gateway_on, message, receive_request

import qmq
from qmq.gateway.config import GatewayConfig
from qmq.gateway.messages import ORDERED_TYPES, PLAIN_TYPES
from qmq.gateway.server import GatewaySource
from qmq.proto.rocketmq import definition_pb2 as api
from qmq.proto.rocketmq import service_pb2 as calls
from qmq.proto.v1 import meta_pb2 as pb
from qmq.testing import TestCluster, virtual


@pytest.fixture
async def gateway() -> AsyncIterator[GatewayStub]:
    async with TestCluster() as cluster, gateway_on(cluster) as found:
        yield found


async def ordered(gateway: GatewayStub, subject: str) -> None:
    await gateway.mq.metadata.create_subject(
        qmq.SubjectConfig(subject, order=qmq.Order.STRICT, logical_partitions=64)
    )


# --- routes and clients ---------------------------------------------------------------------------


async def test_a_route_names_the_address_by_which_the_client_came(gateway: GatewayStub) -> None:
    await gateway.send(message("plain"))
    await ordered(gateway, "inorder")
    for topic, types in (("plain", PLAIN_TYPES), ("inorder", ORDERED_TYPES)):
        found = await gateway.route(topic)
        assert found.status.code == api.OK
        [queue] = found.message_queues
        assert queue.topic.name == topic
        assert queue.permission == api.READ_WRITE
        assert tuple(queue.accept_message_types) == types
        assert queue.broker.endpoints == gateway.endpoints


async def test_what_a_gateway_does_not_do_is_refused_with_its_code(gateway: GatewayStub) -> None:
    stub, headers = gateway.stub, gateway.headers
    answer = await stub.Heartbeat(calls.HeartbeatRequest(client_type=api.PRODUCER))
    assert answer.status.code == api.CLIENT_ID_REQUIRED
    unknown = calls.HeartbeatRequest(client_type=api.LITE_PUSH_CONSUMER)
    answer = await stub.Heartbeat(unknown, metadata=headers)
    assert answer.status.code == api.UNRECOGNIZED_CLIENT_TYPE
    lite = calls.SyncLiteSubscriptionRequest()
    answer = await stub.SyncLiteSubscription(lite, metadata=headers)
    assert answer.status.code == api.UNSUPPORTED
    await gateway.send(message("plain"))
    for refused, code in (
        (message("plain", kind=api.LITE), api.UNSUPPORTED),
        (message("plain", kind=api.FIFO, group="g"), api.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE),
        (message("later", kind=api.DELAY, due_ms=4_000_000_000_000), api.ILLEGAL_DELIVERY_TIME),
    ):
        assert (await gateway.send(refused)).status.code == code


async def test_an_invisible_time_out_of_range_is_refused() -> None:
    async with TestCluster() as cluster, gateway_on(cluster, GatewayConfig(port=0)) as gateway:
        for invisible_s in (9, 43_201):
            codes = await gateway.codes("orders", invisible_s=invisible_s)
            assert codes == [api.ILLEGAL_INVISIBLE_TIME]


async def test_settings_come_back_with_what_the_server_decides(gateway: GatewayStub) -> None:
    await gateway.send(message("plain"))
    await ordered(gateway, "inorder")
    await gateway.mq.metadata.set_group_settings(
        "plain", "G", attempts_max=3, retry_delays_ms=[1_000, 7_000]
    )
    stream = gateway.stub.Telemetry(metadata=gateway.headers)
    await stream.write(
        calls.TelemetryCommand(
            settings=api.Settings(client_type=api.PRODUCER, publishing=api.Publishing())
        )
    )
    producer = await stream.read()
    assert producer.status.code == api.OK
    assert producer.settings.publishing.max_body_size == 4 * 1024 * 1024
    assert producer.settings.backoff_policy.HasField("exponential_backoff")
    for topic, fifo in (("plain", False), ("inorder", True)):
        entry = api.SubscriptionEntry(topic=api.Resource(name=topic))
        subscription = api.Subscription(group=api.Resource(name="G"), subscriptions=[entry])
        told = api.Settings(client_type=api.PUSH_CONSUMER, subscription=subscription)
        await stream.write(calls.TelemetryCommand(settings=told))
        settings = (await stream.read()).settings
        assert settings.subscription.fifo is fifo
        if not fifo:
            assert settings.backoff_policy.max_attempts == 3
            assert [each.seconds for each in settings.backoff_policy.customized_backoff.next] == [
                1,
                7,
            ]
    await stream.done_writing()
    assert await stream.read() is grpc.aio.EOF


# --- sending --------------------------------------------------------------------------------------


async def test_sent_messages_are_received_until_acknowledged(gateway: GatewayStub) -> None:
    sent = message("orders", b"a tie", tag="red", keys=["k1", "k2"], colour="blue")
    answer = await gateway.send(sent)
    assert answer.status.code == api.OK
    assert [each.message_id for each in answer.entries] == [sent.system_properties.message_id]
    [got] = await gateway.receive("orders")
    system = got.system_properties
    assert got.body == b"a tie"
    assert dict(got.user_properties) == {"colour": "blue"}
    assert got.topic.name == "orders"
    assert (system.message_id, system.tag, list(system.keys)) == (
        sent.system_properties.message_id,
        "red",
        ["k1", "k2"],
    )
    assert system.message_type == api.NORMAL
    assert system.delivery_attempt == 1
    assert system.born_host == "here"
    assert (await gateway.ack(got)).status.code == api.OK
    assert await gateway.codes("orders", wait_s=0.1) == [api.MESSAGE_NOT_FOUND]


@pytest.mark.parametrize("due", ["²", "9" * 30, "9" * 5_000])
async def test_a_header_that_is_no_time_does_not_hold_up_other_messages(
    gateway: GatewayStub, due: str
) -> None:
    await gateway.mq.send("orders", b"odd", headers={"rocketmq-due-ms": due})
    await gateway.mq.send("orders", b"good")
    found = [each.body for each in await gateway.receive("orders")]
    while len(found) < 2:
        found += [each.body for each in await gateway.receive("orders")]
    assert sorted(found) == [b"good", b"odd"]


async def test_a_message_is_an_ordinary_one_for_qmqs_own_clients(gateway: GatewayStub) -> None:
    await gateway.send(message("orders", b"from afar", tag="red", keys=["k1"], colour="blue"))
    async with gateway.mq.consumer("orders", "native") as consumer:
        got = await anext(consumer)
    assert got.body == b"from afar"
    assert got.key == "k1"
    assert got.tags == ("red",)
    assert got.headers["colour"] == b"blue"
    receipt = await gateway.mq.send(
        "orders", b"from home", key="k2", tags=["blue"], headers={"size": "1"}
    )
    [foreign] = await gateway.receive("orders", tags="blue")
    system = foreign.system_properties
    assert (system.message_id, system.tag, list(system.keys)) == (str(receipt.id), "blue", ["k2"])
    assert dict(foreign.user_properties) == {"size": "1"}


async def test_a_body_that_a_client_compressed_is_stored_as_it_was_before(
    gateway: GatewayStub,
) -> None:
    body = b"0123456789" * 300_000
    for compressed in (gzip.compress(body), zlib.compress(body)):
        sent = message("large", compressed)
        sent.system_properties.body_encoding = api.GZIP
        sent.system_properties.body_digest.CopyFrom(
            api.Digest(type=api.CRC32, checksum=f"{zlib.crc32(compressed):08X}")
        )
        assert (await gateway.send(sent)).status.code == api.OK
    for got in await gateway.receive_all(2, "large"):
        assert got.body == body
        assert got.system_properties.body_encoding == api.IDENTITY


async def test_each_entry_of_a_request_has_its_own_status(gateway: GatewayStub) -> None:
    broken = message("orders", b"x")
    broken.system_properties.body_digest.CopyFrom(api.Digest(type=api.MD5, checksum="0" * 32))
    answer = await gateway.send(message("orders"), broken)
    assert answer.status.code == api.MULTIPLE_RESULTS
    assert [each.status.code for each in answer.entries] == [api.OK, api.MESSAGE_CORRUPTED]


async def test_a_namespace_is_the_first_part_of_the_subject(gateway: GatewayStub) -> None:
    sent = message("orders", b"of the shop")
    sent.topic.resource_namespace = "shop"
    assert (await gateway.send(sent)).status.code == api.OK
    async with gateway.mq.consumer("shop.orders", "native") as consumer:
        assert (await anext(consumer)).body == b"of the shop"


async def test_a_topic_that_may_not_be_created_is_not_found() -> None:
    config = GatewayConfig(port=0, creates_topics=False)
    async with TestCluster() as cluster, gateway_on(cluster, config) as gateway:
        assert (await gateway.route("missing")).status.code == api.TOPIC_NOT_FOUND
        assert (await gateway.send(message("missing"))).status.code == api.TOPIC_NOT_FOUND
        assert await gateway.codes("missing") == [api.TOPIC_NOT_FOUND]


async def test_a_consumer_may_come_before_the_first_message(gateway: GatewayStub) -> None:
    assert await gateway.codes("new", wait_s=0.1) == [api.MESSAGE_NOT_FOUND]
    await gateway.send(message("new", b"1", kind=api.FIFO, group="a"))
    assert [each.body for each in await gateway.receive("new")] == [b"1"]


# --- delays ---------------------------------------------------------------------------------------


async def test_a_recall_handle_is_good_for_its_topic_only(gateway: GatewayStub) -> None:
    sent = message("later", kind=api.DELAY, due_ms=(int(time.time()) + 3600) * 1000)
    [entry] = (await gateway.send(sent)).entries
    for topic, code in (("other", api.MESSAGE_NOT_FOUND), ("later", api.OK), ("later", api.OK)):
        request = calls.RecallMessageRequest(
            topic=api.Resource(name=topic), recall_handle=entry.recall_handle
        )
        answer = await gateway.stub.RecallMessage(request, metadata=gateway.headers)
        assert answer.status.code == code
    assert answer.message_id == sent.system_properties.message_id
    request = calls.RecallMessageRequest(topic=api.Resource(name="later"), recall_handle="nonsense")
    answer = await gateway.stub.RecallMessage(request, metadata=gateway.headers)
    assert answer.status.code == api.BAD_REQUEST


# --- receiving and settling -----------------------------------------------------------------------


async def test_an_invisible_message_comes_again_when_its_time_is_over(gateway: GatewayStub) -> None:
    await gateway.send(message("orders"))
    [first] = await gateway.receive("orders", invisible_s=0.05)
    [again] = await gateway.receive("orders")
    assert [each.system_properties.delivery_attempt for each in (first, again)] == [1, 2]
    late = await gateway.ack(first)
    assert [each.status.code for each in late.entries] == [api.INVALID_RECEIPT_HANDLE]
    assert (await gateway.ack(again)).status.code == api.OK


async def test_of_two_acknowledgements_the_one_with_a_void_handle_fails(
    gateway: GatewayStub,
) -> None:
    await gateway.send(message("orders", b"1"), message("orders", b"2"))
    first, second = await gateway.receive_all(2, "orders")
    changed = await gateway.change(first, 30)
    assert changed.status.code == api.OK
    assert changed.receipt_handle != first.system_properties.receipt_handle
    answer = await gateway.ack(first, second)
    assert answer.status.code == api.MULTIPLE_RESULTS
    assert [each.status.code for each in answer.entries] == [api.INVALID_RECEIPT_HANDLE, api.OK]
    first.system_properties.receipt_handle = changed.receipt_handle
    assert (await gateway.ack(first)).status.code == api.OK


async def test_a_handle_is_good_for_its_own_group_and_topic_only(gateway: GatewayStub) -> None:
    await gateway.send(message("orders"))
    [got] = await gateway.receive("orders")
    assert (await gateway.ack(got, group="other")).status.code == api.INVALID_RECEIPT_HANDLE
    got.topic.name = "elsewhere"
    assert (await gateway.ack(got)).status.code == api.INVALID_RECEIPT_HANDLE
    got.topic.name = "orders"
    assert (await gateway.ack(got)).status.code == api.OK


async def test_a_changed_time_decides_when_a_message_comes_again(gateway: GatewayStub) -> None:
    await gateway.send(message("orders"))
    [got] = await gateway.receive("orders")
    await gateway.change(got, 0)
    [again] = await gateway.receive("orders")
    assert again.system_properties.delivery_attempt == 2


@pytest.mark.parametrize("kind", [api.NORMAL, api.FIFO], ids=["unordered", "ordered"])
async def test_a_suspended_message_comes_again_with_the_same_attempt(
    gateway: GatewayStub, kind: int
) -> None:
    topic = "orders" if kind == api.NORMAL else "fifo"
    await gateway.send(message(topic, b"1", kind=kind, group="g" if kind == api.FIFO else ""))
    [got] = await gateway.receive(topic)
    await gateway.change(got, 0, suspend=True)
    [again] = await gateway.receive(topic)
    assert (again.body, again.system_properties.delivery_attempt) == (b"1", 1)
    await gateway.ack(again)


async def test_a_message_that_is_given_up_is_a_dead_letter(gateway: GatewayStub) -> None:
    await gateway.send(message("orders", b"poison"))
    [got] = await gateway.receive("orders")
    assert (await gateway.forward(got)).status.code == api.OK
    async with gateway.mq.consumer("%dlq%G", "look") as consumer:
        letter = await anext(consumer)
    assert letter.body == b"poison"
    assert b"given up by its client" in letter.headers["qmq-error"]
    [dead] = await gateway.receive("%dlq%G", "other")
    assert dead.system_properties.message_id == got.system_properties.message_id


async def test_a_subscription_by_tags_gets_messages_with_one_of_them(gateway: GatewayStub) -> None:
    await gateway.send(*[message("tagged", tag.encode(), tag=tag) for tag in ("a", "b", "c")])
    got = await gateway.receive_all(2, "tagged", tags="a || c")
    assert sorted(each.body for each in got) == [b"a", b"c"]
    assert await gateway.codes("tagged", tags="a | b") == [api.ILLEGAL_FILTER_EXPRESSION]


@pytest.mark.parametrize("topic", ["plain", "inorder"])
async def test_a_subscription_by_a_condition_gets_messages_for_which_it_holds(
    gateway: GatewayStub, topic: str
) -> None:
    await ordered(gateway, "inorder")
    for number in range(10):
        await gateway.send(
            message(
                topic, b"%d" % number, tag="even" if number % 2 == 0 else "odd", number=str(number)
            )
        )
    got = await gateway.receive_all(3, topic, sql="number > 3 AND TAGS = 'even'")
    assert sorted(each.body for each in got) == [b"4", b"6", b"8"]
    assert await gateway.codes(topic, sql="number >") == [api.ILLEGAL_FILTER_EXPRESSION]


async def test_a_push_consumers_message_stays_its_own_while_it_is_alive() -> None:
    config = GatewayConfig(port=0, renewed_invisible_ms=20, sweep_ms=5)
    async with TestCluster() as cluster, gateway_on(cluster, config) as gateway:
        await gateway.send(message("orders"))
        [got] = await gateway.receive("orders", renew=True)
        assert await gateway.codes("orders", wait_s=0.2, renew=True) == [api.MESSAGE_NOT_FOUND]
        request = calls.NotifyClientTerminationRequest(group=api.Resource(name="G"))
        await gateway.stub.NotifyClientTermination(request, metadata=gateway.headers)
        assert (await gateway.ack(got)).status.code == api.INVALID_RECEIPT_HANDLE
        [again] = await gateway.receive("orders", renew=True)
        assert again.system_properties.delivery_attempt == 2


async def test_what_a_client_did_not_read_any_more_is_received_by_another(
    gateway: GatewayStub,
) -> None:
    call = gateway.stub.ReceiveMessage(
        receive_request("orders", wait_s=20), metadata=gateway.headers
    )
    call.cancel()
    await gateway.send(message("orders", b"left"))
    [got] = await gateway.receive("orders")
    assert (got.body, got.system_properties.delivery_attempt) == (b"left", 1)


async def test_a_message_without_a_reader_at_this_gateway_goes_to_another() -> None:
    async with (
        TestCluster() as cluster,
        gateway_on(cluster) as one,
        gateway_on(cluster, client_id="stub@2@2") as two,
    ):
        await one.send(message("orders", b"0"))
        [got] = await one.receive("orders")
        await one.ack(got)
        await two.send(*[message("orders", b"%d" % number) for number in range(1, 31)])
        bodies = {each.body for each in await two.receive_all(30, "orders")}
        assert bodies == {b"%d" % number for number in range(1, 31)}


# --- order ----------------------------------------------------------------------------------------


async def test_of_a_message_group_one_message_is_in_hand_at_a_time(gateway: GatewayStub) -> None:
    for number in range(6):
        await gateway.send(message("fifo", b"%d" % number, kind=api.FIFO, group=f"g{number % 2}"))
    seen: dict[str, list[bytes]] = defaultdict(list)
    while sum(map(len, seen.values())) < 6:
        found = await gateway.receive("fifo", batch=32)
        groups = [each.system_properties.message_group for each in found]
        assert len(set(groups)) == len(groups)
        for each in found:
            seen[each.system_properties.message_group].append(each.body)
        await gateway.ack(*found)
    assert seen == {"g0": [b"0", b"2", b"4"], "g1": [b"1", b"3", b"5"]}


async def test_what_follows_a_failed_fifo_message_waits_for_it(gateway: GatewayStub) -> None:
    for number in range(2):
        await gateway.send(message("fifo", b"%d" % number, kind=api.FIFO, group="g"))
    [first] = await gateway.receive("fifo", invisible_s=0.05)
    [again] = await gateway.receive("fifo")
    assert (first.body, again.body, again.system_properties.delivery_attempt) == (b"0", b"0", 2)
    assert not await gateway.receive("fifo", wait_s=0.1)
    await gateway.ack(again)
    [second] = await gateway.receive("fifo")
    assert second.body == b"1"


async def test_one_ordered_topic_takes_messages_of_all_types(gateway: GatewayStub) -> None:
    await ordered(gateway, "mixed")
    due_ms = int(time.time() * 1000) + 50
    answer = await gateway.send(
        message("mixed", b"normal"),
        message("mixed", b"fifo", kind=api.FIFO, group="g"),
        message("mixed", b"delay", kind=api.DELAY, due_ms=due_ms),
        message("mixed", b"transaction", kind=api.TRANSACTION),
    )
    assert [each.status.code for each in answer.entries] == [api.OK] * 4
    commit = calls.EndTransactionRequest(
        topic=api.Resource(name="mixed"),
        transaction_id=answer.entries[3].transaction_id,
        resolution=api.COMMIT,
    )
    assert (
        await gateway.stub.EndTransaction(commit, metadata=gateway.headers)
    ).status.code == api.OK
    found = {each.body: each.system_properties for each in await gateway.receive_all(4, "mixed")}
    types = {body: (each.message_type, each.message_group) for body, each in found.items()}
    assert types == {
        b"normal": (api.NORMAL, ""),
        b"fifo": (api.FIFO, "g"),
        b"delay": (api.DELAY, ""),
        b"transaction": (api.TRANSACTION, ""),
    }


async def test_order_by_message_group_survives_a_split(gateway: GatewayStub) -> None:
    await ordered(gateway, "fifo")
    sent: dict[str, list[bytes]] = defaultdict(list)

    async def send(numbers: range) -> None:
        for number in numbers:
            group = f"g{number % 8}"
            sent[group].append(b"%d" % number)
            assert (
                await gateway.send(message("fifo", b"%d" % number, kind=api.FIFO, group=group))
            ).status.code == api.OK

    await send(range(24))
    await gateway.mq.metadata.change_route("fifo", split=pb.SplitOperation(partition=1))
    await send(range(24, 48))
    seen: dict[str, list[bytes]] = defaultdict(list)
    while sum(map(len, seen.values())) < 48:
        found = await gateway.receive("fifo")
        for each in found:
            seen[each.system_properties.message_group].append(each.body)
        await gateway.ack(*found)
    assert seen == sent


async def test_a_fifo_message_that_is_given_up_sets_its_group_aside(gateway: GatewayStub) -> None:
    for number in range(2):
        await gateway.send(message("fifo", b"%d" % number, kind=api.FIFO, group="g"))
    await gateway.send(message("fifo", b"other", kind=api.FIFO, group="h"))
    for got in await gateway.receive_all(2, "fifo"):
        if got.body == b"0":
            assert (await gateway.forward(got)).status.code == api.OK
        else:
            await gateway.ack(got)
    assert not await gateway.receive("fifo", wait_s=0.1)


async def test_calls_are_counted_by_client_and_outcome(gateway: GatewayStub) -> None:
    await gateway.send(message("orders"))
    await gateway.receive("orders")
    readings = {
        each.figure.name: each.rows
        for each in GatewaySource(gateway.gateway).read()
        if each is not None
    }
    calls_seen = dict(readings["qmq_gateway_calls_total"])
    assert calls_seen["SendMessage", "", "OK"] == calls_seen["ReceiveMessage", "", "OK"] == 1
    assert (
        readings["qmq_gateway_invisible_messages"] == readings["qmq_gateway_clients"] == [((), 1)]
    )


# --- the end of a gateway -------------------------------------------------------------------------


async def test_what_clients_hold_comes_again_after_a_gateway_has_stopped() -> None:
    async with TestCluster() as cluster:
        async with gateway_on(cluster) as one:
            await one.send(message("orders", b"1"), message("orders", b"2"))
            first, second = await one.receive_all(2, "orders", invisible_s=0.3)
            await one.ack(first)
        async with gateway_on(cluster, CONFIG) as two:
            [again] = await two.receive("orders")
            assert again.body == second.body
            assert again.system_properties.delivery_attempt == 2
            assert (await two.ack(second)).status.code == api.INVALID_RECEIPT_HANDLE


@pytest.mark.parametrize("topic", ["plain", "inorder"])
async def test_what_a_lost_gateway_had_handed_out_comes_again_when_its_lease_is_over(
    topic: str,
) -> None:
    async with (
        TestCluster(clock=virtual()) as cluster,
        gateway_on(cluster, at="gateway-1") as lost,
        gateway_on(cluster, client_id="stub@2@2", at="gateway-2") as other,
    ):
        await ordered(other, "inorder")
        await other.send(*[message(topic, b"%d" % number) for number in range(5)])
        held = await lost.receive_all(5, topic, invisible_s=3_600)
        await lost.ack(held[0])
        heal = cluster.cut("gateway-1")
        await cluster.clock.advance(seconds=35)
        again = []
        while len(again) < 4:
            again += await other.receive(topic, wait_s=0)
            await cluster.clock.advance(seconds=1)
        assert {each.body for each in again} == {each.body for each in held[1:]}
        assert (await other.ack(*again)).status.code == api.OK
        heal()
