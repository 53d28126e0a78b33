"""Translates groups' progress from the source to the target of a mirror (mirror_notes.py).

A group of the target is moved forward only, and only while it has no consumer there: after a fail-over its own progress counts. A group
that the target does not know is created there.

A place in an ordered subject of the target is a time, since routes differ: the time at which the target's brokers stored the first message
behind the note's ends, so that no message behind the ends was stored earlier. The mirror's own clock plays no part. `CLOCKS_MS` is
subtracted for messages that arrive while the group is moved: the clocks of the target's brokers may differ by so much. What came within
that time is delivered again. A time moves a group on all partitions, so the group is moved only if it goes back on none.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Final, TypeVar

import qmq
from qmq.cli.mirroring.mirror_notes import MirrorNote, MirrorRecord, newest_done
from qmq.client.consuming.ordered.membership import Member
from qmq.client.metadata.cache import Partial
from qmq.errors import NotConnected, UnknownGroup

if TYPE_CHECKING:
    from qmq.proto.v1 import control_pb2 as control
    from qmq.proto.v1 import meta_pb2 as pb

Done = dict[tuple[str, int], float]
"""By (broker group, partition), the sequence before which everything is done."""

CLOCKS_MS: Final = 60_000
VERSIONS_MS: Final = 10_000
"""A reset to a time may begin earlier by so much: it reads partitions that came with a later version from their beginning, and older
metaservers choose the version by their own clocks.
"""
JOIN_S: Final = 30.0
LEASE_MS: Final = 10_000
_LAST_MS: Final = (1 << 62) - 1
MAKER: Final = "mirror"
"""The consumer that joins a group for a moment, so that the target knows the group."""

_T = TypeVar("_T")


async def plain_progress(source: qmq.Client, subject: str) -> dict[str, Done]:
    """The progress of each group of an unordered subject. Raises NotConnected if a broker group does not answer."""
    found: dict[str, Done] = defaultdict(dict)
    for each in _require_complete(await source.metadata.describe_groups(subject)):
        found[each.group][each.broker_group, each.partition] = each.settled_before
    return found


def ordered_progress(described: pb.DescribeRouteResponse, mark_queues: list[tuple[str, int]]) -> dict[str, Done]:
    """The progress of each group of an ordered subject, on the queues of the mirror's mark. A partition of an older route version that the
    group has left is done. Pure.
    """
    found: dict[str, Done] = {}
    for group in described.groups:
        listed = {each.partition: each for each in group.partitions}
        found[group.group] = {
            (name, partition): _done_on(listed[partition]) if partition in listed else math.inf for name, partition in mark_queues
        }
    return found


def _done_on(status: control.PartitionStatus) -> float:
    if not status.progress:
        return float(status.start_sequence)
    return min(math.inf if each.is_finished else float(each.done_before) for each in status.progress)


def hold_at_parked(done: Done, group: pb.OrderedGroup, keys: Iterable[control.ParkedKey]) -> None:
    """Parked messages count as done, and the target does not know that they are parked: the group stays before the first of them. The list
    of keys has the first ones, partition by partition: where messages are parked of which it has none, the group stays at the beginning.
    """
    first = {each.partition: each.start_sequence for each in group.partitions if each.parked_messages}
    for partition, found in groupby((key for key in keys if key.messages), attrgetter("partition")):
        first[partition] = min(key.first_sequence for key in found)
    for queue in done:
        done[queue] = min(done[queue], first.get(queue[1], math.inf))


def goes_back(group: pb.OrderedGroup, places: Done, ends: Done) -> bool:
    """Whether a move to `places` would deliver something again that an ordered group has done. `ends` are the partitions' ends. A partition
    that the group does not list is one of an older version, and done. Pure.
    """
    listed = {(each.broker_group, each.partition): each for each in group.partitions}
    done = {
        queue: max([0.0, *(end if each.is_finished else float(each.done_before) for each in listed[queue].progress)])
        if queue in listed
        else end
        for queue, end in ends.items()
    }
    return any(done.get(queue, math.inf) > place for queue, place in places.items())


def _require_complete(found: Partial[_T]) -> Partial[_T]:
    if found.silent:
        raise NotConnected(f"{', '.join(sorted(found.silent))} did not answer: groups are moved later")
    return found


class MirroredGroups:
    """The groups of one subject."""

    def __init__(self, source: qmq.Client, target: qmq.Client, subject: str, *, is_ordered: bool) -> None:
        self._source, self._target, self._subject, self._is_ordered = source, target, subject, is_ordered
        self.moves = 0

    async def move(self, record: MirrorRecord) -> MirrorRecord:
        """Move the groups that are further in the source than in the target. Call it between two rounds. Returns the record with the
        moves. Raises QmqError.
        """
        if not record.notes:
            return record
        moved = dict(record.moved)
        for group, done in (await self._progress(record.notes[-1])).items():
            note = newest_done(record.notes, done)
            if note is None or moved.get(group) == note.time_ms:
                continue
            if await (self._move_ordered(group, note) if self._is_ordered else self._move_plain(group, note)):
                self.moves += 1
                moved[group] = note.time_ms
        return replace(record, moved=moved)

    async def _progress(self, newest: MirrorNote) -> dict[str, Done]:
        if not self._is_ordered:
            return await plain_progress(self._source, self._subject)
        described = await self._source.metadata.describe_route(self._subject)
        if described.silent_groups:
            raise NotConnected(f"{', '.join(described.silent_groups)} did not answer: groups are moved later")
        found = ordered_progress(described, list(newest.mark))
        for group in described.groups:
            if group.parked_keys:
                keys = _require_complete(await self._source.metadata.parked(self._subject, group.group))
                hold_at_parked(found[group.group], group, keys)
        return found

    # --- unordered -----------------------------------------------------------------------------------------------------

    async def _move_plain(self, group: str, note: MirrorNote) -> bool:
        """False: it has consumers."""
        known = await self._known_plain(group)
        if any(name not in known for name, _ in note.ends):
            await self._make_plain(group)
            known = await self._known_plain(group)
        if any(each.consumers for each in known.values()):
            return False
        for (name, _), end in note.ends.items():
            if name in known and known[name].settled_before < end:
                await self._target.metadata.reset_group(self._subject, group, sequence=end, broker_group=name, directly=False)
        return True

    async def _known_plain(self, group: str) -> dict[str, control.Group]:
        try:
            return {
                each.broker_group: each for each in _require_complete(await self._target.metadata.describe_groups(self._subject, group))
            }
        except UnknownGroup:
            return {}

    async def _make_plain(self, group: str) -> None:
        consumer = self._target.consumer(self._subject, group, name=MAKER, ack="explicit", prefetch=1)
        try:
            await asyncio.wait_for(consumer.join(), JOIN_S)
        finally:
            await consumer.close()

    # --- ordered -------------------------------------------------------------------------------------------------------

    async def _move_ordered(self, group: str, note: MirrorNote) -> bool:
        """False: it has consumers, or is further on some partition."""
        time_ms = max(await self._stored_ms(note) - CLOCKS_MS, 1)
        places, ends = await self._places(time_ms - VERSIONS_MS), await self._places(_LAST_MS)
        described = await self._target.metadata.describe_route(self._subject)
        if described.silent_groups:
            raise NotConnected(f"{', '.join(described.silent_groups)} did not answer: groups are moved later")
        known = next((each for each in described.groups if each.group == group), None)
        if known is None:
            await self._make_ordered(group)
        elif known.consumers or goes_back(known, places, ends):
            return False
        await self._target.metadata.reset_group(self._subject, group, time_ms=time_ms)
        return True

    async def _stored_ms(self, note: MirrorNote) -> int:
        """When the target stored its first message behind the note's ends; if it has none there, its last message."""
        behind = await anext(self._target.browse(self._subject, positions=note.ends), None)
        if behind is not None:
            return behind.append_time_ms
        return max([each.append_time_ms async for each in self._target.browse(self._subject, last=1)], default=0)

    async def _places(self, time_ms: int) -> Done:
        found = await self._target.metadata.find_time(self._subject, max(time_ms, 1))
        return {(each.broker_group, each.partition): float(each.to_sequence) for each in found}

    async def _make_ordered(self, group: str) -> None:
        """Create the group by a member that joins and leaves."""
        member = Member(self._subject, group, MAKER, secrets.token_hex(8), LEASE_MS, "earliest", "")
        await self._target.metadata.sync_member(member, 0, 0, ())
        await self._target.metadata.sync_member(member, 0, 0, (), leaves=True)
