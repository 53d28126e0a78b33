"""The queues that are bound to a stream exchange: the exchange is a subject, and each queue is a group of that subject.

There is one set of them for each connection, because all its channels read the same queues.
"""

from __future__ import annotations

from typing import Final

from qmq.integrations.cluster_link import ClusterLink
from qmq.integrations.kombu.arrivals import Arrivals

UNLIMITED: Final = 1_000
"""The most messages that a consumer without a prefetch count holds."""


class StreamQueues:
    """A queue receives messages from its binding on. A *passing* queue is deleted with its consumer: each one gets every message, and
    brokers forget it when it stays away.
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

    def bind(self, link: ClusterLink, queue: str, subject: str, group: str, *, name: str, tags: list[str], lease_ms: int) -> None:
        """Read a subject from now on. A passing queue is the consumer `name` of a broadcast group."""
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
