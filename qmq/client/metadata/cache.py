"""What a client knows of the cluster, and how it asks metaservers for it, no more often than
needed.

`MetadataCache` asks. Rules:
* One request at a time for each broker group and each subject, shared by all waiters. What the
  answer says about a group's master holds for every subject on the group.
* Requests about the same thing are 50 to 100 ms apart (with jitter, so that many clients do not ask
  at the same time). If a group has no master for long, the pause grows to a second, until the group
  serves a request again.
* A subject here is a *target*: its messages and its delayed messages are two targets. An unknown
  group may be a new delay group, which takes delayed messages of all subjects: the targets in use
  are located again.
* What a metaserver pushes (`Watch`) is a hint to ask again, after a moment of jitter. Without
  pushes clients only learn later: a broker that is not master says so, and placements are refreshed
  when they are half a minute old.

`RouteTable` knows the broker groups of each subject, and the master of each group, without I/O. It
has three tables, because they change for different reasons:

    places    subject -> its broker groups, each writable or drained
              changes when an operator places or drains
    orders    ordered subject -> its latest route
              changes when it is split, merged or moved
    masters   broker group -> address and epoch of its master
              changes at every failover, for all subjects at once

Rules:
* A master is *doubted* when it answers NotMaster or cannot be reached. A doubted master is not used
  until the answer to a later request names it again, or any answer names another one.
* An answer with an older epoch than the known one is ignored for that group, because a metaserver
  may lag. The group stays doubted, so the next caller asks again.
* An answer with an older route of an ordered subject than the known one is ignored for the subject,
  and used for masters.

Delayed messages of a subject go to delay groups. Their placement has its own *target*, "~" and the
subject's name (no name begins with "~"). Any other target is the subject's name.

Worked example: group g1 is known as (a:1, epoch 4). A broker says NotMaster: doubted. Locate
answers (a:1, 3): ignored. Locate answers (b:1, 5): used for every subject on g1, although only one
was asked about.

`shared` lets several callers wait for one task, such as a look-up. Metaservers' answers become
values here, too: where a subject is, a consumer's lanes, and what several broker groups answered,
of which some may be silent (`Partial`).
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeVar

from qmq_ordering.lanes import Lane
from qmq_ordering.routes import LpRange, PhysicalPartition
from qmq_ordering.routes import Route as OrderedRoute

from qmq.client.connection.connection import TIMING, ClientTiming
from qmq.client.consuming.ordered.membership import Assigned
from qmq.errors import ClientClosed, NotConnected, QmqError, Unavailable, UnknownSubject
from qmq.model import DeclaredSchema, Order, compatibility_of, format_of
from qmq.proto.v1 import control_pb2 as control
from qmq.proto.v1 import meta_pb2 as pb
from qmq.rpc.server_name import ANY_SERVER, ServerName

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


def described(target: str) -> str:
    """The target as a text for messages to people."""
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
    """The order of an ordered subject, its latest route, and the partitions of older versions that
    were fenced.
    """

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


class RouteTable:
    """The three tables, and the rules for accepting an answer."""

    def __init__(self) -> None:
        self._places: dict[str, dict[str, bool]] = {}
        self._orders: dict[str, Ordering] = {}
        self._masters: dict[str, Master] = {}
        self._epochs: dict[str, int] = {}
        self._doubted: dict[str, int] = {}
        self._asks = 0
        self.groups: Final[Callable[[str], Mapping[str, bool] | None]] = self._places.get
        """Returns a subject's broker groups, and whether each is writable;
        None before the first answer.
        """
        self.ordering: Final[Callable[[str], Ordering | None]] = self._orders.get
        """Returns the order of a subject; None if it is not known."""

    def ask(self) -> int:
        """A request begins. Returns its number, for `learn`."""
        self._asks += 1
        return self._asks

    def learn(
        self,
        ask: int,
        subject: str,
        routes: Iterable[SubjectRoute],
        ordering: Ordering | None = None,
    ) -> Learned:
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
        if (
            ordering is not None
            and known is not None
            and ordering.route.version < known.route.version
        ):
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
            # the same master; a metaserver of another release, or one that began just now, may name
            # less of it
            found = known
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
        """This master is not the master, or cannot be reached; None: the current one. False if
        another master is known already.
        """
        if master is not None and self._masters.get(group) != master:
            return False
        self._doubted[group] = self._asks
        return True

    def master(self, group: str) -> Master | None:
        """The group's master, unless it is unknown or doubted."""
        return None if group in self._doubted else self._masters.get(group)

    def cover(self) -> list[str]:
        """A few subjects that together use every known group:
        locating them refreshes all masters.
        """
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


