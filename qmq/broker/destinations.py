"""The destinations of producers: a queue of this broker, and the conditions for a batch. The broker looks a destination up once, and again
after the settings of subjects or routes have changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from qmq.broker.ordered_writes import Routing
from qmq.broker.produce_checks import Destination
from qmq.errors import InvalidArgument, OrderMismatch, RouteChanged
from qmq.log.store import Store
from qmq.model import Fencing, Order, SubjectConfig, SubjectFlush, check_name

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
            raise RouteChanged(f"partition {number} of {config.name!r} is not known here yet: ask the metaserver for the route")
        queue = store.open_queue(config.name, number)
        awaits_flush = config.flush is SubjectFlush.SYNC
        return Destination(queue, config.body_bytes_max, found.range, config.fencing is Fencing.LEASE, awaits_flush=awaits_flush)
