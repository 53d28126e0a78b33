"""Reads one subject for one group in this gateway, for all its clients here: a consumer of QMQ, and the waiting calls.

    unordered subject    a Consumer; the broker matches tags, the gateway matches conditions
    ordered subject      an OrderedConsumer; at most one message of a key is handed out; the gateway matches tags and conditions

The consumer holds the messages that were handed out: if this gateway dies, its lease ends and the messages come back. Messages that no
client here asks for go to other gateways: of an unordered subject at once, of an ordered one with the lanes, after some time without calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Final, Protocol

from qmq import limits
from qmq.client.client import Client
from qmq.client.message import Message, StoredMessage
from qmq.client.ordered.ordered_message import OrderedMessage
from qmq.gateway.client_settings import ATTEMPTS_MAX
from qmq.gateway.message_filter import MessageFilter

AHEAD: Final = 512
"""A reader prefetches at most this many messages of an unordered subject for the next request."""
PREFETCH: Final = 10_000
"""A reader of an ordered subject holds at most this many messages over all lanes: those in hand and those that wait."""
LEASE_MS: Final = 30_000
"""If a gateway is silent for this long, its messages go to other consumers."""
_NOW: Final = timedelta(0)


class GroupReader(Protocol):
    """The interface of both readers. `in_hand` counts messages that were handed out and are not settled; the caller keeps the count."""

    is_ordered: bool
    waiting: int
    in_hand: int

    async def receive(self, messages_max: int, wait_s: float) -> Sequence[StoredMessage]:
        """Wait up to `wait_s` seconds for at most `messages_max` messages; returns none if none came. Raises QmqError."""
        ...

    async def ack(self, message: StoredMessage) -> None:
        """Acknowledge a message; returns when the broker has stored this. Raises StaleDelivery, LaneLost, NotConnected."""
        ...

    def retry(self, message: StoredMessage, delay: timedelta = _NOW, error: str = "") -> None:
        """Deliver the message again after the delay; its attempt count grows by one."""
        ...

    def release(self, message: StoredMessage) -> None:
        """Deliver the message again; its attempt count stays."""
        ...

    def reject(self, message: StoredMessage, error: str) -> None:
        """Move the message to the dead letters."""
        ...

    def rest(self) -> None:
        """Stop fetching: no client asks at present."""
        ...

    async def close(self) -> None:
        """Leave the group."""
        ...


class PlainReader:
    """Reads an unordered subject."""

    is_ordered = False

    def __init__(self, client: Client, subject: str, group: str, wanted: MessageFilter) -> None:
        self._filter = wanted
        self._consumer = client.consumer(
            subject,
            group,
            tags_any=wanted.tags,
            ack="explicit",
            prefetch=AHEAD,
            prefetch_bytes=limits.CONSUMER_UNACKED_BYTES_MAX,
            lease_ms=LEASE_MS,
            expired="skip",
        )
        self.waiting = self.in_hand = 0
        self._is_resting = False

    async def receive(self, messages_max: int, wait_s: float) -> Sequence[StoredMessage]:
        self._consumer.prefetch = min(AHEAD + self.in_hand + messages_max, limits.CONSUMER_UNACKED_MAX)
        if self._is_resting:
            self._is_resting = False
            self._consumer.resume()
        found = list(await self._consumer.pull(messages_max, timedelta(seconds=wait_s)))
        if not self._filter.sql:
            return found
        wanted = [each for each in found if self._filter.wants(each)]
        _pass_over(found, wanted)
        return wanted

    async def ack(self, message: StoredMessage) -> None:
        assert isinstance(message, Message)
        await message.ack_sync()

    def retry(self, message: StoredMessage, delay: timedelta = _NOW, error: str = "") -> None:
        assert isinstance(message, Message)
        message.nack(delay, error)

    def release(self, message: StoredMessage) -> None:
        assert isinstance(message, Message)
        message.release()

    def reject(self, message: StoredMessage, error: str) -> None:
        assert isinstance(message, Message)
        message.reject(error)

    def rest(self) -> None:
        if not self._is_resting:
            self._is_resting = True
            self._consumer.rest()

    async def close(self) -> None:
        await self._consumer.close()


class OrderedReader:
    """Reads an ordered subject. If a message fails too often, its key is set aside (docs/ORDERING.md)."""

    is_ordered = True

    def __init__(self, client: Client, subject: str, group: str, wanted: MessageFilter) -> None:
        self._consumer = client.ordered_consumer(
            subject,
            group,
            ack="explicit",
            on_failure="park",
            attempts_max=ATTEMPTS_MAX,
            prefetch=PREFETCH,
            lease_ms=LEASE_MS,
        )
        self._filter = wanted
        self.waiting = self.in_hand = 0

    async def receive(self, messages_max: int, wait_s: float) -> Sequence[StoredMessage]:
        found = await self._consumer.take(messages_max, timedelta(seconds=wait_s))
        wanted = [each for each in found if self._filter.wants(each)]
        _pass_over(found, wanted)
        return wanted

    async def ack(self, message: StoredMessage) -> None:
        assert isinstance(message, OrderedMessage)
        await message.ack_sync()

    def retry(self, message: StoredMessage, delay: timedelta = _NOW, error: str = "") -> None:
        assert isinstance(message, OrderedMessage)
        message.fail(delay, error)

    def release(self, message: StoredMessage) -> None:
        """Deliver the message again; an ordered subject counts this as an attempt."""
        self.retry(message)

    def reject(self, message: StoredMessage, error: str) -> None:
        assert isinstance(message, OrderedMessage)
        message.reject(error)

    def rest(self) -> None:
        """Does nothing: the reader keeps its lanes until `close`."""

    async def close(self) -> None:
        await self._consumer.close()


def _pass_over(found: Sequence[Message | OrderedMessage], wanted: Sequence[Message | OrderedMessage]) -> None:
    """Acknowledge the messages that the subscription does not want."""
    kept = set(map(id, wanted))
    for each in found:
        if id(each) not in kept:
            each.ack_later()
