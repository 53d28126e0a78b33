"""A consumer group's record and its subject's routes, as the coordination store has them: reading, and swapping the record."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from qmq_coordination.coordination_store import CoordinationStore, KeyValue, Put, unchanged
from qmq_coordination.ordered_records import group_record_key, latest_key, route_key
from qmq_ordering.frontier import GroupRecord
from qmq_ordering.route import Route

from qmq.errors import CoordinationUnknown, OrderMismatch, UnknownGroup


def unknown_route(_subject: str, _version: int) -> Route | None:
    """A route lookup without known routes."""
    return None


class Records:
    """Every question goes to the store, not to a view of it: what is swapped must be what was read.

    `known` gives routes that are known already: a route never changes, so it need not be read again.
    """

    def __init__(self, store: CoordinationStore, known: Callable[[str, int], Route | None] = unknown_route) -> None:
        self.store = store
        self._known = known

    async def find(self, subject: str, group: str) -> tuple[KeyValue, GroupRecord] | None:
        """The group's record, if there is one. Raises CoordinationError."""
        found = await self.store.get(group_record_key(subject, group))
        return None if found is None else (found, GroupRecord.decode(found.value))

    async def record(self, subject: str, group: str) -> tuple[KeyValue, GroupRecord]:
        """The group's record. Raises UnknownGroup, CoordinationError."""
        found = await self.find(subject, group)
        if found is None:
            raise UnknownGroup(f"group {group!r} has never consumed subject {subject!r}")
        return found

    async def swap(self, item: KeyValue, record: GroupRecord) -> KeyValue | None:
        """Compare and swap. None: it was another one already, or nobody knows; what is there is to be read. Raises CoordinationError."""
        value = record.encode()
        try:
            done = await self.store.txn([unchanged(item)], [Put(item.key, value)])
        except CoordinationUnknown:
            # Not read back here: what is found might be of the same value, but written behind a reset that the caller knows nothing of.
            return None
        return replace(item, value=value, mod_revision=done.revision) if done.succeeded else None

    async def latest(self, subject: str) -> int:
        """The latest version. Raises OrderMismatch, CoordinationError."""
        found = await self.store.get(latest_key(subject))
        if found is None:
            raise OrderMismatch(f"subject {subject!r} has no route: is it an ordered one?")
        return int(found.value)

    async def routes(self, subject: str, first: int, last: int, have: Mapping[int, Route] | None = None) -> dict[int, Route]:
        """Versions `first` to `last`; `have` are known to the caller already. Raises OrderMismatch, CoordinationError."""
        found = {}
        for version in range(first, last + 1):
            known = (have or {}).get(version) or self._known(subject, version)
            found[version] = known or await self._read_route(subject, version)
        return found

    async def _read_route(self, subject: str, version: int) -> Route:
        item = await self.store.get(route_key(subject, version))
        if item is None:
            raise OrderMismatch(f"subject {subject!r} has no route version {version}")
        return Route.decode(item.value)
