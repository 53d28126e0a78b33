"""Which right each call of RocketMQ's clients needs: that is enough, and without it no other rights
are.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from gateway_stub import CONFIG, GatewayStub, message, signed
from support import eventually, node_config, running

import qmq
from qmq.gateway.clients import ClientKeys, GatewayCredentials
from qmq.gateway.server import GatewayServer
from qmq.proto.rocketmq import definition_pb2 as api
from qmq.proto.rocketmq import service_pb2 as calls
from qmq.proto.rocketmq.service_pb2_grpc import MessagingServiceStub
from qmq.security.access_rules import Operation

TOPIC, GROUP = api.Resource(name="t"), api.Resource(name="G")
Rights = frozenset[tuple[str, str]]
"""(kind, operation)"""
SUBJECT_RIGHTS = frozenset(
    ("subject", each.value)
    for each in Operation
    if each not in (Operation.REPLICATE, Operation.OPERATE)
)
ALL: Rights = (
    SUBJECT_RIGHTS
    | {("group", operation) for _, operation in SUBJECT_RIGHTS}
    | {("cluster", "operate")}
)
NONE: Rights = frozenset()
PRODUCE: Rights = frozenset({("subject", "produce")})
CONSUME: Rights = frozenset({("subject", "consume"), ("group", "consume")})

Call = Callable[["Caller"], Awaitable[int]]


class Caller:
    """One principal's calls; each returns its status."""

    def __init__(self, stub: GatewayStub) -> None:
        self.gateway = stub

    async def ask(self, name: str, request: Any) -> Any:
        return await getattr(self.gateway.stub, name)(request, metadata=self.gateway.headers)

    async def status(self, name: str, request: Any) -> int:
        return int((await self.ask(name, request)).status.code)

    async def send(self, **options: Any) -> calls.SendMessageResponse:
        found: calls.SendMessageResponse = await self.ask(
            "SendMessage", calls.SendMessageRequest(messages=[message("t", b"x", **options)])
        )
        return found

    async def sent(self) -> int:
        return int((await self.send()).entries[0].status.code)

    async def route(self, name: str, **fields: Any) -> int:
        request = getattr(calls, f"{name}Request")(
            topic=TOPIC, endpoints=self.gateway.endpoints, **fields
        )
        return await self.status(name, request)

    async def ended(self) -> int:
        entry = (await self.send(kind=api.TRANSACTION)).entries[0]
        asked = calls.EndTransactionRequest(
            topic=TOPIC, transaction_id=entry.transaction_id, resolution=api.COMMIT
        )
        return (
            int(entry.status.code)
            if entry.status.code != api.OK
            else await self.status("EndTransaction", asked)
        )

    async def recalled(self) -> int:
        entry = (
            await self.send(kind=api.DELAY, due_ms=int(time.time() * 1000) + 3_600_000)
        ).entries[0]
        asked = calls.RecallMessageRequest(topic=TOPIC, recall_handle=entry.recall_handle)
        return (
            int(entry.status.code)
            if entry.status.code != api.OK
            else await self.status("RecallMessage", asked)
        )

    async def received(self) -> int:
        answers = await self.gateway.answers("t", "G", wait_s=3)
        found = [each.status.code for each in answers if each.HasField("status")]
        return int(api.OK if found[0] == api.MESSAGE_NOT_FOUND else found[0])


NEEDED: dict[str, tuple[Rights, Call]] = {
    "QueryRoute": (frozenset({("subject", "describe")}), lambda each: each.route("QueryRoute")),
    "QueryAssignment": (
        frozenset({("subject", "describe")}),
        lambda each: each.route("QueryAssignment", group=GROUP),
    ),
    "Heartbeat": (
        NONE,
        lambda each: each.status("Heartbeat", calls.HeartbeatRequest(client_type=api.PRODUCER)),
    ),
    "NotifyClientTermination": (
        NONE,
        lambda each: each.status("NotifyClientTermination", calls.NotifyClientTerminationRequest()),
    ),
    "SendMessage": (PRODUCE, Caller.sent),
    "EndTransaction": (PRODUCE, Caller.ended),
    "RecallMessage": (PRODUCE, Caller.recalled),
    "ReceiveMessage": (CONSUME, Caller.received),
}


