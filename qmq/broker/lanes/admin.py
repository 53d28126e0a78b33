"""Administration of partitions of ordered subjects on a broker: closing them, progress of groups, parked keys.

Every answer is committed first: a metaserver opens the next version to a group because of it, and no new master may undo it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import Final

from qmq_ordering.routes import LpRange

from qmq.broker.admin import lag_ms, resolve, stored_bytes
from qmq.broker.broker import Broker
from qmq.errors import InvalidArgument, Overloaded, RouteConflict, UnknownGroup, UnknownPartition
from qmq.limits import PARKED_LIST_BYTES, PARKED_PAGE_BYTES
from qmq.log.actions import Forget, LaneBegin, LaneInherit, LaneReset, LaneUnpark
from qmq.log.lane_state import GroupLaneState, LaneHolder, ParkedKey
from qmq.log.queue import Queue
from qmq.log.unwritten_actions import ENTRY_BYTES_MAX
from qmq.model import check_name
from qmq.proto.v1 import control_pb2 as pb
from qmq.rpc.channel import MESSAGE_BYTES_MAX
from qmq.wire.parked_pages import first_page

FRESH_MS: Final = 5_000
"""If reading the store took longer than this, the answer is too old: the metaserver may have abandoned this request and let the group
continue.
"""


class LaneAdmin:
    """Administration of ordered subjects on one broker of a broker group."""

    def __init__(self, broker: Broker, broker_group: str) -> None:
        self._broker = broker
        self._group = broker_group

    def _queue(self, subject: str, number: int) -> Queue:
        """Raises UnknownSubject, OrderMismatch, RouteChanged, NotMaster."""
        self._broker.require_serving()
        return self._broker.subjects.find_queue(check_name("subject", subject).encode(), number).queue

    async def require_change(self, subject: str, number: int, change_id: str, to_version: int) -> None:
        """A request to close a partition must name the change in the store that does so. Raises InvalidArgument, CoordinationError."""
        self._broker.require_serving()
        if not await self._broker.routing.closes(check_name("subject", subject), number, change_id, to_version):
            raise InvalidArgument(
                f"no change {change_id!r} of {subject!r} to version {to_version} closes partition {number}: nothing was sealed; "
                "change the route with `qmq route split`, `merge` or `move`"
            )

    async def seal(self, subject: str, number: int, change_id: str, to_version: int) -> int:
        """Close a partition and return the sequence of its command message. Raises RouteConflict, NotMaster, DiskFull, as `_queue`."""
        if number < 1:
            raise InvalidArgument(f"partitions of ordered subjects are numbered from 1: there is no partition {number}")
        sequence = self._broker.seal(self._queue(subject, number), change_id, to_version)
        await self._broker.committed()
        return sequence

    async def describe(self, request: pb.DescribeLanesRequest) -> pb.DescribeLanesResponse:
        """The partitions on this broker (those named, or all), and a group's progress on them. Raises NotMaster, Overloaded."""
        found = self._describe(request)
        await self._broker.committed()  # also what a full disk keeps in memory: a group moves on because of this answer
        return found

    def _describe(self, request: pb.DescribeLanesRequest) -> pb.DescribeLanesResponse:
        self._broker.require_serving()
        subject = request.subject.encode()
        queues = [
            queue
            for (name, number), queue in sorted(self._broker.store.queues.items())
            if name == subject and number > 0 and (not request.partitions or number in request.partitions)
        ]
        found = pb.DescribeLanesResponse(partitions=[self._describe_partition(queue, request) for queue in queues])
        if request.with_parked:
            self._add_parked(found, queues, request)
        return found

    def _add_parked(self, answer: pb.DescribeLanesResponse, queues: list[Queue], request: pb.DescribeLanesRequest) -> None:
        """Add a page of the group's parked keys, or all of them. Raises Overloaded if all are too many."""
        share_of = {queue.id.partition: queue.lanes[request.group] for queue in queues if request.group in queue.lanes}
        found = sorted((number, parked.lp, key) for number, share in share_of.items() for key, parked in share.parked.items())
        if not found:
            return
        is_page, after = request.HasField("parked_after"), request.parked_after
        if after.key:
            found = found[bisect_right(found, (after.partition, after.logical_partition, after.key)) :]
        keys = (_parked_key(number, key, share_of[number].parked[key]) for number, _, key in found)
        statuses = {each.partition: each for each in answer.partitions}
        page = list(first_page(keys, PARKED_PAGE_BYTES) if is_page else keys)
        for each in page:
            statuses[each.partition].parked.append(each)
        answer.has_more_parked = len(page) < len(found)
        if answer.ByteSize() > MESSAGE_BYTES_MAX:
            raise Overloaded(
                f"group {request.group!r} has parked too many keys of {request.subject!r} for one answer ({len(found)}): "
                "replay or skip keys (`qmq dlq list`), or upgrade the metaservers, which then ask in pages"
            )

    def _describe_partition(self, queue: Queue, request: pb.DescribeLanesRequest) -> pb.PartitionStatus:
        share = queue.lanes.get(request.group) if request.group else None
        load, lps = self._broker.loads.of(queue), self._range(queue.id.subject, queue.id.partition)
        is_begun = share is not None and share.progress
        status = pb.PartitionStatus(
            subject=queue.id.subject,
            partition=queue.id.partition,
            broker_group=self._group,
            start_sequence=queue.start_sequence,
            next_sequence=queue.next_sequence,
            stored_bytes=stored_bytes(queue),
            last_append_ms=queue.last_append_ms,
            sealed_at=queue.sealed.sequence if queue.sealed is not None else None,
            messages_per_s=load.per_s(load.messages),
            bytes_per_s=load.per_s(load.bytes),
            bent_messages=load.bent,
            lag_ms=lag_ms(queue, share.done_before(), self._broker.clock.time_ms()) if share is not None and is_begun else 0,
            lp_load=[load.per_s(float(load.lps[lp])) if lp < len(load.lps) else 0.0 for lp in range(*lps)] if request.with_load else (),
        )
        if share is not None:
            self._add_progress(status, queue, request, share)
        elif request.group and queue.is_finished(None, lps):
            status.progress.add(lps=pb.LpRange(first=lps.first, end=lps.end), done_before=queue.next_sequence, is_finished=True)
        return status

    def _add_progress(self, status: pb.PartitionStatus, queue: Queue, request: pb.DescribeLanesRequest, share: GroupLaneState) -> None:
        for part in share.progress:
            lps = pb.LpRange(first=part.lps.first, end=part.lps.end)
            status.progress.add(lps=lps, done_before=part.done_before, is_finished=queue.is_finished(share, part.lps))
        status.holders.extend([self._describe_holder(queue, request.group, holder) for holder in share.holders])
        status.parked_keys = sum([bool(parked.sequences) for parked in share.parked.values()])
        status.parked_messages = sum([len(parked.sequences) for parked in share.parked.values()])
        status.is_full = share.is_full

    def _describe_holder(self, queue: Queue, group: str, holder: LaneHolder) -> pb.LaneHolder:
        client = self._broker.lanes.client_of(queue, group, holder.token)
        return pb.LaneHolder(
            lps=pb.LpRange(first=holder.lps.first, end=holder.lps.end),
            consumer=holder.consumer,
            token=holder.token,
            seen_ms_ago=self._broker.lanes.seen_ms_ago(queue, group, holder.token),
            lease_ms=holder.lease_ms,
            client=client,
            is_paused=self._broker.rules.is_paused(queue.id.subject, group, holder.consumer, client),
        )

    async def place(self, subject: str, group: str, places: Iterable[pb.LanePlace], *, moves: bool, record_revision: int = 0) -> None:
        """Let a group begin on partitions; with `moves`, move it there regardless of its progress.

        Raises as `_queue`, NotMaster; and if it moves, or names a revision, RouteConflict, CoordinationError.
        """
        check_name("group", group)
        if moves or record_revision:
            await self._require_held(subject, group, record_revision)
        queues = [(self._queue(subject, place.partition), place) for place in places]
        found = [(queue, queue.id.partition, resolve(queue, place)) for queue, place in queues]
        for queue, number, begin in found:
            whole = self._range(subject, number)
            sequence = min(begin, queue.sealed.sequence if queue.sealed is not None else queue.visible_sequence)
            share = queue.lanes.get(group)
            names = (subject, number, group, "")
            if share is None or not share.progress:
                self._broker.store.act(LaneBegin(*names, *whole, sequence, 0))
            elif moves:
                tokens = [each.token for each in share.holders]
                self._broker.store.act(LaneReset(*names, *whole, sequence))
                for token in tokens:
                    self._broker.lanes.forget(queue, group, token)
        self._broker.schedule()
        await self._broker.committed()

    async def delete_group(self, subject: str, group: str, *, record_revision: int) -> int:
        """Delete a group's progress and parked keys on all partitions of this broker. Returns the number of partitions.

        Raises RouteConflict, NotMaster, CoordinationError.
        """
        self._broker.require_serving()
        check_name("group", group)
        await self._require_held(check_name("subject", subject), group, record_revision)
        self._broker.require_serving()
        queues = [queue for queue in self._broker.store.queues.values() if queue.id.subject == subject and group in queue.lanes]
        for queue in queues:
            tokens = [each.token for each in queue.lanes[group].holders]
            self._broker.store.act(Forget(subject, queue.id.partition, group, ""))
            self._broker.lanes.forget_group(queue, group, tokens)
        self._broker.schedule()
        await self._broker.committed()
        return len(queues)

    async def _require_held(self, subject: str, group: str, record_revision: int) -> None:
        """Require that the group's record has this revision: then no consumer attaches by an older view, and late requests have no effect.

        Raises RouteConflict, CoordinationError.
        """
        began_ms = self._broker.clock.monotonic_ms()
        revision = await self._broker.routing.group_revision(subject, group)
        if revision != record_revision or self._broker.clock.monotonic_ms() - began_ms > FRESH_MS:
            raise RouteConflict(
                f"group {group!r} of {subject!r} has changed since this request was made ({record_revision}, now {revision}): ask again"
            )

    def _range(self, subject: str, number: int) -> LpRange:
        found = self._broker.routing.partition(subject, number)
        if found is None:
            raise UnknownPartition(f"subject {subject!r} has no partition {number} here")
        return found.range

    # --- parked keys ---------------------------------------------------------------------------------------------------

    def parked(self, subject: str, group: str, keys_max: int, only: bytes | None = None) -> list[pb.ParkedKey]:
        """The first parked keys of a group, partition by partition, or of `only` one: at most `keys_max`, and what fits into an answer.

        Raises NotMaster.
        """
        self._broker.require_serving()
        found = [
            (queue.id.partition, parked.sequences[:1], key, parked)
            for queue in self._broker.store.queues.values()
            if queue.id.subject == subject and group in queue.lanes
            for key, parked in queue.lanes[group].parked.items()
            if only is None or key == only
        ]
        found.sort(key=lambda each: each[:3])
        keys = (_parked_key(number, key, parked) for number, _, key, parked in found[: keys_max or None])
        return list(first_page(keys, PARKED_LIST_BYTES))

    async def inherit(
        self, subject: str, group: str, number: int, lps: LpRange, keys: list[tuple[int, bytes]], *, record_revision: int
    ) -> None:
        """Park the keys of a range that are parked in the previous partition, before the group reads this one.

        Raises InvalidArgument, and as `place`.
        """
        check_name("group", group)
        await self._require_held(subject, group, record_revision)
        queue, whole = self._queue(subject, number), self._range(subject, number)
        if not whole.contains(lps) or not all(lps.first <= lp < lps.end for lp, _ in keys):
            raise InvalidArgument(f"partition {number} holds {whole}: {lps}, or a named key, is outside")
        if sum([len(key) + 16 for _, key in keys]) > ENTRY_BYTES_MAX:
            raise InvalidArgument(f"{len(keys)} parked keys are too many for one entry: replay or skip some, in the previous partition")
        share = self._broker.lanes.share(queue, group, whole)
        self._act_on_holders(queue, share, LaneInherit(subject, number, group, "", *lps, tuple(keys)))
        self._broker.schedule()
        await self._broker.committed()

    def _act_on_holders(self, queue: Queue, share: GroupLaneState, action: LaneInherit | LaneUnpark) -> int:
        """Apply an action that may take lanes from their holders, and notify these. Returns the number of affected messages or keys."""
        tokens = {each.token for each in share.holders}
        count = self._broker.store.act(action)
        for token in tokens - {each.token for each in share.holders}:
            self._broker.lanes.forget(queue, action.group, token)
        return count

    async def unpark(self, subject: str, group: str, number: int, key: bytes, *, replays: bool, record_revision: int = 0) -> int:
        """Replay a key's messages in order, or drop them. Returns their number. Raises UnknownGroup if the key is not parked there, as
        `place`.
        """
        await self._require_held(subject, group, record_revision)
        queue = self._queue(subject, number)
        share = queue.lanes.get(group)
        if share is None or key not in share.parked:
            raise UnknownGroup(
                f"group {group!r} has not parked this key in {queue.id}: `qmq dlq list {subject} {group}` shows its parked keys"
            )
        count = self._act_on_holders(queue, share, LaneUnpark(subject, number, group, "", key, replays))
        self._broker.schedule()
        await self._broker.committed()
        return count


def _parked_key(number: int, key: bytes, parked: ParkedKey) -> pb.ParkedKey:
    return pb.ParkedKey(
        partition=number,
        logical_partition=parked.lp,
        key=key,
        messages=len(parked.sequences),
        first_sequence=parked.sequences[0] if parked.sequences else 0,
    )
