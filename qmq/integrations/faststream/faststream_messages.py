"""Messages between FastStream and QMQ: parsing of received ones, encoding and sending of published ones."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

from faststream._internal.configs import BrokerConfig
from faststream._internal.endpoint.utils import ParserComposition
from faststream._internal.parser import DefaultCodec
from faststream._internal.producer import ProducerProto
from faststream.exceptions import FeatureNotSupportedException
from faststream.message import StreamMessage, decode_message
from faststream.response import PublishCommand, Response
from faststream.response.publish_type import PublishType

import qmq
from qmq.client.any_message import AnyMessage, fail

CONTENT_TYPE: Final = "content-type"
CORRELATION_ID: Final = "correlation_id"
REPLY_TO: Final = "reply_to"


class QmqMessage(StreamMessage[AnyMessage]):
    """A received message. `raw_message` is QMQ's own."""

    async def ack(self) -> None:
        """Acknowledge, unless the message has a verdict."""
        if self.committed is None:
            self.raw_message.ack_later()
        await super().ack()

    async def nack(self, delay: timedelta | None = None) -> None:
        """Have the message handed out again, after the group's own delay if none is given."""
        if self.committed is None:
            fail(self.raw_message, delay)
        await super().nack()

    async def reject(self) -> None:
        """Put the message into the dead-letter queue; of an ordered subject, park its key."""
        if self.committed is None:
            self.raw_message.reject("rejected by FastStream")
        await super().reject()


async def parse_message(message: AnyMessage) -> QmqMessage:
    """A message as FastStream's handlers get it."""
    headers = {name: value.decode("utf-8", "replace") for name, value in message.headers.items()}
    return QmqMessage(
        message,
        message.body,
        headers=headers,
        reply_to=headers.get(REPLY_TO, ""),
        content_type=headers.get(CONTENT_TYPE),
        correlation_id=headers.get(CORRELATION_ID),
        message_id=str(message.id),
    )


async def decode(message: StreamMessage[Any]) -> Any:
    """The body as JSON, text or bytes, by its content type."""
    return decode_message(message)


class QmqResponse(Response):
    """What a handler returns if its answer needs a key, tags or a delay."""

    def __init__(
        self,
        body: Any,
        *,
        key: str | bytes | None = None,
        tags: Sequence[str] = (),
        delay: timedelta | None = None,
        headers: dict[str, Any] | None = None,
        correlation_id: str | None = None,
    ) -> None:
        super().__init__(body, headers=headers, correlation_id=correlation_id)
        self.key, self.tags, self.delay = key, tuple(tags), delay

    def as_publish_command(self) -> QmqPublishCommand:
        return QmqPublishCommand(
            self.body,
            key=self.key,
            tags=self.tags,
            delay=self.delay,
            headers=self.headers,
            correlation_id=self.correlation_id,
            _publish_type=PublishType.PUBLISH,
        )


class QmqPublishCommand(PublishCommand):
    """A message to send to the subject `destination`."""

    def __init__(
        self, body: Any, *, key: str | bytes | None = None, tags: Sequence[str] = (), delay: timedelta | None = None, **named: Any
    ) -> None:
        super().__init__(body, **named)
        self.key, self.tags, self.delay = key, tuple(tags), delay

    @classmethod
    def from_cmd(cls, cmd: PublishCommand) -> QmqPublishCommand:
        """A command of any kind as one of ours."""
        if isinstance(cmd, QmqPublishCommand):
            return cmd
        return cls(
            cmd.body,
            destination=cmd.destination,
            headers=cmd.headers,
            correlation_id=cmd.correlation_id,
            reply_to=cmd.reply_to,
            _publish_type=cmd.publish_type,
        )


class QmqProducer(ProducerProto[QmqPublishCommand]):
    """Sends messages with the client of its configuration."""

    def __init__(self, config: QmqBrokerConfig, parser: Any, decoder: Any) -> None:
        self._config = config
        self._parser = ParserComposition(parser, parse_message) if parser else parse_message
        self._decoder = ParserComposition(decoder, decode) if decoder else decode
        self.codec = config.broker_codec or DefaultCodec()

    async def publish(self, cmd: QmqPublishCommand) -> qmq.Receipt:
        """Send a message; returns when it is stored. Raises as `qmq.Client.send`."""
        body, content_type = await self.codec.encode(cmd.body, self._config.fd_config._serializer)
        own = {CONTENT_TYPE: content_type, CORRELATION_ID: cmd.correlation_id, REPLY_TO: cmd.reply_to}
        headers = {name: value for name, value in own.items() if value} | {name: str(value) for name, value in cmd.headers.items()}
        return await self._config.client.send(cmd.destination, body, key=cmd.key, tags=cmd.tags, headers=headers, delay=cmd.delay)

    async def request(self, cmd: QmqPublishCommand) -> Any:
        raise FeatureNotSupportedException("QMQ stores messages and has no requests: publish with reply_to, and subscribe to that subject")

    async def publish_batch(self, cmd: QmqPublishCommand) -> Any:
        raise FeatureNotSupportedException("publish the messages one by one: the client makes batches of them")


class QmqBrokerConfig(BrokerConfig):
    """FastStream's configuration of a broker or router, with the client while there is one."""

    mq: qmq.Client | None = None

    @property
    def client(self) -> qmq.Client:
        """The client. Raises ClientClosed before the broker is connected and after it stopped."""
        if self.mq is None:
            raise qmq.errors.ClientClosed("the broker is not connected: await broker.connect(), or run the application")
        return self.mq
