"""A gateway on a cluster in the test's process, and RocketMQ's stub in front of it.

docs/reference/rocketmq_clients.md: the calls that each of RocketMQ's clients made of a gateway, and
the codes of the answers.

The tests of each client compare its column with the calls that they recorded. With
`QMQ_WRITE_CLIENT_TABLE=1` they write the column.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import shutil
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from system.gateway_processes import CACHE, JAR

import qmq
from qmq.gateway.clients import GatewayCredentials
from qmq.gateway.config import GatewayConfig
from qmq.gateway.server import GatewayServer
from qmq.gateway.status import AnsweredCall
from qmq.process.event_loop import Clock
from qmq.proto.rocketmq import definition_pb2 as api
from qmq.proto.rocketmq import service_pb2 as calls
from qmq.proto.rocketmq.service_pb2_grpc import MessagingServiceStub
from qmq.rpc.network import NETWORK, Network
from qmq.testing import TestCluster

CONFIG = GatewayConfig(port=0, invisible_ms_min=0, sweep_ms=10)


def seconds(count: float) -> Duration:
    return Duration(seconds=int(count), nanos=int(count % 1 * 1e9))


@dataclass
class GatewayStub:
    """One client of a gateway."""

    stub: Any
    gateway: GatewayServer
    mq: qmq.Client
    client_id: str = "stub@1@1"
    signed: tuple[tuple[str, str], ...] = ()

    @property
    def headers(self) -> tuple[tuple[str, str], ...]:
        return (("x-mq-client-id", self.client_id), *self.signed)

    @property
    def endpoints(self) -> api.Endpoints:
        return api.Endpoints(
            scheme=api.IPv4, addresses=[api.Address(host="127.0.0.1", port=self.gateway.port)]
        )

    async def route(self, topic: str) -> calls.QueryRouteResponse:
        request = calls.QueryRouteRequest(topic=api.Resource(name=topic), endpoints=self.endpoints)
        found: calls.QueryRouteResponse = await self.stub.QueryRoute(request, metadata=self.headers)
        return found

    async def send(self, *messages: api.Message) -> calls.SendMessageResponse:
        found: calls.SendMessageResponse = await self.stub.SendMessage(
            calls.SendMessageRequest(messages=messages), metadata=self.headers
        )
        return found

    async def answers(
        self, topic: str, group: str = "G", **options: Any
    ) -> list[calls.ReceiveMessageResponse]:
        request = receive_request(topic, group, **options)
        return [
            each
            async for each in self.stub.ReceiveMessage(request, metadata=self.headers, timeout=30)
        ]

    async def codes(self, topic: str, group: str = "G", **options: Any) -> list[int]:
        """The status of each answer."""
        return [each.status.code for each in await self.answers(topic, group, **options)]

    async def produce(self, topic: str) -> Any:
        """The stream of a producer of the topic, from which nothing was read."""
        stream = self.stub.Telemetry(metadata=self.headers)
        publishing = api.Publishing(topics=[api.Resource(name=topic)])
        settings = api.Settings(client_type=api.PRODUCER, publishing=publishing)
        await stream.write(calls.TelemetryCommand(settings=settings))
        return stream

    async def receive(self, topic: str, group: str = "G", **options: Any) -> list[api.Message]:
        return [
            each.message
            for each in await self.answers(topic, group, **options)
            if each.HasField("message")
        ]

    async def receive_all(
        self, count: int, topic: str, group: str = "G", **options: Any
    ) -> list[api.Message]:
        """Receive `count` messages, in as many calls as necessary."""
        found: list[api.Message] = []
        while len(found) < count:
            found += await self.receive(topic, group, batch=count - len(found), **options)
        return found

    async def ack(self, *messages: api.Message, group: str = "G") -> calls.AckMessageResponse:
        entries = [
            calls.AckMessageEntry(
                message_id=each.system_properties.message_id,
                receipt_handle=each.system_properties.receipt_handle,
            )
            for each in messages
        ]
        request = calls.AckMessageRequest(
            group=api.Resource(name=group), topic=messages[0].topic, entries=entries
        )
        found: calls.AckMessageResponse = await self.stub.AckMessage(request, metadata=self.headers)
        return found

    async def change(
        self, message: api.Message, invisible_s: float, group: str = "G", *, suspend: bool = False
    ) -> calls.ChangeInvisibleDurationResponse:
        request = calls.ChangeInvisibleDurationRequest(
            suspend=suspend,
            group=api.Resource(name=group),
            topic=message.topic,
            receipt_handle=message.system_properties.receipt_handle,
            invisible_duration=seconds(invisible_s),
            message_id=message.system_properties.message_id,
        )
        found: calls.ChangeInvisibleDurationResponse = await self.stub.ChangeInvisibleDuration(
            request, metadata=self.headers
        )
        return found

    async def forward(
        self, message: api.Message, group: str = "G"
    ) -> calls.ForwardMessageToDeadLetterQueueResponse:
        request = calls.ForwardMessageToDeadLetterQueueRequest(
            group=api.Resource(name=group),
            topic=message.topic,
            receipt_handle=message.system_properties.receipt_handle,
            message_id=message.system_properties.message_id,
            delivery_attempt=message.system_properties.delivery_attempt,
            max_delivery_attempts=2,
        )
        found: calls.ForwardMessageToDeadLetterQueueResponse = (
            await self.stub.ForwardMessageToDeadLetterQueue(request, metadata=self.headers)
        )
        return found


def receive_request(
    topic: str,
    group: str = "G",
    *,
    batch: int = 32,
    invisible_s: float = 30,
    wait_s: float = 10,
    tags: str = "*",
    sql: str = "",
    renew: bool = False,
) -> calls.ReceiveMessageRequest:
    request = calls.ReceiveMessageRequest(
        group=api.Resource(name=group),
        message_queue=api.MessageQueue(topic=api.Resource(name=topic)),
        filter_expression=api.FilterExpression(type=api.TAG, expression=tags),
        batch_size=batch,
        long_polling_timeout=seconds(wait_s),
        auto_renew=renew,
    )
    if sql:
        request.filter_expression.CopyFrom(api.FilterExpression(type=api.SQL, expression=sql))
    if not renew:
        request.invisible_duration.CopyFrom(seconds(invisible_s))
    return request


def message(
    topic: str,
    body: bytes = b"body",
    *,
    kind: api.MessageType.ValueType = api.NORMAL,
    group: str = "",
    tag: str = "",
    keys: Sequence[str] = (),
    due_ms: int = 0,
    **properties: str,
) -> api.Message:
    """A message as a client makes it, with its own id."""
    found = api.Message(
        topic=api.Resource(name=topic),
        user_properties=properties,
        body=body,
        system_properties=api.SystemProperties(
            message_id=uuid.uuid4().hex.upper(),
            message_type=kind,
            keys=keys,
            body_encoding=api.IDENTITY,
            born_host="here",
        ),
    )
    if tag:
        found.system_properties.tag = tag
    if group:
        found.system_properties.message_group = group
    if due_ms:
        found.system_properties.delivery_timestamp.CopyFrom(
            Timestamp(seconds=due_ms // 1000, nanos=due_ms % 1000 * 1_000_000)
        )
    return found


@asynccontextmanager
async def gateway_on(
    cluster: TestCluster,
    config: GatewayConfig = CONFIG,
    client_id: str = "stub@1@1",
    *,
    at: str = "",
    network: Network = NETWORK,
    credentials: GatewayCredentials | None = None,
    connect: Callable[[str], qmq.Client] | None = None,
    clock: Clock | None = None,
) -> AsyncIterator[GatewayStub]:
    """A gateway on a machine of the cluster, and a stub of one client. `network` is for the
    gateway's port, `clock` its machine's (default: the cluster's).
    """
    mq = cluster.client(at=at)
    gateway = GatewayServer(
        mq,
        config,
        clock=clock or cluster.machine_clock,
        network=network,
        credentials=credentials,
        connect=connect,
    )
    await gateway.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{gateway.port}") as channel:
            yield GatewayStub(MessagingServiceStub(channel), gateway, mq, client_id)
    finally:
        await gateway.stop()


PAGE: Final = Path(__file__).parents[3] / "docs" / "reference" / "rocketmq_clients.md"
CLIENTS: Final = {
    "JAVA": "Java 5.2.0",
    "PYTHON": "Python 5.1.2",
    "HTTP": "Node 1.0.8",
    "RUST": "Rust 5.0.0",
    "GO": "Go 5.1.4",
    "": "stub",
}
"""By the language that a client's header says: the client, as its registry has it. The stub is
RocketMQ's API without a client.
"""
COMMANDS: Final = ("Telemetry: settings", "Telemetry: recover_orphaned_transaction_command")
CALLS: Final = tuple(
    each.name
    for each in calls.DESCRIPTOR.services_by_name["MessagingService"].methods
    if each.name != "Telemetry"
)
ROWS: Final = (*CALLS, *COMMANDS)
NONE: Final = "-"
HEAD: Final = """# Calls of RocketMQ's clients

The calls that each client made of the gateway in the tests, which write this page, and the codes of
the answers. `-`: the client did not make the call. `MESSAGE_NOT_FOUND`: an empty long poll ended.
[ROCKETMQ](../ROCKETMQ.md) says what the calls do.

"""


def cells_of(counts: Iterable[AnsweredCall], language: str) -> dict[str, str]:
    """A client's column: for each row, the codes of its answers."""
    seen: dict[str, set[str]] = defaultdict(set)
    for each in counts:
        if each.language == language:
            seen[each.call].add(each.code)
    return {
        row: ", ".join(sorted(seen[row], key=lambda code: (code != "OK", code))) or NONE
        for row in ROWS
    }


def read_page() -> dict[str, dict[str, str]]:
    """The page's columns, by the clients' names."""
    lines = (
        [each for each in PAGE.read_text().splitlines() if each.startswith("|")]
        if PAGE.is_file()
        else []
    )
    rows = [[cell.strip().strip("`") for cell in each.strip("|").split("|")] for each in lines]
    if not rows:
        return {}
    return {name: {row[0]: row[at] for row in rows[2:]} for at, name in enumerate(rows[0]) if at}


def page_of(columns: dict[str, dict[str, str]]) -> str:
    """The page with these columns."""
    names = list(CLIENTS.values())
    lines = [f"| call | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for row in ROWS:
        cells = [columns.get(name, {}).get(row, NONE) for name in names]
        lines.append(f"| {row} | {' | '.join(cells)} |")
    return HEAD + "\n".join(lines) + "\n"


def check_column(counts: Iterable[AnsweredCall], language: str) -> None:
    """The client's column on the page is what was seen."""
    name, seen = CLIENTS[language], cells_of(counts, language)
    columns = read_page()
    if os.environ.get("QMQ_WRITE_CLIENT_TABLE"):
        PAGE.write_text(page_of({**columns, name: seen}))
        return
    assert columns[name] == seen, (
        f"run this test with QMQ_WRITE_CLIENT_TABLE=1, and look at what changed in {PAGE}"
    )


WHEN = "20261124T120000Z"


def signed(access_key: str, secret_key: str, when: str = WHEN) -> tuple[tuple[str, str], ...]:
    signature = hmac.new(secret_key.encode(), when.encode(), hashlib.sha1).hexdigest().upper()
    shown = (
        f"MQv2-HMAC-SHA1 Credential={access_key}, SignedHeaders=x-mq-date-time, "
        f"Signature={signature}"
    )
    return (("authorization", shown), ("x-mq-date-time", when))


MODULES: Final = CACHE / "node_modules"


QUICK_START: Final = "-XX:TieredStopAtLevel=1"


needs_java = pytest.mark.skipif(
    not JAR.is_file() or shutil.which("javac") is None,
    reason="needs a JDK, and scripts/rocketmq_clients",
)


needs_node = pytest.mark.skipif(
    not MODULES.is_dir() or shutil.which("node") is None,
    reason="needs Node, and scripts/rocketmq_clients",
)
