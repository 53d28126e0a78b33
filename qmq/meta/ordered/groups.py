"""A consumer group in the coordination store: its record, replaced by compare-and-swap, its
subject's routes, and its members.

A member is `/qmq/members/S/G/CONSUMER`, under a lease that each request of the consumer renews.

* A consumer whose metaserver died asks another one, which puts the key again under a new lease. The
  incarnation is the same, so the assignment does not change. When the first lease ends, the key
  stays, since it belongs to the second lease.
* A name belongs to its newest incarnation. Incarnation ids do not say which one is newer. An
  incarnation that knows no assignment yet (generation 0) and did not ask before has just begun, and
  takes the name over. An incarnation that asked before, or knows an assignment, and finds another
  one in its place is the older one. It gets StaleDelivery, like a consumer whose messages were
  handed to another one: its request is valid, but it was replaced, and asking again will not help.
  So exactly one of two incarnations is stopped.
* An attempt to put the key is identified by its lease, which no other attempt uses: after a lost
  answer the key is read back.

The values of `start` in a group's record say where the group starts or is moved to, and which
partitions' brokers get it:

    value            the group reads                                          sent to
    earliest         a new group: from version 1, from the beginning          none
    latest           a new group: from the latest version, from its end       that version's
                                                                              partitions
    reset:earliest   from version 1, from the beginning                       all partitions of all
                                                                              versions
    reset:latest     from the latest version, from its end                    the same
    reset:TIME_MS    from the first version with a partition that has later   the same
                     messages, from that time
    unpark:ID        unchanged, except for the logical partition of one key   none
    delete           nothing: the group is being deleted (placement.py)       all brokers, to delete
                                                                              the group's progress

A partition that only later versions have is always read from its beginning, because its messages
follow those of its source partitions. A partition that only earlier versions have is left at its
end: the group does not read it, and no key stays parked there. A move forgets every parked key; if
it left the older messages of a key parked, a later replay would put them behind newer ones.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from qmq_coordination.coordination_store import (
    CoordinationStore,
    Delete,
    KeyValue,
    LeaseId,
    Put,
    absent,
    unchanged,
)
from qmq_coordination.ordered_records import (
    MemberRecord,
    group_record_key,
    latest_key,
    member_key,
    route_key,
)
from qmq_ordering.lanes import GroupRecord
from qmq_ordering.routes import Route

from qmq.errors import (
    CoordinationError,
    CoordinationUnknown,
    InvalidArgument,
    LeaseNotFound,
    OrderMismatch,
    Overloaded,
    StaleDelivery,
    UnknownGroup,
)
from qmq.proto.v1 import control_pb2 as control


def unknown_route(_subject: str, _version: int) -> Route | None:
    return None


class Records:
    """Reads and swaps records. Every read goes to the store, not to a view, because a swap must
    compare with the value read. `known` returns routes that are known already: a route never
    changes, so it need not be read again.
    """

    def __init__(
        self, store: CoordinationStore, known: Callable[[str, int], Route | None] = unknown_route
    ) -> None:
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
        """Compare and swap. Returns None if the record has changed since it was read, or the
        outcome is unknown: read the record again. Raises CoordinationError.
        """
        value = record.encode()
        try:
            done = await self.store.txn([unchanged(item)], [Put(item.key, value)])
        except CoordinationUnknown:
            # Do not read back here: an equal value may have been written after a reset that the
            # caller does not know of.
            return None
        return replace(item, value=value, mod_revision=done.revision) if done.succeeded else None

    async def latest(self, subject: str) -> int:
        """The latest version. Raises OrderMismatch, CoordinationError."""
        found = await self.store.get(latest_key(subject))
        if found is None:
            raise OrderMismatch(f"subject {subject!r} has no route: is it an ordered one?")
        return int(found.value)

    async def routes(
        self, subject: str, first: int, last: int, have: Mapping[int, Route] | None = None
    ) -> dict[int, Route]:
        """Versions `first` to `last`; `have` are the routes that the caller knows already. Raises
        OrderMismatch, CoordinationError.
        """
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


LEASE_MS_MIN: Final = 2_000
LEASE_MS_MAX: Final = 300_000
"""The longest lease, as at brokers: a lost consumer keeps its lanes for this time."""


class GroupMember(NamedTuple):
    """A consumer's name."""

    subject: str
    group: str
    consumer: str

    @property
    def key(self) -> str:
        """The member's key in the store."""
        return member_key(*self)


