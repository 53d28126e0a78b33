"""The broker's control port: gRPC in front of `BrokerAdmin`."""

from __future__ import annotations

from collections.abc import Callable

import grpc
from qmq_ordering.route import LpRange

from qmq.batch_columns import UNREADABLE
from qmq.broker.admin import AtSequence, AtTime, BrokerAdmin, Earliest, GroupInfo, Latest, QueueInfo, Target
from qmq.broker.broker import Broker
from qmq.broker.group_status import GroupStatus, ReplicaInfo
from qmq.broker.lane_admin import LaneAdmin, PartitionInfo, Place
from qmq.broker.message_search import FoundMessage
from qmq.broker.message_state import MessageState
from qmq.clock import Clock, SystemClock
from qmq.errors import CorruptBatch, InvalidArgument
from qmq.log.lane_share import LaneShare, ParkedKey
from qmq.log.queue import Queue
from qmq.log.trail import TrailEvent
from qmq.model import MessageId, Sequence, TimeMs
from qmq.network import NETWORK, Network
from qmq.proto.v1 import control_pb2 as pb
from qmq.proto.v1 import control_pb2_grpc
from qmq.rpc import SERVER_OPTIONS, answering
from qmq.security.access_control import AccessControl, OpenAccess
from qmq.security.rpc_guard import RpcGuard
from qmq.targeted import is_directed


