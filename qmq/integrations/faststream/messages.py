"""Received messages as FastStream's handlers get them: one, or a batch with one verdict for all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any, Final

from faststream.message import StreamMessage, decode_message

import qmq
from qmq.client.consuming.message import Messages
from qmq.client.consuming.ordered.consumer import AnyMessage, fail
from qmq.client.consuming.ordered.message import OrderedMessages
from qmq.client.payloads import Undecodable

CONTENT_TYPE: Final = "content-type"
CORRELATION_ID: Final = "correlation_id"
REPLY_TO: Final = "reply_to"


class MessageBatch:
    """Messages that a handler gets together. A verdict is for all of them."""

    __slots__ = ("is_settled", "messages")

    def __init__(self, messages: Messages | OrderedMessages) -> None:
        self.messages = messages
        self.is_settled = False

    def __len__(self) -> int:
        return len(self.messages)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.messages)

    def __getitem__(self, index: int) -> Any:
        return self.messages[index]

    def ack_later(self) -> None:
        """Acknowledge all."""
        if not self.is_settled:
            self.messages.ack_later()
            self.is_settled = True

    def fail(self, delay: timedelta | None = None, error: str | BaseException = "") -> None:
        """Count a failed attempt of all messages: they are handed out again. Raises InvalidArgument, DelayTooLong."""
        if self.is_settled:
            return
        if isinstance(self.messages, Messages):
            self.messages.nack(delay, error)
        else:
            self.messages.fail(delay, error)
        self.is_settled = True

    def reject(self, error: str | BaseException = "") -> None:
        """Put all messages into the dead-letter queue. Those of an ordered subject are handed out again: a batch cannot park its keys."""
        if not isinstance(self.messages, Messages):
            self.fail(error=error)
        elif not self.is_settled:
            self.messages.reject(error)
            self.is_settled = True


Raw = AnyMessage | MessageBatch
"""The type of FastStream's `raw_message`."""


def fail_raw(raw: Raw, delay: timedelta | None = None, error: str = "") -> None:
    """Count a failed attempt."""
    if isinstance(raw, MessageBatch):
        raw.fail(delay, error)
    else:
        fail(raw, delay, error)


class QmqMessage(StreamMessage[Raw]):
    """A received message. `raw_message` is QMQ's own; of a batch, a sequence of QMQ's own."""

    async def ack(self) -> None:
        """Acknowledge, unless the message has a verdict."""
        if self.committed is None:
            self.raw_message.ack_later()
        await super().ack()

    async def nack(self, delay: timedelta | None = None) -> None:
        """Have the message handed out again, after the group's own delay if none is given."""
        if self.committed is None:
            fail_raw(self.raw_message, delay)
        await super().nack()

    async def reject(self) -> None:
        """Put the message into the dead-letter queue; of an ordered subject, park its key."""
        if self.committed is None:
            self.raw_message.reject("rejected by FastStream")
        await super().reject()


async def parse_message(message: Any) -> QmqMessage:
    """A message as FastStream's handlers get it."""
    return _parsed(message, message.body, message.id, _headers(message))


async def decode(message: StreamMessage[Any]) -> Any:
    """The body as JSON, text or bytes, by its content type. Raises Undecodable."""
    return _decoded(message)


async def parse_batch(batch: MessageBatch) -> QmqMessage:
    """A batch as FastStream's handlers get it; correlation id, content type and `reply_to` are those of its first message."""
    every = [_headers(each) for each in batch]
    return _parsed(batch, batch.messages.bodies, batch[0].id, every[0], every)


async def decode_batch(message: StreamMessage[Any]) -> list[Any]:  # FastStream knows a batch by this name
    """The bodies, each by its own content type."""
    return [_decoded(await parse_message(each)) for each in message.raw_message]


def _decoded(message: StreamMessage[Any]) -> Any:
    try:
        return decode_message(message)
    except (ValueError, RecursionError) as failure:
        if not message.content_type:
            return message.body  # nobody said that it is JSON
        raise Undecodable(f"{type(failure).__name__}: {failure}") from failure


def _headers(message: Any) -> dict[str, str]:
    return {name: value.decode("utf-8", "replace") for name, value in message.headers.items()}


def _parsed(raw: Any, body: Any, id: qmq.MessageId, headers: Mapping[str, str], every: list[dict[str, str]] | None = None) -> QmqMessage:
    return QmqMessage(
        raw,
        body,
        headers=dict(headers),
        batch_headers=every,
        reply_to=headers.get(REPLY_TO, ""),
        content_type=headers.get(CONTENT_TYPE),
        correlation_id=headers.get(CORRELATION_ID),
        message_id=str(id),
    )
