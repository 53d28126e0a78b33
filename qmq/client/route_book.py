"""What a client knows of the cluster: which broker groups a subject lives on, and who is each group's master. Pure.

Three tables, because they change for different reasons:

    places    subject -> its broker groups, each writable or drained     changes when an operator places or drains
    orders    ordered subject -> its latest route                        changes when it is split, merged or moved
    masters   broker group -> address and epoch of its master            changes at every failover, for all subjects at once

Rules:
* A master is *doubted* when it sends a client away or cannot be reached. A doubted master is not given out until an answer that was asked
  for later names it again, or any answer names another one.
* An answer with an older epoch than one already known for the group is not believed for that group: a metaserver may lag behind.
  The group's doubt stays, so whoever needs it asks again.
* An answer with an older route of an ordered subject than one already known is not believed for the subject, only for masters.

Delayed messages of a subject go to other groups than the rest. Where they go is kept under a *target* of its own, "~" and the subject's
name (no name begins so); of an unordered subject or an ordered one alike. Everywhere else a target is the subject's name.

Worked example: group g1 is known as (a:1, epoch 4). A broker says NotMaster: doubted. Locate answers (a:1, 3): not believed.
Locate answers (b:1, 5): believed, for every subject on g1, though only one of them was asked about.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from qmq_ordering.route import Route as OrderedRoute

from qmq.model import Order

_DELAYED: Final = "~"


def delayed_target(subject: str) -> str:
    """Under what the places of a subject's delayed messages are kept."""
    return _DELAYED + subject


def is_delayed(target: str) -> bool:
    """Whether a target is one of delayed messages."""
    return target.startswith(_DELAYED)


def subject_of(target: str) -> str:
    """Whose target it is."""
    return target.removeprefix(_DELAYED)


def spoken(target: str) -> str:
    return f"{subject_of(target)!r}, to be delayed," if is_delayed(target) else repr(target)


class Master(NamedTuple):
    """Where a broker group is served, and since which term."""

    address: str
    epoch: int


class SubjectRoute(NamedTuple):
    """One line of a metaserver's answer. `address` is empty while the group has no master."""

    group: str
    address: str
    epoch: int
    is_writable: bool


class Ordering(NamedTuple):
    """Of an ordered subject: what it promises, its latest route, and the partitions of older versions that a fence closed."""

    order: Order
    route: OrderedRoute
    fenced: frozenset[int]


class Placement(NamedTuple):
    """A metaserver's whole answer about a subject; `ordering` is None if it is unordered."""

    routes: list[SubjectRoute]
    ordering: Ordering | None = None


@dataclass(slots=True)
class Learned:
    """What an answer changed: what to tell those who listen."""

    is_placed_anew: bool = False
    """The subject's groups, whether they may be written to, or its order."""
    moved: set[str] = field(default_factory=set)
    """Groups with another master than before."""
    outdated: set[str] = field(default_factory=set)
    """Groups for which the answer was older than what is known."""
    is_route_outdated: bool = False
    """Whether the subject's route is."""


class RouteBook:
    """The two tables, and the rules for believing an answer."""

    def __init__(self) -> None:
        self._places: dict[str, dict[str, bool]] = {}
        self._orders: dict[str, Ordering] = {}
        self._masters: dict[str, Master] = {}
        self._epochs: dict[str, int] = {}
        self._doubted: dict[str, int] = {}
        self._asks = 0

    def ask(self) -> int:
        """A question begins: its number, for `learn`."""
        self._asks += 1
        return self._asks

    def learn(self, ask: int, subject: str, routes: Iterable[SubjectRoute], ordering: Ordering | None = None) -> Learned:
        """Take the answer to the question number `ask`."""
        learned = Learned()
        before = self._places.get(subject)
        places: dict[str, bool] = {}
        for route in routes:
            if self._learn_master(ask, route, learned):
                places[route.group] = route.is_writable
            else:
                places[route.group] = (before or {}).get(route.group, route.is_writable)
        known = self._orders.get(subject)
        if ordering is not None and known is not None and ordering.route.version < known.route.version:
            learned.is_route_outdated = True
            return learned
        learned.is_placed_anew = places != before or ordering != known
        self._places[subject] = places
        if ordering is not None:
            self._orders[subject] = ordering
        else:
            self._orders.pop(subject, None)
        return learned

    def forget(self, subject: str) -> None:
        """The subject is gone: one of its name that comes later is another one, with a route of its own."""
        self._places.pop(subject, None)
        self._orders.pop(subject, None)

    def _learn_master(self, ask: int, route: SubjectRoute, learned: Learned) -> bool:
        """Whether the line is believed."""
        group = route.group
        if route.epoch < self._epochs.get(group, 0):
            learned.outdated.add(group)
            return False
        self._epochs[group] = route.epoch
        known, found = self._masters.get(group), Master(route.address, route.epoch)
        if not route.address:
            if known is not None:
                self._doubted.setdefault(group, ask)
        elif known != found:
            self._masters[group] = found
            self._doubted.pop(group, None)
            learned.moved.add(group)
        elif ask > self._doubted.get(group, ask):
            del self._doubted[group]
        return True

    def doubt(self, group: str, master: Master | None = None) -> bool:
        """This master is none, or cannot be reached; None: whoever it is. False if another one is known already."""
        if master is not None and self._masters.get(group) != master:
            return False
        self._doubted[group] = self._asks
        return True

    def master(self, group: str) -> Master | None:
        """The group's master, unless it is unknown or doubted."""
        return None if group in self._doubted else self._masters.get(group)

    def groups(self, subject: str) -> Mapping[str, bool] | None:
        """The subject's broker groups, and whether each may be written to; None if nobody asked yet."""
        return self._places.get(subject)

    def ordering(self, subject: str) -> Ordering | None:
        """Of an ordered subject that was asked about."""
        return self._orders.get(subject)

    def cover(self) -> list[str]:
        """A few subjects that together live on every known group: locating them refreshes all masters."""
        chosen: list[str] = []
        left = set(self._masters)
        for subject, places in self._places.items():
            if not left.isdisjoint(places):
                chosen.append(subject)
                left.difference_update(places)
        return chosen

    def subject_on(self, group: str) -> str | None:
        """Some subject that lives on the group."""
        return next((subject for subject, places in self._places.items() if group in places), None)