class ControlService(control_pb2_grpc.BrokerControlServicer):
    """See control.proto. `wall` is the machine's clock, which bears witness for others: never a kept time, which would only echo theirs."""

    def __init__(
        self, admin: BrokerAdmin, lanes: LaneAdmin, standing: GroupStatus, broker_group: str, *, wall: Clock | None = None
    ) -> None:
        self._admin = admin
        self._lanes = lanes
        self._standing = standing
        self._group = broker_group
        self._wall = wall or SystemClock()

    @answering
    async def DescribeQueues(self, request: pb.DescribeQueuesRequest) -> pb.DescribeQueuesResponse:
        return pb.DescribeQueuesResponse(queues=[self._queue(info) for info in await self._admin.queues(request.subject)])

    def _queue(self, info: QueueInfo) -> pb.Queue:
        return pb.Queue(
            subject=info.queue.id.subject,
            partition=info.queue.id.partition,
            broker_group=self._group,
            start_sequence=info.start_sequence,
            next_sequence=info.next_sequence,
            stored_bytes=info.stored_bytes,
            last_append_ms=info.last_append_ms,
        )

    @answering
    async def DescribeGroups(self, request: pb.DescribeGroupsRequest) -> pb.DescribeGroupsResponse:
        found = await self._admin.groups(request.subject, request.group)
        return pb.DescribeGroupsResponse(groups=[self._describe(info) for info in found])

    def _describe(self, info: GroupInfo) -> pb.Group:
        consumers = [
            pb.Consumer(
                name=each.name,
                unacked=each.unacked,
                seen_ms_ago=each.seen_ms_ago,
                lease_ms=each.lease_ms,
                client=each.client,
                is_paused=each.is_paused,
            )
            for each in info.consumers
        ]
        return pb.Group(
            subject=info.queue.id.subject,
            partition=info.queue.id.partition,
            broker_group=self._group,
            group=info.group,
            next_sequence=info.next_sequence,
            settled_before=info.settled_before,
            waiting=info.waiting,
            unacked=info.unacked,
            requeued=info.requeued,
            lag_ms=info.lag_ms,
            expired=info.expired,
            consumers=consumers,
            is_paused=info.is_paused,
            dying=info.dying,
        )

    @answering
    async def ResetGroup(self, request: pb.ResetGroupRequest) -> pb.ResetGroupResponse:
        moved = self._admin.reset(request.subject, request.group, _target(request))
        return pb.ResetGroupResponse(moved=[self._moved(queue, begin, end) for queue, begin, end in moved])

    @answering
    async def DeleteGroup(self, request: pb.DeleteGroupRequest) -> pb.DeleteGroupResponse:
        if request.record_revision:
            partitions = await self._lanes.delete_group(request.subject, request.group, record_revision=request.record_revision)
            return pb.DeleteGroupResponse(queues=partitions)
        return pb.DeleteGroupResponse(queues=await self._admin.delete_group(request.subject, request.group))

    @answering
    async def DropSubject(self, request: pb.DropSubjectRequest) -> pb.DropSubjectResponse:
        return pb.DropSubjectResponse(queues=await self._admin.drop_subject(request.subject))

    def _moved(self, queue: Queue, begin: int, end: int) -> pb.Moved:
        return pb.Moved(partition=queue.id.partition, broker_group=self._group, from_sequence=begin, to_sequence=end)

    @answering
    async def FindMessage(self, request: pb.FindMessageRequest) -> pb.FindMessageResponse:
        message_id = MessageId.parse(request.message_id)
        if not request.every:
            found = await self._admin.find_message(request.subject, message_id)
            return pb.FindMessageResponse(message=self._message(found, request.message_id))
        places, is_incomplete = await self._admin.finding.find(request.subject, message_id, request.since_ms)
        found_at = [self._message(each, request.message_id) for each in places]
        return pb.FindMessageResponse(message=found_at[0] if found_at else None, others=found_at[1:], is_incomplete=is_incomplete)

    def _message(self, found: FoundMessage, message_id: str) -> pb.StoredMessage:
        try:
            return self._readable(found, message_id)
        except UNREADABLE as cause:
            sequence = found.view.base_sequence + found.index
            raise CorruptBatch(f"what is stored at sequence {sequence} of {found.queue.id} is no message: {cause}") from cause

    def _readable(self, found: FoundMessage, message_id: str) -> pb.StoredMessage:
        view, index = found.view, found.index
        keys, tags, headers, dues = view.keys(), view.tags(), view.headers(), view.dues_ms()
        return pb.StoredMessage(
            subject=found.queue.id.subject,
            partition=found.queue.id.partition,
            broker_group=self._group,
            sequence=view.base_sequence + index,
            message_id=message_id,
            body=view.bodies()[index],
            key=keys[index] if keys else b"",
            tags=tags[index] if tags else (),
            headers=[pb.Header(name=name, value=value) for name, value in (headers[index] if headers else {}).items()],
            create_time_ms=view.create_times_ms()[index],
            append_time_ms=view.envelope.append_time_ms,
            due_ms=dues[index] if dues else 0,
            is_directed=is_directed(view.header),
        )

    @answering
    async def TraceMessage(self, request: pb.TraceMessageRequest) -> pb.TraceMessageResponse:
        page = await self._admin.trails.follow(request.subject, request.partition, request.sequence, request.group, request.cursor)
        return pb.TraceMessageResponse(
            events=[_event(each) for each in page.events],
            cursor=page.cursor,
            states=[self._state(each) for each in page.states],
            known_since_ms=page.known_since_ms,
            time_ms=self._wall.time_ms(),
        )

    def _state(self, each: MessageState) -> pb.MessageState:
        letter = self._message(each.dead_letter, "") if each.dead_letter is not None else None
        if letter is not None:
            letter.ClearField("body")
        return pb.MessageState(
            group=each.group,
            state=each.state,
            last=_event(each.last) if each.last is not None else None,
            consumer=each.consumer,
            attempt=each.attempt,
            attempts_max=each.attempts_max,
            due_ms=each.due_ms,
            lease_left_ms=each.lease_left_ms,
            behind=each.behind,
            consumers=each.consumers,
            is_paused=each.is_paused,
            is_consumer_paused=each.is_consumer_paused,
            dead_letter=letter,
            parked_first=each.parked_first,
        )

    @answering
    async def FindTime(self, request: pb.FindTimeRequest) -> pb.FindTimeResponse:
        found = await self._admin.find_time(request.subject, request.time_ms)
        return pb.FindTimeResponse(found=[self._moved(queue, sequence, sequence) for queue, sequence in found])

    # --- the replica ---------------------------------------------------------------------------------------------------

    @answering
    async def DescribeReplica(self, request: pb.DescribeReplicaRequest) -> pb.ReplicaStatus:
        return self._status(self._standing.describe())

    def _status(self, info: ReplicaInfo) -> pb.ReplicaStatus:
        peers = [
            pb.Peer(replica=each.replica, match_index=each.match_index, in_step=each.in_step, silent_ms=each.silent_ms)
            for each in info.peers
        ]
        return pb.ReplicaStatus(
            replica=info.replica,
            broker_group=self._group,
            role=info.role,
            epoch=info.epoch,
            master=info.master,
            last_index=info.last_index,
            stored_index=info.stored_index,
            commit_index=info.commit_index,
            message_position=info.message_position,
            action_position=info.action_position,
            is_whole=info.is_whole,
            membership_version=info.membership_version,
            voters=info.voters,
            learners=info.learners,
            peers=peers,
            is_serving=info.is_serving,
            time_ms=self._wall.time_ms(),
            attempts_max=self._admin.retries.attempts_max,
            retry_delays_ms=self._admin.retries.retry_delays_ms,
        )

    @answering
    async def Transfer(self, request: pb.TransferRequest) -> pb.TransferResponse:
        done = await self._standing.transfer(request.to)
        return pb.TransferResponse(master=done.master, epoch=done.epoch, refused_ms=done.refused_ms)

    @answering
    async def ReadLog(self, request: pb.ReadLogRequest) -> pb.ReadLogResponse:
        if request.only_committed:
            position, entries = self._admin.read_committed(request.log, request.position, request.bytes_max)
            return pb.ReadLogResponse(entries=entries, position=position)
        return pb.ReadLogResponse(entries=self._standing.read_log(request.log, request.position, request.bytes_max))

    @answering
    async def ChangeReplicas(self, request: pb.ChangeReplicasRequest) -> pb.ChangeReplicasResponse:
        info = await self._standing.change(add=request.add, remove=request.remove)
        return pb.ChangeReplicasResponse(membership_version=info.membership_version, voters=info.voters, learners=info.learners)

    # --- ordered subjects ----------------------------------------------------------------------------------------------

    @answering
    async def Seal(self, request: pb.SealRequest) -> pb.SealResponse:
        if not request.change_id:
            raise InvalidArgument("a change that closes a partition has an id")
        await self._lanes.require_change(request.subject, request.partition, request.change_id, request.to_version)
        sequence = await self._lanes.seal(request.subject, request.partition, request.change_id, request.to_version)
        return pb.SealResponse(sequence=sequence)

    @answering
    async def DescribeLanes(self, request: pb.DescribeLanesRequest) -> pb.DescribeLanesResponse:
        found = await self._lanes.describe(request.subject, list(request.partitions), request.group)
        return pb.DescribeLanesResponse(partitions=[self._partition(each, request) for each in found])

    def _partition(self, each: PartitionInfo, request: pb.DescribeLanesRequest) -> pb.PartitionStatus:
        queue, load, share = each.info.queue, each.load, each.share
        status = pb.PartitionStatus(
            subject=queue.id.subject,
            partition=queue.id.partition,
            broker_group=self._group,
            start_sequence=each.info.start_sequence,
            next_sequence=each.info.next_sequence,
            stored_bytes=each.info.stored_bytes,
            last_append_ms=each.info.last_append_ms,
            sealed_at=queue.sealed.sequence if queue.sealed is not None else None,
            messages_per_s=load.per_s(load.messages),
            bytes_per_s=load.per_s(load.bytes),
            bent_messages=load.bent,
            lag_ms=each.lag_ms,
            lp_load=(
                [load.per_s(float(load.lps[lp])) if lp < len(load.lps) else 0.0 for lp in range(*each.lps)] if request.with_load else ()
            ),
        )
        if share is not None:
            self._add_progress(status, queue, request, share)
        elif request.group and queue.is_finished(None, each.lps):
            whole = pb.LpRange(first=each.lps.first, end=each.lps.end)
            status.progress.add(lps=whole, done_before=each.info.next_sequence, is_finished=True)
        return status

    def _add_progress(self, status: pb.PartitionStatus, queue: Queue, request: pb.DescribeLanesRequest, share: LaneShare) -> None:
        group = request.group
        for part in share.progress:
            lps = pb.LpRange(first=part.lps.first, end=part.lps.end)
            status.progress.add(lps=lps, done_before=part.done_before, is_finished=queue.is_finished(share, part.lps))
        for holder in share.holders:
            client, is_paused = self._lanes.client_of(queue, group, holder)
            status.holders.add(
                lps=pb.LpRange(first=holder.lps.first, end=holder.lps.end),
                consumer=holder.consumer,
                token=holder.token,
                seen_ms_ago=self._lanes.seen_ms_ago(queue, group, holder.token),
                lease_ms=holder.lease_ms,
                client=client,
                is_paused=is_paused,
            )
        status.parked_keys = sum([bool(parked.sequences) for parked in share.parked.values()])
        status.parked_messages = sum([len(parked.sequences) for parked in share.parked.values()])
        if request.with_parked:
            status.parked.extend([_parked_key(queue, key, parked) for key, parked in share.parked.items()])

    @answering
    async def PlaceLanes(self, request: pb.PlaceLanesRequest) -> pb.PlaceLanesResponse:
        places = [(each.partition, _place(each)) for each in request.places]
        await self._lanes.place(request.subject, request.group, places, moves=request.moves, record_revision=request.record_revision)
        return pb.PlaceLanesResponse()

    @answering
    async def DescribeParked(self, request: pb.DescribeParkedRequest) -> pb.DescribeParkedResponse:
        only = request.key if request.HasField("key") else None
        found = self._lanes.parked(request.subject, request.group, request.keys_max, only)
        return pb.DescribeParkedResponse(keys=[_parked_key(*each) for each in found])

    @answering
    async def InheritParked(self, request: pb.InheritParkedRequest) -> pb.InheritParkedResponse:
        lps = LpRange(request.lps.first, request.lps.end)
        keys = [(each.logical_partition, each.key) for each in request.keys]
        await self._lanes.inherit(request.subject, request.group, request.partition, lps, keys, record_revision=request.record_revision)
        return pb.InheritParkedResponse()

    @answering
    async def Unpark(self, request: pb.UnparkRequest) -> pb.UnparkResponse:
        count = await self._lanes.unpark(
            request.subject, request.group, request.partition, request.key, replays=request.replay, record_revision=request.record_revision
        )
        return pb.UnparkResponse(messages=count)