@dataclass(slots=True)
class _Held:
    """The lease of one consumer that this metaserver keeps alive."""

    incarnation: str
    lease: LeaseId
    until_ms: int
    """The time, by this process's clock,
    at which the consumer counts as lost if it makes no request.
    """


class Members:
    """The consumers that poll this metaserver."""

    def __init__(
        self, store: CoordinationStore, now_ms: Callable[[], int], monotonic_ms: Callable[[], int]
    ) -> None:
        self._store = store
        self._now_ms = now_ms
        self._monotonic_ms = monotonic_ms
        self._held: dict[GroupMember, _Held] = {}
        self._counts: Counter[tuple[str, str]] = Counter()
        """The number of consumers by (subject, group)."""
        self._locks: defaultdict[GroupMember, asyncio.Lock] = defaultdict(asyncio.Lock)

    @property
    def pairs(self) -> Collection[tuple[str, str]]:
        """The (subject, group) pairs of these consumers."""
        return self._counts.keys()

    def forget_silent(self) -> None:
        """Forget consumers that did not poll within their lease: they have stopped, or poll another
        metaserver. Their keys expire with the lease. Call this from time to time.
        """
        now = self._monotonic_ms()
        for name in [
            name
            for name, held in self._held.items()
            if held.until_ms <= now and not self._locks[name].locked()
        ]:
            self._forget(name)

    def _forget(self, name: GroupMember) -> None:
        self._locks.pop(name, None)
        if self._held.pop(name, None) is not None:
            pair = (name.subject, name.group)
            self._counts[pair] -= 1
            if not self._counts[pair]:
                del self._counts[pair]

    async def keep(
        self,
        name: GroupMember,
        incarnation: str,
        lease_ms: int,
        *,
        generation: int,
        condition: str | None = None,
    ) -> bool:
        """Renew the lease of a consumer that polled for `lease_ms`. Returns True if its key was put
        just now. Raises StaleDelivery, CoordinationError.
        """
        lease_ms = min(max(lease_ms, LEASE_MS_MIN), LEASE_MS_MAX)
        async with self._locks[name]:
            while True:
                item = await self._store.get(name.key)
                self._require_newest(name, incarnation, generation, item)
                if await self._keep_alive(name, incarnation, lease_ms, item):
                    return False
                if await self._put(name, incarnation, lease_ms, item, condition):
                    return True

    def _require_newest(
        self, name: GroupMember, incarnation: str, generation: int, item: KeyValue | None
    ) -> None:
        if item is None or MemberRecord.decode(item.value).incarnation == incarnation:
            return
        held = self._held.get(name)
        if generation > 0 or (held is not None and held.incarnation == incarnation):
            raise superseded(name)

    async def _keep_alive(
        self, name: GroupMember, incarnation: str, lease_ms: int, item: KeyValue | None
    ) -> bool:
        """Renew the lease. Returns True if the key is ours. A key under another lease belongs to
        another metaserver, or was put by a request whose answer came late.
        """
        held = self._held.get(name)
        if (
            item is None
            or held is None
            or held.incarnation != incarnation
            or item.lease != held.lease
        ):
            return False
        try:
            await self._store.keep_alive(held.lease)
        except LeaseNotFound:
            return False
        held.until_ms = self._monotonic_ms() + lease_ms
        return True

    async def _put(
        self,
        name: GroupMember,
        incarnation: str,
        lease_ms: int,
        item: KeyValue | None,
        condition: str | None,
    ) -> bool:
        until_ms = self._monotonic_ms() + lease_ms
        lease = await self._store.grant(lease_ms / 1000)
        there = None if item is None else MemberRecord.decode(item.value)
        since_ms = (
            there.since_ms
            if there is not None and there.incarnation == incarnation
            else self._now_ms()
        )
        put = Put(
            name.key, MemberRecord(name.consumer, incarnation, since_ms, condition).encode(), lease
        )
        try:
            done = (
                await self._store.txn(
                    [absent(name.key) if item is None else unchanged(item)], [put]
                )
            ).succeeded
        except CoordinationUnknown:
            found = await self._store.get(name.key)
            done = found is not None and found.lease == lease
        if not done:
            await self._drop(lease)
            return False
        before = self._held.get(name)
        self._held[name] = _Held(incarnation, lease, until_ms)
        if before is not None:
            await self._drop(before.lease)
        else:
            self._counts[name.subject, name.group] += 1
        return True

    async def leave(self, name: GroupMember, incarnation: str) -> None:
        """Remove a consumer that leaves: delete its key if it still belongs to this incarnation.
        Raises CoordinationError.
        """
        async with self._locks[name]:
            while (item := await self._store.get(name.key)) is not None:
                if MemberRecord.decode(item.value).incarnation != incarnation:
                    break
                # Compare the revision, because a newer incarnation may put its own key meanwhile.
                # Repeating is harmless: the call deletes the key that was read, or none.
                with suppress(CoordinationUnknown):
                    await self._store.txn([unchanged(item)], [Delete(name.key)])
            held = self._held.get(name)
            if held is not None and held.incarnation == incarnation:
                await self._drop(held.lease)
        if held is not None and held.incarnation == incarnation:
            self._forget(name)

    async def _drop(self, lease: LeaseId) -> None:
        """Revoke an unused lease. If this fails, the lease expires."""
        with suppress(CoordinationError):
            await self._store.revoke(lease)


