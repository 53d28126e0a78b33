"""Publishers and subscribers of FastStream on QMQ: they send and handle messages one by one, or in
batches.

Their descriptions are for AsyncAPI. Only this module joins a subject with the prefixes of its
routers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import ExitStack
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
from qmq.client.consuming.ordered.consumer import AnyConsumer, joined
from qmq.integrations.faststream.messages import (
    MessageBatch,
    Raw,
    decode,
    decode_batch,
    fail_raw,
    parse_batch,
    parse_message,
)
from qmq.integrations.faststream.sending import REQUEST_S, QmqPublishCommand


@dataclass(kw_only=True)
class SubscriberDescription(SubscriberSpecificationConfig):
    subject: str


@dataclass(kw_only=True)
class PublisherDescription(PublisherSpecificationConfig):
    subject: str


class PrefixedSubject:
    """An endpoint whose subject has the prefixes of its routers."""

    _outer_config: Any
    config: Any

    @property
    def subject(self) -> str:
        """The subject, with the prefixes of its routers."""
        return f"{self._outer_config.prefix}{self.config.subject}"


class DescribedSubscriber(PrefixedSubject, SubscriberSpecification[Any, SubscriberDescription]):
    @property
    def channel_labels(self) -> list[str]:
        return [self.subject]

    def get_schema(self) -> dict[str, SubscriberSpec]:
        operation = _operation(self.name, self.get_payloads())
        return {
            self.name: SubscriberSpec(
                address=self.subject,
                description=self.description,
                operation=operation,
                bindings=None,
            )
        }


class DescribedPublisher(PrefixedSubject, PublisherSpecification[Any, PublisherDescription]):
    @property
    def name(self) -> str:
        return self.config.title_ or f"{self.subject}:Publisher"

    def get_schema(self) -> dict[str, PublisherSpec]:
        operation = _operation(self.name, self.get_payloads(), "Publisher")
        return {
            self.name: PublisherSpec(
                address=self.subject,
                description=self.config.description_,
                operation=operation,
                bindings=None,
            )
        }


def _operation(name: str, payloads: Any, served: str = "") -> Operation:
    return Operation(
        message=Message(title=f"{name}:Message", payload=resolve_payloads(payloads, served)),
        bindings=None,
    )


@dataclass(kw_only=True)
class PublisherConfig(PublisherUsecaseConfig):
    headers: Mapping[str, str]
    reply_to: str = ""


class SubjectPublisher(PublisherUsecase):
    """Sends to one subject: what a decorated handler returns, and what `publish` is given."""

    is_batch = False

    def __init__(self, config: PublisherConfig, specification: DescribedPublisher) -> None:
        super().__init__(config, specification)  # type: ignore[arg-type]  # the parameters of its types are invariant
        self._own, self._described = config, specification

    @property
    def subject(self) -> str:
        """The subject, with the prefixes of its routers."""
        return self._described.subject

    def _command(
        self,
        bodies: Sequence[Any],
        subject: str,
        headers: Mapping[str, str] | None,
        correlation_id: str | None,
        reply_to: str,
        **named: Any,
    ) -> QmqPublishCommand:
        return QmqPublishCommand(
            *bodies,
            destination=subject or self.subject,
            headers=dict(self._own.headers) | dict(headers or {}),
            correlation_id=correlation_id or self._outer_config.id_generator(),
            reply_to=reply_to or self._own.reply_to,
            **named,
        )

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
        sent = {"key": key, "tags": tags, "delay": delay, "_publish_type": PublishType.PUBLISH}
        command = self._command((message,), subject, headers, correlation_id, reply_to, **sent)
        return await self._basic_publish(  # type: ignore[no-any-return]
            command, producer=self._outer_config.producer, _extra_middlewares=()
        )

    async def request(
        self,
        message: Any,
        subject: str = "",
        *,
        key: str | bytes | None = None,
        tags: Sequence[str] = (),
        headers: Mapping[str, str] | None = None,
        correlation_id: str | None = None,
        timeout: float = REQUEST_S,
    ) -> Any:
        """Send a message, and return the answer of its handler. Raises as `QmqBroker.request`."""
        sent = {
            "key": key,
            "tags": tags,
            "timeout_s": timeout,
            "_publish_type": PublishType.REQUEST,
        }
        command = self._command((message,), subject, headers, correlation_id, "", **sent)
        return await self._basic_request(command, producer=self._outer_config.producer)

    async def _publish(self, cmd: PublishCommand, *, _extra_middlewares: Iterable[Any]) -> Any:
        command = self._completed(QmqPublishCommand.from_cmd(cmd))
        return await self._basic_publish(
            command, producer=self._outer_config.producer, _extra_middlewares=_extra_middlewares
        )

    def _completed(self, command: QmqPublishCommand) -> QmqPublishCommand:
        command.destination = command.destination or self.subject
        command.reply_to = command.reply_to or self._own.reply_to
        command.add_headers(dict(self._own.headers), override=False)
        return command


class BatchPublisher(SubjectPublisher):
    """Sends several messages together. A decorated handler returns a list of them."""

    is_batch = True

    async def publish(  # type: ignore[override]  # many messages
        self,
        *messages: Any,
        subject: str = "",
        key: str | bytes | None = None,
        tags: Sequence[str] = (),
        delay: timedelta | None = None,
        headers: Mapping[str, str] | None = None,
        correlation_id: str | None = None,
        reply_to: str = "",
    ) -> qmq.Receipts:
        """Send messages; returns when all are stored. A `QmqResponse` has its own key, tags and
        delay. Raises as `qmq.Client.send_many`.
        """
        sent = {"key": key, "tags": tags, "delay": delay, "_publish_type": PublishType.PUBLISH}
        command = self._command(
            messages or (None,), subject, headers, correlation_id, reply_to, **sent
        )
        return await self._basic_publish_batch(  # type: ignore[no-any-return]
            command, producer=self._outer_config.producer, _extra_middlewares=()
        )

    async def _publish(self, cmd: PublishCommand, *, _extra_middlewares: Iterable[Any]) -> Any:
        command = self._completed(QmqPublishCommand.from_cmd(cmd, batch=True))
        return await self._basic_publish_batch(
            command, producer=self._outer_config.producer, _extra_middlewares=_extra_middlewares
        )


log = logging.getLogger("qmq.integrations")

WAIT_S: Final = 20.0


@dataclass(kw_only=True)
class SubscriberConfig(SubscriberUsecaseConfig):
    group: str
    workers: int = 1
    messages_max: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ack_policy(self) -> AckPolicy:
        """By default, a failed message is handed out again,
        with an attempt number increased by one.
        """
        for found in (self._ack_policy, self._outer_config.ack_policy):
            if found is not EMPTY:
                return found
        return AckPolicy.NACK_ON_ERROR


class SubjectSubscriber(SubscriberUsecase[Raw]):
    """Handles the messages of a subject for a group, `workers` at a time. On an ordered subject,
    messages of a key are handled in order.
    """

    is_batch = False
    on_failure = "park"
    """What happens to an ordered subject after a message's last attempt."""
    _parse: Any = staticmethod(parse_message)
    _decode: Any = staticmethod(decode)

    def __init__(
        self, config: SubscriberConfig, specification: DescribedSubscriber, calls: Any
    ) -> None:
        config.parser, config.decoder = self._parse, self._decode
        super().__init__(config, specification, calls)  # type: ignore[arg-type]  # the parameters of its types are invariant
        self.group, self.options = config.group, config.options
        self._own, self._described = config, specification
        self._consumer: AnyConsumer | None = None
        self._workers: list[asyncio.Task[None]] = []

    @property
    def subject(self) -> str:
        """The subject, with the prefixes of its routers."""
        return self._described.subject

    @property
    def _client(self) -> qmq.Client:
        return self._outer_config.client  # type: ignore[attr-defined, no-any-return]  # QmqBrokerConfig

    def get_log_context(self, message: StreamMessage[Raw] | None) -> dict[str, str]:
        """The message's fields in a line of the log."""
        return {"subject": self.subject, "group": self.group} | super().get_log_context(message)

    async def start(self) -> None:
        """Join the group, and handle messages until `stop`.
        Raises UnknownSubject, InvalidName, AccessDenied.
        """
        await super().start()
        self._post_start()
        if self.calls:
            consumer = await self._joined()
            self._workers = [
                asyncio.create_task(self._work(consumer)) for _ in range(self._own.workers)
            ]

    async def _joined(self) -> AnyConsumer:
        if self._consumer is None:
            mq = self._client
            # A subscriber may start before the first message is sent: like a listener, it creates
            # the subject.
            located = await mq.metadata.locate(self.subject, create=True)
            consumer: AnyConsumer
            if located.settings.order:
                consumer = mq.ordered_consumer(
                    self.subject,
                    self.group,
                    ack="explicit",
                    on_failure=self.on_failure,
                    **self.options,
                )
            else:
                consumer = mq.consumer(
                    self.subject, self.group, ack="explicit", expired="skip", **self.options
                )
            await joined(consumer)
            self._consumer = consumer
        return self._consumer

    async def _work(self, consumer: AnyConsumer) -> None:
        while self.running:
            try:
                found = await self._next(consumer)
            except qmq.errors.ClientClosed:
                return
            except qmq.QmqError:
                log.exception("subscriber of %s: messages could not be read", self.subject)
                await asyncio.sleep(1)
                continue
            for each in found:
                await self._handle(each)

    async def _next(self, consumer: AnyConsumer, wait_s: float = WAIT_S) -> Sequence[Raw]:
        """The next message, or none if none came in time. Not by iteration, because workers share
        the consumer.
        """
        wait = timedelta(seconds=wait_s)
        return (
            await consumer.take(1, wait)
            if isinstance(consumer, qmq.OrderedConsumer)
            else list(await consumer.pull(1, wait))
        )

    async def _handle(self, raw: Raw) -> None:
        if self.ack_policy is AckPolicy.ACK_FIRST:
            raw.ack_later()
        with ExitStack() as stack:
            for each in raw if isinstance(raw, MessageBatch) else (raw,):
                stack.enter_context(self._client.interceptors.handling(each, self.group))
            await self.consume(raw)
        if not raw.is_settled and self.ack_policy is not AckPolicy.MANUAL:
            fail_raw(raw, error="the handler did not get the message")  # it cannot be decoded

    async def stop(self) -> None:
        """Take no more messages, let handlers finish, for the broker's `graceful_timeout`, and
        leave the group.
        """
        if isinstance(self._consumer, qmq.Consumer):
            self._consumer.drain()
        elif isinstance(self._consumer, qmq.OrderedConsumer):
            self._consumer.pause()
        await super().stop()
        workers, self._workers = self._workers, []
        # A handler that raises StopConsume stops its own subscriber: its worker ends by itself.
        others = [each for each in workers if each is not asyncio.current_task()]
        for each in others:
            each.cancel()
        if others:
            await asyncio.wait(others)
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            await consumer.close()

    def _make_response_publisher(self, message: StreamMessage[Raw]) -> Sequence[ReplyPublisher]:
        return (ReplyPublisher(self._outer_config.producer, message.reply_to),)

    async def get_one(self, *, timeout: float = 5) -> Any:
        """The next message or batch, of a subscriber without handlers; None if none came in time.
        Settle it: `await message.ack()`.
        """
        assert not self.calls, "the subscriber has handlers, which get the messages"
        consumer = await self._joined()
        for each in await self._next(consumer, timeout):
            return await self._parsed(each)
        return None

    async def __aiter__(self) -> AsyncIterator[Any]:
        assert not self.calls, "the subscriber has handlers, which get the messages"
        consumer = await self._joined()
        while True:
            for each in await self._next(consumer):
                yield await self._parsed(each)

    async def _parsed(self, raw: Raw) -> Any:
        parser, decoder = self._get_parser_and_decoder()
        around = (
            each(raw, context=self._outer_config.context) for each in self._broker_middlewares
        )
        return await process_msg(msg=raw, middlewares=around, parser=parser, decoder=decoder)


class BatchSubscriber(SubjectSubscriber):
    """Handles up to `messages_max` messages at a time, as a list. It does not wait until a list is
    full. The messages of a list succeed or fail together. On an ordered subject they come from one
    lane, whose later messages wait.
    """

    is_batch = True
    on_failure = "block"
    _parse = staticmethod(parse_batch)
    _decode = staticmethod(decode_batch)

    async def _next(self, consumer: AnyConsumer, wait_s: float = WAIT_S) -> Sequence[Raw]:
        found = await consumer.pull(self._own.messages_max, timedelta(seconds=wait_s))
        return [MessageBatch(found)] if len(found) else []


class ReplyPublisher(FakePublisher):
    """Sends a handler's answer to the subject that the message names in `reply_to`."""

    def __init__(self, producer: Any, subject: str) -> None:
        super().__init__(producer=producer)
        self.subject = subject

    def patch_command(self, cmd: PublishCommand) -> QmqPublishCommand:
        found = QmqPublishCommand.from_cmd(super().patch_command(cmd))
        found.destination = self.subject
        return found
