"""What metaservers and operators ask a broker about partitions of ordered subjects: closing them, how far groups are, parked keys.

Whatever is answered is committed: a metaserver opens the next version to a group on the strength of it, and no new master may take it back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from qmq_ordering.route import LpRange

from qmq.broker.admin import AtTime, Earliest, Latest, QueueInfo, lag_ms, queue_info, resolve
from qmq.broker.broker import Broker
from qmq.broker.load_meters import LoadMeter
from qmq.errors import InvalidArgument, RouteConflict, UnknownGroup, UnknownPartition
from qmq.log.actions import Forget, LaneBegin, LaneInherit, LaneReset, LaneUnpark
from qmq.log.lane_share import LaneHolder, LaneShare, ParkedKey
from qmq.log.queue import Queue
from qmq.model import check_name


@dataclass(frozen=True, slots=True)
class PartitionInfo:
    info: QueueInfo
    lps: LpRange
    load: LoadMeter
    share: LaneShare | None
    """The group's; None if it never began here, or none was asked about."""
    lag_ms: int


Place = Earliest | Latest | AtTime
FRESH_MS: Final = 5_000
"""A look into the store that took longer does not count: whoever asked may have been given up, and the group let go on."""


class LaneAdmin:
    """Administration of ordered subjects on one broker."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def _queue(self, subject: str, number: int) -> Queue:
        """Raises UnknownSubject, OrderMismatch, RouteChanged, NotMaster."""
        self._broker.require_serving()
        return self._broker.find_queue(check_name("subject", subject).encode(), number).queue

    async def require_change(self, subject: str, number: int, change_id: str, to_version: int) -> None:
        """Whoever asks to close a partition must name the change in the store that does so. Raises InvalidArgument, CoordinationError."""
        self._broker.require_serving()
        if not await self._broker.routing.closes(check_name("subject", subject), number, change_id, to_version):
            raise InvalidArgument(
                f"no change {change_id!r} of {subject!r} to version {to_version} closes partition {number}: nothing was sealed; "
                "change the route with `qmq route split`, `merge` or `move`"
            )

    async def seal(self, subject: str, number: int, change_id: str, to_version: int) -> int:
        """Close a partition; the sequence of its command message. Raises RouteConflict, NotMaster, DiskFull, as `_queue`."""
        if number < 1:
            raise InvalidArgument(f"partitions of ordered subjects are numbered from 1: there is no {number} to close")
        sequence = self._broker.seal(self._queue(subject, number), change_id, to_version)
        await self._broker.committed()
        return sequence

    async def describe(self, subject: str, numbers: list[int], group: str) -> list[PartitionInfo]:
        """Partitions that are here (those named, or all), and how far a group is on them. Raises NotMaster."""
        self._broker.require_serving()
        store = self._broker.store
        queues = [queue for (name, number), queue in sorted(store.queues.items()) if name == subject.encode() and number > 0]
        found = [self._describe(queue, group) for queue in queues if not numbers or queue.id.partition in numbers]
        await self._broker.committed()
        return found

    def _describe(self, queue: Queue, group: str) -> PartitionInfo:
        share = queue.lanes.get(group) if group else None
        if share is not None:
            share = LaneShare.from_state(share.to_state())  # as of now: it goes on while we wait for the commit of what is told
        lag = lag_ms(queue, share.done_before(), self._broker.clock.time_ms()) if share is not None and share.progress else 0
        return PartitionInfo(queue_info(queue), self._range(queue.id.subject, queue.id.partition), self._broker.loads.of(queue), share, lag)

    def seen_ms_ago(self, queue: Queue, group: str, token: int) -> int:
        """How long ago a lane's holder gave a sign of life."""
        return self._broker.lanes.seen_ms_ago(queue, group, token)

    def client_of(self, queue: Queue, group: str, holder: LaneHolder) -> tuple[str, bool]:
        """The name of a holder's client, empty while it is not connected; and whether it is handed nothing."""
        client = self._broker.lanes.client_of(queue, group, holder.token)
        return client, self._broker.rules.is_paused(queue.id.subject, group, holder.consumer, client)

    async def place(self, subject: str, group: str, places: list[tuple[int, Place]], *, moves: bool, record_revision: int = 0) -> None:
        """Let a group begin on partitions; or, if it `moves`, put it there whatever it had done.

        Raises as `_queue`, NotMaster; and if it moves, or names a revision, RouteConflict, CoordinationError.
        """
        check_name("group", group)
        if moves or record_revision:
            await self._require_held(subject, group, record_revision)
        found = [(self._queue(subject, number), number, place) for number, place in places]
        for queue, number, place in found:
            whole = self._range(subject, number)
            sequence = min(resolve(queue, place), queue.sealed.sequence if queue.sealed is not None else queue.visible_sequence)
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
        """Forget a group on all partitions that are here, with its parked keys; on how many it was.

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
        """The group is held still by that very record: nobody attaches by an older view, and a request that comes too late does nothing.

        Raises RouteConflict, CoordinationError.
        """
        began_ms = self._broker.clock.monotonic_ms()
        revision = await self._broker.routing.group_revision(subject, group)
        if revision != record_revision or self._broker.clock.monotonic_ms() - began_ms > FRESH_MS:
            raise RouteConflict(f"group {group!r} of {subject!r} is not held still for this ({record_revision}, now {revision}): ask again")

    def _range(self, subject: str, number: int) -> LpRange:
        found = self._broker.routing.partition(subject, number)
        if found is None:
            raise UnknownPartition(f"subject {subject!r} has no partition {number} here")
        return found.range

    # --- parked keys ---------------------------------------------------------------------------------------------------

    def parked(self, subject: str, group: str, keys_max: int, only: bytes | None = None) -> list[tuple[Queue, bytes, ParkedKey]]:
        """Keys that were set aside for a group, partition by partition; or `only` one. Raises NotMaster."""
        self._broker.require_serving()
        found = [
            (queue, key, parked)
            for queue in self._broker.store.queues.values()
            if queue.id.subject == subject and group in queue.lanes
            for key, parked in queue.lanes[group].parked.items()
            if only is None or key == only
        ]
        return sorted(found, key=lambda each: (each[0].id, each[2].sequences[:1], each[1]))[: keys_max or len(found)]

    async def inherit(
        self, subject: str, group: str, number: int, lps: LpRange, keys: list[tuple[int, bytes]], *, record_revision: int
    ) -> None:
        """Before the group reads the partition: these keys of the range are parked there, as they are in the partition before.

        Raises InvalidArgument, and as `place`.
        """
        check_name("group", group)
        await self._require_held(subject, group, record_revision)
        queue, whole = self._queue(subject, number), self._range(subject, number)
        if not whole.contains(lps) or not all(lps.first <= lp < lps.end for lp, _ in keys):
            raise InvalidArgument(f"partition {number} holds {whole}: {lps} with the keys that are named does not lie in it")
        share = self._broker.lanes.share(queue, group, whole)
        self._act_on_holders(queue, share, LaneInherit(subject, number, group, "", *lps, tuple(keys)))
        self._broker.schedule()
        await self._broker.committed()

    def _act_on_holders(self, queue: Queue, share: LaneShare, action: LaneInherit | LaneUnpark) -> int:
        """Do what may take lanes from their holders, who then hear of it; what `LaneShare.apply` gave."""
        tokens = {each.token for each in share.holders}
        count = self._broker.store.act_on_lane(action)
        for token in tokens - {each.token for each in share.holders}:
            self._broker.lanes.forget(queue, action.group, token)
        return count

    async def unpark(self, subject: str, group: str, number: int, key: bytes, *, replays: bool, record_revision: int = 0) -> int:
        """Give a key's messages back, in order, or drop them; how many. Raises UnknownGroup if the key is not parked there, as `place`."""
        await self._require_held(subject, group, record_revision)
        queue = self._queue(subject, number)
        share = queue.lanes.get(group)
        if share is None or key not in share.parked:
            raise UnknownGroup(f"group {group!r} has no such key parked in {queue.id}: `qmq dlq list {subject} {group}` shows which it has")
        count = self._act_on_holders(queue, share, LaneUnpark(subject, number, group, "", key, replays))
        self._broker.schedule()
        await self._broker.committed()
        return count