def require_room(name: GroupMember, there: Collection[str], most: int) -> None:
    """Check that a new consumer may join the group. Raises Overloaded."""
    if name.consumer not in there and len(there) >= most:
        raise Overloaded(
            f"group {name.group!r} has {len(there)} consumers, the limit: a lost consumer "
            "counts until its lease ends"
        )


def require_same_condition(
    name: GroupMember, incarnation: str, condition: str | None, there: Mapping[str, MemberRecord]
) -> None:
    """Refuse a consumer that selects other messages than those that joined before it: what a
    consumer leaves out counts as done for the whole group. Of two that joined at once, the later
    one is refused at its next request. Raises InvalidArgument.
    """
    mine = there.get(name.consumer)
    since = (
        (mine.since_ms, name.consumer)
        if mine is not None and mine.incarnation == incarnation
        else None
    )
    for other in there.values():
        if (
            other.consumer == name.consumer
            or other.condition in (None, condition)
            or condition is None
        ):
            continue
        if since is None or (other.since_ms, other.consumer) < since:
            theirs, ours = other.condition or "all messages", condition or "all messages"
            raise InvalidArgument(
                f"group {name.group!r} reads {theirs} of {name.subject!r} (consumer "
                f"{other.consumer!r}), and {name.consumer!r} asks for {ours}: "
                "all consumers of a group need the same filter. Use another group, "
                "or stop the other consumers first; a lost one counts until its lease ends"
            )


def superseded(name: GroupMember) -> StaleDelivery:
    """The error for the older one of two incarnations."""
    return StaleDelivery(
        f"consumer {name.consumer!r} of group {name.group!r} was started again elsewhere, "
        "so this one must stop: give each process its own name"
    )


EARLIEST: Final = "earliest"
LATEST: Final = "latest"
UNPARK: Final = "unpark:"
DELETE: Final = "delete"
_RESET: Final = "reset:"


