"""Consumers of a client that has interceptors: the same consumers, and interceptors around the handling of each message.

With `async for`, a message is being handled until it gets a verdict, until its task asks for the next one or ends, or until the consumer
is closed; then interceptors see the exception that ended the task, or that leaves `async with consumer`. If an interceptor raises, the
message fails: it is handed out again, and the loop, or the call that gave the verdict, ends with that exception.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from qmq.client.any_message import AnyMessage, fail
from qmq.client.consumer import Consumer
from qmq.client.interceptors import Chain
from qmq.client.listening.guarded_message import before_verdicts
from qmq.client.message import Message
from qmq.client.ordered.ordered_consumer import CONCURRENCY, Handler, OrderedConsumer
from qmq.client.ordered.ordered_message import OrderedMessage
from qmq.client.ready_form import TaskHolding
from qmq.client.task_messages import TaskMessages

log = logging.getLogger("qmq.client")

M = TypeVar("M", bound=AnyMessage)


class _Handling:
    """A message that is being handled, with what its interceptors do around it."""

    def __init__(self, message: AnyMessage, around: AbstractContextManager[object]) -> None:
        self.message = message
        self._around = around
        self._is_over = False
        before_verdicts(message, self._given)

    def __repr__(self) -> str:
        return repr(self.message)

    def _given(self) -> None:
        """The message gets a verdict. Raises what interceptors raise; then the message has failed instead."""
        is_settled, self.message.is_settled = self.message.is_settled, False
        self.end()
        self.message.is_settled = is_settled

    def end(self, error: BaseException | None = None) -> None:
        """The message is handled. Raises what interceptors raise; then the message has failed. Harmless to repeat."""
        if self._is_over:
            return
        self._is_over = True
        try:
            self._around.__exit__(type(error) if error is not None else None, error, error.__traceback__ if error is not None else None)
        except BaseException as failure:
            _fail(self.message, failure)
            raise


class _Handlings:
    """The messages that the tasks of a consumer handle."""

    def __init__(self, chain: Chain, name: str, group: str) -> None:
        self._chain, self._group = chain, group
        self._held = TaskMessages[_Handling](name, asyncio.get_running_loop(), _Handling.end, _end_of_task)

    def next(self, coming: Coroutine[Any, Any, M]) -> Coroutine[Any, Any, M]:
        """The message that `coming` gives the running task, once its last one has ended. Raises what interceptors raise."""
        return self._next(coming, *self._held.asks())  # the task that asks, also if another one awaits the answer

    async def _next(self, coming: Coroutine[Any, Any, M], holding: TaskHolding, last: _Handling | None) -> M:
        try:
            self._held.finish(holding, last)
        except BaseException:
            coming.close()
            raise
        message = await coming
        self._begin(holding, message)
        return message

    def _begin(self, holding: TaskHolding, message: AnyMessage) -> None:
        around = self._chain.handling(message, self._group)
        try:
            around.__enter__()
        except BaseException as failure:
            _fail(message, failure)
            raise
        self._held.add(holding, _Handling(message, around))

    def close(self, error: BaseException | None) -> None:
        """End all. Raises what an interceptor raises, after the others."""
        raised: BaseException | None = None
        for each in self._held.close():
            try:
                each.end(error)
            except BaseException as failure:
                raised = raised or failure
        if raised is not None:
            raise raised


def _end_of_task(handling: _Handling, failure: BaseException | None) -> None:
    try:
        handling.end(failure)
    except Exception as raised:
        if raised is not failure:
            log.exception("an interceptor failed when the task of %r had ended", handling.message)


def _fail(message: AnyMessage, failure: BaseException) -> None:
    if not message.is_settled:
        fail(message, error=failure)


class InterceptedConsumer(Consumer):
    def __init__(self, chain: Chain, *positional: Any, **named: Any) -> None:
        super().__init__(*positional, **named)
        self._handlings = _Handlings(chain, self.name, self.group)

    def __aiter__(self) -> AsyncIterator[Message]:
        return self

    def __anext__(self) -> Coroutine[Any, Any, Message]:
        return self._handlings.next(super().__anext__())

    async def close(self, error: BaseException | None = None) -> None:
        try:
            self._handlings.close(error)
        finally:
            await super().close(error)


class InterceptedOrderedConsumer(OrderedConsumer):
    def __init__(self, chain: Chain, *positional: Any, **named: Any) -> None:
        super().__init__(*positional, **named)
        self._chain = chain
        self._handlings = _Handlings(chain, self.name, self.group)

    def __anext__(self) -> Coroutine[Any, Any, OrderedMessage]:
        return self._handlings.next(super().__anext__())

    async def run(self, handler: Handler, *, concurrency: int = CONCURRENCY) -> None:
        async def handle(message: OrderedMessage) -> None:
            with self._chain.handling(message, self.group):
                await handler(message)

        await super().run(handle, concurrency=concurrency)

    async def close(self, error: BaseException | None = None) -> None:
        try:
            self._handlings.close(error)
        finally:
            await super().close(error)
