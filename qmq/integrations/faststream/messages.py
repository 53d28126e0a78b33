"""Received messages as FastStream's handlers get them: one, or a batch with one verdict for all.

*Answers to requests.* All brokers that send requests read one subject of answers. Each of them
reads every answer, and takes those whose correlation id belongs to one of its requests:

    request ──▶ subject, with `reply_to` and a correlation id ──▶ handler
    ──▶ subject of answers ──▶ the broker that asked

The first request joins the subject of answers; from then on no answer is missed. QMQ stores
requests like any message: a request that timed out is still handled, but its answer is dropped.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any, Final

from faststream.message import StreamMessage, decode_message

import qmq
from qmq.client.consuming.message import Message, Messages
from qmq.client.consuming.ordered.consumer import AnyMessage, fail, joined_unordered
from qmq.client.consuming.ordered.message import OrderedMessages
from qmq.client.payloads import Undecodable
from qmq.errors import ClientClosed, InvalidArgument, QmqError

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
        """Count a failed attempt of all messages: they are handed out again. Raises
        InvalidArgument, DelayTooLong.
        """
        if self.is_settled:
            return
        if isinstance(self.messages, Messages):
            self.messages.nack(delay, error)
        else:
            self.messages.fail(delay, error)
        self.is_settled = True

    def reject(self, error: str | BaseException = "") -> None:
        """Put all messages into the dead-letter queue. Those of an ordered subject are handed out
        again: a batch cannot park its keys.
        """
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
    """A batch as FastStream's handlers get it; correlation id, content type and `reply_to` are
    those of its first message.
    """
    every = [_headers(each) for each in batch]
    return _parsed(batch, batch.messages.bodies, batch[0].id, every[0], every)


async def decode_batch(
    message: StreamMessage[Any],
) -> list[Any]:  # FastStream knows a batch by this name
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


def _parsed(
    raw: Any,
    body: Any,
    id: qmq.MessageId,
    headers: Mapping[str, str],
    every: list[dict[str, str]] | None = None,
) -> QmqMessage:
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


log = logging.getLogger("qmq.integrations")

GROUP: Final = "faststream-requests"


class RequestAnswers:
    """Waits for the answers to one broker's requests on `subject`."""

    def __init__(self, subject: str) -> None:
        self.subject = subject
        self._waiting: dict[str, asyncio.Future[Message]] = {}
        self._joining = asyncio.Lock()
        self._joined: tuple[qmq.Consumer, asyncio.Task[None]] | None = None

    async def ask(
        self,
        mq: qmq.Client,
        correlation_id: str,
        send: Callable[[], Awaitable[object]],
        timeout_s: float,
    ) -> Message:
        """Send a request by `send`, and return its answer. Raises TimeoutError if none came in time
        after it was stored, InvalidArgument if another request waits with the same correlation id,
        and what `send` raises.
        """
        await self._join(mq)
        if correlation_id in self._waiting:
            raise InvalidArgument(
                f"a request with the correlation id {correlation_id!r} waits already: give "
                "each its own id"
            )
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._waiting[correlation_id] = answer
        try:
            await send()
            async with asyncio.timeout(timeout_s):
                return await answer
        finally:
            del self._waiting[correlation_id]

    async def _join(self, mq: qmq.Client) -> None:
        async with self._joining:
            if self._joined is None:
                await mq.metadata.locate(self.subject, create=True)
                consumer = mq.consumer(
                    self.subject, GROUP, broadcast=True, ack="explicit", expired="skip"
                )
                if not await joined_unordered(consumer):
                    raise InvalidArgument(
                        f"answers cannot come over the ordered subject {self.subject}: give "
                        "another as `answers=`"
                    )
                self._joined = consumer, asyncio.create_task(self._read(consumer))

    async def _read(self, consumer: qmq.Consumer) -> None:
        while True:
            try:
                found = await consumer.pull()
            except ClientClosed:
                return
            except QmqError:
                log.exception("answers on %s could not be read", self.subject)
                await asyncio.sleep(1)
                continue
            for each in found:
                waiting = self._waiting.get(
                    each.headers.get(CORRELATION_ID, b"").decode("utf-8", "replace")
                )
                if waiting is not None and not waiting.done():
                    waiting.set_result(each)
            found.ack_later()

    async def close(self) -> None:
        """Read no more answers; requests that wait fail with ClientClosed."""
        joined, self._joined = self._joined, None
        if joined is not None:
            consumer, reader = joined
            await consumer.close()
            await reader
        for each in self._waiting.values():
            if not each.done():
                each.set_exception(ClientClosed("the broker stopped before the answer came"))
