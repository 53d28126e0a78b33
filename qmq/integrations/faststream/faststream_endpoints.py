"""Subscribers and publishers of FastStream on QMQ, with their descriptions for AsyncAPI."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final

from faststream._internal.configs import (
    PublisherSpecificationConfig,
    PublisherUsecaseConfig,
    SubscriberSpecificationConfig,
    SubscriberUsecaseConfig,
)
from faststream._internal.constants import EMPTY
from faststream._internal.endpoint.publisher import PublisherSpecification, PublisherUsecase
from faststream._internal.endpoint.publisher.fake import FakePublisher
from faststream._internal.endpoint.subscriber import SubscriberSpecification, SubscriberUsecase
from faststream._internal.endpoint.utils import process_msg
from faststream.message import StreamMessage
from faststream.middlewares import AckPolicy
from faststream.response import PublishCommand
from faststream.response.publish_type import PublishType
from faststream.specification.asyncapi.utils import resolve_payloads
from faststream.specification.schema import Message, Operation, PublisherSpec, SubscriberSpec

import qmq
from qmq.client.any_message import AnyMessage, fail, joined_unordered
from qmq.integrations.faststream.faststream_messages import QmqPublishCommand, decode, parse_message

log = logging.getLogger("qmq.integrations")

WAIT_S: Final = 20.0


@dataclass(kw_only=True)
class QmqSubscriberConfig(SubscriberUsecaseConfig):
    subject: str
    group: str
    workers: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ack_policy(self) -> AckPolicy:
        """By default a failed message is handed out again, one attempt older."""
        for found in (self._ack_policy, self._outer_config.ack_policy):
            if found is not EMPTY:
                return found
        return AckPolicy.NACK_ON_ERROR


@dataclass(kw_only=True)
class QmqSubscriberDescription(SubscriberSpecificationConfig):
    subject: str


class QmqSubscriberSpecification(SubscriberSpecification[Any, QmqSubscriberDescription]):
    @property
    def subject(self) -> str:
        return f"{self._outer_config.prefix}{self.config.subject}"

    @property
    def channel_labels(self) -> list[str]:
        return [self.subject]

    def get_schema(self) -> dict[str, SubscriberSpec]:
        message = Message(title=f"{self.name}:Message", payload=resolve_payloads(self.get_payloads()))
        operation = Operation(message=message, bindings=None)
        return {self.name: SubscriberSpec(address=self.subject, description=self.description, operation=operation, bindings=None)}


class QmqSubscriber(SubscriberUsecase[AnyMessage]):
    """Handles the messages of a subject for a group, `workers` at once; of an ordered subject, those of a key in order."""

    def __init__(self, config: QmqSubscriberConfig, specification: QmqSubscriberSpecification, calls: Any) -> None:
        config.parser, config.decoder = parse_message, decode
        super().__init__(config, specification, calls)  # type: ignore[arg-type]  # the parameters of its types are invariant
        self._own = config
        self._consumer: qmq.Consumer | qmq.OrderedConsumer | None = None
        self._workers: list[asyncio.Task[None]] = []

    @property
    def subject(self) -> str:
        """The subject, with the prefixes of its routers."""
        return f"{self._outer_config.prefix}{self._own.subject}"

    @property
    def _client(self) -> qmq.Client:
        return self._outer_config.client  # type: ignore[attr-defined, no-any-return]  # QmqBrokerConfig

    async def start(self) -> None:
        """Join the group, and handle messages until `stop`. Raises UnknownSubject, InvalidName, AccessDenied."""
        await super().start()
        self._post_start()
        if self.calls:
            consumer = await self._joined()
            self._workers = [asyncio.create_task(self._work(consumer)) for _ in range(self._own.workers)]

    async def _joined(self) -> qmq.Consumer | qmq.OrderedConsumer:
        if self._consumer is None:
            mq = self._client
            # A subscriber may start before anybody sends: as a listener does, it makes the subject.
            await mq.metadata.locate(self.subject, create=True)
            plain = mq.consumer(self.subject, self._own.group, ack="explicit", expired="skip", **self._own.options)
            if await joined_unordered(plain):
                self._consumer = plain
            else:
                self._consumer = mq.ordered_consumer(self.subject, self._own.group, ack="explicit", on_failure="park", **self._own.options)
        return self._consumer

    async def _work(self, consumer: qmq.Consumer | qmq.OrderedConsumer) -> None:
        while self.running:
            try:
                found = await _next(consumer)
            except qmq.errors.ClientClosed:
                return
            except qmq.QmqError:
                log.exception("subscriber of %s: messages could not be read", self.subject)
                await asyncio.sleep(1)
                continue
            for message in found:
                await self._handle(message)

    async def _handle(self, message: AnyMessage) -> None:
        if self.ack_policy is AckPolicy.ACK_FIRST:
            message.ack_later()
        with self._client.interceptors.handling(message, self._own.group):
            await self.consume(message)
        if not message.is_settled and self.ack_policy is not AckPolicy.MANUAL:
            fail(message, error="the handler did not get the message")  # it cannot be decoded, or the subscriber stopped

    async def stop(self) -> None:
        """Let handlers finish, for the broker's `graceful_timeout`, and leave the group."""
        await super().stop()
        workers, self._workers = self._workers, []
        for each in workers:
            each.cancel()
        if workers:
            await asyncio.wait(workers)
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            await consumer.close()

    def _make_response_publisher(self, message: StreamMessage[AnyMessage]) -> Sequence[ReplyPublisher]:
        return (ReplyPublisher(self._outer_config.producer, message.reply_to),)

    async def get_one(self, *, timeout: float = 5) -> Any:
        """The next message, of a subscriber without handlers; None if none came in time. Settle it: `await message.ack()`."""
        assert not self.calls, "the subscriber has handlers, which get the messages"
        consumer = await self._joined()
        for message in await _next(consumer, timeout):
            return await self._parsed(message)
        return None

    async def __aiter__(self) -> AsyncIterator[Any]:
        assert not self.calls, "the subscriber has handlers, which get the messages"
        consumer = await self._joined()
        while True:
            for message in await _next(consumer):
                yield await self._parsed(message)

    async def _parsed(self, message: AnyMessage) -> Any:
        parser, decoder = self._get_parser_and_decoder()
        around = (each(message, context=self._outer_config.context) for each in self._broker_middlewares)
        return await process_msg(msg=message, middlewares=around, parser=parser, decoder=decoder)


