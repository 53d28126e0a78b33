"""Sending through FastStream: commands with options for each message, and the producer that encodes
and sends them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final

from faststream._internal.configs import BrokerConfig
from faststream._internal.endpoint.utils import ParserComposition
from faststream._internal.parser import BatchCodecProto, DefaultCodec
from faststream._internal.producer import ProducerProto
from faststream.response import PublishCommand, Response
from faststream.response.publish_type import PublishType
from faststream.response.response import BatchPublishCommand

import qmq
from qmq.client.consuming.message import Message
from qmq.integrations.faststream.messages import (
    CONTENT_TYPE,
    CORRELATION_ID,
    REPLY_TO,
    RequestAnswers,
    decode,
    parse_message,
)
from qmq.integrations.local_messages import LocalMessage

REQUEST_S: Final = 0.5
"""How long a request waits for its answer: FastStream's own default."""


class QmqResponse(Response):
    """A handler's answer with a key, tags or a delay.
    In `publish_batch`, one message with its own options.
    """

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


@dataclass(frozen=True, slots=True)
class MessageOptions:
    """The options of one message of a batch; the command's options are the defaults."""

    key: str | bytes | None = None
    tags: tuple[str, ...] = ()
    delay: timedelta | None = None
    headers: dict[str, Any] = field(default_factory=dict)
    correlation_id: str | None = None


NO_OPTIONS: Final = MessageOptions()


class QmqPublishCommand(BatchPublishCommand):
    """Messages to send to the subject `destination`.
    Bodies that are a `QmqResponse` have their own options.
    """

    def __init__(
        self,
        body: Any,
        /,
        *bodies: Any,
        key: str | bytes | None = None,
        tags: Sequence[str] = (),
        delay: timedelta | None = None,
        timeout_s: float = REQUEST_S,
        **named: Any,
    ) -> None:
        every = (body, *bodies)
        super().__init__(
            *(each.body if isinstance(each, Response) else each for each in every), **named
        )
        self.key, self.tags, self.delay, self.timeout_s = key, tuple(tags), delay, timeout_s
        self._options = [_options_of(each) for each in every]

    @classmethod
    def from_cmd(cls, cmd: PublishCommand, *, batch: bool = False) -> QmqPublishCommand:
        """Convert a command of any kind to a QMQ command.
        For a batch, a list as body means many bodies.
        """
        if isinstance(cmd, QmqPublishCommand) and not batch:
            return cmd
        body, more = cls._parse_bodies(cmd.body, batch=batch)
        own: dict[str, Any] = (
            {"key": cmd.key, "tags": cmd.tags, "delay": cmd.delay}
            if isinstance(cmd, QmqPublishCommand)
            else {}
        )
        return cls(
            body,
            *more,
            destination=cmd.destination,
            headers=cmd.headers,
            correlation_id=cmd.correlation_id,
            reply_to=cmd.reply_to,
            _publish_type=cmd.publish_type,
            **own,
        )

    @BatchPublishCommand.batch_bodies.setter  # type: ignore[attr-defined, untyped-decorator]
    def batch_bodies(self, value: Sequence[Any]) -> None:
        """Replace the bodies: options stay with their body, also if a middleware changes the order,
        the number or the bodies themselves.
        """
        self._options = aligned(self.batch_bodies, self._options, value)
        self.body, self.extra_bodies = (value[0], tuple(value[1:])) if value else (None, ())

    def options(self, place: int) -> MessageOptions:
        """The options of one of the bodies."""
        return self._options[place] if place < len(self._options) else NO_OPTIONS


def _options_of(body: Any) -> MessageOptions:
    if isinstance(body, QmqResponse):
        return MessageOptions(body.key, body.tags, body.delay, body.headers, body.correlation_id)
    return (
        MessageOptions(headers=body.headers, correlation_id=body.correlation_id)
        if isinstance(body, Response)
        else NO_OPTIONS
    )


def aligned(
    bodies: Sequence[Any], options: Sequence[MessageOptions], wanted: Sequence[Any]
) -> list[MessageOptions]:
    """The options of the `wanted` bodies. A body gets the options of the first equal body that has
    not been taken. If the numbers of `bodies` and `wanted` are equal, a new body gets the options
    of the next body that was replaced.
    """
    left = list(zip(bodies, options, strict=False))
    found: list[MessageOptions | None] = []
    for each in wanted:
        place = next(
            (index for index, (body, _) in enumerate(left) if body is each or body == each), None
        )
        found.append(None if place is None else left.pop(place)[1])
    gone = iter([own for _, own in left] if len(wanted) == len(bodies) else [])
    return [next(gone, NO_OPTIONS) if own is None else own for own in found]


