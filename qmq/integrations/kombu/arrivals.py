"""Passes the messages of one subject from the loop's thread to the thread that drains a channel."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Final

import qmq
from qmq.integrations.cluster_link import ClusterLink

AT_ONCE: Final = 100
SOON: Final = timedelta(milliseconds=100)


class Arrivals:
    """Received messages of one subject. `arrived` has those that the channel has not taken. `failure` says why no more come."""

    def __init__(
        self,
        link: ClusterLink,
        subject: str,
        group: str,
        *,
        prefetch: int,
        lease_ms: int,
        start: str = "earliest",
        broadcast: str = "",
        tags: Sequence[str] = (),
    ) -> None:
        """`broadcast` is the name under which this reader gets every message."""
        self.subject, self.group = subject, group
        self.arrived: deque[qmq.Message] = deque()
        self.failure: Exception | None = None
        self.has_looked = False
        """Whether this reader has pulled from the brokers once."""
        self._link = link
        self.share = f"{group}%{broadcast}" if broadcast else group
        self._consumer: qmq.Consumer = link.call(
            lambda: link.client.consumer(
                subject,
                group,
                name=broadcast or None,
                broadcast=bool(broadcast),
                start=start,
                tags_any=tags,
                ack="explicit",
                prefetch=prefetch,
                lease_ms=lease_ms,
                expired="skip",
            )
        )
        link.run(self._consumer.join())
        self._pump: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to receive messages. Harmless to repeat."""
        if self._pump is None:
            self._pump = self._link.call(lambda: asyncio.get_running_loop().create_task(self._bring()))

    async def _bring(self) -> None:
        try:
            while True:
                found = await self._consumer.pull(AT_ONCE, timedelta(seconds=20) if self.has_looked else SOON)
                self.has_looked = True
                self.arrived.extend(found)
                self._link.wake()
        except Exception as failure:  # the thread that drains the channel raises it
            self.failure = failure
            self._link.wake()

    def take(self) -> qmq.Message | None:
        """The next received message. Raises `failure` if no more come."""
        if self.arrived:
            return self.arrived.popleft()
        if self.failure is not None:
            raise self.failure
        return None

    def get(self) -> qmq.Message | None:
        """The next message; None if the queue has none. For a reader that was not started."""
        while True:
            found = self._link.run(self._consumer.pull(1, SOON))
            if found:
                return found[0]
            if not self._link.waiting(self.subject, self.share):
                return None

    def limit(self, prefetch: int) -> None:
        """Change the largest number of held messages."""
        self._link.call(lambda: self._consumer.limit(prefetch))

    def drain(self) -> None:
        """Receive no more, and return messages that were not taken. Those that were taken may still be settled."""
        self._link.call(self._drain)

    def _drain(self) -> None:
        if self._pump is not None:
            self._pump.cancel()
        while self.arrived:
            self.arrived.popleft().release()
        self._consumer.drain()

    def close(self) -> None:
        """Return messages that were not taken, and leave the group."""

        async def leave() -> None:
            self._drain()
            await self._consumer.close()

        self._link.run(leave())
