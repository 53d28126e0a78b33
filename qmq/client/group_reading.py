"""Reads a subject for a group on behalf of callers that ask from time to time, as a gateway does.
One class for each kind of subject.

    unordered   a Consumer; between calls, `idle` gives unseen messages back to other consumers of
                the group
    ordered     an OrderedConsumer; at most one message of a key is handed out at a time. Others get
                no messages of its lanes, so after `idle_s` without a call and without unsettled
                messages it leaves the group, and the next call joins again

Messages are settled by their own methods; after its verdict, each is reported by `settled`. Who has
used a message's body sets it to b"", so that messages that wait for their verdict hold no memory.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Final, TypeAlias

from qmq import limits
from qmq.client.client import Client
from qmq.client.consuming.message import DecodedBatch, StoredMessage
from qmq.client.consuming.ordered.consumer import AnyMessage, OrderedConsumer, joined_unordered

AHEAD: Final = 512
"""A reading prefetches at most this many messages of an unordered subject for the next call."""
PREFETCH: Final = 10_000
"""A reading of an ordered subject holds at most this many messages over all lanes: unsettled ones
and those that wait.
"""
LEASE_MS: Final = 30_000
"""If this process is silent for this long, its messages go to other consumers."""

Wants = Callable[[StoredMessage], bool]
"""Whether callers want a message. Other messages are acknowledged and not returned."""


class DecompressedBatch:
    """The batch that a reading handed out last. It alone stays decompressed: each message has its
    own body.
    """

    def __init__(self) -> None:
        self._batch: DecodedBatch | None = None

    def handed_out(self, batch: DecodedBatch | None) -> None:
        """Forget what another batch was decompressed to."""
        if self._batch is not None and self._batch is not batch:
            self._batch.decoded = None
        self._batch = batch


class PlainReading:
    """Reads an unordered subject. The broker matches `tags_any`. `condition` is the text of what
    `wants` selects. `unsettled` counts the messages without a verdict. Do not call `close`
    concurrently.
    """

    def __init__(
        self,
        client: Client,
        subject: str,
        group: str,
        *,
        tags_any: Sequence[str] = (),
        wants: Wants | None = None,
        condition: str = "",
    ) -> None:
        self._consumer = client.consumer(
            subject,
            group,
            tags_any=tags_any,
            ack="explicit",
            prefetch=AHEAD,
            prefetch_bytes=limits.CONSUMER_UNACKED_BYTES_MAX,
            lease_ms=LEASE_MS,
            expired="skip",
            condition=condition,
        )
        self._wants = wants
        self.unsettled = 0
        self._is_idle = False
        self._open = DecompressedBatch()

    async def joined(self) -> bool:
        """Join the group. Returns False, with the reading closed, if the subject is ordered. Raises
        as `joined_unordered`.
        """
        return await joined_unordered(self._consumer)

    async def receive(self, messages_max: int, wait_s: float) -> Sequence[AnyMessage]:
        """At most `messages_max` messages, and fewer if their bodies have 8 MiB; none if none came
        within `wait_s`. Raises QmqError.
        """
        self._consumer.limit(
            min(AHEAD + self.unsettled + messages_max, limits.CONSUMER_UNACKED_MAX)
        )
        if self._is_idle:
            self._is_idle = False
            self._consumer.resume()
        pulled = await self._consumer.pull(messages_max, timedelta(seconds=wait_s))
        found = _wanted(list(pulled), self._wants)
        for each in pulled.slices:
            self._open.handed_out(each.batch)
        self.unsettled += len(found)
        return found

    def settled(self) -> None:
        """One of the handed out messages has its verdict."""
        self.unsettled -= 1

    def idle(self) -> None:
        """Called when no call waits for messages."""
        if not self._is_idle:
            self._is_idle = True
            self._open.handed_out(None)
            self._consumer.pause_and_return()

    async def close(self) -> None:
        """Leave the group."""
        await self._consumer.close()


class OrderedReading:
    """Reads an ordered subject, with the methods of `PlainReading`. A key whose message fails too
    often is parked. `options` are those of `Client.ordered_consumer`.
    """

    def __init__(
        self,
        client: Client,
        subject: str,
        group: str,
        *,
        wants: Wants | None = None,
        idle_s: float = math.inf,
        **options: Any,
    ) -> None:
        named: dict[str, Any] = {
            "ack": "explicit",
            "on_failure": "park",
            "prefetch": PREFETCH,
            "lease_ms": LEASE_MS,
        } | options
        self._make: Callable[[], OrderedConsumer] = partial(
            client.ordered_consumer, subject, group, **named
        )
        self._wants, self._idle_s = wants, idle_s
        self.unsettled = 0
        self._open = DecompressedBatch()
        self._consumer: OrderedConsumer | None = None
        self._is_asked = False
        self._idle: asyncio.TimerHandle | None = None
        self._leaving: set[asyncio.Task[None]] = set()

    async def receive(self, messages_max: int, wait_s: float) -> Sequence[AnyMessage]:
        self._is_asked = True
        self._stop_timer()
        if self._consumer is None:
            self._consumer = self._make()
        taken = await self._consumer.take(messages_max, timedelta(seconds=wait_s))
        for each in taken:
            self._open.handed_out(each.batch)
        found = _wanted(taken, self._wants)
        self.unsettled += len(found)
        return found

    def settled(self) -> None:
        self.unsettled -= 1
        self._leave_when_idle()

    def idle(self) -> None:
        self._is_asked = False
        self._leave_when_idle()

    def _leave_when_idle(self) -> None:
        self._stop_timer()
        if (
            not self._is_asked
            and not self.unsettled
            and self._consumer is not None
            and self._idle_s < math.inf
        ):
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


GroupReading: TypeAlias = PlainReading | OrderedReading
"""Hands out messages of a subject for a group."""


def _wanted(found: Sequence[AnyMessage], wants: Wants | None) -> Sequence[AnyMessage]:
    if wants is None:
        return found
    wanted = []
    for each in found:
        if wants(each):
            wanted.append(each)
        else:
            each.ack_later()
    return wanted


async def reading_of(
    client: Client, subject: str, group: str, *, idle_s: float = math.inf
) -> GroupReading:
    """The reading for the subject's kind. Raises UnknownSubject, AccessDenied, ClientClosed."""
    plain = PlainReading(client, subject, group)
    return plain if await plain.joined() else OrderedReading(client, subject, group, idle_s=idle_s)
