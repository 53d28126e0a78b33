"""The broker's control port: gRPC in front of `BrokerAdmin` and `LaneAdmin`.

`LaneAdmin` administers partitions of ordered subjects on a broker: closing them, progress of
groups, parked keys.

Every answer is committed first: a metaserver opens the next version to a group because of it, and
no new master may undo it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import grpc
from qmq_ordering.routes import LpRange

from qmq.broker.admin import BrokerAdmin, GroupStatus, lag_ms, resolve, stored_bytes
from qmq.broker.broker import Broker
from qmq.broker.reading.cold_reads import through_cold_reads
from qmq.broker.replica_time import ReplicaTime, TimeStatus
from qmq.errors import InvalidArgument, Overloaded, RouteConflict, UnknownGroup, UnknownPartition
from qmq.limits import PARKED_LIST_BYTES, PARKED_PAGE_BYTES
from qmq.log.actions import ENTRY_BYTES_MAX, Forget, LaneBegin, LaneInherit, LaneReset, LaneUnpark
from qmq.log.lane_state import GroupLaneState, LaneHolder, ParkedKey
from qmq.log.queue import Queue
from qmq.log.retention import Before
from qmq.model import MessageId, check_name
from qmq.process.description import DescribeProcess
from qmq.process.event_loop import Clock, SystemClock
from qmq.process.files import control_connections_max, limit
from qmq.proto.v1 import control_pb2 as pb
from qmq.proto.v1 import control_pb2_grpc
from qmq.rpc.channel import MESSAGE_BYTES_MAX, answering
from qmq.rpc.guard import RpcGuard
from qmq.rpc.network import NETWORK, Network, RpcPort, only_uid
from qmq.rpc.server import NameCheck, RpcBounds, RpcListener, rpc_server
from qmq.rpc.server_name import NameSource, any_server
from qmq.security.access import AccessControl, OpenAccess
from qmq.wire.parked_pages import first_page

FRESH_MS: Final = 5_000
"""If reading the store took longer than this, the answer is too old: the metaserver may have
abandoned this request and let the group continue.
"""


class LaneAdmin:
    """Administration of ordered subjects on one broker of a broker group."""

    def __init__(self, broker: Broker, broker_group: str) -> None:
        self._broker = broker
        self._group = broker_group

    def _queue(self, subject: str, number: int) -> Queue:
        """Raises UnknownSubject, OrderMismatch, RouteChanged, NotMaster."""
        self._broker.require_serving()
        return self._broker.subjects.find_queue(
            check_name("subject", subject).encode(), number
        ).queue

    async def require_change(
        self, subject: str, number: int, change_id: str, to_version: int
    ) -> None:
        """A request to close a partition must name the change in the store that does so. Raises
        InvalidArgument, CoordinationError.
        """
        self._broker.require_serving()
        if not await self._broker.routing.closes(
            check_name("subject", subject), number, change_id, to_version
        ):
            raise InvalidArgument(
                f"no change {change_id!r} of {subject!r} to version {to_version} closes partition "
                f"{number}: nothing was sealed; change the route with `qmq route split`, "
                "`merge` or `move`"
            )

    async def seal(self, subject: str, number: int, change_id: str, to_version: int) -> int:
        """Close a partition and return the sequence of its command message. Raises RouteConflict,
        NotMaster, DiskFull, as `_queue`.
        """
        if number < 1:
            raise InvalidArgument(
                "partitions of ordered subjects are numbered from 1: there is no partition "
                f"{number}"
            )
        sequence = self._broker.seal(self._queue(subject, number), change_id, to_version)
        await self._broker.committed()
        return sequence

    async def describe(self, request: pb.DescribeLanesRequest) -> pb.DescribeLanesResponse:
        """The partitions on this broker (those named, or all), and a group's progress on them.
        Raises NotMaster, Overloaded.
        """
        found = self._describe(request)
        await (
            self._broker.committed()
        )  # also what a full disk keeps in memory: a group moves on because of this answer
        return found

    def _describe(self, request: pb.DescribeLanesRequest) -> pb.DescribeLanesResponse:
        self._broker.require_serving()
        subject = request.subject.encode()
        queues = [
            queue
            for (name, number), queue in sorted(self._broker.store.queues.items())
            if name == subject
            and number > 0
            and (not request.partitions or number in request.partitions)
        ]
        found = pb.DescribeLanesResponse(
            partitions=[self._describe_partition(queue, request) for queue in queues]
        )
        if request.with_parked:
            self._add_parked(found, queues, request)
        return found

    def _add_parked(
        self,
        answer: pb.DescribeLanesResponse,
        queues: list[Queue],
        request: pb.DescribeLanesRequest,
    ) -> None:
        """Add a page of the group's parked keys, or all of them.
        Raises Overloaded if all are too many.
        """
        share_of = {
            queue.id.partition: queue.lanes[request.group]
            for queue in queues
            if request.group in queue.lanes
        }
        found = sorted(
            (number, parked.lp, key)
            for number, share in share_of.items()
            for key, parked in share.parked.items()
        )
        if not found:
            return
        is_page, after = request.HasField("parked_after"), request.parked_after
        if after.key:
            found = found[
                bisect_right(found, (after.partition, after.logical_partition, after.key)) :
            ]
        keys = (_parked_key(number, key, share_of[number].parked[key]) for number, _, key in found)
        statuses = {each.partition: each for each in answer.partitions}
        page = list(first_page(keys, PARKED_PAGE_BYTES) if is_page else keys)
        for each in page:
            statuses[each.partition].parked.append(each)
        answer.has_more_parked = len(page) < len(found)
        if answer.ByteSize() > MESSAGE_BYTES_MAX:
            raise Overloaded(
                f"group {request.group!r} has parked too many keys of {request.subject!r} "
                f"for one answer ({len(found)}): replay or skip keys (`qmq dlq list`), "
                "or upgrade the metaservers, which then ask in pages"
            )

    def _describe_partition(
        self, queue: Queue, request: pb.DescribeLanesRequest
    ) -> pb.PartitionStatus:
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
            lag_ms=lag_ms(queue, share.done_before(), self._broker.clock.time_ms())
            if share is not None and is_begun
            else 0,
            lp_load=[
                load.per_s(float(load.lps[lp])) if lp < len(load.lps) else 0.0 for lp in range(*lps)
            ]
            if request.with_load
            else (),
        )
        if share is not None:
            self._add_progress(status, queue, request, share)
        elif request.group and queue.is_finished(None, lps):
            status.progress.add(
                lps=pb.LpRange(first=lps.first, end=lps.end),
                done_before=queue.next_sequence,
                is_finished=True,
            )
        return status

    def _add_progress(
        self,
        status: pb.PartitionStatus,
        queue: Queue,
        request: pb.DescribeLanesRequest,
        share: GroupLaneState,
    ) -> None:
        is_left = not self._broker.store.has_waiting_effects(queue, request.group)
        for part in share.progress:
            lps = pb.LpRange(first=part.lps.first, end=part.lps.end)
            status.progress.add(
                lps=lps,
                done_before=part.done_before,
                is_finished=is_left and queue.is_finished(share, part.lps),
            )
        status.holders.extend(
            [self._describe_holder(queue, request.group, holder) for holder in share.holders]
        )
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
            is_paused=self._broker.rules.is_paused(
                queue.id.subject, group, holder.consumer, client
            ),
        )

    async def place(
        self,
        subject: str,
        group: str,
        places: Iterable[pb.LanePlace],
        *,
        moves: bool,
        record_revision: int = 0,
    ) -> None:
        """Let a group begin on partitions; with `moves`, move it there regardless of its progress.

        Raises as `_queue`, NotMaster; and if it moves, or names a revision, RouteConflict,
        CoordinationError.
        """
        check_name("group", group)
        if moves or record_revision:
            await self._require_held(subject, group, record_revision)
        queues = [(self._queue(subject, place.partition), place) for place in places]
        found = [(queue, queue.id.partition, resolve(queue, place)) for queue, place in queues]
        for queue, number, begin in found:
            whole = self._range(subject, number)
            sequence = min(
                begin, queue.sealed.sequence if queue.sealed is not None else queue.visible_sequence
            )
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
        """Delete a group's progress and parked keys on all partitions of this broker. Returns the
        number of partitions.

        Raises RouteConflict, NotMaster, CoordinationError.
        """
        self._broker.require_serving()
        check_name("group", group)
        await self._require_held(check_name("subject", subject), group, record_revision)
        self._broker.require_serving()
        queues = [
            queue
            for queue in self._broker.store.queues.values()
            if queue.id.subject == subject and group in queue.lanes
        ]
        for queue in queues:
            tokens = [each.token for each in queue.lanes[group].holders]
            self._broker.store.act(Forget(subject, queue.id.partition, group, ""))
            self._broker.lanes.forget_group(queue, group, tokens)
        self._broker.schedule()
        await self._broker.committed()
        return len(queues)

    async def _require_held(self, subject: str, group: str, record_revision: int) -> None:
        """Require that the group's record has this revision: then no consumer attaches by an older
        view, and late requests have no effect.

        Raises RouteConflict, CoordinationError.
        """
        began_ms = self._broker.clock.monotonic_ms()
        revision = await self._broker.routing.group_revision(subject, group)
        if revision != record_revision or self._broker.clock.monotonic_ms() - began_ms > FRESH_MS:
            raise RouteConflict(
                f"group {group!r} of {subject!r} has changed since this request was made "
                f"({record_revision}, now {revision}): ask again"
            )

    def _range(self, subject: str, number: int) -> LpRange:
        found = self._broker.routing.partition(subject, number)
        if found is None:
            raise UnknownPartition(f"subject {subject!r} has no partition {number} here")
        return found.range

    # --- parked keys ------------------------------------------------------------------------------

    def parked(
        self, subject: str, group: str, keys_max: int, only: bytes | None = None
    ) -> list[pb.ParkedKey]:
        """The first parked keys of a group, partition by partition, or of `only` one: at most
        `keys_max`, and what fits into an answer.

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
        keys = (
            _parked_key(number, key, parked) for number, _, key, parked in found[: keys_max or None]
        )
        return list(first_page(keys, PARKED_LIST_BYTES))

    async def inherit(
        self,
        subject: str,
        group: str,
        number: int,
        lps: LpRange,
        keys: list[tuple[int, bytes]],
        *,
        record_revision: int,
    ) -> None:
        """Park the keys of a range that are parked in the previous partition, before the group
        reads this one.

        Raises InvalidArgument, and as `place`.
        """
        check_name("group", group)
        await self._require_held(subject, group, record_revision)
        queue, whole = self._queue(subject, number), self._range(subject, number)
        if not whole.contains(lps) or not all(lps.first <= lp < lps.end for lp, _ in keys):
            raise InvalidArgument(
                f"partition {number} holds {whole}: {lps}, or a named key, is outside"
            )
        if sum([len(key) + 16 for _, key in keys]) > ENTRY_BYTES_MAX:
            raise InvalidArgument(
                f"{len(keys)} parked keys are too many for one entry: replay or skip some, "
                "in the previous partition"
            )
        share = self._broker.lanes.share(queue, group, whole)
        self._act_on_holders(
            queue, share, LaneInherit(subject, number, group, "", *lps, tuple(keys))
        )
        self._broker.schedule()
        await self._broker.committed()

    def _act_on_holders(
        self, queue: Queue, share: GroupLaneState, action: LaneInherit | LaneUnpark
    ) -> int:
        """Apply an action that may take lanes from their holders, and notify these. Returns the
        number of affected messages or keys.
        """
        tokens = {each.token for each in share.holders}
        count = self._broker.store.act(action)
        for token in tokens - {each.token for each in share.holders}:
            self._broker.lanes.forget(queue, action.group, token)
        return count

    async def unpark(
        self,
        subject: str,
        group: str,
        number: int,
        key: bytes,
        *,
        replays: bool,
        record_revision: int = 0,
    ) -> int:
        """Replay a key's messages in order, or drop them. Returns their number. Raises UnknownGroup
        if the key is not parked there, as `place`.
        """
        await self._require_held(subject, group, record_revision)
        queue = self._queue(subject, number)
        share = queue.lanes.get(group)
        if share is None or key not in share.parked:
            raise UnknownGroup(
                f"group {group!r} has not parked this key in {queue.id}: `qmq dlq list "
                f"{subject} {group}` shows its parked keys"
            )
        count = self._act_on_holders(
            queue, share, LaneUnpark(subject, number, group, "", key, replays)
        )
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