class QmqProducer(ProducerProto[QmqPublishCommand]):
    """Sends messages with the client of its configuration."""

    def __init__(
        self, config: QmqBrokerConfig, parser: Any, decoder: Any, answers: RequestAnswers
    ) -> None:
        self._config, self._answers = config, answers
        self._parser = ParserComposition(parser, parse_message) if parser else parse_message
        self._decoder = ParserComposition(decoder, decode) if decoder else decode
        self.codec = config.broker_codec or DefaultCodec()

    async def publish(self, cmd: QmqPublishCommand) -> qmq.Receipt:
        """Send a message; returns when it is stored. Raises as `qmq.Client.send`."""
        (content,), (delay,) = await self.contents(cmd, (cmd.body,))
        sent = content._asdict() | {"delay": delay}
        return await self._config.client.send(cmd.destination, sent.pop("body"), **sent)

    async def publish_batch(self, cmd: QmqPublishCommand) -> qmq.Receipts:
        """Send messages together; returns when all are stored. Raises as `qmq.Client.send_many`."""
        contents, delays = await self.contents(cmd, cmd.batch_bodies)
        if not contents:
            return qmq.Receipts([])
        bodies, keys, tags, headers = zip(*contents, strict=True)
        later = [each or timedelta(0) for each in delays] if any(delays) else None
        return await self._config.client.send_many(
            cmd.destination, bodies, keys=keys, tags=tags, headers=headers, delays=later
        )

    async def request(self, cmd: QmqPublishCommand) -> Message:
        """Send a message and wait for the answer. Raises TimeoutError; else as `publish`."""
        cmd.reply_to = self._answers.subject
        return await self._answers.ask(
            self._config.client, cmd.correlation_id or "", lambda: self.publish(cmd), cmd.timeout_s
        )

    async def contents(
        self, cmd: QmqPublishCommand, bodies: Sequence[Any]
    ) -> tuple[list[LocalMessage], list[timedelta | None]]:
        """The encoded messages of a command, and their delays."""
        serializer = self._config.fd_config._serializer
        if isinstance(self.codec, BatchCodecProto) and len(bodies) > 1:
            encoded = await self.codec.encode_batch(bodies, serializer)
        else:
            encoded = [await self.codec.encode(each, serializer) for each in bodies]
        contents, delays = [], []
        for place, (body, content_type) in enumerate(encoded):
            own = cmd.options(place)
            named = {
                CONTENT_TYPE: content_type,
                CORRELATION_ID: own.correlation_id or cmd.correlation_id,
                REPLY_TO: cmd.reply_to,
            }
            headers: dict[str, str | bytes] = {
                name: value for name, value in named.items() if value
            }
            headers |= {
                name: header_value(name, value)
                for name, value in (cmd.headers | own.headers).items()
            }
            contents.append(
                LocalMessage(
                    body, own.key if own.key is not None else cmd.key, own.tags or cmd.tags, headers
                )
            )
            delays.append(own.delay if own.delay is not None else cmd.delay)
        return contents, delays


def header_value(name: str, value: object) -> str | bytes:
    """Bytes and text as they are, numbers as text. Raises InvalidArgument for other values, whose
    text no reader could take back.
    """
    if isinstance(value, str | bytes):
        return value
    if isinstance(value, int | float):
        return str(value)
    raise qmq.errors.InvalidArgument(
        f"the header {name!r} is str, bytes or a number, not {type(value).__name__}: leave "
        "out what has no value"
    )


class QmqBrokerConfig(BrokerConfig):
    """FastStream's configuration of a broker or router, with the client while there is one."""

    mq: qmq.Client | None = None

    @property
    def client(self) -> qmq.Client:
        """The client. Raises ClientClosed before the broker is connected and after it stopped."""
        if self.mq is None:
            raise qmq.errors.ClientClosed(
                "the broker is not connected: await broker.connect(), or run the application"
            )
        return self.mq
