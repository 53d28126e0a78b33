"""The destinations of producers: a queue of this broker, and the conditions for a batch. `BrokerSubjects` looks a destination up once, and
again after the settings of its subject, or any route, have changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from qmq.broker.ordered_writes import Routing
from qmq.broker.produce_checks import Destination
from qmq.errors import InvalidArgument, OrderMismatch, Outcome, RouteChanged, UnknownSubject
from qmq.log.queue import Queue
from qmq.log.store import Store
from qmq.model import Fencing, Order, SubjectConfig, SubjectFlush, check_name, is_dead_letters

LookUpSubject = Callable[[str], SubjectConfig | None]
FindSubject = Callable[[str], SubjectConfig]
"""The subject's settings. Raises UnknownSubject."""


class Destinations(Protocol):
    """The destinations of one kind of group: `QueueDestinations`, or `qmq.delay.delay_destinations.DelayDestinations`."""

    def find(self, store: Store, find_subject: FindSubject, subject: bytes, partition: int) -> Destination:
        """Raises InvalidArgument, InvalidName, UnknownSubject, OrderMismatch, RouteChanged."""
        ...


class QueueDestinations:
    """The destinations of a broker group: the one queue of an unordered subject, or the partitions of an ordered subject on this broker."""

    def __init__(self, routing: Routing) -> None:
        self._routing = routing

    def find(self, store: Store, find_subject: FindSubject, subject: bytes, partition: int) -> Destination:
        try:
            name = check_name("subject", subject.decode())
        except UnicodeDecodeError:
            raise InvalidArgument("a subject must be UTF-8") from None
        config = find_subject(name)
        if config.order is not Order.NONE:
            return self._find_ordered(store, config, partition)
        if partition != 0:
            raise InvalidArgument(f"subject {name!r} has only partition 0, not {partition}")
        return Destination(store.open_queue(name, partition), config.body_bytes_max, awaits_flush=config.flush is SubjectFlush.SYNC)

    def _find_ordered(self, store: Store, config: SubjectConfig, number: int) -> Destination:
        if number == 0:
            raise OrderMismatch(f"subject {config.name!r} is ordered: send with mq.ordered_producer, consume with mq.ordered_consumer")
        found = self._routing.partition(config.name, number)
        if found is None:
            raise _not_in_a_route(store.queue(config.name, number), config.name, number)
        queue = store.open_queue(config.name, number)
        awaits_flush = config.flush is SubjectFlush.SYNC
        return Destination(queue, config.body_bytes_max, found.range, config.fencing is Fencing.LEASE, awaits_flush=awaits_flush)


def _not_in_a_route(queue: Queue | None, subject: str, number: int) -> RouteChanged:
    """The refusal for a partition that no known route has. If it has messages, the coordination store was put back to older routes: a batch
    that was sent before may be in it, and a sender that asks about that batch must not read the refusal as that of a sealed partition.
    """
    if queue is None or queue.is_blank:
        return RouteChanged(f"partition {number} of {subject!r} is not known here yet: ask the metaserver for the route")
    text = f"partition {number} of {subject!r} has messages, and no route has the partition any more: see `qmq doctor`"
    return RouteChanged(text, outcome=Outcome.UNKNOWN)


class BrokerSubjects:
    """The subjects that a broker knows, and the destinations of their messages in one store. Made with the store that is served from."""

    def __init__(self, store: Store, look_up: LookUpSubject, destinations: Destinations, *, has_consumers: bool) -> None:
        self._store = store
        self._look_up = look_up
        self._destinations = destinations
        self._has_consumers = has_consumers
        self._unordered: dict[bytes, Destination] = {}
        """Destinations of partition 0, which follow from the subject's settings alone."""
        self._partitions: dict[tuple[bytes, int], Destination] = {}

    def find_queue(self, subject: bytes, partition: int) -> Destination:
        """Raises InvalidArgument, InvalidName, UnknownSubject, OrderMismatch, RouteChanged."""
        found = self._partitions.get((subject, partition)) if partition else self._unordered.get(subject)
        if found is None:
            found = self._destinations.find(self._store, self.settings, subject, partition)
            if partition:
                self._partitions[subject, partition] = found
            else:
                self._unordered[subject] = found
        return found

    def settings(self, name: str) -> SubjectConfig:
        """Raises UnknownSubject."""
        config = self._settings_or_none(name)
        if config is None:
            raise UnknownSubject(f"there is no subject {name!r}: create it with `qmq subject create {name}`")
        return config

    def retention_settings(self, name: str) -> SubjectConfig | None:
        """The settings by which this broker keeps the subject's messages, if the subject exists. None in a delay group, which keeps
        messages until they are delivered, regardless of the subject's settings.
        """
        return self._settings_or_none(name) if self._has_consumers else None

    def _settings_or_none(self, name: str) -> SubjectConfig | None:
        """Settings of a dead-letter queue follow from its name."""
        return SubjectConfig(name) if is_dead_letters(name) else self._look_up(name)

    def forget(self, subjects: Iterable[str] | None = None) -> None:
        """The settings of these subjects, and routes, may have changed: look their destinations up again. None: of all subjects.

        Looking up 10,000 subjects again because another one was created takes as long as a thousand batches.
        """
        self._partitions.clear()
        if subjects is None:
            self._unordered.clear()
            return
        for subject in subjects:
            self._unordered.pop(subject.encode(), None)