CALLS_MAX: Final = 5_000
"""The limit of concurrent calls on one broker's control port."""


_R = TypeVar("_R")


def reading(
    method: Callable[[Any, Any], Awaitable[_R]],
) -> Callable[[Any, Any, Any], Awaitable[_R]]:
    """Wrap a servicer's method that answers from the broker's state: the answer is sent when what
    was read is committed.
    """

    async def read(self: ControlService, request: Any) -> _R:
        async with self.committed_read():
            return await method(self, request)

    read.__name__ = method.__name__
    return answering(read)


@dataclass(frozen=True, slots=True)
class ProcessParts:
    """What the servers of one process have in common."""

    time: ReplicaTime | None = None
    """Without it the broker's clock is trusted."""
    network: Network = NETWORK
    access: OpenAccess = field(default_factory=OpenAccess)
    describe: DescribeProcess = pb.ProcessStatus
    wall: Clock = field(default_factory=SystemClock)
    """The machine's clock, which delay servers use as a witness. It must not be a corrected time,
    which would only repeat theirs.
    """

    @property
    def retention_before(self) -> Before | None:
        """Says which messages are too old; None: the broker's clock does."""
        return None if self.time is None else self.time.before_ms


class ControlService(control_pb2_grpc.BrokerControlServicer):
    """Implements control.proto."""

    def __init__(
        self,
        broker: Broker,
        status: GroupStatus,
        broker_group: str,
        parts: ProcessParts | None = None,
    ) -> None:
        self._admin = BrokerAdmin(broker, broker_group)
        self.committed_read = self._admin.committed_read
        self._lanes = LaneAdmin(broker, broker_group)
        self._status = status
        self._group = broker_group
        self.parts = parts or ProcessParts()

    @reading
    async def DescribeQueues(self, request: pb.DescribeQueuesRequest) -> pb.DescribeQueuesResponse:
        return pb.DescribeQueuesResponse(queues=await self._admin.queues(request.subject))

    @reading
    async def DescribeGroups(self, request: pb.DescribeGroupsRequest) -> pb.DescribeGroupsResponse:
        return pb.DescribeGroupsResponse(
            groups=await self._admin.groups(request.subject, request.group),
            readers=() if request.group else await self._admin.readers(request.subject),
        )

    @answering
    async def ResetGroup(self, request: pb.ResetGroupRequest) -> pb.ResetGroupResponse:
        return pb.ResetGroupResponse(
            moved=await self._admin.reset(request.subject, request.group, request)
        )

    @answering
    async def DeleteGroup(self, request: pb.DeleteGroupRequest) -> pb.DeleteGroupResponse:
        if request.record_revision:
            partitions = await self._lanes.delete_group(
                request.subject, request.group, record_revision=request.record_revision
            )
            return pb.DeleteGroupResponse(queues=partitions)
        return pb.DeleteGroupResponse(
            queues=await self._admin.delete_group(request.subject, request.group)
        )

    @answering
    async def DropSubject(self, request: pb.DropSubjectRequest) -> pb.DropSubjectResponse:
        return pb.DropSubjectResponse(queues=await self._admin.drop_subject(request.subject))

    @answering
    async def PurgeSubject(self, request: pb.DropSubjectRequest) -> pb.DropSubjectResponse:
        queues, messages = await self._admin.purge_subject(request.subject)
        return pb.DropSubjectResponse(queues=queues, messages=messages)

    @reading
    async def FindMessage(self, request: pb.FindMessageRequest) -> pb.FindMessageResponse:
        message_id = MessageId.parse(request.message_id)
        if not request.every:
            found = await self._admin.find_message(request.subject, message_id)
            return pb.FindMessageResponse(message=found.described(self._group, request.message_id))
        places, is_incomplete = await self._admin.finding.find(
            request.subject, message_id, request.since_ms
        )
        found_at = [each.described(self._group, request.message_id) for each in places]
        return pb.FindMessageResponse(
            message=found_at[0] if found_at else None,
            others=found_at[1:],
            is_incomplete=is_incomplete,
        )

    @reading
    async def TraceMessage(self, request: pb.TraceMessageRequest) -> pb.TraceMessageResponse:
        page = await self._admin.trails.follow(
            request.subject, request.partition, request.sequence, request.group, request.cursor
        )
        page.time_ms = self.parts.wall.time_ms()
        return page

    @reading
    async def FindTime(self, request: pb.FindTimeRequest) -> pb.FindTimeResponse:
        return pb.FindTimeResponse(
            found=await self._admin.find_time(request.subject, request.time_ms)
        )

    # --- the replica ------------------------------------------------------------------------------

    @answering
    async def DescribeReplica(self, request: pb.DescribeReplicaRequest) -> pb.ReplicaStatus:
        status, retries = self._status.describe(), self._admin.retries
        status.broker_group, status.time_ms = self._group, self.parts.wall.time_ms()
        status.attempts_max = retries.attempts_max
        status.retry_delays_ms.extend(retries.retry_delays_ms)
        status.storage.CopyFrom(self._admin.storage())
        status.process.CopyFrom(self.parts.describe())
        if self.parts.time is not None:
            time = self.parts.time.status()
            status.clock_step_ms, status.retention_behind_ms = (
                time.step_ms,
                time.retention_behind_ms,
            )
        return status

    @answering
    async def ConfirmClock(self, request: pb.ConfirmClockRequest) -> pb.ConfirmClockResponse:
        time = self.parts.time
        before = time.confirm(request.time_ms) if time is not None else TimeStatus()
        return pb.ConfirmClockResponse(behind_ms=before.behind_clock_ms)

    @answering
    async def Transfer(self, request: pb.TransferRequest) -> pb.TransferResponse:
        return await self._status.transfer(request.to)

    @answering
    async def ReadLog(self, request: pb.ReadLogRequest) -> pb.ReadLogResponse:
        if request.only_committed:
            position, entries = await through_cold_reads(
                self._admin.read_committed, request.log, request.position, request.bytes_max
            )
            return pb.ReadLogResponse(entries=entries, position=position)
        entries = await through_cold_reads(
            self._status.read_log, request.log, request.position, request.bytes_max
        )
        return pb.ReadLogResponse(entries=entries)

    @answering
    async def HoldWrites(self, request: pb.HoldWritesRequest) -> pb.HoldWritesResponse:
        await self._status.hold(request.token, request.hold_ms)
        return pb.HoldWritesResponse()

    @answering
    async def DescribeHold(self, request: pb.DescribeHoldRequest) -> pb.HeldLogs:
        return await self._status.held_logs(request.token)

    @answering
    async def ReleaseWrites(self, request: pb.ReleaseWritesRequest) -> pb.ReleaseWritesResponse:
        self._status.release(request.token)
        return pb.ReleaseWritesResponse()

    @answering
    async def ChangeReplicas(self, request: pb.ChangeReplicasRequest) -> pb.ChangeReplicasResponse:
        return await self._status.change(add=request.add, remove=request.remove)

    # --- ordered subjects -------------------------------------------------------------------------

    @answering
    async def Seal(self, request: pb.SealRequest) -> pb.SealResponse:
        if not request.change_id:
            raise InvalidArgument("a change that closes a partition needs an id")
        await self._lanes.require_change(
            request.subject, request.partition, request.change_id, request.to_version
        )
        sequence = await self._lanes.seal(
            request.subject, request.partition, request.change_id, request.to_version
        )
        return pb.SealResponse(sequence=sequence)

    @reading
    async def DescribeLanes(self, request: pb.DescribeLanesRequest) -> pb.DescribeLanesResponse:
        return await self._lanes.describe(request)

    @answering
    async def PlaceLanes(self, request: pb.PlaceLanesRequest) -> pb.PlaceLanesResponse:
        held = request.record_revision
        await self._lanes.place(
            request.subject,
            request.group,
            request.places,
            moves=request.moves,
            record_revision=held,
        )
        return pb.PlaceLanesResponse()

    @reading
    async def DescribeParked(self, request: pb.DescribeParkedRequest) -> pb.DescribeParkedResponse:
        only = request.key if request.HasField("key") else None
        return pb.DescribeParkedResponse(
            keys=self._lanes.parked(request.subject, request.group, request.keys_max, only)
        )

    @answering
    async def InheritParked(self, request: pb.InheritParkedRequest) -> pb.InheritParkedResponse:
        lps = LpRange(request.lps.first, request.lps.end)
        keys = [(each.logical_partition, each.key) for each in request.keys]
        await self._lanes.inherit(
            request.subject,
            request.group,
            request.partition,
            lps,
            keys,
            record_revision=request.record_revision,
        )
        return pb.InheritParkedResponse()

    @answering
    async def Unpark(self, request: pb.UnparkRequest) -> pb.UnparkResponse:
        count = await self._lanes.unpark(
            request.subject,
            request.group,
            request.partition,
            request.key,
            replays=request.replay,
            record_revision=request.record_revision,
        )
        return pb.UnparkResponse(messages=count)


async def serve_control(
    service: ControlService,
    host: str,
    port: int,
    *,
    also: Callable[[grpc.aio.Server], None] | None = None,
    bounds: RpcBounds | None = None,
    own: NameSource = any_server,
) -> RpcPort:
    """Serve the control port of the replica with the name `own`. `also` may add services. Raises
    OSError if the port is taken.
    """
    network, access = service.parts.network, service.parts.access
    guard = (
        RpcGuard(access, local_uid=lambda: only_uid(host, served.port))
        if isinstance(access, AccessControl)
        else None
    )
    bounds = bounds or RpcBounds(
        control_connections_max(limit(), network.rpc_descriptors(host)), CALLS_MAX
    )
    door = RpcListener(bounds) if guard is None else RpcListener(bounds, guard.refused, guard.peers)
    server = rpc_server(door, (NameCheck(own), *(() if guard is None else (guard,))))
    control_pb2_grpc.add_BrokerControlServicer_to_server(service, server)
    if also is not None:
        also(server)
    served = await network.serve(server, host, port, door)
    return served
