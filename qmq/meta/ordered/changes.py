"""A change of a subject's route, from the request of an operator or a policy, whose cuts and broker
groups are chosen here, to `done` (docs/ORDERING.md, "A change").

    prepared ──seal every source──▶ sealed ──publish──▶ published ──every group advanced──▶ done

Any metaserver may continue a change, at the same time as others, and may crash anywhere: this
module has no state. This is safe because

* the change is written first, guarded by `absent(its key)`: a version has only one change;
* each later step is one transaction that compares the change with what was read, and replaces it.
  So each step happens once; and a try whose answer was lost (CoordinationUnknown) may be repeated:
  if it was done, the comparison fails, and the record shows it. A request that is executed late
  fails for the same reason;
* a broker answers a repeated request to seal with the same answer, so a repeated request is
  harmless.

`arrow` is called before and after every step, with its name: tests kill metaservers there.

A source of a change is closed: its master seals it, or the coordination store fences it
(docs/ORDERING.md, "Fencing a group"). A fence is put only while the group has no master key and the
epoch's claim is as it was read. A master that wins, or sets its key again, lists the fences after
that: so either it sees this fence, or the transaction fails, and that master is called. A master
whose key was deleted has lost its write lease already, by its own clock. No clocks are compared
here.

A fence is needed until the seal is in the change's record: then the command message is in the
broker group's log. The leader removes such a fence (`lift`). A fence is put only while its change
is as read, so that a late request cannot put it again, nor after the subject is deleted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final, TypeAlias

from qmq_coordination.broker_groups import Mode, group_key, read_group
from qmq_coordination.coordination_store import (
    CoordinationStore,
    Delete,
    KeyValue,
    Operation,
    Put,
    absent,
    unchanged,
)
from qmq_coordination.ordered_records import (
    Fence,
    change_key,
    fence_key,
    groups_prefix,
    latest_key,
    route_key,
    stale_prefix,
)
from qmq_coordination.subjects import decode_subject, subject_key
from qmq_coordination.view import ClusterView
from qmq_ordering.changes import PhaseEvent, merge, move, next_route, split, step
from qmq_ordering.lanes import GroupRecord
from qmq_ordering.routes import FENCED, Change, Phase, PhysicalPartition, Route, cut_by_load

from qmq.errors import (
    CoordinationError,
    CoordinationUnavailable,
    CoordinationUnknown,
    InvalidArgument,
    OrderMismatch,
    QmqError,
    RouteConflict,
    UnknownPartition,
    UnknownSubject,
)
from qmq.meta.calls import PartitionMasters
from qmq.model import Fencing, Order, SubjectConfig
from qmq.proto.v1 import control_pb2 as control
from qmq.proto.v1 import meta_pb2 as pb

FENCE_AFTER_S: Final = 1.0
"""A master that does not answer is asked again for this long before a fence is considered: usually
longer than an election.
"""
RETRY_S: Final = 0.1

Arrow = Callable[[str], Awaitable[None]]
Sleep = Callable[[float], Awaitable[None]]


async def nowhere(_: str) -> None:
    """A hook that does nothing."""


class Sealing:
    """Closes the sources of a change. `arrow` is called before and after each step, with the step's
    name: a hook for tests.
    """

    def __init__(
        self,
        store: CoordinationStore,
        sealer: PartitionMasters,
        *,
        sleep: Sleep,
        now_ms: Callable[[], int],
        arrow: Arrow,
    ) -> None:
        self._store = store
        self.sealer = sealer
        self._sleep = sleep
        self._now_ms = now_ms
        self._arrow = arrow
        self._silent_since: dict[str, int] = {}
        """The time since which each broker group has not answered a seal, so that its second
        partition need not wait again.
        """

    def note_gone(self, broker_group: str) -> None:
        """Note that the broker group has had no master for long enough, so that it is fenced
        without another wait.
        """
        self._silent_since[broker_group] = self._now_ms() - int(FENCE_AFTER_S * 1000)

    async def silent_first(
        self, subject: str, sources: Sequence[PhysicalPartition]
    ) -> list[PhysicalPartition]:
        """Sort sources with silent masters first, so that writers of the others can continue while
        a lease expires.
        """
        if len(sources) < 2:
            return list(sources)
        silent, well = [], []
        for part in sources:
            try:
                await self.sealer.probe(part.group, subject, part.number)
                well.append(part)
            except QmqError:
                silent.append(part)
        return silent + well

    async def close(
        self,
        subject: str,
        part: PhysicalPartition,
        change: Change,
        record: KeyValue,
        fencing: Fencing,
    ) -> int:
        """Seal a source, or fence it. `record` is the change as stored. Returns the sequence of its
        command message, or FENCED. If the record has changed, another metaserver closed the source:
        then the result is not to be stored. Raises RouteConflict.
        """
        while True:
            await self._arrow("before seal")
            try:
                sequence = await self.sealer.seal(
                    part.group, subject, part.number, change.id, change.to_version
                )
                await self._arrow("behind seal")
                self._silent_since.pop(part.group, None)
                return sequence
            except RouteConflict:
                raise
            except QmqError:
                since_ms = self._silent_since.setdefault(part.group, self._now_ms())
                # Call again, to learn the outcome. A broker that does not know the subject yet
                # (CallerError) will learn of it.
                if fencing is Fencing.LEASE and await self._is_fenced(
                    subject, part, change, record, since_ms
                ):
                    return FENCED
            await self._sleep(RETRY_S)

    async def _is_fenced(
        self, subject: str, part: PhysicalPartition, change: Change, record: KeyValue, since_ms: int
    ) -> bool:
        """Whether there is a fence, or the record has changed; puts a fence if it is time. The
        clock only decides when to try; the store's keys decide whether the fence is put.
        """
        key = fence_key(part.group, subject, part.number)
        if (
            now := await self._store.get(record.key)
        ) is None or now.mod_revision != record.mod_revision:
            return True
        if _is_ours(await self._store.get(key), change):
            return True
        if self._now_ms() - since_ms < FENCE_AFTER_S * 1000:
            return False
        state = await read_group(self._store, part.group)
        if "master" in state.items:
            return False  # the master's lease has not ended, or there is a new master: call again
        epoch = state.items.get("epoch")
        epoch_as_read = (
            absent(group_key(part.group, "epoch")) if epoch is None else unchanged(epoch)
        )
        compares = [
            absent(group_key(part.group, "master")),
            epoch_as_read,
            absent(key),
            unchanged(record),
        ]
        await self._arrow("before fence")
        # Unknown outcome: read back. If the transaction is executed late, its comparison held then,
        # and the fence closes a partition that this change closes anyway.
        with suppress(CoordinationUnknown):
            await self._store.txn(
                compares, [Put(key, Fence(change.id, change.to_version).encode())]
            )
        await self._arrow("behind fence")
        return _is_ours(await self._store.get(key), change)

    async def lift(self, broker_group: str, subject: str, number: int) -> None:
        """Remove a fence that is not needed any more, and none other. Raises CoordinationError; the
        next call shows the outcome.
        """
        item = await self._store.get(fence_key(broker_group, subject, number))
        if item is None:
            return
        fence = Fence.decode(item.value)
        found = await self._store.get(change_key(subject, fence.to_version))
        if not fence.is_needed(None if found is None else Change.decode(found.value), number):
            await self._store.txn([unchanged(item)], [Delete(item.key)])


def _is_ours(item: KeyValue | None, change: Change) -> bool:
    return item is not None and Fence.decode(item.value).change_id == change.id


class RouteChanges:
    """Prepares changes, and continues them. The class has no state."""

    def __init__(
        self,
        store: CoordinationStore,
        sealer: PartitionMasters,
        *,
        sleep: Sleep,
        now_ms: Callable[[], int],
        new_id: Callable[[], str],
        arrow: Arrow = nowhere,
    ) -> None:
        self._store = store
        self.sealing = Sealing(store, sealer, sleep=sleep, now_ms=now_ms, arrow=arrow)
        self._sleep = sleep
        self._now_ms = now_ms
        self._arrow = arrow
        self.new_id = new_id
        """Returns a unique id for each change."""

    # --- prepare ----------------------------------------------------------------------------------

    async def prepare(
        self, subject: str, make: Callable[[Route], Change], *, from_version: int = 0
    ) -> Change:
        """Write the change that `make` makes from the latest route. After that, any metaserver will
        complete the change.

        Raises:
            RouteConflict: a change is under way, or `from_version` (0: any) is not the latest.
            UnknownSubject, OrderMismatch: there is no such ordered subject. NotConnected and
            similar errors: with fencing=majority, a source's master does not answer; nothing was
            changed. CoordinationUnknown: the change may be prepared; a metaserver then continues
            it. InvalidArgument and similar errors: from `make`.
        """
        config = await self._subject(subject)
        latest = await self._latest(subject)
        if (stale := (await self._store.list(stale_prefix(subject))).items) and stale[0].value:
            raise RouteConflict(
                f"the routes of subject {subject!r} must not change: the coordination "
                f"store's data was put back ({stale[0].value.decode()})"
            )
        version = int(latest.value)
        if from_version not in (0, version):
            raise other_version(subject, version, from_version)
        if (found := await self._store.get(change_key(subject, version + 1))) is not None:
            raise _under_way(subject, Change.decode(found.value))
        route = await self.route(subject, version)
        change = make(route)
        change = replace(change, times_ms={**change.times_ms, Phase.PREPARED.value: self._now_ms()})
        if config.fencing is not Fencing.LEASE:
            # This group could not be fenced: a merge would close one source, whose producers would
            # wait until the other source's group is back.
            for number in change.sources:
                part = _source(route, number)
                await self.sealing.sealer.probe(part.group, subject, number)
        await self._arrow("before prepare")
        await self._put_prepared(subject, latest, change)
        await self._arrow("behind prepare")
        return change

    async def _put_prepared(self, subject: str, latest: KeyValue, change: Change) -> None:
        """Put the prepared change. Its id is unique for this attempt, so reading back shows which
        attempt won. Repeating is harmless, because `absent` holds once.
        """
        key = change_key(subject, change.to_version)
        lost: CoordinationUnknown | None = None
        while True:
            try:
                if (
                    await self._store.txn(
                        [unchanged(latest), absent(key)], [Put(key, change.encode())]
                    )
                ).succeeded:
                    return
                found = await self._store.get(key)
                # None: `latest` has changed, so this change's key exists, or will never exist
                if found is None:
                    raise RouteConflict(
                        f"the route of subject {subject!r} changed in the meantime: read the "
                        "route again, then plan the change again"
                    )
                other = Change.decode(found.value)
                if other.id == change.id:
                    return
                raise _under_way(subject, other)
            except CoordinationUnknown as failure:
                lost = failure
                await self._sleep(RETRY_S)
            except CoordinationError as failure:
                if lost is None:
                    raise
                raise CoordinationUnknown(
                    f"whether change {change.id} of subject {subject!r} was prepared cannot "
                    "be read back: if it was, it continues by itself"
                ) from failure

    async def made(self, subject: str, version: int, change_id: str) -> Change | None:
        """The change that leads to `version`, in any phase, or None if there is none or it has
        another id.
        """
        found = await self._store.get(change_key(subject, version))
        change = Change.decode(found.value) if found is not None else None
        return change if change is not None and change.id == change_id else None

    # --- carry on ---------------------------------------------------------------------------------

    async def carry_on(self, subject: str, version: int) -> Change:
        """Continue the change that leads to `version` until it is published, without a time limit,
        and return it.

        Retries while the coordination store, or (fencing=majority) a source's broker group, cannot
        be reached. Raises RouteConflict if there is no such change.
        """
        while True:
            try:
                change = await self._step(subject, version)
            except (CoordinationUnavailable, CoordinationUnknown):
                # reading the change again shows the outcome of the step
                await self._sleep(RETRY_S)
                continue
            if change.phase in (Phase.PUBLISHED, Phase.DONE):
                return change

    async def _step(self, subject: str, version: int) -> Change:
        """Make the next step. Returns the change as it was before."""
        item, change = await self._change(subject, version)
        if change.phase is Phase.PREPARED:
            await self._seal(subject, item, change)
        elif change.phase is Phase.SEALED:
            await self._publish(subject, item, change)
        return change

    async def _seal(self, subject: str, item: KeyValue, change: Change) -> None:
        config = await self._subject(subject)
        route = await self.route(subject, change.to_version - 1)
        sources = [_source(route, number) for number in change.sources]
        after = change
        for part in await self.sealing.silent_first(subject, sources):
            sequence = await self.sealing.close(subject, part, change, item, config.fencing)
            after = step(after, PhaseEvent.SOURCE_SEALED, number=part.number, sequence=sequence)
        after = step(after, PhaseEvent.ALL_SEALED, now_ms=self._now_ms())
        await self._arrow("before sealed")
        await self._store.txn([unchanged(item)], [Put(item.key, after.encode())])
        await self._arrow("behind sealed")

    # --- publish ----------------------------------------------------------------------------------

    async def _publish(self, subject: str, item: KeyValue, change: Change) -> None:
        latest = await self._latest(subject)
        if int(latest.value) != change.to_version - 1:
            return  # another metaserver published the change after it was read
        route = next_route(await self.route(subject, change.to_version - 1), change)
        after = step(change, PhaseEvent.PUBLISHED, now_ms=self._now_ms())
        key = route_key(subject, route.version)
        compares = [unchanged(item), unchanged(latest), absent(key)]
        puts: list[Operation] = [
            Put(key, route.encode()),
            Put(latest.key, b"%d" % route.version),
            Put(item.key, after.encode()),
        ]
        await self._arrow("before publish")
        await self._store.txn(compares, puts)
        await self._arrow("behind publish")

    # --- steps that no caller waits for -----------------------------------------------------------

    async def finish(self, subject: str, version: int) -> bool:
        """Mark a published change done if every group has reached its version. Returns True if it
        is done. Raises CoordinationError.
        """
        item, change = await self._change(subject, version)
        if change.phase is not Phase.PUBLISHED:
            return change.phase is Phase.DONE
        groups = (await self._store.list(groups_prefix(subject))).items
        if any(GroupRecord.decode(each.value).frontier.version < version for each in groups):
            return False
        await self._arrow("before done")
        after = step(change, PhaseEvent.EVERY_GROUP_ADVANCED, now_ms=self._now_ms())
        done = await self._store.txn([unchanged(item)], [Put(item.key, after.encode())])
        await self._arrow("behind done")
        return done.succeeded

    async def learn_sealed(self, subject: str, version: int) -> bool:
        """Ask fenced broker groups again, and record where they sealed. Returns True if all seals
        are known. Raises CoordinationError.
        """
        item, change = await self._change(subject, version)
        after = change
        for number in [number for number, sequence in change.sealed.items() if sequence == FENCED]:
            part = _source(await self.route(subject, version - 1), number)
            with suppress(QmqError):
                sequence = await self.sealing.sealer.seal(
                    part.group, subject, number, change.id, version
                )
                after = step(after, PhaseEvent.SOURCE_SEALED, number=number, sequence=sequence)
        if after != change:
            await self._store.txn([unchanged(item)], [Put(item.key, after.encode())])
        return FENCED not in after.sealed.values()

    # --- reading ----------------------------------------------------------------------------------

    async def _subject(self, subject: str) -> SubjectConfig:
        found = await self._store.get(subject_key(subject))
        if found is None:
            raise UnknownSubject(f"there is no subject {subject!r}: see `qmq subject list`")
        config = decode_subject(found)
        if config.order is Order.NONE:
            raise OrderMismatch(f"subject {subject!r} is not ordered: it has no route to change")
        return config

    async def _latest(self, subject: str) -> KeyValue:
        found = await self._store.get(latest_key(subject))
        if found is None:
            raise OrderMismatch(f"subject {subject!r} has no route")
        return found

    async def route(self, subject: str, version: int) -> Route:
        found = await self._store.get(route_key(subject, version))
        if found is None:
            raise RouteConflict(f"subject {subject!r} has no route version {version}")
        return Route.decode(found.value)

    async def _change(self, subject: str, version: int) -> tuple[KeyValue, Change]:
        found = await self._store.get(change_key(subject, version))
        if found is None:
            raise RouteConflict(f"no change leads to version {version} of subject {subject!r}")
        return found, Change.decode(found.value)


def _source(route: Route, number: int) -> PhysicalPartition:
    part = route.partition(number)
    if part is None:
        raise RouteConflict(f"route version {route.version} has no partition {number}")
    return part


def other_version(subject: str, version: int, from_version: int) -> RouteConflict:
    """The error of a change that was planned for another version than the latest."""
    return RouteConflict(
        f"the route of subject {subject!r} is at version {version}, not {from_version}: read "
        "the route again, then plan the change again"
    )


def _under_way(subject: str, other: Change) -> RouteConflict:
    return RouteConflict(
        f"another change of subject {subject!r} is under way ({other.kind.value} to version "
        f"{other.to_version}, {other.phase.value}): wait for it, then plan the change again"
    )


Make: TypeAlias = Callable[[Route], Change]


class Plans:
    """Makes plans, and changes nothing."""

    def __init__(self, view: ClusterView, masters: PartitionMasters) -> None:
        self._view = view
        self._masters = masters

    async def plan(
        self, request: pb.ChangeRouteRequest, config: SubjectConfig, route: Route, change_id: str
    ) -> Make:
        """Return a function that makes the change from a route. `route` is the latest known one,
        for measuring loads.

        Raises InvalidArgument, UnknownPartition; NotConnected if the load is needed and a master
        does not answer.
        """
        which = request.WhichOneof("operation")
        if which == "merge":
            joined, group = tuple(request.merge.partitions), request.merge.broker_group
            return lambda found: merge(
                found, joined, change_id=change_id, group=group, reason=request.reason
            )
        if which == "move":
            number, target = request.move.partition, request.move.broker_group
            return lambda found: move(
                found, number, target, change_id=change_id, reason=request.reason
            )
        if which != "split":
            raise InvalidArgument("name the change of the route: split, merge or move")
        at = tuple(request.split.at) or await self._cut(config.name, route, request.split)
        places = tuple(request.split.broker_groups) or self.spread(
            config, route, request.split.partition, len(at) + 1
        )
        return lambda found: split(
            found,
            request.split.partition,
            at,
            change_id=change_id,
            groups=places,
            reason=request.reason,
        )

    async def _cut(
        self, subject: str, route: Route, operation: pb.SplitOperation
    ) -> tuple[int, ...]:
        """Choose cuts by the load that the partition's master has counted."""
        part = require_partition(route, operation.partition)
        request = control.DescribeLanesRequest(
            subject=subject, partitions=[part.number], with_load=True
        )
        answer = await self._masters.describe_lanes(part.group, request)
        load = next(
            (list(each.lp_load) for each in answer.partitions if each.partition == part.number), []
        )
        return tuple(
            cut_by_load(part.range, load or [0.0] * part.range.width, operation.parts or 2)
        )

    def spread(
        self, config: SubjectConfig, route: Route, number: int, parts: int
    ) -> tuple[str, ...]:
        """The broker groups of the parts: the subject's groups with the fewest partitions first.
        Empty if all parts stay.
        """
        writable = [
            name for name in config.groups if self._view.group(name).mode is Mode.READ_WRITE
        ]
        if len(writable) < 2:
            return ()
        return spread(route, require_partition(route, number), parts, writable)


def spread(
    route: Route, source: PhysicalPartition, parts: int, groups: Sequence[str]
) -> tuple[str, ...]:
    """A group for each part: always the one with the fewest partitions; of several, the source's
    own, then by name. Pure.
    """
    counts = Counter(part.group for part in route.partitions if part.number != source.number)
    places = []
    for _ in range(parts):
        place = min(groups, key=lambda name: (counts[name], name != source.group, name))
        counts[place] += 1
        places.append(place)
    return tuple(places)


def require_partition(route: Route, number: int) -> PhysicalPartition:
    """A partition of the latest route. Raises UnknownPartition."""
    part = route.partition(number)
    if part is None:
        here = ", ".join(str(each.number) for each in route.partitions)
        raise UnknownPartition(
            f"version {route.version} of the route has no partition {number}: it has {here}"
        )
    return part