T = TypeVar("T")


async def shared(task: asyncio.Task[T]) -> T:
    """Wait for the task; cancelling this caller does not cancel the task. Raises ClientClosed if
    the client was closed, which cancels such tasks: a caller that was not cancelled itself must not
    get CancelledError.
    """
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if task.cancelled() and not is_cancelled_from_outside():
            raise ClientClosed(
                "the client was closed meanwhile: make a new one with qmq.connect()"
            ) from None
        raise


def is_cancelled_from_outside() -> bool:
    """Whether the running task is cancelled; False if only something that it waits for is."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


log = logging.getLogger("qmq.client")

PAUSE_S: Final = (0.05, 0.1)
STEADY_ASKS: Final = 50
"""Requests that keep the short pause: about 4 s, longer than a failover."""
PAUSE_S_MAX: Final = 1.0
FIRST_JITTER_S: Final = 0.01
"""All clients of a master that dies notice at the same moment."""
PUSH_JITTER_S: Final = 0.03
REFRESHES_MAX: Final = 4
"""Concurrent background requests."""


class Pushed(NamedTuple):
    """A change that a metaserver pushed. `is_gap`: earlier changes may have been missed."""

    subjects: Sequence[str] = ()
    groups: Sequence[str] = ()
    is_gap: bool = False


Locate = Callable[[str], Awaitable[Placement]]
"""Subject -> its placement. Raises Unavailable, UnknownSubject."""
Watch = Callable[[], AsyncIterator[Pushed]]
"""Changes that metaservers push; ends if they do not support it."""


class MetadataCache:
    """Keeps a `RouteTable` up to date. `outdated` is called when a metaserver lags, to ask the next
    one.

    `locate` may create a subject; background requests use `locate_existing`, which never does, so
    that a deleted subject stays deleted.
    """

    def __init__(
        self,
        locate: Locate,
        watch: Watch,
        outdated: Callable[[], None] = lambda: None,
        *,
        locate_existing: Locate | None = None,
        timing: ClientTiming = TIMING,
    ) -> None:
        self.book = RouteTable()
        self._locate_existing = locate_existing or locate
        self._refresh_s = timing.refresh_s
        self._locate, self._watch, self._outdated = locate, watch, outdated
        self._asking: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._asked_s: dict[tuple[str, str], float] = {}
        self._tries: dict[tuple[str, str], int] = {}
        self._placed_s: dict[str, float] = {}
        self._listeners: dict[str, dict[Callable[[], None], None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._refreshes = asyncio.Semaphore(REFRESHES_MAX)
        self._refreshing: set[str] = set()
        self._watcher: asyncio.Task[None] | None = None
        self._is_closed = False

    # --- asking -----------------------------------------------------------------------------------

    async def groups(self, subject: str, *, refresh: bool = False) -> Mapping[str, bool]:
        """The subject's broker groups, and whether each is writable. `refresh` asks a metaserver
        even if they are known.

        Raises UnknownSubject, Unavailable.
        """
        self._start_watching()
        if refresh or self.book.groups(subject) is None:
            await self._ask(("subject", subject), subject)
        return self.book.groups(subject) or {}

    async def ordering(self, subject: str, *, refresh: bool = False) -> Ordering | None:
        """The subject's order and its latest route; None if it is unordered. `refresh` as in
        `groups`.

        Raises UnknownSubject, Unavailable.
        """
        await self.groups(subject, refresh=refresh)
        return self.book.ordering(subject)

    async def master(self, subject: str, group: str) -> Master:
        """The master of a group that has the subject. Asks once if the master is not known; raises
        NotConnected if it is not known then.
        """
        found = self.book.master(group)
        if found is None:
            await self._ask(("group", group), subject)
            found = self.book.master(group)
        if found is None:
            raise NotConnected(f"broker group {group} has no master at the moment")
        return found

    async def _ask(self, what: tuple[str, str], subject: str) -> None:
        """Join the request that is under way, or start one."""
        task = self._asking.get(what)
        # Awaiting a finished task does not let other tasks run: a caller that asks again and again
        # would block the event loop.
        is_mine = task is None or task.done()
        if task is None or task.done():
            task = self._asking[what] = asyncio.create_task(self._ask_paced(what, subject))
            task.add_done_callback(lambda done: self._asked(what, done))
        try:
            await shared(task)
        except QmqError as failure:
            # The other caller's subject may be deleted while ours exists: then the error is theirs,
            # and we ask again.
            if is_mine or what[0] == "subject" or isinstance(failure, Unavailable):
                raise

    def _asked(self, what: tuple[str, str], done: asyncio.Task[None]) -> None:
        if self._asking.get(what) is done:
            del self._asking[what]
        if not done.cancelled():
            done.exception()

    async def _ask_paced(self, what: tuple[str, str], subject: str) -> None:
        tries = self._tries.get(what, 0)
        self._tries[what] = tries + 1
        if tries:
            wait_s = (
                self._asked_s.get(what, 0.0) + _pause_s(tries) - asyncio.get_running_loop().time()
            )
        else:
            wait_s = random.uniform(0, FIRST_JITTER_S) if what[0] == "group" else 0.0  # noqa: S311 - jitter, not a secret
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        try:
            await self._locate_now(subject, self._locate)
        finally:
            self._asked_s[what] = asyncio.get_running_loop().time()

    async def _locate_now(self, subject: str, locate: Locate) -> None:
        ask = self.book.ask()
        learned = self.book.learn(ask, subject, *await locate(subject))
        self._placed_s[subject] = asyncio.get_running_loop().time()
        if learned.outdated or learned.is_route_outdated:
            self._outdated()
        for group in learned.moved:
            self._tries.pop(("group", group), None)
        if learned.is_placed_again:
            self._tries.pop(("subject", subject), None)
            self._notify(subject)
        if learned.moved:
            for each in list(self._listeners):
                if not learned.moved.isdisjoint(self.book.groups(each) or ()):
                    self._notify(each)

    # --- what others find out ---------------------------------------------------------------------

    def doubt(self, group: str, master: Master) -> None:
        """This master answered NotMaster, or cannot be reached."""
        self.book.doubt(group, master)

    def confirm(self, group: str) -> None:
        """The group served a request: the next failure is a new one."""
        self._tries.pop(("group", group), None)

    def listen(self, subject: str, callback: Callable[[], None]) -> None:
        """Call `callback` when the subject's groups or their masters change."""
        self._listeners.setdefault(subject, {})[callback] = None

    def unlisten(self, subject: str, callback: Callable[[], None]) -> None:
        callbacks = self._listeners.get(subject, {})
        callbacks.pop(callback, None)
        if not callbacks:
            self._listeners.pop(subject, None)

    def _notify(self, subject: str) -> None:
        for callback in list(self._listeners.get(subject, ())):
            callback()

    # --- in the background ------------------------------------------------------------------------

    def touch(self, subject: str) -> None:
        """The subject is in use: refresh it if the last answer is old."""
        if asyncio.get_running_loop().time() > self._placed_s.get(subject, 0.0) + self._refresh_s:
            self.refresh(subject)

    def refresh(self, subject: str, *, jitter_s: float = 0.0) -> None:
        """Ask again in the background; failures are ignored."""
        if subject not in self._refreshing and not self._is_closed:
            self._refreshing.add(subject)
            self._start(self._refresh(subject, random.uniform(0, jitter_s)))  # noqa: S311 - jitter, not a secret

    async def _refresh(self, subject: str, wait_s: float) -> None:
        try:
            await asyncio.sleep(wait_s)
            async with self._refreshes:
                self._refreshing.discard(subject)
                self._placed_s[subject] = asyncio.get_running_loop().time()
                await self._locate_now(subject, self._locate_existing)
        except UnknownSubject:
            log.info("subject %s was deleted", subject)
            self.book.forget(subject)
            self._notify(subject)
        except QmqError as failure:
            log.debug("the metaservers could not be asked where %s is: %s", subject, failure)
        finally:
            self._refreshing.discard(subject)

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # --- what is pushed ---------------------------------------------------------------------------

    def _start_watching(self) -> None:
        if self._watcher is None and not self._is_closed:
            self._watcher = self._start(self._follow())

    async def _follow(self) -> None:
        try:
            async for pushed in self._watch():
                self._pushed(pushed)
        except QmqError as failure:
            log.debug("metaservers push no changes: %s", failure)

    def _pushed(self, pushed: Pushed) -> None:
        named = {target for each in pushed.subjects for target in (each, delayed_target(each))}
        subjects = {each for each in named if self.book.groups(each) is not None}
        for group in pushed.groups:
            found = self.book.subject_on(group)
            if found is not None:
                subjects.add(found)
                self._age_places_on(group)
            else:
                self._age_delayed()
        if pushed.is_gap:
            self._placed_s.clear()
            subjects.update(self.book.cover())
        for subject in subjects:
            self.refresh(subject, jitter_s=PUSH_JITTER_S)

    def _age_places_on(self, group: str) -> None:
        """Whether the group is writable may have changed for all its subjects; subjects in use are
        refreshed at their next use.
        """
        for subject in list(self._placed_s):
            if group in (self.book.groups(subject) or ()):
                self._placed_s.pop(subject)

    def _age_delayed(self) -> None:
        for target in list(self._placed_s):
            if is_delayed(target):
                self._placed_s.pop(target)

    # --- the end ----------------------------------------------------------------------------------

    async def close(self) -> None:
        """End the background tasks."""
        self._is_closed = True
        tasks = [*self._tasks, *self._asking.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _pause_s(tries: int) -> float:
    grown = 1.5 ** min(max(tries - STEADY_ASKS, 0), 20)
    return min(random.uniform(*PAUSE_S) * grown, PAUSE_S_MAX)  # noqa: S311 - jitter, not a secret


@dataclass(frozen=True, slots=True)
class FoundSubject:
    """A subject, as the broker groups that answer describe it."""

    description: pb.SubjectDescription
    silent: dict[str, str]
    """The broker groups that did not answer, with the reasons:
    the description lacks their queues.
    """

    @property
    def settings(self) -> pb.SubjectSettings:
        return self.description.settings


def placement_of(subject: str, found: pb.LocateResponse) -> Placement:
    """Convert a metaserver's answer. Raises NotConnected if an ordered subject has no route yet."""
    return Placement(routes_of(found.routes, found.cluster), _ordering(subject, found))


def routes_of(routes: Iterable[pb.QueueRoute], cluster: str) -> list[SubjectRoute]:
    """The broker groups in an answer of this cluster."""
    return [
        SubjectRoute(
            each.broker_group,
            each.data_address,
            each.epoch,
            each.is_writable,
            ServerName(cluster, each.broker_group, each.replica),
        )
        for each in routes
        if each.partition == 0
    ]


def _ordering(subject: str, found: pb.LocateResponse) -> Ordering | None:
    """The order in a metaserver's answer.
    Raises NotConnected if an ordered subject has no route yet.
    """
    if not found.settings.order:
        return None
    if not found.route.partitions:
        raise NotConnected(f"ordered subject {subject!r} has no route yet")
    parts = tuple(
        PhysicalPartition(each.number, LpRange(each.lps.first, each.lps.end), each.broker_group)
        for each in found.route.partitions
    )
    number = max(part.number for part in parts) + 1
    route = OrderedRoute(found.route.version, found.route.logical_partitions, number, parts)
    return Ordering(Order(found.settings.order), route, frozenset(found.route.fenced))


def schema_of(found: pb.SubjectSchema) -> DeclaredSchema:
    """Raises InvalidArgument for a format that only a newer release knows."""
    return DeclaredSchema(
        format_of(found.format),
        found.text,
        compatibility_of(found.compatibility),
        found.version,
        found.created_ms,
    )


def assigned_lane(lane: Lane) -> pb.AssignedLane:
    lps = control.LpRange(first=lane.range.first, end=lane.range.end)
    return pb.AssignedLane(
        partition=lane.partition, lps=lps, broker_group=lane.group, version=lane.version
    )


def lanes_of(found: pb.SyncMemberResponse) -> Assigned:
    """The lanes that a consumer is assigned, sorted."""
    lanes = [
        Lane(each.partition, LpRange(each.lps.first, each.lps.end), each.broker_group, each.version)
        for each in found.lanes
    ]
    return Assigned(found.generation, tuple(sorted(lanes)))


_T = TypeVar("_T")


class Partial(list[_T]):
    """The answers of the groups that answered. `silent` has the groups that did not answer, with
    the reasons; empty if the answer is complete.
    """

    def __init__(self, found: Iterable[_T] = (), silent: Mapping[str, str] | None = None) -> None:
        super().__init__(found)
        self.silent: dict[str, str] = dict(silent or {})


class DescribedGroups(Partial[control.Group]):
    """Consumer groups, and beside them the readers without a group."""

    def __init__(self, found: control.DescribeGroupsResponse) -> None:
        super().__init__(found.groups, found.silent)
        self.readers: list[control.Reader] = list(found.readers)
