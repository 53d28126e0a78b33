"""Producers and consumers of a client that has interceptors. They are separate classes, so that a
client without interceptors pays nothing extra (docs/adr/0019).

A producer's call goes through the interceptors first: they add headers, and learn the outcome from
the ticket.

A consumer has interceptors around the handling of each message. With `async for`, a message is
being handled until it gets a verdict, until its task asks for the next one or ends, or until the
consumer is closed; then interceptors see the exception that ended the task, or that leaves `async
with consumer`. If an interceptor raises, the message fails: it is handed out again, and the loop,
or the call that gave the verdict, ends with that exception.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import (
    AsyncIterator,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

from qmq.client.connection.pool import ConnectionPool
from qmq.client.consuming import TaskHolding
from qmq.client.consuming.consumer import Consumer
from qmq.client.consuming.message import Message
from qmq.client.consuming.ordered.consumer import (
    CONCURRENCY,
    AnyMessage,
    Handler,
    OrderedConsumer,
    fail,
)
from qmq.client.consuming.ordered.message import OrderedMessage
from qmq.client.interceptors import Chain, Outgoing, outgoing
from qmq.client.listening.message_handling import before_verdicts
from qmq.client.producing import batch
from qmq.client.producing.delayed import DelayedProducer, DueTimes, When
from qmq.client.producing.ordered.producer import OrderedProducer
from qmq.client.producing.producer import Producer
from qmq.client.producing.receipts import BatchReceipt, Ticket, Tickets
from qmq.client.task_messages import TaskMessages
from qmq.errors import QmqError

Headers = Mapping[str, str | bytes]


class InterceptedProducer(Producer):
    def __init__(self, chain: Chain, *positional: Any, **named: Any) -> None:
        super().__init__(*positional, **named)
        self._chain = chain

    def send(
        self,
        body: bytes,
        key: str | bytes | None = None,
        tags: Iterable[str] | None = None,
        headers: Headers | None = None,
    ) -> Ticket:
        told = _one(self.subject, body, key, tags, headers)
        with _sending(self._chain, told):
            ticket = super().send(body, key, told.tags[0], told.headers[0])
        return _follow(self._chain, self._links, told, ticket, self.place_of_last(ticket))

    def send_many(
        self,
        bodies: Sequence[bytes],
        keys: Sequence[str | bytes | None] | None = None,
        tags: Sequence[Iterable[str]] | None = None,
        headers: Sequence[Headers] | None = None,
    ) -> Tickets:
        told = _many(self.subject, bodies, keys, tags, headers)
        with _sending(self._chain, told):
            tickets = super().send_many(bodies, keys, tags and told.tags, _headers(told))
        return _follow_many(self._chain, self._links, told, tickets)


class InterceptedOrderedProducer(OrderedProducer):
    def __init__(self, chain: Chain, *positional: Any, **named: Any) -> None:
        super().__init__(*positional, **named)
        self._chain = chain

    def send(
        self,
        body: bytes,
        key: str | bytes,
        tags: Iterable[str] | None = None,
        headers: Headers | None = None,
    ) -> Ticket:
        told = _one(self.subject, body, key, tags, headers)
        with _sending(self._chain, told):
            ticket = super().send(body, key, told.tags[0], told.headers[0])
        return _follow(self._chain, self._links, told, ticket, self.place_of_last(ticket))

    def send_many(
        self,
        bodies: Sequence[bytes],
        keys: Sequence[str | bytes],
        tags: Sequence[Iterable[str]] | None = None,
        headers: Sequence[Headers] | None = None,
    ) -> Tickets:
        told = _many(self.subject, bodies, keys, tags, headers)
        with _sending(self._chain, told):
            tickets = super().send_many(bodies, keys, tags and told.tags, _headers(told))
        return _follow_many(self._chain, self._links, told, tickets)


class InterceptedDelayedProducer(DelayedProducer):
    def __init__(self, chain: Chain, *positional: Any, **named: Any) -> None:
        super().__init__(*positional, **named)
        self._chain = chain

    def send(
        self,
        body: bytes,
        key: str | bytes | None = None,
        tags: Iterable[str] | None = None,
        headers: Headers | None = None,
        *,
        due: When | None = None,
        due_ms: int | None = None,
    ) -> Ticket:
        told = _one(self.subject, body, key, tags, headers, is_delayed=True)
        with _sending(self._chain, told):
            ticket = super().send(body, key, told.tags[0], told.headers[0], due=due, due_ms=due_ms)
        return _follow(self._chain, self._links, told, ticket, self.place_of_last(ticket))

    def send_many(
        self,
        bodies: Sequence[bytes],
        keys: Sequence[str | bytes | None] | None = None,
        tags: Sequence[Iterable[str]] | None = None,
        headers: Sequence[Headers] | None = None,
        *,
        due: DueTimes | None = None,
        due_ms: Sequence[int] | int | None = None,
    ) -> Tickets:
        told = _many(self.subject, bodies, keys, tags, headers, is_delayed=True)
        with _sending(self._chain, told):
            tickets = super().send_many(
                bodies, keys, tags and told.tags, _headers(told), due=due, due_ms=due_ms
            )
        return _follow_many(self._chain, self._links, told, tickets)

    def send_recurring(
        self,
        body: bytes,
        cron: str,
        zone: str,
        *,
        start_ms: int | None = None,
        key: str | bytes | None = None,
        tags: Iterable[str] | None = None,
        headers: Headers | None = None,
    ) -> Ticket:
        told = _one(self.subject, body, key, tags, headers, is_delayed=True)
        with _sending(self._chain, told):
            ticket = super().send_recurring(
                body,
                cron,
                zone,
                start_ms=start_ms,
                key=key,
                tags=told.tags[0],
                headers=told.headers[0],
            )
        return _follow(self._chain, self._links, told, ticket, 0)


def _one(
    subject: str, body: bytes, key: Any, tags: Any, headers: Any, *, is_delayed: bool = False
) -> Outgoing:
    return outgoing(
        subject, (key,), (batch.tag_tuple(tags),), (headers,), bodies=(body,), is_delayed=is_delayed
    )


def _many(
    subject: str, bodies: Any, keys: Any, tags: Any, headers: Any, *, is_delayed: bool = False
) -> Outgoing:
    count = len(bodies)
    for name, column in (("keys", keys), ("tags", tags), ("headers", headers)):
        batch.check_length(name, column, count)
    told_tags: Sequence[Iterable[str]] = (
        [batch.tag_tuple(each) for each in tags] if tags else [()] * count
    )
    return outgoing(
        subject,
        keys or [None] * count,
        told_tags,
        headers or [None] * count,
        bodies=bodies,
        is_batch=True,
        is_delayed=is_delayed,
    )


def _headers(told: Outgoing) -> Sequence[Headers] | None:
    return told.headers if any(told.headers) else None


@contextmanager
def _sending(chain: Chain, told: Outgoing) -> Iterator[None]:
    """Wraps the acceptance of messages:
    calls `sending` first, and `failed` if the messages are refused.
    """
    chain.sending(told)
    try:
        yield
    except Exception as error:
        chain.failed(told, error)
        raise


def _follow(
    chain: Chain, links: ConnectionPool, told: Outgoing, ticket: Ticket, place: int
) -> Ticket:
    def decided() -> None:
        outcome = ticket.decided
        if isinstance(outcome, BatchReceipt):
            receipt = outcome.receipt(place)
            told.server = links.server(receipt.broker_group)
            chain.sent(told, (receipt,))
        elif outcome is not None:
            chain.failed(told, outcome)

    ticket.when_decided(decided)
    return ticket


def _follow_many(chain: Chain, links: ConnectionPool, told: Outgoing, tickets: Tickets) -> Tickets:
    """Calls `sent` or `failed` once, when the last ticket is decided."""
    waiting = len(tickets.tickets)

    def decided() -> None:
        nonlocal waiting
        waiting -= 1
        if waiting <= 0:
            _tell(chain, links, told, tickets)

    watched: Callable[[], None] = decided
    for ticket in tickets.tickets:
        ticket.when_decided(watched)
    if not tickets.tickets:
        chain.sent(told, ())
    return tickets


def _tell(chain: Chain, links: ConnectionPool, told: Outgoing, tickets: Tickets) -> None:
    outcomes = [ticket.decided for ticket in tickets.tickets]
    failure = next((each for each in outcomes if isinstance(each, QmqError)), None)
    if failure is not None:
        chain.failed(told, failure)
        return
    receipts = [each for each in outcomes if isinstance(each, BatchReceipt)]
    groups = {each.broker_group for each in receipts}
    told.server = links.server(groups.pop()) if len(groups) == 1 else None
    chain.sent(told, tickets.collect(receipts))


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
        """The message gets a verdict. Raises what interceptors raise;
        then the message has failed instead.
        """
        is_settled, self.message.is_settled = self.message.is_settled, False
        self.end()
        self.message.is_settled = is_settled

    def end(self, error: BaseException | None = None) -> None:
        """The message is handled. Raises what interceptors raise; then the message has failed.
        Harmless to repeat.
        """
        if self._is_over:
            return
        self._is_over = True
        try:
            self._around.__exit__(
                type(error) if error is not None else None,
                error,
                error.__traceback__ if error is not None else None,
            )
        except BaseException as failure:
            _fail(self.message, failure)
            raise


class _Handlings:
    """The messages that the tasks of a consumer handle."""

    def __init__(self, chain: Chain, name: str, group: str) -> None:
        self._chain, self._group = chain, group
        self._held = TaskMessages[_Handling](
            name, asyncio.get_running_loop(), _Handling.end, _end_of_task
        )

    def next(self, coming: Coroutine[Any, Any, M]) -> Coroutine[Any, Any, M]:
        """The message that `coming` gives the running task, once its last one has ended. Raises
        what interceptors raise.
        """
        return self._next(
            coming, *self._held.asks()
        )  # the task that asks, also if another one awaits the answer

    async def _next(
        self, coming: Coroutine[Any, Any, M], holding: TaskHolding, last: _Handling | None
    ) -> M:
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

    def __aiter__(self) -> AsyncIterator[OrderedMessage]:
        return self

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
