"""Producers of a client that has interceptors: each call goes through the interceptors first.

They are separate classes, so that sending without interceptors costs nothing extra (docs/adr/0019). Interceptors add headers, and learn the
outcome from the ticket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from qmq.client import message_checks
from qmq.client.delayed_producer import DelayedProducer
from qmq.client.due_times import DueTimes, When
from qmq.client.interceptors import Chain, Outgoing, outgoing
from qmq.client.links import Links
from qmq.client.ordered.ordered_producer import OrderedProducer
from qmq.client.producer import Producer
from qmq.client.receipts import BatchReceipt, Ticket, Tickets
from qmq.errors import QmqError

Headers = Mapping[str, str | bytes]


class InterceptedProducer(Producer):
    def __init__(self, chain: Chain, *positional: Any, **named: Any) -> None:
        super().__init__(*positional, **named)
        self._chain = chain

    def send(
        self, body: bytes, key: str | bytes | None = None, tags: Iterable[str] | None = None, headers: Headers | None = None
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

    def send(self, body: bytes, key: str | bytes, tags: Iterable[str] | None = None, headers: Headers | None = None) -> Ticket:
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
            tickets = super().send_many(bodies, keys, tags and told.tags, _headers(told), due=due, due_ms=due_ms)
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
            ticket = super().send_recurring(body, cron, zone, start_ms=start_ms, key=key, tags=told.tags[0], headers=told.headers[0])
        return _follow(self._chain, self._links, told, ticket, 0)


def _one(subject: str, body: bytes, key: Any, tags: Any, headers: Any, *, is_delayed: bool = False) -> Outgoing:
    return outgoing(subject, (key,), (message_checks.tag_tuple(tags),), (headers,), bodies=(body,), is_delayed=is_delayed)


def _many(subject: str, bodies: Any, keys: Any, tags: Any, headers: Any, *, is_delayed: bool = False) -> Outgoing:
    count = len(bodies)
    for name, column in (("keys", keys), ("tags", tags), ("headers", headers)):
        message_checks.check_length(name, column, count)
    told_tags: Sequence[Iterable[str]] = [message_checks.tag_tuple(each) for each in tags] if tags else [()] * count
    return outgoing(
        subject, keys or [None] * count, told_tags, headers or [None] * count, bodies=bodies, is_batch=True, is_delayed=is_delayed
    )


def _headers(told: Outgoing) -> Sequence[Headers] | None:
    return told.headers if any(told.headers) else None


@contextmanager
def _sending(chain: Chain, told: Outgoing) -> Iterator[None]:
    """Wraps the acceptance of messages: calls `sending` first, and `failed` if the messages are refused."""
    chain.sending(told)
    try:
        yield
    except Exception as error:
        chain.failed(told, error)
        raise


def _follow(chain: Chain, links: Links, told: Outgoing, ticket: Ticket, place: int) -> Ticket:
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


def _follow_many(chain: Chain, links: Links, told: Outgoing, tickets: Tickets) -> Tickets:
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


def _tell(chain: Chain, links: Links, told: Outgoing, tickets: Tickets) -> None:
    outcomes = [ticket.decided for ticket in tickets.tickets]
    failure = next((each for each in outcomes if isinstance(each, QmqError)), None)
    if failure is not None:
        chain.failed(told, failure)
        return
    receipts = [each for each in outcomes if isinstance(each, BatchReceipt)]
    groups = {each.broker_group for each in receipts}
    told.server = links.server(groups.pop()) if len(groups) == 1 else None
    chain.sent(told, tickets.collect(receipts))
