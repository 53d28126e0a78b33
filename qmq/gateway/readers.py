"""The readers of this gateway, one for each group, subject and filter. A request makes its reader;
an unused reader is closed after some time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, NamedTuple

from qmq.client.client import Client
from qmq.client.consuming.ordered.consumer import AnyMessage
from qmq.client.group_reading import GroupReading, OrderedReading, PlainReading
from qmq.errors import InvalidArgument, QmqError
from qmq.gateway.config import ATTEMPTS_MAX
from qmq.gateway.filters import MessageFilter

log = logging.getLogger("qmq.gateway")

REST_MS: Final = 1_000
"""A reader pauses when no client has asked for this long;
a client that receives in a loop asks sooner.
"""
CLOSE_MS: Final = 30_000


class ReaderKey(NamedTuple):
    """The group, subject and filter that a reader serves."""

    subject: str
    group: str
    wanted: MessageFilter
    is_ordered: bool


@dataclass(slots=True, eq=False)
class HandedOut:
    """A message that a client received and has not settled, and the reading that it came from."""

    reading: GroupReading
    message: AnyMessage
    counts_no_attempt: bool = False
    """If true, the next delivery has the same attempt count as this one."""


@dataclass(slots=True, eq=False)
class _Kept:
    reading: GroupReading
    waiting: int = 0
    """Calls that wait for messages."""
    asked_ms: int = 0


class GroupReaders:
    """Makes, finds and closes the readers. `client` makes their consumers."""

    def __init__(
        self,
        client: Client,
        monotonic_ms: Callable[[], int] = lambda: time.monotonic_ns() // 1_000_000,
    ) -> None:
        self._client, self._monotonic_ms = client, monotonic_ms
        self._readers: dict[ReaderKey, _Kept] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._readers)

    async def receive(
        self, key: ReaderKey, messages_max: int, wait_s: float
    ) -> tuple[GroupReading, Sequence[AnyMessage]]:
        """Wait up to `wait_s` for at most `messages_max` messages, with their reading; returns none
        if none came. Raises QmqError.
        """
        until_ms = self._monotonic_ms() + int(wait_s * 1000)
        with self._asking(key) as reading:
            while True:
                left_ms = max(until_ms - self._monotonic_ms(), 0)
                found = await reading.receive(messages_max, left_ms / 1000)
                # The filter may have refused all messages of a fetch: then the wait continues.
                if found or until_ms <= self._monotonic_ms():
                    return reading, found

    @contextmanager
    def _asking(self, key: ReaderKey) -> Iterator[GroupReading]:
        kept = self._readers.get(key)
        if kept is None:
            self._require_same_filter(key)
            kept = self._readers[key] = _Kept(self._made(key))
        kept.waiting += 1
        try:
            yield kept.reading
        finally:
            kept.waiting -= 1
            kept.asked_ms = self._monotonic_ms()

    def _require_same_filter(self, key: ReaderKey) -> None:
        """Refuse a filter that differs from the one by which the group reads: what a filter leaves
        out counts as done for the whole group. The broker compares tags and conditions of an
        unordered subject for all gateways and clients. Raises InvalidArgument.
        """
        for other in self._readers:
            if (other.subject, other.group) == (
                key.subject,
                key.group,
            ) and other.wanted != key.wanted:
                raise InvalidArgument(
                    f"group {key.group!r} reads {other.wanted} of {key.subject!r}, "
                    f"and this client asks for {key.wanted}: all clients of a group need "
                    "the same filter expression. Use another group, or stop the others: "
                    f"{CLOSE_MS // 1000} s after their last request the new expression is taken"
                )

    def _made(self, key: ReaderKey) -> GroupReading:
        """The reading of a key. For an unordered subject the broker matches tags and the gateway
        matches conditions; for an ordered one the gateway matches both. It keeps its lanes until
        `tidy` closes it.
        """
        if key.is_ordered:
            condition = str(key.wanted) if key.wanted != MessageFilter() else ""
            return OrderedReading(
                self._client,
                key.subject,
                key.group,
                wants=key.wanted.wants,
                attempts_max=ATTEMPTS_MAX,
                condition=condition,
            )
        wants = key.wanted.wants if key.wanted.sql else None
        return PlainReading(
            self._client,
            key.subject,
            key.group,
            tags_any=key.wanted.tags,
            wants=wants,
            condition=key.wanted.sql,
        )

    def tidy(self) -> None:
        """Pause or close the readers that no client waits for.
        The sweep of the gateway calls this regularly.
        """
        now_ms = self._monotonic_ms()
        for key, kept in list(self._readers.items()):
            if kept.waiting:
                continue
            idle_ms = now_ms - kept.asked_ms
            if idle_ms >= CLOSE_MS and not kept.reading.unsettled:
                del self._readers[key]
                self._spawn_close(kept.reading)
            elif idle_ms >= REST_MS:
                kept.reading.idle()

    def _spawn_close(self, reading: GroupReading) -> None:
        task = asyncio.ensure_future(self._close(reading))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _close(self, reading: GroupReading) -> None:
        try:
            await reading.close()
        except QmqError as failure:
            log.warning("a consumer could not leave its group: %s", failure)

    async def close(self) -> None:
        """Close all readers."""
        readers, self._readers = self._readers, {}
        for kept in readers.values():
            self._spawn_close(kept.reading)
        if self._closing:
            await asyncio.wait(self._closing)