async def _next(consumer: qmq.Consumer | qmq.OrderedConsumer, wait_s: float = WAIT_S) -> Sequence[AnyMessage]:
    """The next message, or none if none came in time. Not by iteration, because workers share the consumer."""
    wait = timedelta(seconds=wait_s)
    return await consumer.take(1, wait) if isinstance(consumer, qmq.OrderedConsumer) else list(await consumer.pull(1, wait))


class ReplyPublisher(FakePublisher):
    """Sends a handler's answer to the subject that the message names in `reply_to`."""

    def __init__(self, producer: Any, subject: str) -> None:
        super().__init__(producer=producer)
        self.subject = subject

    def patch_command(self, cmd: PublishCommand) -> QmqPublishCommand:
        found = QmqPublishCommand.from_cmd(super().patch_command(cmd))
        found.destination = self.subject
        return found


@dataclass(kw_only=True)
class QmqPublisherConfig(PublisherUsecaseConfig):
    subject: str
    headers: Mapping[str, str]


@dataclass(kw_only=True)
class QmqPublisherDescription(PublisherSpecificationConfig):
    subject: str


class QmqPublisherSpecification(PublisherSpecification[Any, QmqPublisherDescription]):
    @property
    def subject(self) -> str:
        return f"{self._outer_config.prefix}{self.config.subject}"

    @property
    def name(self) -> str:
        return self.config.title_ or f"{self.subject}:Publisher"

    def get_schema(self) -> dict[str, PublisherSpec]:
        message = Message(title=f"{self.name}:Message", payload=resolve_payloads(self.get_payloads(), "Publisher"))
        operation = Operation(message=message, bindings=None)
        return {self.name: PublisherSpec(address=self.subject, description=self.config.description_, operation=operation, bindings=None)}


class QmqPublisher(PublisherUsecase):
    """Sends to one subject: what a decorated handler returns, and what `publish` is given."""

    def __init__(self, config: QmqPublisherConfig, specification: QmqPublisherSpecification) -> None:
        super().__init__(config, specification)  # type: ignore[arg-type]  # as above
        self._own = config

    @property
    def subject(self) -> str:
        """The subject, with the prefixes of its routers."""
        return f"{self._outer_config.prefix}{self._own.subject}"

    async def publish(
        self,
        message: Any,
        subject: str = "",
        *,
        key: str | bytes | None = None,
        tags: Sequence[str] = (),
        delay: timedelta | None = None,
        headers: Mapping[str, str] | None = None,
        correlation_id: str | None = None,
        reply_to: str = "",
    ) -> qmq.Receipt:
        """Send a message; returns when it is stored. Raises as `qmq.Client.send`."""
        command = QmqPublishCommand(
            message,
            key=key,
            tags=tags,
            delay=delay,
            destination=subject or self.subject,
            headers=dict(self._own.headers) | dict(headers or {}),
            correlation_id=correlation_id or self._outer_config.id_generator(),
            reply_to=reply_to,
            _publish_type=PublishType.PUBLISH,
        )
        return await self._basic_publish(command, producer=self._outer_config.producer, _extra_middlewares=())  # type: ignore[no-any-return]

    async def _publish(self, cmd: PublishCommand, *, _extra_middlewares: Iterable[Any]) -> Any:
        command = QmqPublishCommand.from_cmd(cmd)
        command.destination = command.destination or self.subject
        command.add_headers(dict(self._own.headers), override=False)
        return await self._basic_publish(command, producer=self._outer_config.producer, _extra_middlewares=_extra_middlewares)

    async def request(self, message: Any, /, **named: Any) -> Any:
        """QMQ has no requests. Raises FeatureNotSupportedException."""
        return await self._outer_config.producer.request(QmqPublishCommand(message, _publish_type=PublishType.REQUEST))