def without(right: tuple[str, str]) -> Rights:
    """All rights but one. `describe` comes with any other right on the same thing."""
    return ALL - (
        {each for each in ALL if each[0] == right[0]} if right[1] == "describe" else {right}
    )


@asynccontextmanager
async def callers(tmp_path: Path, rights: dict[str, Rights]) -> AsyncIterator[dict[str, Caller]]:
    """A gateway with an access key for each of these principals, on a node that enforces rules."""
    async with running(node_config(tmp_path, delay=True)) as node:
        tokens = {}
        async with qmq.connect(node.address) as first:
            await first.send("t", b"0")
            for kind in ("cluster", "subject", "group"):
                await first.access.put_rule("op:admin", [], kind)
            for name, each in rights.items():
                tokens[name] = (await first.access.create_token(f"app:{name}")).token
                for kind, thing in (("subject", "t"), ("group", "G"), ("cluster", "*")):
                    if operations := sorted(operation for its, operation in each if its == kind):
                        await first.access.put_rule(f"app:{name}", operations, kind, thing)
            admin = (await first.access.create_token("op:admin")).token
        async with qmq.connect(node.address, token=admin) as mq:
            await mq.access.set_mode("enforce")
            await eventually(lambda: node.view.access.mode.value == "enforce")
            gateway = GatewayServer(
                mq,
                CONFIG,
                credentials=GatewayCredentials(
                    {
                        name: ClientKeys(name, f"secret of {name}", token)
                        for name, token in tokens.items()
                    }
                ),
                connect=lambda token: qmq.connect(node.address, token=token, state_dir=False),
            )
            await gateway.start()
            try:
                async with grpc.aio.insecure_channel(f"127.0.0.1:{gateway.port}") as channel:
                    stub = MessagingServiceStub(channel)
                    signatures = {name: signed(name, f"secret of {name}") for name in rights}
                    yield {
                        name: Caller(GatewayStub(stub, gateway, mq, name, by))
                        for name, by in signatures.items()
                    }
            finally:
                await gateway.stop()


@pytest.mark.parametrize("call", NEEDED)
async def test_each_call_needs_its_right_which_is_enough(tmp_path: Path, call: str) -> None:
    needed, ask = NEEDED[call]
    lacking = {
        f"without-{kind}-{operation}": without((kind, operation)) for kind, operation in needed
    }
    async with callers(tmp_path, {"enough": needed, **lacking}) as found:
        assert await ask(found["enough"]) == api.OK
        for name in lacking:
            assert await ask(found[name]) == api.FORBIDDEN, name


OF_A_RECEIPT = {"AckMessage", "ChangeInvisibleDuration", "ForwardMessageToDeadLetterQueue"}
"""They need the receipt of a message, which only who received it has."""
OF_PULL_CONSUMERS = {"PullMessage", "UpdateOffset", "GetOffset", "QueryOffset"}
"""See test_pull_calls.py."""
OTHERS = {"SyncLiteSubscription", "Telemetry"}
"""A stream that only tells about clients, and calls that the gateway does not serve."""


def test_each_call_has_its_right_here() -> None:
    (service,) = calls.DESCRIPTOR.services_by_name.values()
    assert {each.name for each in service.methods} == set(
        NEEDED
    ) | OF_A_RECEIPT | OF_PULL_CONSUMERS | OTHERS


async def test_a_fifo_message_creates_no_topic_where_servers_create_none(tmp_path: Path) -> None:
    async with (
        running(node_config(tmp_path, auto_create=False)) as node,
        qmq.connect(node.address, state_dir=False) as mq,
    ):
        gateway = GatewayServer(mq, CONFIG)
        await gateway.start()
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{gateway.port}") as channel:
                stub = GatewayStub(MessagingServiceStub(channel), gateway, mq, "stub@1@1")
                for fifo in ({}, {"kind": api.FIFO, "group": "a"}):
                    assert (
                        await stub.send(message("t", b"x", **fifo))
                    ).status.code == api.TOPIC_NOT_FOUND
        finally:
            await gateway.stop()
        assert not await mq.metadata.list_subjects()
