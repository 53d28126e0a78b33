"""A change of a subject's route, from `prepared` to `done` (docs/ORDERING.md, "A change").

    prepared ──seal every source──▶ sealed ──publish──▶ published ──every group advanced──▶ done

Any metaserver may continue a change, at the same time as others, and may crash anywhere: this module has no state. This is safe because

* the change is written first, guarded by `absent(its key)`: a version has only one change;
* each later step is one transaction that compares the change with what was read, and replaces it. So each step happens once; and a try
  whose answer was lost (CoordinationUnknown) may be repeated: if it was done, the comparison fails, and the record shows it. A request that
  is executed late fails for the same reason;
* a broker answers a repeated request to seal with the same answer, so a repeated request is harmless.

`arrow` is called before and after every step, with its name: tests kill metaservers there.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Final

from qmq_coordination.coordination_store import CoordinationStore, KeyValue, Operation, Put, absent, unchanged
from qmq_coordination.ordered_records import change_key, groups_prefix, latest_key, route_key, stale_prefix
from qmq_coordination.subjects import decode_subject, subject_key
from qmq_ordering.algebra import next_route
from qmq_ordering.frontier import GroupRecord
from qmq_ordering.phases import PhaseEvent, step
from qmq_ordering.route import FENCED, Change, Phase, PhysicalPartition, Route

from qmq.errors import (
    CoordinationError,
    CoordinationUnavailable,
    CoordinationUnknown,
    OrderMismatch,
    QmqError,
    RouteConflict,
    UnknownSubject,
)
from qmq.meta.ordered.sealing import Arrow, Sealer, Sealing, Sleep, nowhere
from qmq.model import Fencing, Order, SubjectConfig

RETRY_S: Final = 0.1


class RouteChanges:
    """Prepares changes, and continues them. The class has no state."""

    def __init__(
        self,
        store: CoordinationStore,
        sealer: Sealer,
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

    # --- prepare -------------------------------------------------------------------------------------------------------

    async def prepare(self, subject: str, make: Callable[[Route], Change], *, from_version: int = 0) -> Change:
        """Write the change that `make` makes from the latest route. After that, any metaserver will complete the change.

        Raises:
            RouteConflict: a change is under way, or `from_version` (0: any) is not the latest.
            UnknownSubject, OrderMismatch: there is no such ordered subject.
            NotConnected and similar errors: with fencing=majority, a source's master does not answer; nothing was changed.
            CoordinationUnknown: the change may be prepared; a metaserver then continues it.
            InvalidArgument and similar errors: from `make`.
        """
        config = await self._subject(subject)
        latest = await self._latest(subject)
        if (stale := (await self._store.list(stale_prefix(subject))).items) and stale[0].value:
            raise RouteConflict(
                f"the routes of subject {subject!r} must not change: the coordination store's data was put back ({stale[0].value.decode()})"
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
            # This group could not be fenced: a merge would close one source, whose producers would wait until the other source's group is
            # back.
            for number in change.sources:
                part = _source(route, number)
                await self.sealing.sealer.probe(part.group, subject, number)
        await self._arrow("before prepare")
        await self._put_prepared(subject, latest, change)
        await self._arrow("behind prepare")
        return change

    async def _put_prepared(self, subject: str, latest: KeyValue, change: Change) -> None:
        """Put the prepared change. Its id is unique for this attempt, so reading back shows which attempt won. Repeating is harmless,
        because `absent` holds once.
        """
        key = change_key(subject, change.to_version)
        lost: CoordinationUnknown | None = None
        while True:
            try:
                if (await self._store.txn([unchanged(latest), absent(key)], [Put(key, change.encode())])).succeeded:
                    return
                found = await self._store.get(key)
                if found is None:  # `latest` has changed: this change's key exists, or will never exist
                    raise RouteConflict(
                        f"the route of subject {subject!r} changed in the meantime: read the route again, then plan the change again"
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
                    f"whether change {change.id} of subject {subject!r} was prepared cannot be read back: if it was, it continues by itself"
                ) from failure

    async def made(self, subject: str, version: int, change_id: str) -> Change | None:
        """The change that leads to `version`, in any phase, or None if there is none or it has another id."""
        found = await self._store.get(change_key(subject, version))
        change = Change.decode(found.value) if found is not None else None
        return change if change is not None and change.id == change_id else None

    def know_gone(self, broker_group: str) -> None:
        """Note that the broker group has had no master for long enough, so that it is fenced without another wait."""
        self.sealing.know_gone(broker_group)

    # --- carry on ------------------------------------------------------------------------------------------------------

    async def carry_on(self, subject: str, version: int) -> Change:
        """Continue the change that leads to `version` until it is published, without a time limit, and return it.

        Retries while the coordination store, or (fencing=majority) a source's broker group, cannot be reached. Raises RouteConflict if
        there is no such change.
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

    # --- publish -------------------------------------------------------------------------------------------------------

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

    # --- steps that no caller waits for -----------------------------------------------------------------------------------------

    async def finish(self, subject: str, version: int) -> bool:
        """Mark a published change done if every group has reached its version. Returns True if it is done. Raises CoordinationError."""
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
        """Ask fenced broker groups again, and record where they sealed. Returns True if all seals are known. Raises CoordinationError."""
        item, change = await self._change(subject, version)
        after = change
        for number in [number for number, sequence in change.sealed.items() if sequence == FENCED]:
            part = _source(await self.route(subject, version - 1), number)
            with suppress(QmqError):
                sequence = await self.sealing.sealer.seal(part.group, subject, number, change.id, version)
                after = step(after, PhaseEvent.SOURCE_SEALED, number=number, sequence=sequence)
        if after != change:
            await self._store.txn([unchanged(item)], [Put(item.key, after.encode())])
        return FENCED not in after.sealed.values()

    # --- reading -------------------------------------------------------------------------------------------------------

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
        f"the route of subject {subject!r} is at version {version}, not {from_version}: read the route again, then plan the change again"
    )


def _under_way(subject: str, other: Change) -> RouteConflict:
    return RouteConflict(
        f"another change of subject {subject!r} is under way ({other.kind.value} to version {other.to_version}, {other.phase.value}): "
        "wait for it, then plan the change again"
    )
