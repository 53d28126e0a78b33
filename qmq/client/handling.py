"""Consumers of a client that has interceptors: the same consumers, and interceptors around the handling of each message.

With `async for`, a message is being handled until the loop asks for the next one, or the consumer is closed; then interceptors see the
exception that leaves `async with consumer`. If an interceptor raises, the message fails: it is handed out again, and the loop ends with
that exception.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractContextManager
from typing import Any

from qmq.client.any_message import AnyMessage, fail
from qmq.client.consumer import Consumer
from qmq.client.interceptors import Chain
from qmq.client.message import Message
from qmq.client.ordered.ordered_consumer import CONCURRENCY, Handler, OrderedConsumer
from qmq.client.ordered.ordered_message import OrderedMessage


class Turn:
    """The message that a loop handles."""

    __slots__ = ("_chain", "_group", "_handling", "_message")

    def __init__(self, chain: Chain, group: str) -> None:
        self._chain = chain
        self._group = group
        self._message: AnyMessage | None = None
        self._handling: AbstractContextManager[object] | None = None

    def begin(self, message: AnyMessage) -> None:
        """The loop gets a message. Raises what interceptors raise; then the message has failed."""
        handling = self._chain.handling(message, self._group)
        try:
            handling.__enter__()
        except BaseException as failure:
            _fail(message, failure)
            raise
        self._message, self._handling = message, handling

    def end(self, error: BaseException | None = None) -> None:
        """The loop has finished the message. Raises what interceptors raise; then the message has failed."""
        message, handling, self._message, self._handling = self._message, self._handling, None, None
        if message is None or handling is None:
            return
        try:
            handling.__exit__(type(error) if error is not None else None, error, error.__traceback__ if error is not None else None)
        except BaseException as failure:
            _fail(message, failure)
            raise


def _fail(message: AnyMessage, failure: BaseException) -> None:
    if not message.is_settled:
        fail(message, error=failure)


class InterceptedConsumer(Consumer):
    def __init__(self, chain: Chain, *positional: Any, **named: Any) -> None:
        super().__init__(*positional, **named)
        self._turn_of_loop = Turn(chain, self.group)

    def __aiter__(self) -> AsyncIterator[Message]:
        return self

    async def __anext__(self) -> Message:
        self._turn_of_loop.end()
        message = await self.ready.__anext__()
        self._turn_of_loop.begin(message)
        return message

    async def close(self, error: BaseException | None = None) -> None:
        try:
            self._turn_of_loop.end(error)
        finally:
            await super().close(error)


class InterceptedOrderedConsumer(OrderedConsumer):
    def __init__(self, chain: Chain, *positional: Any, **named: Any) -> None:
        super().__init__(*positional, **named)
        self._chain = chain
        self._turn_of_loop = Turn(chain, self.group)

    async def __anext__(self) -> OrderedMessage:
        self._turn_of_loop.end()
        message = await super().__anext__()
        self._turn_of_loop.begin(message)
        return message

    async def run(self, handler: Handler, *, concurrency: int = CONCURRENCY) -> None:
        async def handle(message: OrderedMessage) -> None:
            with self._chain.handling(message, self.group):
                await handler(message)

        await super().run(handle, concurrency=concurrency)

    async def close(self, error: BaseException | None = None) -> None:
        try:
            self._turn_of_loop.end(error)
        finally:
            await super().close(error)