def _parked_key(queue: Queue, key: bytes, parked: ParkedKey) -> pb.ParkedKey:
    return pb.ParkedKey(
        partition=queue.id.partition,
        logical_partition=parked.lp,
        key=key,
        messages=len(parked.sequences),
        first_sequence=parked.sequences[0] if parked.sequences else 0,
    )


def _event(event: TrailEvent) -> pb.MessageEvent:
    return pb.MessageEvent(
        time_ms=event.time_ms,
        group=event.group,
        kind=event.kind,
        consumer=event.consumer,
        attempt=event.attempt,
        delay_ms=event.delay_ms,
        error=event.error,
    )


def _place(request: pb.LanePlace) -> Place:
    kind = request.WhichOneof("target")
    if kind == "time_ms":
        return AtTime(TimeMs(request.time_ms))
    if kind is None:
        raise InvalidArgument("say where the group shall begin: earliest, latest or a time")
    return Earliest() if kind == "earliest" else Latest()


def _target(request: pb.ResetGroupRequest) -> Target:
    kind = request.WhichOneof("target")
    if kind == "earliest":
        return Earliest()
    if kind == "latest":
        return Latest()
    if kind == "time_ms":
        return AtTime(TimeMs(request.time_ms))
    if kind == "sequence":
        return AtSequence(Sequence(request.sequence))
    raise InvalidArgument("say where the group shall go: earliest, latest, a time or a sequence")


async def serve_control(
    broker: Broker,
    standing: GroupStatus,
    broker_group: str,
    host: str,
    port: int,
    *,
    also: Callable[[grpc.aio.Server], None] | None = None,
    wall: Clock | None = None,
    network: Network = NETWORK,
    access: OpenAccess | None = None,
) -> tuple[grpc.aio.Server, int]:
    """Serve the control port; the server and the port it got. `also` may add services to it. Raises OSError if the port is taken."""
    interceptors = (RpcGuard(access),) if isinstance(access, AccessControl) else ()
    server = grpc.aio.server(interceptors=interceptors, options=SERVER_OPTIONS)
    service = ControlService(BrokerAdmin(broker), LaneAdmin(broker), standing, broker_group, wall=wall)
    control_pb2_grpc.add_BrokerControlServicer_to_server(service, server)
    if also is not None:
        also(server)
    bound = network.bind(server, host, port)
    await server.start()
    return server, bound
