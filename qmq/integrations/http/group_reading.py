"""The reading of a subject by a group for requests: one class for each kind of subject. `reading_of` finds out which kind it is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Final, Protocol

import qmq
from qmq.client.any_message import AnyMessage, fail, joined_unordered
from qmq.integrations.http.http_requests import Settle

IDLE_S: Final = 10.0
"""After so long without a request, and with no message in hand, other processes get the lanes of an ordered subject."""
LEASE_MS: Final = 30_000


class GroupReading(Protocol):
    """Hands out messages of a subject for a group, and takes verdicts. Not for two callers of `close` at once."""

    async def receive(self, messages_max: int, wait_s: float) -> Sequence[AnyMessage]:
        """At most `messages_max` messages; none if none came within `wait_s`. Raises QmqError."""
        ...

    def settle(self, message: AnyMessage, ask: Settle) -> None:
        """Pass the verdict on."""
        ...

    def rest(self) -> None:
        """No request waits for messages."""
        ...

    async def close(self) -> None:
        """Leave the group."""
        ...


class PlainReading:
    """Reads an unordered subject. Between requests, other consumers of the group get the remaining messages."""

    def __init__(self, consumer: qmq.Consumer) -> None:
        self._consumer = consumer

    async def receive(self, messages_max: int, wait_s: float) -> Sequence[AnyMessage]:
        await self._consumer.join()
        self._consumer.resume()
        return list(await self._consumer.pull(messages_max, timedelta(seconds=wait_s)))

    def settle(self, message: AnyMessage, ask: Settle) -> None:
        settle(message, ask)

    def rest(self) -> None:
        self._consumer.rest()

    async def close(self) -> None:
        await self._consumer.close()


class OrderedReading:
    """Reads an ordered subject: of a key one message is in hand, whoever asks. A key whose message fails too often is parked.

    A consumer holds lanes, and other processes get nothing of them. So an idle reading leaves the group, and the next request joins again.
    """

    def __init__(self, consumer: Callable[[], qmq.OrderedConsumer], idle_s: float = IDLE_S) -> None:
        self._make, self._idle_s = consumer, idle_s
        self._consumer: qmq.OrderedConsumer | None = None
        self._in_hand = 0
        self._is_asked = False
        self._idle: asyncio.TimerHandle | None = None
        self._leaving: set[asyncio.Task[None]] = set()

    async def receive(self, messages_max: int, wait_s: float) -> Sequence[AnyMessage]:
        self._is_asked = True
        self._stop_timer()
        if self._consumer is None:
            self._consumer = self._make()
        found = await self._consumer.take(messages_max, timedelta(seconds=wait_s))
        self._in_hand += len(found)
        return found

    def settle(self, message: AnyMessage, ask: Settle) -> None:
        self._in_hand -= 1
        settle(message, ask)
        self._look()

    def rest(self) -> None:
        self._is_asked = False
        self._look()

    def _look(self) -> None:
        self._stop_timer()
        if not self._is_asked and not self._in_hand and self._consumer is not None:
            self._idle = asyncio.get_running_loop().call_later(self._idle_s, self._leave)

    def _stop_timer(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None

    def _leave(self) -> None:
        self._idle = None
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            task = asyncio.get_running_loop().create_task(consumer.close())
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)

    async def close(self) -> None:
        self._stop_timer()
        self._leave()
        while self._leaving:
            await asyncio.wait(set(self._leaving))


async def reading_of(mq: qmq.Client, subject: str, group: str) -> GroupReading:
    """The reading for the subject's kind. Raises UnknownSubject, AccessDenied, ClientClosed."""
    plain = mq.consumer(subject, group, ack="explicit", expired="skip")
    if await joined_unordered(plain):
        return PlainReading(plain)
    return OrderedReading(lambda: mq.ordered_consumer(subject, group, ack="explicit", on_failure="park", lease_ms=LEASE_MS))


def settle(message: AnyMessage, ask: Settle) -> None:
    """Pass a verdict on, the same for both kinds of subjects."""
    if ask.verdict == "ack":
        message.ack_later()
    elif ask.verdict == "nack":
        fail(message, ask.delay, ask.error)
    elif ask.verdict == "reject":
        message.reject(ask.error)
    else:
        message.release()
