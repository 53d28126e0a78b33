"""A client's knowledge of the cluster: the broker groups of each subject, and the master of each group. Pure.

Three tables, because they change for different reasons:

    places    subject -> its broker groups, each writable or drained     changes when an operator places or drains
    orders    ordered subject -> its latest route                        changes when it is split, merged or moved
    masters   broker group -> address and epoch of its master            changes at every failover, for all subjects at once

Rules:
* A master is *doubted* when it answers NotMaster or cannot be reached. A doubted master is not used until the answer to a later request
  names it again, or any answer names another one.
* An answer with an older epoch than the known one is ignored for that group, because a metaserver may lag. The group stays doubted, so the
  next caller asks again.
* An answer with an older route of an ordered subject than the known one is ignored for the subject, and used for masters.

Delayed messages of a subject go to delay groups. Their placement has its own *target*, "~" and the subject's name (no name begins with
"~"). Any other target is the subject's name.

Worked example: group g1 is known as (a:1, epoch 4). A broker says NotMaster: doubted. Locate answers (a:1, 3): ignored. Locate answers
(b:1, 5): used for every subject on g1, although only one was asked about.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from qmq_ordering.route import Route as OrderedRoute

from qmq.model import Order
from qmq.server_name import ANY_SERVER, ServerName

_DELAYED: Final = "~"


def delayed_target(subject: str) -> str:
    """The target of a subject's delayed messages."""
    return _DELAYED + subject


def is_delayed(target: str) -> bool:
    """Whether a target is for delayed messages."""
    return target.startswith(_DELAYED)


def subject_of(target: str) -> str:
    """The subject of a target."""
    return target.removeprefix(_DELAYED)


def spoken(target: str) -> str:
    return f"{subject_of(target)!r}, to be delayed," if is_delayed(target) else repr(target)


class Master(NamedTuple):
    """Where a broker group's master is, its epoch, and its name."""

    address: str
    epoch: int
    server: ServerName = ANY_SERVER


class SubjectRoute(NamedTuple):
    """One group in a metaserver's answer. `address` is empty while the group has no master."""

    group: str
    address: str
    epoch: int
    is_writable: bool
    server: ServerName = ANY_SERVER
    """The master's name. Metaservers of release 0.2.0 name only the group."""


class Ordering(NamedTuple):
    """The order of an ordered subject, its latest route, and the partitions of older versions that were fenced."""

    order: Order
    route: OrderedRoute
    fenced: frozenset[int]


class Placement(NamedTuple):
    """A metaserver's answer about a subject; `ordering` is None if it is unordered."""

    routes: list[SubjectRoute]
    ordering: Ordering | None = None


@dataclass(slots=True)
class Learned:
    """The changes of an answer, for listeners."""

    is_placed_again: bool = False
    """Whether the subject's groups, their writability, or its order changed."""
    moved: set[str] = field(default_factory=set)
    """Groups whose master changed."""
    outdated: set[str] = field(default_factory=set)
    """Groups for which the answer was older than what is known."""
    is_route_outdated: bool = False
    """Whether the answer's route is older than the known one."""


class RouteBook:
    """The three tables, and the rules for accepting an answer."""

    def __init__(self) -> None:
        self._places: dict[str, dict[str, bool]] = {}
        self._orders: dict[str, Ordering] = {}
        self._masters: dict[str, Master] = {}
        self._epochs: dict[str, int] = {}
        self._doubted: dict[str, int] = {}
        self._asks = 0

    def ask(self) -> int:
        """A request begins. Returns its number, for `learn`."""
        self._asks += 1
        return self._asks

    def learn(self, ask: int, subject: str, routes: Iterable[SubjectRoute], ordering: Ordering | None = None) -> Learned:
        """Take the answer to request number `ask`."""
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
        learned.is_placed_again = places != before or ordering != known
        self._places[subject] = places
        if ordering is not None:
            self._orders[subject] = ordering
        else:
            self._orders.pop(subject, None)
        return learned

    def forget(self, subject: str) -> None:
        """The subject is deleted: a later one of the same name has its own route."""
        self._places.pop(subject, None)
        self._orders.pop(subject, None)

    def _learn_master(self, ask: int, route: SubjectRoute, learned: Learned) -> bool:
        """Whether the answer about a group is accepted."""
        group = route.group
        if route.epoch < self._epochs.get(group, 0):
            learned.outdated.add(group)
            return False
        self._epochs[group] = route.epoch
        known, found = self._masters.get(group), Master(route.address, route.epoch, route.server)
        if known is not None and known[:2] == found[:2]:
            found = known  # the same master; a metaserver of another release, or one that began just now, may name less of it
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
        """This master is not the master, or cannot be reached; None: the current one. False if another master is known already."""
        if master is not None and self._masters.get(group) != master:
            return False
        self._doubted[group] = self._asks
        return True

    def master(self, group: str) -> Master | None:
        """The group's master, unless it is unknown or doubted."""
        return None if group in self._doubted else self._masters.get(group)

    def groups(self, subject: str) -> Mapping[str, bool] | None:
        """The subject's broker groups, and whether each is writable; None before the first answer."""
        return self._places.get(subject)

    def ordering(self, subject: str) -> Ordering | None:
        """The order of a subject; None if it is not known."""
        return self._orders.get(subject)

    def cover(self) -> list[str]:
        """A few subjects that together use every known group: locating them refreshes all masters."""
        chosen: list[str] = []
        left = set(self._masters)
        for subject, places in self._places.items():
            if not left.isdisjoint(places):
                chosen.append(subject)
                left.difference_update(places)
        return chosen

    def subject_on(self, group: str) -> str | None:
        """Any subject that uses the group."""
        return next((subject for subject, places in self._places.items() if group in places), None)
