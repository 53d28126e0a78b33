"""Passes the messages of one subject from the loop's thread to the thread that drains a channel.

*Stream exchanges.* The exchange is a subject, and each queue that is bound to it is a group of that
subject. There is one set of them for each connection, because all its channels read the same
queues.
"""

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
    """Received messages of one subject. `arrived` has those that the channel has not taken.
    `failure` says why no more come.
    """

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
            self._pump = self._link.call(
                lambda: asyncio.get_running_loop().create_task(self._bring())
            )

    async def _bring(self) -> None:
        try:
            while True:
                found = await self._consumer.pull(
                    AT_ONCE, timedelta(seconds=20) if self.has_looked else SOON
                )
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
        """Receive no more, and return messages that were not taken. Those that were taken may still
        be settled.
        """
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


UNLIMITED: Final = 1_000
"""The most messages that a consumer without a prefetch count holds."""


class StreamQueues:
    """A queue receives messages from its binding on. A *passing* queue is deleted with its
    consumer: each one gets every message, and brokers forget it when it stays away.
    """

    def __init__(self) -> None:
        self._readers: dict[str, Arrivals] = {}
        self._patterns: dict[str, str] = {}
        """The routing keys that a queue accepts from a topic exchange."""
        self._passing: set[str] = set()

    def __contains__(self, queue: str | None) -> bool:
        return queue in self._readers

    def reader(self, queue: str) -> Arrivals | None:
        """The reader of a queue; None if it is bound to no stream exchange."""
        return self._readers.get(queue)

    def pattern(self, queue: str) -> str | None:
        """The pattern of the routing keys that a queue accepts; None: all."""
        return self._patterns.get(queue)

    def passes(self, queue: str) -> None:
        """The queue is deleted with its consumer."""
        self._passing.add(queue)

    def is_passing(self, queue: str) -> bool:
        return queue in self._passing

    def bind(
        self,
        link: ClusterLink,
        queue: str,
        subject: str,
        group: str,
        *,
        name: str,
        tags: list[str],
        lease_ms: int,
    ) -> None:
        """Read a subject from now on. A passing queue is the consumer `name` of
        a broadcast group.
        """
        self._readers[queue] = Arrivals(
            link,
            subject,
            group,
            prefetch=UNLIMITED,
            start="latest",
            broadcast=name if queue in self._passing else "",
            tags=tags,
            lease_ms=lease_ms,
        )

    def accept(self, queue: str, pattern: str) -> None:
        """Accept only messages whose routing key matches the pattern."""
        self._patterns[queue] = pattern

    def delete(self, link: ClusterLink, queue: str) -> bool:
        """End a queue, and delete its group. False if it is bound to no stream exchange."""
        self._patterns.pop(queue, None)
        reader = self._readers.pop(queue, None)
        if reader is None:
            return False
        reader.close()
        link.forget(reader.subject, reader.share)
        return True

    def close(self, link: ClusterLink) -> None:
        """The connection ends: leave all groups, and delete those of passing queues."""
        while self._readers:
            queue, reader = self._readers.popitem()
            reader.close()
            if queue in self._passing:
                link.forget(reader.subject, reader.share)
