"""Authentication and permissions of RocketMQ's clients: signatures, rules, TLS, the gateway of `qmq
dev`.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import uvloop
from gateway_stub import CONFIG, WHEN, GatewayStub, message, signed
from support import eventually, node_config, running

import qmq
from qmq.cli.gateway import GatewayOptions
from qmq.errors import InvalidArgument
from qmq.gateway.clients import ClientKeys, GatewayCredentials
from qmq.gateway.config import GatewayConfig
from qmq.gateway.sending import TransactionTiming
from qmq.gateway.server import GatewayServer
from qmq.gateway.status import Refused
from qmq.proto.rocketmq import definition_pb2 as api
from qmq.proto.rocketmq import service_pb2 as calls
from qmq.proto.rocketmq.service_pb2_grpc import MessagingServiceStub
from qmq.security.audit import AuditLog
from qmq.security.certificates import create_authority, issue
from qmq.testing import TestCluster


def known() -> GatewayCredentials:
    return GatewayCredentials({"shop": ClientKeys("shop", "secret", "qmq_token")})


def test_a_signature_names_the_keys_it_was_made_with() -> None:
    assert known().authenticate(dict(signed("shop", "secret"))).token == "qmq_token"
    assert "secret" not in repr(known().authenticate(dict(signed("shop", "secret"))))


@pytest.mark.parametrize(
    "headers",
    [
        {},
        dict(signed("shop", "wrong")),
        dict(signed("nobody", "secret")),
        dict(signed("nobody", "")),
        {**dict(signed("shop", "secret")), "x-mq-date-time": "20261124T120001Z"},
        {"authorization": "Bearer qmq_token", "x-mq-date-time": WHEN},
    ],
)
def test_who_is_not_signed_for_is_refused(headers: dict[str, str]) -> None:
    with pytest.raises(Refused) as caught:
        known().authenticate(headers)
    assert caught.value.code == api.UNAUTHORIZED


@pytest.mark.parametrize("text", ["", "{}", "[]", "[1]", '[{"access_key": "a", "secret_key": ""}]'])
def test_a_file_of_keys_that_cannot_be_used_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_text(text)
    with pytest.raises(InvalidArgument):
        GatewayCredentials.load(path)
    with pytest.raises(InvalidArgument):
        GatewayCredentials.load(tmp_path / "missing")


def test_a_file_of_keys_is_read(tmp_path: Path) -> None:
    entry = {"access_key": "a", "secret_key": "s", "token": "t"}
    path = tmp_path / "keys.json"
    path.write_text(json.dumps([entry]))
    assert GatewayCredentials.load(path).keys == {"a": ClientKeys("a", "s", "t")}
    path.write_text(json.dumps([entry, entry]))
    with pytest.raises(InvalidArgument, match="twice"):
        GatewayCredentials.load(path)


@asynccontextmanager
async def guarded_gateway(
    tmp_path: Path, audit: AuditLog | None = None, config: GatewayConfig = CONFIG
) -> AsyncIterator[tuple[GatewayStub, qmq.Client]]:
    """A node that enforces rules, a gateway with two access keys, and the administrator."""
    async with running(node_config(tmp_path, delay=True)) as node:
        tokens = {}
        async with qmq.connect(node.address) as first:
            for name in ("op:admin", "app:orders", "app:other"):
                tokens[name] = (await first.access.create_token(name)).token
            for kind in ("cluster", "subject", "group"):
                await first.access.put_rule("op:admin", [], kind)
            await first.access.put_rule(
                "app:orders", ["produce", "create", "consume", "describe"], "subject", "orders"
            )
            await first.access.put_rule("app:orders", ["consume"], "group", "G")
        async with (
            qmq.connect(node.address, token=tokens["op:admin"]) as admin,
            qmq.connect(node.address) as nobody,
        ):
            await admin.access.set_mode("enforce")
            await eventually(
                lambda: (
                    node.view.access.mode.value == "enforce" and len(node.view.access.rules) == 5
                )
            )
            names = {"orders": tokens["app:orders"], "other": tokens["app:other"]}
            keys = {
                name: ClientKeys(name, f"secret of {name}", token) for name, token in names.items()
            }
            gateway = GatewayServer(
                nobody,
                config,
                credentials=GatewayCredentials(keys),
                connect=lambda token: qmq.connect(node.address, token=token, state_dir=False),
                audit=audit,
            )
            await gateway.start()
            try:
                async with grpc.aio.insecure_channel(f"127.0.0.1:{gateway.port}") as channel:
                    yield GatewayStub(MessagingServiceStub(channel), gateway, nobody), admin
            finally:
                await gateway.stop()


async def test_each_access_key_may_do_what_its_token_may(tmp_path: Path) -> None:
    async with guarded_gateway(tmp_path) as (gateway, admin):
        assert (await gateway.send(message("orders"))).status.code == api.UNAUTHORIZED
        assert (await gateway.route("orders")).status.code == api.UNAUTHORIZED
        other = replace(gateway, signed=signed("other", "secret of other"))
        assert (await other.send(message("orders"))).status.code == api.FORBIDDEN
        orders = replace(gateway, signed=signed("orders", "secret of orders"))
        assert (await orders.send(message("orders", b"allowed"))).status.code == api.OK
        assert (await orders.send(message("payments"))).status.code == api.FORBIDDEN
        [got] = await orders.receive("orders")
        assert got.body == b"allowed"
        assert (await other.ack(got)).status.code == api.INVALID_RECEIPT_HANDLE
        assert (await orders.ack(got)).status.code == api.OK
        assert await orders.codes("orders", "forbidden") == [api.FORBIDDEN]
        assert (await admin.access.whoami()).principal == "op:admin"


async def test_a_quota_of_an_access_keys_principal_holds_through_the_gateway(
    tmp_path: Path,
) -> None:
    async with guarded_gateway(tmp_path) as (gateway, admin):
        orders = replace(gateway, signed=signed("orders", "secret of orders"))
        assert (await orders.send(message("orders"))).status.code == api.OK
        await admin.access.put_quota("app:orders", {"subjects": 1})
        await admin.access.put_rule("app:orders", ["produce", "create"], "subject", "more")

        async def code() -> int:
            return int((await orders.send(message("more"))).status.code)

        while (found := await code()) == api.FORBIDDEN:  # until the rule is known everywhere
            await asyncio.sleep(0.01)
        assert found == api.TOO_MANY_REQUESTS


async def test_calls_that_are_not_signed_for_are_in_the_audit_log(tmp_path: Path) -> None:
    records: list[str] = []
    async with guarded_gateway(tmp_path, AuditLog(sink=records.append)) as (gateway, _):
        assert (await gateway.send(message("orders"))).status.code == api.UNAUTHORIZED
        wrong = replace(gateway, signed=signed("orders", "a guess"))
        assert (await wrong.route("orders")).status.code == api.UNAUTHORIZED
        assert await wrong.codes("orders") == [api.UNAUTHORIZED]
        stream = wrong.stub.Telemetry(metadata=wrong.headers)
        assert (await stream.read()).status.code == api.UNAUTHORIZED
        assert (
            await replace(gateway, signed=signed("orders", "secret of orders")).send(
                message("orders")
            )
        ).status.code == api.OK
    found = [json.loads(each) for each in records]
    assert [(each["action"], each.get("on")) for each in found] == [
        ("SendMessage", None),
        ("QueryRoute", "access key orders"),
        ("ReceiveMessage", "access key orders"),
        ("Telemetry", "access key orders"),
    ]
    assert {(each["principal"], each["how"], each["result"]) for each in found} == {
        ("any:anonymous", "none", "denied")
    }
    assert all(each["from"].startswith("127.0.0.1:") and each["error"] for each in found)


async def test_clients_come_by_tls(tmp_path: Path) -> None:
    authority = create_authority(tmp_path / "certs")
    made = issue(tmp_path / "certs", "gateway", "node", ["127.0.0.1"])
    options = GatewayOptions(tls_cert=made.cert, tls_key=made.key)
    records: list[str] = []
    async with (
        running(node_config(tmp_path / "node")) as node,
        qmq.connect(node.address) as mq,
        AsyncExitStack() as ending,
    ):
        gateway = GatewayServer(
            mq, CONFIG, network=options.network(), audit=AuditLog(sink=records.append)
        )
        await gateway.start()
        ending.push_async_callback(gateway.stop)
        trusted = grpc.ssl_channel_credentials(authority.cert.read_bytes())
        async with grpc.aio.secure_channel(f"127.0.0.1:{gateway.port}", trusted) as channel:
            stub = GatewayStub(MessagingServiceStub(channel), gateway, mq)
            assert (await stub.send(message("orders", b"sealed"))).status.code == api.OK
            [got] = await stub.receive("orders")
            assert got.body == b"sealed"
        assert not records
        async with grpc.aio.insecure_channel(f"127.0.0.1:{gateway.port}") as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await GatewayStub(MessagingServiceStub(channel), gateway, mq).send(
                    message("orders", b"in the open")
                )
        record = json.loads(records[0])
        assert record["action"] == "TLS handshake"
        assert record["principal"] == "any:anonymous"
        assert record["result"] == "denied"


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_where_tls_is_optional_both_come_to_one_port(
    new_loop: Callable[[], asyncio.AbstractEventLoop], tmp_path: Path
) -> None:
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(_both_come_to_one_port_and_nothing_else(tmp_path))


async def _both_come_to_one_port_and_nothing_else(tmp_path: Path) -> None:
    authority = create_authority(tmp_path / "certs")
    made = issue(tmp_path / "certs", "gateway", "node", ["127.0.0.1"])
    options = GatewayOptions(port=0, tls_cert=made.cert, tls_key=made.key, tls="optional")
    records: list[str] = []
    async with TestCluster() as cluster, AsyncExitStack() as ending:
        mq = cluster.client()
        gateway = GatewayServer(
            mq, options.config(), network=options.network(), audit=AuditLog(sink=records.append)
        )
        await gateway.start()
        ending.push_async_callback(gateway.stop)
        trusted = grpc.ssl_channel_credentials(authority.cert.read_bytes())
        with_tls = await ending.enter_async_context(
            grpc.aio.secure_channel(gateway.address, trusted)
        )
        without = await ending.enter_async_context(grpc.aio.insecure_channel(gateway.address))
        for channel in (with_tls, without):
            assert (
                await GatewayStub(MessagingServiceStub(channel), gateway, mq).send(
                    message("orders")
                )
            ).status.code == api.OK
        silent = await asyncio.open_connection("127.0.0.1", gateway.port)
        silent[1].close()
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        await reader.read()
        writer.close()
        await eventually(lambda: len(records) == 1)
        assert json.loads(records[0])["action"] == "TLS handshake"


def test_beyond_this_machine_a_gateway_needs_tls_and_credentials(tmp_path: Path) -> None:
    GatewayOptions(host="127.0.0.1").require_closed()
    for options in (
        GatewayOptions(host="0.0.0.0"),
        GatewayOptions(host="0.0.0.0", credentials=tmp_path),
    ):
        with pytest.raises(InvalidArgument):
            options.require_closed()
    GatewayOptions(
        host="0.0.0.0", credentials=tmp_path, tls_cert=tmp_path, tls_key=tmp_path
    ).require_closed()
    with pytest.raises(InvalidArgument, match="no access control"):
        GatewayOptions(
            host="0.0.0.0",
            credentials=tmp_path,
            tls_cert=tmp_path,
            tls_key=tmp_path,
            tls="optional",
        ).require_closed()
    for refused in (
        GatewayOptions(tls="optional"),
        GatewayOptions(tls="off", tls_cert=tmp_path, tls_key=tmp_path),
    ):
        with pytest.raises(InvalidArgument, match="QMQ_GATEWAY_TLS"):
            refused.config()
    with pytest.raises(InvalidArgument, match="together"):
        GatewayOptions(tls_cert=tmp_path).network()


async def test_a_node_for_development_serves_clients_with_tls_and_without(tmp_path: Path) -> None:
    config = replace(node_config(tmp_path), gateway_port=0)
    async with running(config) as node, qmq.connect(node.address) as mq, AsyncExitStack() as ending:
        assert node.gateway is not None
        trusted = grpc.ssl_channel_credentials((config.data / "gateway" / "ca.pem").read_bytes())
        with_tls = await ending.enter_async_context(
            grpc.aio.secure_channel(node.gateway.address, trusted)
        )
        without = await ending.enter_async_context(grpc.aio.insecure_channel(node.gateway.address))
        consumer = await ending.enter_async_context(mq.consumer("orders", "G"))
        for channel, body in ((with_tls, b"sealed"), (without, b"in the open")):
            stub = GatewayStub(MessagingServiceStub(channel), node.gateway.server, mq)
            assert (await stub.send(message("orders", body))).status.code == api.OK
            assert (await anext(consumer)).body == body


async def test_a_call_without_a_signature_is_refused_before_its_request_arrives(
    tmp_path: Path,
) -> None:
    async def unfinished() -> AsyncIterator[api.Message]:
        await asyncio.Event().wait()
        yield api.Message()

    async with (
        guarded_gateway(tmp_path) as (gateway, _),
        grpc.aio.insecure_channel(gateway.gateway.address) as channel,
    ):
        ask = channel.stream_unary(
            "/apache.rocketmq.v2.MessagingService/SendMessage",
            response_deserializer=calls.SendMessageResponse.FromString,
        )
        answer = await ask(unfinished(), metadata=(*gateway.headers, *signed("orders", "wrong")))
        assert answer.status.code == api.UNAUTHORIZED
        follow = channel.stream_stream(
            "/apache.rocketmq.v2.MessagingService/ReceiveMessage",
            response_deserializer=calls.ReceiveMessageResponse.FromString,
        )
        answers = [each async for each in follow(unfinished(), metadata=gateway.headers)]
        assert [each.status.code for each in answers] == [api.UNAUTHORIZED]


async def test_produce_alone_decides_recalls_and_is_asked(tmp_path: Path) -> None:
    """docs/ACCESS.md: who may produce may cancel and move delayed messages; a transaction is
    one.
    """
    quick = replace(
        CONFIG, transactions=TransactionTiming(first_check_ms=0, pauses_ms=(50,), look_ms=10)
    )
    async with guarded_gateway(tmp_path, config=quick) as (gateway, admin):
        await admin.send("paid", b"0")
        await admin.access.put_rule("app:other", ["produce"], "subject", "paid")
        gateway.signed = signed("other", "secret of other")

        async def sent(**options: Any) -> calls.SendMessageResponse:
            answer = await gateway.send(message("paid", b"half", **options))
            return answer

        found = await sent(kind=api.TRANSACTION)
        while found.status.code == api.FORBIDDEN:  # the rule has not arrived at the broker yet
            found = await sent(kind=api.TRANSACTION)
        transaction = found.entries[0].transaction_id
        stream = await gateway.produce("paid")
        while not (command := await stream.read()).HasField("recover_orphaned_transaction_command"):
            pass
        asked = command.recover_orphaned_transaction_command
        assert (asked.transaction_id, asked.message.body) == (transaction, b"half")
        for _ in range(2):  # repeated, it changes nothing
            request = calls.EndTransactionRequest(
                topic=api.Resource(name="paid"), transaction_id=transaction, resolution=api.COMMIT
            )
            assert (
                await gateway.stub.EndTransaction(request, metadata=gateway.headers)
            ).status.code == api.OK
        handle = (
            (await sent(kind=api.DELAY, due_ms=int(time.time() * 1000) + 3_600_000))
            .entries[0]
            .recall_handle
        )
        recall = calls.RecallMessageRequest(topic=api.Resource(name="paid"), recall_handle=handle)
        assert (
            await gateway.stub.RecallMessage(recall, metadata=gateway.headers)
        ).status.code == api.OK
        stream.cancel()
