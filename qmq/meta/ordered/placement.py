"""Starts, moves and deletes a consumer group of an ordered subject. To start or to move it, writes
the group's record, then tells the brokers, then marks the record as ready.

    begin      write the record ──▶ (if it starts at the latest: tell the brokers) ──▶ ready
    reset      write the new frontier, not ready ──▶ tell the brokers ──▶ ready
    set_back   write the frontier with one logical partition at an older partition, not ready
               ──▶ the caller replays there ──▶ ready
    hold       mark the record as not ready until the group is deleted

Consumers attach only to a group that is ready. The record names the operation under way (`Start`),
so any metaserver can continue it. The record has the new frontier from the first write on, because
the frontier tells which version the operation uses.

To start a group twice is harmless: a partition where the group has started stays as it is. To move
a group twice is not harmless once consumers have continued. So only the metaserver that reset a
group moves it, and another one takes over a reset that makes no progress only after all calls of
the first one have timed out (qmq/meta/ordered/controller.py).

To delete it (docs/DELETION.md):

    hold      swap the record: not ready, start `delete` ──▶ no consumer attaches, and no round
              moves it
    forget    the masters of all broker groups that any version names forget its lanes and parked
              keys, under the record's revision
    delete    one transaction, if the record is unchanged: deletes it, with the assignment, members,
              settings and pauses

The record names the step under way, so any metaserver may continue immediately: forgetting twice is
harmless, and a late request names a revision that no longer exists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from qmq_coordination.coordination_store import Delete, KeyValue, Put, absent, unchanged
from qmq_coordination.ordered_records import assignment_key, group_record_key, member_key
from qmq_coordination.subjects import PAUSES, PauseKind, Whom, pause_key, settings_key
from qmq_ordering.lanes import Frontier, FrontierPiece, Gate, GroupRecord, first_frontier
from qmq_ordering.routes import LpRange, PhysicalPartition, Route

from qmq.errors import (
    CoordinationUnknown,
    InvalidArgument,
    LaneNotOpen,
    NotConnected,
    QmqError,
    RouteConflict,
)
from qmq.meta.calls import PartitionMasters
from qmq.meta.ordered.changes import Arrow, nowhere
from qmq.meta.ordered.groups import DELETE, UNPARK, Records, Start
from qmq.proto.v1 import control_pb2 as control


class Placing:
    def __init__(
        self, records: Records, lanes: PartitionMasters, *, arrow: Arrow = nowhere
    ) -> None:
        self._records = records
        self._lanes = lanes
        self._arrow = arrow

    # --- beginning --------------------------------------------------------------------------------

    async def begin(self, subject: str, group: str, start: Start, gate: Gate) -> GroupRecord:
        """Create a group if it does not exist. Returns its record, which may not be ready: call
        `make_ready` next. Raises OrderMismatch, CoordinationError.
        """
        latest = await self._records.latest(subject)
        route = (await self._records.routes(subject, latest, latest))[latest]
        version = latest if start.is_latest else 1
        record = GroupRecord(
            first_frontier(route.logical_partitions, version),
            gate,
            start.text,
            not start.needs_placing,
        )
        key = group_record_key(subject, group)
        await self._arrow("before begin")
        while True:
            try:
                await self._records.store.txn([absent(key)], [Put(key, record.encode())])
                break
            except CoordinationUnknown:
                if await self._records.find(subject, group) is not None:
                    # Any record that exists now is the group's, ours or another's; if there is
                    # none, our put was not done, and `absent` holds once only.
                    break
        await self._arrow("behind begin")
        return (await self._records.record(subject, group))[1]

    async def make_ready(self, subject: str, group: str) -> GroupRecord:
        """Tell the brokers where a new or moved group begins, then mark the group ready. Raises
        UnknownGroup, LaneNotOpen (the group is being deleted), CoordinationError, and the brokers'
        errors. After an error the group is not ready yet.
        """
        item, record = await self._records.record(subject, group)
        if record.is_ready:
            return record
        if record.start == DELETE:
            raise being_deleted(subject, group)
        first = record.frontier.version
        start = Start.parse(record.start)
        routes = await self._records.routes(subject, 1, await self._records.latest(subject))
        for name, request in sorted(_requests(subject, group, routes, start, first).items()):
            request.record_revision = item.mod_revision
            await self._arrow("before place")
            await self._lanes.place_lanes(name, request)
            await self._arrow("behind place")
        await self._arrow("before ready")
        await self._records.swap(item, replace(record, is_ready=True))
        await self._arrow("behind ready")
        return (await self._records.record(subject, group))[1]

    # --- moving -----------------------------------------------------------------------------------

    async def reset(self, subject: str, group: str, start: Start, version: int) -> GroupRecord:
        """Move a group: from now on it reads `version`, from the place that `start` says. Raises
        UnknownGroup, CoordinationError, and the brokers' errors. After a broker's error the group
        waits until the broker answers, and moves then.
        """
        route = (await self._records.routes(subject, version, version))[version]
        frontier = first_frontier(route.logical_partitions, version)
        await self._change(
            subject,
            group,
            "reset",
            lambda record: replace(record, frontier=frontier, start=start.text, is_ready=False),
        )
        return await self.make_ready(subject, group)

    async def set_back(
        self, subject: str, group: str, part: PhysicalPartition, lp: int, attempt: str
    ) -> int:
        """Stop a group's rounds while a key's messages are put back into a partition; `make_ready`
        ends the stop. Each `attempt` is used once. Returns the revision of the record: the broker
        puts messages back under this revision only. If the group has left the partition in that
        logical partition, it reads the partition again, so that the messages put back come before
        newer ones. Raises UnknownGroup, LaneNotOpen (the group is being moved), CoordinationError.
        """
        latest = await self._records.latest(subject)
        routes = await self._records.routes(subject, 1, latest)
        last = max(
            version for version, route in routes.items() if route.partition(part.number) is not None
        )

        def back(record: GroupRecord) -> GroupRecord:
            if record.start == UNPARK + attempt:
                return record  # the record has this attempt already: an answer was lost
            if not record.is_ready:
                raise LaneNotOpen(
                    f"group {group!r} of subject {subject!r} is being started or moved: try "
                    "again soon"
                )
            version = next(
                piece.version
                for piece in record.frontier.pieces
                if piece.range.first <= lp < piece.range.end
            )
            frontier = _with(
                record.frontier, FrontierPiece(LpRange(lp, lp + 1), min(version, last))
            )
            return replace(record, frontier=frontier, start=UNPARK + attempt, is_ready=False)

        return await self._change(subject, group, "unpark", back)

    async def set_gate(self, subject: str, group: str, gate: Gate) -> None:
        """Change when a group reads the next version. Raises UnknownGroup, CoordinationError."""
        await self._change(subject, group, "gate", lambda record: replace(record, gate=gate))

    async def mark_for_deletion(self, subject: str, group: str) -> int:
        """Mark a group for deletion, so that no consumer attaches any more. Returns the revision of
        the record. Raises UnknownGroup, CoordinationError.
        """
        return await self._change(
            subject, group, DELETE, lambda record: replace(record, start=DELETE, is_ready=False)
        )

    async def _change(
        self, subject: str, group: str, what: str, change: Callable[[GroupRecord], GroupRecord]
    ) -> int:
        """Change the record. Returns its new revision.
        Raises LaneNotOpen if the group is being deleted.
        """
        while True:
            item, record = await self._records.record(subject, group)
            if record.start == DELETE != what:
                raise being_deleted(subject, group)
            if (after := change(record)) == record:
                return item.mod_revision
            await self._arrow(f"before {what}")
            swapped = await self._records.swap(item, after)
            await self._arrow(f"behind {what}")
            if swapped is not None:
                return swapped.mod_revision


def being_deleted(subject: str, group: str) -> LaneNotOpen:
    """The error for requests about a group that is being deleted.
    A new group may begin afterwards.
    """
    return LaneNotOpen(
        f"group {group!r} of subject {subject!r} is being deleted: try again soon, or see "
        "`qmq cluster status`"
    )


def _with(frontier: Frontier, there: FrontierPiece) -> Frontier:
    """The frontier with another version in one range."""
    lps = there.range
    pieces = [there]
    for piece in frontier.pieces:
        for left in (LpRange(piece.range.first, lps.first), LpRange(lps.end, piece.range.end)):
            rest = left.cut(piece.range)
            if rest.width > 0:
                pieces.append(FrontierPiece(rest, piece.version))
    return Frontier(_joined(sorted(pieces)))


def _joined(pieces: Sequence[FrontierPiece]) -> tuple[FrontierPiece, ...]:
    found: list[FrontierPiece] = []
    for piece in pieces:
        if found and found[-1].version == piece.version:
            found[-1] = FrontierPiece(
                LpRange(found[-1].range.first, piece.range.end), piece.version
            )
        else:
            found.append(piece)
    return tuple(found)


def _requests(
    subject: str, group: str, routes: Mapping[int, Route], start: Start, first: int
) -> dict[str, control.PlaceLanesRequest]:
    """One request for each broker group."""
    parts = {part.number: part for route in routes.values() for part in route.partitions}
    found: dict[str, control.PlaceLanesRequest] = {}
    for number, place in sorted(start.places(routes, first).items()):
        request = found.setdefault(
            parts[number].group,
            control.PlaceLanesRequest(subject=subject, group=group, moves=start.moves),
        )
        request.places.append(place)
    return found


_REST: Final = (
    "no consumer can attach to it, and the rest is done when these broker groups are back"
)


class Forgetting:
    def __init__(
        self,
        records: Records,
        placing: Placing,
        masters: PartitionMasters,
        *,
        arrow: Arrow = nowhere,
    ) -> None:
        self._records = records
        self._placing = placing
        self._masters = masters
        self._arrow = arrow

    async def delete(self, subject: str, group: str) -> int:
        """Delete a group, or continue its deletion. Returns the number of partitions that had state
        of it. Raises UnknownGroup, InvalidArgument (the group has members), CoordinationError;
        NotConnected: the deletion continues later.
        """
        _, record = await self._records.record(subject, group)
        if record.start != DELETE:
            await self._require_no_members(subject, group)
            await self._placing.mark_for_deletion(subject, group)
        return await self.carry_on(subject, group)

    async def _require_no_members(self, subject: str, group: str) -> None:
        prefix = member_key(subject, group, "")
        names = [
            item.key.removeprefix(prefix) for item in (await self._records.store.list(prefix)).items
        ]
        if names:
            raise InvalidArgument(
                f"group {group!r} has consumers on {subject!r}; stop them first: "
                f"{', '.join(sorted(names))}"
            )

    async def carry_on(self, subject: str, group: str) -> int:
        """Delete a group that is marked for deletion; 0 if another metaserver was faster.
        Raises as `delete`.
        """
        found = await self._records.find(subject, group)
        if found is None or found[1].start != DELETE:
            return 0
        item = found[0]
        routes = await self._records.routes(subject, 1, await self._records.latest(subject))
        names = {part.group for route in routes.values() for part in route.partitions}
        try:
            partitions = await self._forget(sorted(names), subject, group, item.mod_revision)
        except RouteConflict:
            if await self._is_there(item):
                raise
            return 0
        await self._arrow("before delete record")
        try:
            await self._records.store.txn([unchanged(item)], list(_gone(subject, group, item)))
        except CoordinationUnknown:
            if await self._is_there(item):
                raise
        await self._arrow("behind delete record")
        return partitions

    async def _forget(self, names: Iterable[str], subject: str, group: str, revision: int) -> int:
        """Send FORGET to all masters, also if some of them do not answer."""
        request = control.DeleteGroupRequest(subject=subject, group=group, record_revision=revision)
        partitions = 0
        silent: dict[str, QmqError] = {}
        for name in names:
            await self._arrow("before forget")
            try:
                partitions += await self._masters.forget_group(name, request)
            except RouteConflict:
                raise
            except QmqError as failure:
                silent[name] = failure
            await self._arrow("behind forget")
        if silent:
            text = "; ".join(f"{name}: {failure.message}" for name, failure in silent.items())
            raise NotConnected(
                f"group {group!r} of {subject!r} is not completely deleted yet; {_REST}; {text}"
            )
        return partitions

    async def _is_there(self, item: KeyValue) -> bool:
        found = await self._records.store.get(item.key)
        return found is not None and found.mod_revision == item.mod_revision


def _gone(subject: str, group: str, record: KeyValue) -> Iterable[Delete]:
    yield Delete(record.key)
    yield Delete(assignment_key(subject, group))
    yield Delete(member_key(subject, group, ""), is_prefix=True)
    yield Delete(settings_key(subject, group))
    yield Delete(pause_key(Whom(PauseKind.GROUP, subject, group)))
    yield Delete(f"{PAUSES}{PauseKind.CONSUMER.value}/{subject}/{group}/", is_prefix=True)
