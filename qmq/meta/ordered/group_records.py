"""Reads a consumer group's record and its subject's routes in the coordination store, and replaces the record by compare-and-swap."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from qmq_coordination.coordination_store import CoordinationStore, KeyValue, Put, unchanged
from qmq_coordination.ordered_records import group_record_key, latest_key, route_key
from qmq_ordering.frontier import GroupRecord
from qmq_ordering.route import Route

from qmq.errors import CoordinationUnknown, OrderMismatch, UnknownGroup


def unknown_route(_subject: str, _version: int) -> Route | None:
    return None


class Records:
    """Reads and swaps records. Every read goes to the store, not to a view, because a swap must compare with the value read. `known`
    returns routes that are known already: a route never changes, so it need not be read again.
    """

    def __init__(self, store: CoordinationStore, known: Callable[[str, int], Route | None] = unknown_route) -> None:
        self.store = store
        self._known = known

    async def find(self, subject: str, group: str) -> tuple[KeyValue, GroupRecord] | None:
        """The group's record; None if there is none. Raises CoordinationError."""
        found = await self.store.get(group_record_key(subject, group))
        return None if found is None else (found, GroupRecord.decode(found.value))

    async def record(self, subject: str, group: str) -> tuple[KeyValue, GroupRecord]:
        """The group's record. Raises UnknownGroup, CoordinationError."""
        found = await self.find(subject, group)
        if found is None:
            raise UnknownGroup(f"group {group!r} has never consumed subject {subject!r}")
        return found

    async def swap(self, item: KeyValue, record: GroupRecord) -> KeyValue | None:
        """Compare and swap. Returns None if the record has changed since it was read, or the outcome is unknown: read the record again.
        Raises CoordinationError.
        """
        value = record.encode()
        try:
            done = await self.store.txn([unchanged(item)], [Put(item.key, value)])
        except CoordinationUnknown:
            # Do not read back here: an equal value may have been written after a reset that the caller does not know of.
            return None
        return replace(item, value=value, mod_revision=done.revision) if done.succeeded else None

    async def latest(self, subject: str) -> int:
        """The latest version. Raises OrderMismatch, CoordinationError."""
        found = await self.store.get(latest_key(subject))
        if found is None:
            raise OrderMismatch(f"subject {subject!r} has no route: is it an ordered one?")
        return int(found.value)

    async def routes(self, subject: str, first: int, last: int, have: Mapping[int, Route] | None = None) -> dict[int, Route]:
        """Versions `first` to `last`; `have` are the routes that the caller knows already. Raises OrderMismatch, CoordinationError."""
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
