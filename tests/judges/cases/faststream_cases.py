"""Subclasses of FastStream's base cases for brokers, as it has for each of its brokers: on a node,
and in memory where FastStream has cases for test brokers.
"""

from __future__ import annotations

import os
from typing import Any
from uuid import uuid4

import pytest
from faststream import BaseMiddleware
from tests.brokers.base import (
    address,
    codec,
    connection,
    consume,
    fastapi,
    include_router,
    middlewares,
    parser,
    publish,
    publish_command,
    requests,
    testclient,
)
from tests.brokers.base import router as routers

from qmq.integrations.faststream import (
    QmqBroker,
    QmqPublisher,
    QmqRoute,
    QmqRouter,
    TestQmqBroker,
)
from qmq.integrations.faststream.fastapi import FastApiQmqRouter
from qmq.integrations.faststream.registrator import QmqRegistrator
from qmq.integrations.faststream.sending import QmqPublishCommand
from qmq.integrations.faststream.testing import MemoryProducer

ADDRESS = os.environ["QMQ_JUDGED"]


class Grouping(QmqRegistrator):
    """Many of FastStream's cases name no group: each subscriber gets a new one."""

    def subscriber(self, subject: str, *, group: str = "", **options: Any) -> Any:
        return super().subscriber(subject, group=group or f"group-{uuid4().hex}", **options)


class GroupingBroker(Grouping, QmqBroker):
    async def publish_batch(self, *bodies: Any, topic: str = "", **options: Any) -> Any:
        """The cases of batches have Kafka's word for a subject."""
        return await super().publish_batch(
            *bodies, **({"subject": topic} if topic else {}), **options
        )


class GroupingRouter(Grouping, QmqRouter):
    pass


class OnNode:
    """A broker on the node."""

    timeout = 10.0

    def get_broker(self, apply_types: bool = False, **options: Any) -> QmqBroker:
        return GroupingBroker(ADDRESS, apply_types=apply_types, state_dir=False, **options)

    def get_router(self, **options: Any) -> QmqRouter:
        return GroupingRouter(**options)


class InMemory(OnNode):
    """A broker under `TestQmqBroker`."""

    def patch_broker(self, *brokers: QmqBroker, **options: Any) -> Any:
        return TestQmqBroker(*brokers, **options)


class NodeRouter(FastApiQmqRouter):
    """FastStream's cases for FastAPI make routers without an address and without groups."""

    def __init__(self, addresses: str = ADDRESS, **options: Any) -> None:
        super().__init__(addresses, state_dir=False, **options)

    def subscriber(self, subject: str, *, group: str = "", **options: Any) -> Any:
        return super().subscriber(subject, group=group or f"group-{uuid4().hex}", **options)


@pytest.fixture
def settings() -> None:
    return None


@pytest.fixture
def router() -> QmqRouter:
    return GroupingRouter()


class TestAddress(OnNode, address.AddressTemplateTestcase):
    broker_address = "logs.*"

    def get_subscriber_address(self, subscriber: Any) -> Any:
        return subscriber.subject


@pytest.mark.asyncio
class TestCodec(InMemory, codec.CodecTestcase):
    pass


@pytest.mark.asyncio
class TestBatchCodec(InMemory, codec.BatchCodecTestcase):
    pass


class TestConnection(connection.BrokerConnectionTestcase):
    broker = QmqBroker

    def get_broker_args(self, settings: None) -> dict[str, Any]:
        return {"addresses": ADDRESS}


class TestConsume(OnNode, consume.BrokerRealConsumeTestcase):
    pass


class TestFastApi(OnNode, fastapi.FastAPITestcase):
    router_class = NodeRouter
    broker_router_class = GroupingRouter


class TestFastApiLocal(InMemory, fastapi.FastAPILocalTestcase):
    router_class = NodeRouter
    broker_router_class = GroupingRouter


class TestIncludeSubscriber(OnNode, include_router.IncludeSubscriberTestcase):
    pass


class TestIncludePublisher(OnNode, include_router.IncludePublisherTestcase):
    pass


class TestMiddlewaresOrder(InMemory, middlewares.MiddlewaresOrderTestcase):
    pass


class TestMiddlewares(OnNode, middlewares.MiddlewareTestcase):
    pass


class TestExceptionMiddlewares(OnNode, middlewares.ExceptionMiddlewareTestcase):
    pass


class TestCustomParser(OnNode, parser.CustomParserTestcase):
    pass


class TestPublish(OnNode, publish.BrokerPublishTestcase):
    pass


class TestPublishCommand(publish_command.BatchPublishCommandTestcase):
    publish_command_cls = QmqPublishCommand


class Doubling(BaseMiddleware):
    """What each of FastStream's brokers has for the cases of requests."""

    async def on_receive(self) -> None:
        self.msg.body *= 2

    async def consume_scope(self, call_next: Any, msg: Any) -> Any:
        msg.body *= 2
        return await call_next(msg)


@pytest.mark.asyncio
class TestRequests(OnNode, requests.RequestsTestcase):
    def get_middleware(self, **options: Any) -> type[BaseMiddleware]:
        return Doubling


@pytest.mark.asyncio
class TestRequestsLocal(InMemory, requests.RequestsTestcase):
    def get_middleware(self, **options: Any) -> type[BaseMiddleware]:
        return Doubling


class GroupingRoute(QmqRoute):
    """A route without a group."""

    def __init__(self, call: Any, subject: str, *, group: str = "", **options: Any) -> None:
        super().__init__(call, subject, group=group or f"group-{uuid4().hex}", **options)


class TestRouter(OnNode, routers.RouterTestcase):
    route_class = GroupingRoute
    publisher_class = QmqPublisher


class TestRouterLocal(InMemory, routers.RouterLocalTestcase):
    route_class = GroupingRoute
    publisher_class = QmqPublisher


@pytest.mark.asyncio
class TestTestclient(InMemory, testclient.BrokerTestclientTestcase):
    @pytest.fixture
    def fake_producer_cls(self) -> type[MemoryProducer]:
        return MemoryProducer
