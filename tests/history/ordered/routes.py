"""All versions of a route, from a history: for each logical partition the chain of partitions that held it, one after another.

    version 1    1 [0, 8)
    version 2    2 [0, 4)   3 [4, 8)          a split of 1
    version 3    4 [0, 8)                     a merge of 2 and 3
    chain of logical partition 5              1, 3, 4

A partition is *since* the version in which it first appears; these versions grow along a chain.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from history.ordered.columns import NEVER
from history.ordered.events import Part, Rerouted


@dataclass(frozen=True, slots=True)
class Change:
    """The change that led to a version, with everything recorded about it."""

    version: int
    sources: tuple[int, ...]
    targets: tuple[int, ...]
    began_ns: int | None
    published_ns: int | None


class Routes:
    """Raises ValueError if versions are missing or the route was recorded differently before."""

    def __init__(self, events: Iterable[Rerouted]) -> None:
        self.logical_partitions = 0
        self.parts: dict[int, Part] = {}
        self.since: dict[int, int] = {}
        self.sealed: dict[int, int] = {}
        """Of each closed partition the sequence of its command message; -1 if nobody knows it."""
        self.fenced: set[int] = set()
        self.changes: dict[int, Change] = {}
        self._routes: dict[int, tuple[Part, ...]] = {}
        for event in events:
            self._learn(event)
        if sorted(self._routes) != list(range(1, len(self._routes) + 1)):
            raise ValueError(f"the history must record every version of the route, in order; it has {sorted(self._routes)}")
        for version in self._routes:
            for part in self._routes[version]:
                self.since.setdefault(part.number, version)
        self.chains = [self._chain(lp) for lp in range(self.logical_partitions)]

    def _learn(self, event: Rerouted) -> None:
        known = self._routes.setdefault(event.version, event.partitions)
        if known != event.partitions or self.logical_partitions not in (0, event.logical_partitions):
            raise ValueError(f"version {event.version} of the route was recorded as {known}, and as {event.partitions}")
        self.logical_partitions = event.logical_partitions
        before = {part.number for part in self._routes.get(event.version - 1, ())}
        targets = tuple(part.number for part in event.partitions if part.number not in before)
        self.parts.update((part.number, part) for part in event.partitions)
        self.changes.setdefault(event.version, Change(event.version, event.sources, targets, event.began_ns, event.published_ns))
        self.fenced.update(event.fenced)
        for number, sequence in event.sealed:
            self.sealed[number] = max(sequence, self.sealed.get(number, -1))
            if sequence < 0:
                self.fenced.add(number)

    def _chain(self, lp: int) -> tuple[int, ...]:
        chain: list[int] = []
        for version in sorted(self._routes):
            (holder,) = [part.number for part in self._routes[version] if part.first <= lp < part.end]
            if not chain or chain[-1] != holder:
                chain.append(holder)
        return tuple(chain)

    def held_by(self, group: str, since_ns: int, until_ns: int) -> frozenset[int]:
        """The logical partitions that a broker group held at some time in a route that was the latest then."""
        found: set[int] = set()
        for version, route in self._routes.items():
            if self._published_ns(version) <= until_ns and since_ns < self._published_ns(version + 1):
                found.update(lp for part in route if part.broker_group == group for lp in range(part.first, part.end))
        return frozenset(found)

    def _published_ns(self, version: int) -> int:
        """When the version became the latest; long ago if no time was recorded."""
        if version not in self.changes:
            return NEVER
        return self.changes[version].published_ns or 0

    def lps_of(self, numbers: Iterable[int]) -> list[range]:
        """The ranges of partitions."""
        return [range(self.parts[number].first, self.parts[number].end) for number in numbers if number in self.parts]
