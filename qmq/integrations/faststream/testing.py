"""FastStream's test broker for QMQ: a handler runs while its message is published, in memory or,
with `with_real`, on a real node.

In memory there is no node: messages are QMQ's own (`qmq.integrations.local_messages`), but no
broker stores them. One subscriber of each group gets a message, if its tags fit. Delays are
ignored, an exception of a handler is raised where the message was published, and verdicts have no
effect: there are no retries and no dead letters. To test these, use `qmq.testing.TestCluster`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any
from uuid import uuid4

from faststream._internal.testing.broker import EnterType, TestBroker, change_producer
from faststream.exceptions import SubscriberNotFound
from faststream.response import Response

import qmq
from qmq.client.consuming.message import Message, Messages
from qmq.errors import ClientClosed
from qmq.integrations.faststream.broker import ANSWERS, QmqBroker
from qmq.integrations.faststream.endpoints import SubjectPublisher, SubjectSubscriber
from qmq.integrations.faststream.messages import MessageBatch, Raw, RequestAnswers
from qmq.integrations.faststream.sending import QmqProducer, QmqPublishCommand
from qmq.integrations.local_messages import LocalMessage, chosen, local_batch
from qmq.proto.v1.meta_pb2 import LocateResponse


class TestQmqBroker(TestBroker[QmqBroker, EnterType], broker=QmqBroker):
    """`async with TestQmqBroker(broker) as br:` publishes in memory; handlers and publishers have
    `.mock` and the assertions of FastStream. With `with_real=True` the messages go over the
    broker's own node.
    """

    def create_publisher_fake_subscriber(
        self, broker: QmqBroker, publisher: SubjectPublisher
    ) -> tuple[SubjectSubscriber, bool]:
        """The subscriber whose calls the publisher's mock shows: one of the application, or one
        that is made for the test.
        """
        for each in _subscribers(self.brokers):
            if each.subject == publisher.subject:
                return each, True
        group = f"faststream-test-{uuid4().hex}"
        made = broker.subscriber(
            publisher.subject,
            group=group,
            batch=publisher.is_batch,
            start="latest",
            persistent=False,
        )
        return made, False

    @contextmanager
    def _patch_producer(self, broker: QmqBroker) -> Iterator[None]:
        config = broker.config.broker_config
        memory = MemoryClient()
        before, config.mq = config.mq, memory  # type: ignore[assignment]  # it has the methods of a client that subscribers use
        try:
            with change_producer(config, MemoryProducer(broker, self.brokers)):
                yield
        finally:
            config.mq = before
            memory.end()

    async def _fake_connect(self, broker: QmqBroker, *args: Any, **kwargs: Any) -> Any:
        return broker.config.broker_config.mq


class MemoryProducer(QmqProducer):
    """Hands messages to the subscribers of `brokers`."""

    def __init__(self, broker: QmqBroker, brokers: Sequence[QmqBroker]) -> None:
        super().__init__(
            broker.config.broker_config, broker._parser, broker._decoder, RequestAnswers(ANSWERS)
        )
        self._brokers = brokers

    async def publish(self, cmd: QmqPublishCommand) -> qmq.Receipt:
        contents, _ = await self.contents(cmd, (cmd.body,))
        return (await self._deliver(cmd.destination, contents))[0]

    async def publish_batch(self, cmd: QmqPublishCommand) -> qmq.Receipts:
        contents, _ = await self.contents(cmd, cmd.batch_bodies)
        return await self._deliver(cmd.destination, contents)

    async def request(self, cmd: QmqPublishCommand) -> Message:
        contents, _ = await self.contents(cmd, (cmd.body,))
        messages = local_batch(cmd.destination, contents).messages
        async with asyncio.timeout(cmd.timeout_s):
            for each in _receivers(self._brokers, cmd.destination):
                for answer in await _handle(each, messages):
                    said = QmqPublishCommand.from_cmd(answer.as_publish_command())
                    found, _ = await self.contents(said, (said.body,))
                    return local_batch(ANSWERS, found).messages[0]
        raise SubscriberNotFound(f"no subscriber gets messages of {cmd.destination}")

    async def _deliver(self, subject: str, contents: Sequence[LocalMessage]) -> qmq.Receipts:
        messages, receipts = local_batch(subject, contents)
        for each in _receivers(self._brokers, subject):
            await _handle(each, messages)
        return receipts


def _subscribers(brokers: Sequence[QmqBroker]) -> Iterator[SubjectSubscriber]:
    return (each for broker in brokers for each in broker.subscribers)  # type: ignore[misc]  # all are ours


def _receivers(brokers: Sequence[QmqBroker], subject: str) -> Iterator[SubjectSubscriber]:
    """The subject's subscribers: one of each group, all of a broadcast group."""
    groups = set()
    for each in _subscribers(brokers):
        if each.subject == subject and each.group not in groups:
            if not each.options.get("broadcast"):
                groups.add(each.group)
            yield each


async def _handle(subscriber: SubjectSubscriber, messages: Messages) -> list[Response]:
    """The handler's results: one for each message that matches the subscriber's tags, or one for
    the batch.
    """
    tags_any, tags_all = (
        set(subscriber.options.get("tags_any", ())),
        set(subscriber.options.get("tags_all", ())),
    )
    wanted = chosen(
        messages,
        lambda each: (
            tags_all <= set(each.tags) and (not tags_any or bool(tags_any & set(each.tags)))
        ),
    )
    raws: list[Raw] = (
        [MessageBatch(wanted)] if subscriber.is_batch and len(wanted) else list(wanted)
    )
    return [await subscriber.process_message(each) for each in raws]


class MemoryClient:
    """The part of a client that subscribers use when the application starts them one by one:
    consumers without messages.
    """

    def __init__(self) -> None:
        self._closed = asyncio.Event()

    @property
    def metadata(self) -> MemoryClient:
        return self

    async def locate(self, subject: str, *, create: bool = False) -> LocateResponse:
        """The subject is unordered."""
        return LocateResponse()

    def consumer(self, subject: str, group: str, **options: Any) -> MemoryClient:
        return self

    async def join(self) -> None: ...

    async def pull(self, messages_max: int, wait: timedelta) -> Messages:
        """Waits, and returns none. Raises ClientClosed."""
        with suppress(TimeoutError):
            async with asyncio.timeout(wait.total_seconds()):
                await self._closed.wait()
                raise ClientClosed("the test broker is closed")
        return Messages([])

    async def close(self) -> None: ...

    def end(self) -> None:
        """End the test."""
        self._closed.set()
