"""Subjects and broker groups at a metaserver, without gRPC: locates, creates and places subjects,
declares their schemas (docs/SCHEMAS.md), and sets the modes of broker groups.

Two metaservers never give different answers for long, and neither undoes a change that the other
confirmed, because they keep no state: each answer comes from the view, and each change is a
compare-and-swap in the store. After a change the key is read back into the view, so that the next
request to *this* metaserver sees it; the others see it through their watches.

While the store cannot be reached, known subjects and masters are answered from memory. An *unknown*
subject may have been created meanwhile, so the answer is CoordinationUnavailable, not
UnknownSubject. Changes fail with CoordinationUnavailable, too.

The broker groups of a new subject:

    read-write groups only; those with a master first, then those with the fewest subjects, then by
    name; shards of one broker, which share its machines (docs/SHARDS.md), only when there are no
    other groups of that kind left

A group without a master, perhaps during an election, is chosen when there are not enough others.
The choice stays when groups are added later (`qmq subject place` changes it).

Example: g1 has 3 subjects, g2 has 1, g3 has 1 and is drained, g4 is new. Two groups for a new
subject: g4, g2.

Each request about schemas reads them from the store, since requests are rare. A new version is one
transaction, which requires that the version used for the comparison is still the newest one. If two
versions are declared at the same time, the second is compared with the first.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, Final

from qmq_coordination.broker_groups import BrokerGroupState, Mode, group_key
from qmq_coordination.coordination_store import CoordinationStore, KeyValue, Put, absent, unchanged
from qmq_coordination.ordered_records import OrderedState, latest_key, route_key
from qmq_coordination.subjects import SubjectCatalog, schema_key, schemas_prefix, subject_key
from qmq_coordination.view import ClusterView
from qmq_ordering.changes import first_route

from qmq.errors import (
    CoordinationUnavailable,
    CoordinationUnknown,
    InvalidArgument,
    NotConnected,
    OrderMismatch,
    ReadOnly,
    SubjectExists,
    Unavailable,
    UnknownSubject,
)
from qmq.model import (
    Compatibility,
    DeclaredSchema,
    Order,
    SubjectConfig,
    SubjectFlush,
    check_name,
    compatibility_of,
    format_of,
    is_dead_letters,
)
from qmq.process.description import family_of
from qmq.process.event_loop import Clock
from qmq.proto.v1 import meta_pb2 as pb
from qmq.rpc.guard import CALLER
from qmq.schemas import declared_schema
from qmq.security.quotas import nearest, require_room_for, require_room_of

GROUPS_PER_SUBJECT: Final = 2


@dataclass(frozen=True, slots=True)
class Candidate:
    """A broker group that can be chosen."""

    name: str
    is_writable: bool
    has_master: bool
    subjects: int


def choose(candidates: Iterable[Candidate], count: int = GROUPS_PER_SUBJECT) -> tuple[str, ...]:
    """Choose `count` groups for a new subject, or fewer if there are not enough. Raises
    NotConnected without groups, ReadOnly if all are drained.
    """
    known = list(candidates)
    writable = [each for each in known if each.is_writable]
    if not known:
        raise NotConnected(
            "no broker is registered: is one running, and can it reach the coordination store?"
        )
    if not writable:
        raise ReadOnly(
            f"all broker groups are drained ({', '.join(each.name for each in known)}): `qmq "
            "broker resume` one of them"
        )
    ranked = sorted(writable, key=lambda each: (not each.has_master, each.subjects, each.name))
    seen: Counter[tuple[bool, str]] = Counter()
    rounds: list[tuple[bool, int, int, str]] = []
    for rank, each in enumerate(ranked):
        family = each.has_master, family_of(each.name)
        rounds.append((not each.has_master, seen[family], rank, each.name))
        seen[family] += 1
    return tuple(name for *_, name in sorted(rounds)[:count])


def move(config: SubjectConfig, groups: tuple[str, ...], known: Iterable[str]) -> SubjectConfig:
    """Move the subject to other groups. The record keeps the former groups, because they may still
    hold messages, and the metaserver cannot know when they have none. Raises InvalidArgument for no
    group, a group named twice, or one that is not `known`.
    """
    names = set(known)
    strangers = [group for group in groups if group not in names]
    if strangers:
        raise InvalidArgument(
            f"there is no broker group {', '.join(strangers)}: there are "
            f"{', '.join(sorted(names)) or 'none'}"
        )
    if not groups or len(set(groups)) < len(groups):
        raise InvalidArgument(
            f"a subject lives on one broker group at least, and on each once, not on {list(groups)}"
        )
    hosts = hosts_of(config, sorted(names))
    former = tuple(group for group in hosts if group not in groups)
    return replace(config, groups=groups, former_groups=former)


def hosts_of(config: SubjectConfig, known: Iterable[str]) -> tuple[str, ...]:
    """All groups that may hold messages of the subject."""
    return (*(config.groups or known), *config.former_groups)


READ_S: Final = 1.5
"""Timeout for reading one subject from the store: clients leave a metaserver after two seconds, and
should get the reason.
"""


class ClusterCatalog:
    """The catalog that a metaserver reads and changes.
    With `auto_create` the first send creates a subject.
    """

    def __init__(
        self,
        store: CoordinationStore,
        view: ClusterView,
        *,
        auto_create: bool,
        groups_per_subject: int = GROUPS_PER_SUBJECT,
    ) -> None:
        self._store = store
        self._view = view
        self._catalog = SubjectCatalog(store)
        self._auto_create = auto_create
        self._groups_per_subject = groups_per_subject

    # --- subjects ---------------------------------------------------------------------------------

    async def subject(self, name: str) -> SubjectConfig:
        """An existing subject. Raises UnknownSubject, InvalidName; CoordinationUnavailable if that
        cannot be known.
        """
        found = await self._find(name)
        if found is None:
            raise UnknownSubject(f"there is no subject {name!r}: see `qmq subject list`")
        return found

    async def _find(self, name: str) -> SubjectConfig | None:
        """Find a subject in memory. A subject that is not there may be new,
        so read the store then.
        """
        key = subject_key(name)
        if is_dead_letters(name):
            return SubjectConfig(name)  # a dead-letter queue may be on every broker group
        found = self._view.subject(name)
        if found is None:
            try:
                async with asyncio.timeout(READ_S):
                    await self._view.fetch(key)
            except TimeoutError:
                raise CoordinationUnavailable(
                    f"subject {name!r} is not known here, and the coordination store does "
                    "not answer whether it exists"
                ) from None
            found = self._view.subject(name)
        return found

    async def locate(
        self, name: str, *, create: bool, delayed: bool = False
    ) -> tuple[SubjectConfig, list[pb.QueueRoute]]:
        """Locate a subject, or the delay groups for its delayed messages. Raises UnknownSubject;
        NotConnected if no group has a master.
        """
        config = await self._find(name)
        if config is None:
            if not create:
                raise _unknown(name)
            await self.require_creation(name)
            config = await self.create(SubjectConfig(name))
        if config.order is not Order.NONE:
            await self.ordered(config)
        if delayed:
            return config, await self._delay_routes()
        routes = self._routes(config.former_groups, self.hosts(config))
        if not any(each.data_address for each in routes):
            raise NotConnected(
                f"none of subject {name!r}'s broker groups has a master at the moment "
                f"({', '.join(self.hosts(config)) or 'no group is known'})"
            )
        return config, routes

    async def _delay_routes(self) -> list[pb.QueueRoute]:
        if not self.delay_groups():
            await self._view.refresh()
        found = self._routes((), self.delay_groups())
        if not any(each.data_address for each in found):
            names = ", ".join(self.delay_groups())
            raise NotConnected(
                f"no delay group has a master at the moment ({names})"
                if names
                else "there is no delay group: start `qmq delay`"
            )
        return found

    def _is_writable(self, group: str) -> bool:
        return self._view.group(group).mode is Mode.READ_WRITE

    def _routes(self, former_groups: Collection[str], groups: Iterable[str]) -> list[pb.QueueRoute]:
        """The broker groups, those with a master first. A group without a master is included, so
        that a client that learns of its new master knows how to use it.
        """
        found: list[tuple[bool, pb.QueueRoute]] = []
        for group in groups:
            state = self._view.group(group)
            master = state.master
            has_master = master is not None and bool(master.data_address)
            if not has_master and not state.items:
                continue  # no broker has registered under this name
            address, epoch = (
                (master.data_address, master.epoch)
                if master is not None and has_master
                else ("", state.claim.epoch)
            )
            is_writable = group not in former_groups and self._is_writable(group)
            route = pb.QueueRoute(
                partition=0,
                broker_group=group,
                data_address=address,
                epoch=epoch,
                is_writable=is_writable,
            )
            route.replica = master.replica if address and master is not None else ""
            found.append((not has_master, route))
        return [route for _, route in sorted(found, key=itemgetter(0))]

    def hosts(self, config: SubjectConfig) -> tuple[str, ...]:
        """All groups that may have messages of the subject; for an ordered one, those with a
        partition of any version.
        """
        if config.order is not Order.NONE:
            state = self._view.ordered(config.name)
            return (
                tuple(state.broker_groups) if state is not None and state.routes else config.groups
            )
        return hosts_of(config, self.group_names())

    async def require_creation(self, name: str) -> None:
        """Raises UnknownSubject if the subject does not exist and a first message
        may not create it.
        """
        if not self._auto_create and await self._find(name) is None:
            raise _unknown(name)

    async def create(self, config: SubjectConfig, *, partitions: int = 0) -> SubjectConfig:
        """Create a subject on the named groups, or on chosen ones. Returns the existing subject, if
        there is one.

        `partitions`: of an ordered subject's first route; 0: one for each group. Raises
        InvalidArgument, SubjectExists, QuotaExceeded, NotConnected and ReadOnly (no group can be
        chosen), CoordinationUnavailable.
        """
        if is_dead_letters(config.name):
            raise InvalidArgument(
                f"{config.name!r} is a dead-letter queue: brokers create it themselves"
            )
        if self._view.subject(config.name) is None:
            config = self._admitted(config)
        is_placed = bool(config.groups)
        if is_placed:
            await self._require_groups(config.groups)
            self._require_real_time(config.groups)
        else:
            config = replace(config, groups=await self._choose())
        if config.order is not Order.NONE:
            return await self._create_ordered(config, partitions, is_placed=is_placed)
        if partitions:
            raise InvalidArgument(
                f"subject {config.name!r} is not ordered, so it has no partitions: leave out "
                "the partitions, or give the subject an order"
            )
        made = await self._catalog.create(config, is_placed=is_placed)
        await self._view.read_back(subject_key(config.name))
        return made

    def _admitted(self, config: SubjectConfig) -> SubjectConfig:
        """Make the settings of a new subject, with the caller as its creator.
        Raises QuotaExceeded.
        """
        access, caller = self._view.access, CALLER.get()
        require_room_for(access.quotas.values(), config.name, self._view.subject_names())
        principal = caller.principal
        if not caller.address or principal.is_server:
            return config
        if access.quotas:
            quota = nearest(access.quotas.values(), principal, access.book.roles_of(principal))
            require_room_of(quota, principal, (each.created_by for each in self._view.subjects()))
        return replace(config, created_by=str(principal))

    # --- ordered subjects -------------------------------------------------------------------------

    async def _create_ordered(
        self, config: SubjectConfig, partitions: int, *, is_placed: bool
    ) -> SubjectConfig:
        """Create settings and first route in one transaction."""
        route = first_route(
            config.logical_partitions, partitions or len(config.groups), config.groups
        )
        first = [Put(route_key(config.name, 1), route.encode()), Put(latest_key(config.name), b"1")]
        made = await self._catalog.create(config, is_placed=is_placed, also=first)
        await self._view.read_back(subject_key(config.name))
        if not partitions:
            return made
        there = (await self.learn_route(config.name)).routes[1]
        if len(there.partitions) != partitions:
            raise SubjectExists(
                f"subject {config.name!r} exists, and its first route has {len(there.partitions)} "
                f"partitions, not {partitions}: split or merge them, or choose another name"
            )
        return made

    async def ordered(self, config: SubjectConfig) -> OrderedState:
        """The routes of an ordered subject, as known here. Raises OrderMismatch, CoordinationError;
        Unavailable if the routes are older than a broker group's log.
        """
        if config.order is Order.NONE:
            raise OrderMismatch(f"subject {config.name!r} is not ordered: it has no route")
        state = self._view.ordered(config.name)
        if state is None or state.route is None or 1 not in state.routes:
            state = await self.learn_route(config.name)
        require_current(state)
        return state

    async def learn_route(self, name: str) -> OrderedState:
        """Read the first and latest route of an ordered subject from the store into the view.
        Raises CoordinationError.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(READ_S):
                latest = await self._view.fetch(latest_key(name))
                for version in {1, int(latest.value) if latest is not None else 1}:
                    await self._view.fetch(route_key(name, version))
        state = self._view.ordered(name)
        if state is None or state.route is None or 1 not in state.routes:
            raise CoordinationUnavailable(
                f"the route of subject {name!r} cannot be read at the moment: try again soon"
            )
        return state

    async def _choose(self) -> tuple[str, ...]:
        if not self.group_names():
            await self._view.refresh()
        candidates = [
            Candidate(
                state.name,
                state.mode is Mode.READ_WRITE,
                state.master is not None,
                self._view.subject_count(state.name),
            )
            for state in self._view.groups()
            if state.delay is None
        ]
        return choose(candidates, self._groups_per_subject)

    async def place(self, name: str, groups: tuple[str, ...]) -> SubjectConfig:
        """Set the broker groups that take a subject's messages. Raises UnknownSubject,
        InvalidArgument, CoordinationUnavailable.
        """
        if (await self.subject(name)).order is not Order.NONE:
            raise InvalidArgument(
                f"subject {name!r} is ordered: move its partitions one by one, `qmq route "
                f"move {name} PARTITION GROUP`"
            )
        await self._require_groups(groups)
        self._require_real_time(groups)
        known = self.group_names()
        placed = await self._catalog.update(name, lambda config: move(config, groups, known))
        await self._view.read_back(subject_key(name))
        return placed

    async def set_flush(self, name: str, flush: SubjectFlush) -> SubjectConfig:
        """Set when a subject's producers get their acknowledgement.
        Raises UnknownSubject, CoordinationUnavailable.
        """
        return await self.alter(name, {"flush": flush})

    async def alter(self, name: str, changes: Mapping[str, Any]) -> SubjectConfig:
        """Change fields of a subject's settings.
        Raises UnknownSubject, InvalidArgument, CoordinationUnavailable.
        """
        found = await self._catalog.update(name, lambda config: replace(config, **changes))
        await self._view.read_back(subject_key(name))
        return found

    # --- broker groups ----------------------------------------------------------------------------

    def group_names(self) -> list[str]:
        """All broker groups in order, without delay groups."""
        return [state.name for state in self._view.groups() if state.delay is None]

    def delay_groups(self) -> list[str]:
        """All delay groups, in order."""
        return [state.name for state in self._view.groups() if state.delay is not None]

    async def group(self, name: str) -> BrokerGroupState:
        """An existing broker group. Raises InvalidName, InvalidArgument; CoordinationUnavailable if
        that cannot be known.
        """
        await self._require_groups((check_name("broker group", name),))
        return self._view.group(name)

    async def require_writable(self, names: tuple[str, ...]) -> None:
        """Check that these broker groups exist and are not drained.
        Raises InvalidArgument, CoordinationError.
        """
        await self._require_groups(names)
        self._require_real_time(names)
        drained = [name for name in names if self._view.group(name).mode is not Mode.READ_WRITE]
        if drained:
            raise InvalidArgument(
                f"broker group {', '.join(drained)} is drained and takes no new partitions: "
                "choose another, or resume it"
            )

    async def _require_groups(self, names: tuple[str, ...]) -> None:
        if all(self._view.group(name).items for name in names):
            return
        await self._view.refresh()
        strangers = [name for name in names if not self._view.group(name).items]
        if strangers:
            known = ", ".join(state.name for state in self._view.groups()) or "none"
            raise InvalidArgument(
                f"there is no broker group {', '.join(strangers)}: there are {known}"
            )

    def _require_real_time(self, names: tuple[str, ...]) -> None:
        delays = [name for name in names if self._view.group(name).delay is not None]
        if delays:
            raise InvalidArgument(
                f"{', '.join(delays)} is a delay group: subjects live on broker groups, "
                f"{', '.join(self.group_names())}"
            )

    async def set_mode(self, name: str, mode: str) -> Mode:
        """Drain a group, or resume it. Raises InvalidArgument,
        CoordinationUnavailable, CoordinationUnknown.
        """
        wanted = _mode(mode)
        await self.group(name)
        key = group_key(name, "mode")
        try:
            await self._store.put(key, wanted.value.encode())
        except CoordinationUnknown:
            found = await self._store.get(key)
            if found is None or found.value != wanted.value.encode():
                raise
        await self._view.read_back(key)
        return wanted


