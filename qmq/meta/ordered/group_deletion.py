"""Deletes a consumer group of an ordered subject (docs/DELETION.md).

    hold      swap the record: not ready, start `delete` ──▶ no consumer attaches, and no round moves it
    forget    the masters of all broker groups that any version names forget its lanes and parked keys, under the record's revision
    delete    one transaction, if the record is unchanged: deletes it, with the assignment, members, settings and pauses

The record names the step under way, so any metaserver may continue immediately: forgetting twice is harmless, and a late request names a
revision that no longer exists.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Protocol

from qmq_coordination.coordination_store import Delete, KeyValue, unchanged
from qmq_coordination.delivery_settings import PAUSES, PauseKind, Whom, pause_key, settings_key
from qmq_coordination.ordered_records import assignment_key, member_key

from qmq.errors import CoordinationUnknown, InvalidArgument, NotConnected, QmqError, RouteConflict
from qmq.meta.ordered.group_placement import Placing
from qmq.meta.ordered.group_records import Records
from qmq.meta.ordered.group_starts import DELETE
from qmq.meta.ordered.sealing import Arrow, nowhere
from qmq.proto.v1 import control_pb2 as control

_REST: Final = "no consumer can attach to it, and the rest is done when these broker groups are back"


class GroupForgetter(Protocol):
    """The calls of a deletion to the masters of broker groups."""

    async def forget_group(self, broker_group: str, request: control.DeleteGroupRequest) -> int:
        """Delete the group's state at one master. Returns the number of partitions that had state. Raises NotConnected, NotMaster,
        DeadlineExceeded, RouteConflict.
        """
        ...


class Forgetting:
    def __init__(self, records: Records, placing: Placing, masters: GroupForgetter, *, arrow: Arrow = nowhere) -> None:
        self._records = records
        self._placing = placing
        self._masters = masters
        self._arrow = arrow

    async def delete(self, subject: str, group: str) -> int:
        """Delete a group, or continue its deletion. Returns the number of partitions that had state of it. Raises UnknownGroup,
        InvalidArgument (the group has members), CoordinationError; NotConnected: the deletion continues later.
        """
        _, record = await self._records.record(subject, group)
        if record.start != DELETE:
            await self._require_no_members(subject, group)
            await self._placing.hold_to_delete(subject, group)
        return await self.carry_on(subject, group)

    async def _require_no_members(self, subject: str, group: str) -> None:
        prefix = member_key(subject, group, "")
        names = [item.key.removeprefix(prefix) for item in (await self._records.store.list(prefix)).items]
        if names:
            raise InvalidArgument(f"group {group!r} has consumers on {subject!r}; stop them first: {', '.join(sorted(names))}")

    async def carry_on(self, subject: str, group: str) -> int:
        """Delete a group that is marked for deletion; 0 if another metaserver was faster. Raises as `delete`."""
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
            said = "; ".join(f"{name}: {failure.message}" for name, failure in silent.items())
            raise NotConnected(f"group {group!r} of {subject!r} is not completely deleted yet; {_REST}; {said}")
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