class Start(NamedTuple):
    text: str

    @classmethod
    def parse(cls, text: str) -> Start:
        """Raises InvalidArgument."""
        where = text.removeprefix(_RESET)
        if (
            text == DELETE
            or where in (EARLIEST, LATEST)
            or (text.startswith(_RESET) and where.isdecimal())
            or text.startswith(UNPARK)
        ):
            return cls(text)
        raise InvalidArgument(f"a group starts at {EARLIEST} or {LATEST}, not {text!r}")

    @classmethod
    def of_new(cls, text: str) -> Start:
        """The start that a consumer requests; empty: earliest. Raises InvalidArgument."""
        if text not in ("", EARLIEST, LATEST):
            raise InvalidArgument(f"a group starts at {EARLIEST} or {LATEST}, not {text!r}")
        return cls(text or EARLIEST)

    @classmethod
    def of_reset(cls, request: control.ResetGroupRequest) -> Start:
        """The start of a reset. Raises InvalidArgument for a sequence, which is only valid within
        one partition.
        """
        which = request.WhichOneof("target")
        if which == "sequence" or which is None:
            raise InvalidArgument(
                "a group of an ordered subject is moved to the earliest, the latest, or a time"
            )
        return cls(_RESET + (str(max(0, request.time_ms)) if which == "time_ms" else which))

    @property
    def _where(self) -> str:
        return self.text.removeprefix(_RESET)

    @property
    def is_latest(self) -> bool:
        """True if the start is the end of the latest version."""
        return self._where == LATEST

    @property
    def needs_placing(self) -> bool:
        """True if brokers must know the start before the group is ready."""
        return self.text not in (EARLIEST, DELETE)

    @property
    def moves(self) -> bool:
        """True if the group may have begun before, so that it is moved."""
        return self.text.startswith(_RESET)

    @property
    def is_delicate(self) -> bool:
        """True if only the metaserver that began the move should continue it, unless that
        metaserver has stopped.
        """
        return self.moves or self.text.startswith(UNPARK)

    def version(self, routes: Mapping[int, Route], last_append_ms: Mapping[int, int]) -> int:
        """The version at which a reset begins. `routes`: all versions. `last_append_ms`: by
        partition, when its broker stored its last message. The dates of the versions are those of a
        metaserver's clock, which may be wrong: a version chosen by them could lie behind messages
        that were stored since.
        """
        if self._where in (EARLIEST, LATEST):
            return 1 if self._where == EARLIEST else max(routes)
        newest = {
            part.number: version
            for version, route in sorted(routes.items())
            for part in route.partitions
        }
        return min(
            (
                newest[number]
                for number, at_ms in last_append_ms.items()
                if at_ms >= int(self._where)
            ),
            default=max(routes),
        )

    def places(self, routes: Mapping[int, Route], first: int) -> dict[int, control.LanePlace]:
        """The starts for brokers by partition. `routes`: all versions; the group reads those from
        `first` on.
        """
        if self.text == EARLIEST or self.text.startswith(UNPARK):
            return {}
        here = {part.number for part in routes[first].partitions}
        later = {
            part.number
            for version, route in routes.items()
            if version > first
            for part in route.partitions
        } - here
        left = (
            {part.number for route in routes.values() for part in route.partitions} - here - later
        )
        found = {number: self._place(number) for number in here}
        if self.moves:
            found.update(
                {number: control.LanePlace(partition=number, earliest=True) for number in later}
            )
            found.update(
                {number: control.LanePlace(partition=number, latest=True) for number in left}
            )
        return found

    def _place(self, number: int) -> control.LanePlace:
        if self._where == EARLIEST:
            return control.LanePlace(partition=number, earliest=True)
        if self._where == LATEST:
            return control.LanePlace(partition=number, latest=True)
        return control.LanePlace(partition=number, time_ms=int(self._where))