def _mode(text: str) -> Mode:
    try:
        return Mode(text)
    except ValueError:
        raise InvalidArgument(
            f"a broker group's mode is {' or '.join(each.value for each in Mode)}, not {text!r}"
        ) from None


def require_current(state: OrderedState) -> None:
    """Raise Unavailable if the subject's routes are older than a broker group's log. Messages of
    newer partitions would be skipped.
    """
    for what in state.stale.values():
        raise Unavailable(
            f"the routes of subject {state.subject!r} are not used: the coordination store's data "
            f"was put back ({what}). Change nothing, and rebuild it from the brokers' folders: "
            "docs/RUNBOOKS.md, etcd was put back to older data"
        )


def _unknown(name: str) -> UnknownSubject:
    return UnknownSubject(
        f"there is no subject {name!r}: create it with `qmq subject create {name}`"
    )


class SchemaService:
    def __init__(self, store: CoordinationStore, cluster: ClusterCatalog, clock: Clock) -> None:
        self._store = store
        self._cluster = cluster
        self._clock = clock

    async def declare(self, request: pb.SetSubjectSchemaRequest) -> pb.SubjectSchema:
        """Store the next version. Declaring the newest version again stores nothing.

        Raises InvalidName, InvalidArgument, UnknownSubject, IncompatibleSchema, CoordinationError.
        """
        await self._require(request.subject)
        new = DeclaredSchema(format_of(request.format), request.text)
        if not declared_schema.struct_of(new).fields:
            raise InvalidArgument("the schema has no fields")
        while True:
            item = await self._newest(request.subject)
            old = None if item is None else DeclaredSchema.decode(item.value)
            wanted = self._next(request, new, old)
            if old is not None and (old.format, old.text, old.compatibility) == (
                wanted.format,
                wanted.text,
                wanted.compatibility,
            ):
                return _message(old)
            if old is not None:
                declared_schema.require(request.subject, old, wanted)
            if request.dry_run:
                return _message(wanted)
            compares = [
                absent(schema_key(request.subject, wanted.version)),
                *([] if item is None else [unchanged(item)]),
            ]
            # if the put was done, this version is the newest one now
            with suppress(CoordinationUnknown):
                put = Put(schema_key(request.subject, wanted.version), wanted.encode())
                if (await self._store.txn(compares, [put])).succeeded:
                    return _message(wanted)

    def _next(
        self, request: pb.SetSubjectSchemaRequest, new: DeclaredSchema, old: DeclaredSchema | None
    ) -> DeclaredSchema:
        held = Compatibility.BACKWARD if old is None else old.compatibility
        chosen = compatibility_of(request.compatibility) if request.compatibility else held
        version = 1 if old is None else old.version + 1
        return replace(new, compatibility=chosen, version=version, created_ms=self._clock.time_ms())

    async def list(self, request: pb.ListSubjectSchemasRequest) -> pb.ListSubjectSchemasResponse:
        """All versions. Raises InvalidName, UnknownSubject, CoordinationError."""
        await self._require(request.subject)
        found = await self._store.list(schemas_prefix(request.subject))
        return pb.ListSubjectSchemasResponse(
            schemas=[_message(DeclaredSchema.decode(each.value)) for each in found.items]
        )

    async def delete(
        self, request: pb.DeleteSubjectSchemasRequest
    ) -> pb.DeleteSubjectSchemasResponse:
        """Delete all versions. Raises InvalidName, UnknownSubject, CoordinationError."""
        await self._require(request.subject)
        return pb.DeleteSubjectSchemasResponse(
            versions=await self._store.delete(schemas_prefix(request.subject), is_prefix=True)
        )

    async def _require(self, subject: str) -> None:
        if is_dead_letters(subject):
            raise InvalidArgument(
                f"{subject!r} is a dead-letter queue: its messages have the schemas of their "
                "subjects"
            )
        await self._cluster.subject(subject)

    async def _newest(self, subject: str) -> KeyValue | None:
        found = await self._store.list(schemas_prefix(subject))
        return found.items[-1] if found.items else None


def _message(schema: DeclaredSchema) -> pb.SubjectSchema:
    return pb.SubjectSchema(
        version=schema.version,
        format=schema.format.value,
        text=schema.text,
        compatibility=schema.compatibility.value,
        created_ms=schema.created_ms,
    )
