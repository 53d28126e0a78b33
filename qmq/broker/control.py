"""The broker's control port: gRPC in front of `BrokerAdmin`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

import grpc
from qmq_ordering.routes import LpRange

from qmq.broker.admin import BrokerAdmin, GroupStatus
from qmq.broker.broker import Broker
from qmq.broker.lanes.admin import LaneAdmin
from qmq.broker.reading.cold_reads import through_cold_reads
from qmq.broker.replica_time import ReplicaTime, TimeStatus
from qmq.errors import InvalidArgument
from qmq.model import MessageId
from qmq.process.description import DescribeProcess
from qmq.process.event_loop import Clock, SystemClock
from qmq.process.files import control_connections_max, limit
from qmq.proto.v1 import control_pb2 as pb
from qmq.proto.v1 import control_pb2_grpc
from qmq.rpc.channel import answering
from qmq.rpc.guard import RpcGuard
from qmq.rpc.network import NETWORK, Network, RpcPort, only_uid
from qmq.rpc.server import NameCheck, RpcBounds, RpcListener, rpc_server
from qmq.rpc.server_name import NameSource, any_server
from qmq.security.access import AccessControl, OpenAccess

CALLS_MAX: Final = 5_000
"""The limit of concurrent calls on one broker's control port."""


_R = TypeVar("_R")


def reading(method: Callable[[Any, Any], Awaitable[_R]]) -> Callable[[Any, Any, Any], Awaitable[_R]]:
    """Wrap a servicer's method that answers from the broker's state: the answer is sent when what was read is committed."""

    async def read(self: ControlService, request: Any) -> _R:
        async with self.committed_read():
            return await method(self, request)

    read.__name__ = method.__name__
    return answering(read)


class ControlService(control_pb2_grpc.BrokerControlServicer):
    """Implements control.proto. `wall` is the machine's clock, which delay servers use as a witness. It must not be a corrected time, which
    would only repeat theirs.
    """

    def __init__(
        self,
        admin: BrokerAdmin,
        lanes: LaneAdmin,
        standing: GroupStatus,
        broker_group: str,
        *,
        time: ReplicaTime | None = None,
        wall: Clock | None = None,
        process: DescribeProcess = pb.ProcessStatus,
    ) -> None:
        self._admin = admin
        self.committed_read = admin.committed_read
        self._lanes = lanes
        self._standing = standing
        self._group = broker_group
        self._time = time
        self._wall = wall or SystemClock()
        self._process = process

    @reading
    async def DescribeQueues(self, request: pb.DescribeQueuesRequest) -> pb.DescribeQueuesResponse:
        return pb.DescribeQueuesResponse(queues=await self._admin.queues(request.subject))

    @reading
    async def DescribeGroups(self, request: pb.DescribeGroupsRequest) -> pb.DescribeGroupsResponse:
        return pb.DescribeGroupsResponse(groups=await self._admin.groups(request.subject, request.group))

    @answering
    async def ResetGroup(self, request: pb.ResetGroupRequest) -> pb.ResetGroupResponse:
        return pb.ResetGroupResponse(moved=await self._admin.reset(request.subject, request.group, request))

    @answering
    async def DeleteGroup(self, request: pb.DeleteGroupRequest) -> pb.DeleteGroupResponse:
        if request.record_revision:
            partitions = await self._lanes.delete_group(request.subject, request.group, record_revision=request.record_revision)
            return pb.DeleteGroupResponse(queues=partitions)
        return pb.DeleteGroupResponse(queues=await self._admin.delete_group(request.subject, request.group))

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
        places, is_incomplete = await self._admin.finding.find(request.subject, message_id, request.since_ms)
        found_at = [each.described(self._group, request.message_id) for each in places]
        return pb.FindMessageResponse(message=found_at[0] if found_at else None, others=found_at[1:], is_incomplete=is_incomplete)

    @reading
    async def TraceMessage(self, request: pb.TraceMessageRequest) -> pb.TraceMessageResponse:
        page = await self._admin.trails.follow(request.subject, request.partition, request.sequence, request.group, request.cursor)
        page.time_ms = self._wall.time_ms()
        return page

    @reading
    async def FindTime(self, request: pb.FindTimeRequest) -> pb.FindTimeResponse:
        return pb.FindTimeResponse(found=await self._admin.find_time(request.subject, request.time_ms))

    # --- the replica ---------------------------------------------------------------------------------------------------

    @answering
    async def DescribeReplica(self, request: pb.DescribeReplicaRequest) -> pb.ReplicaStatus:
        status, retries = self._standing.describe(), self._admin.retries
        status.broker_group, status.time_ms = self._group, self._wall.time_ms()
        status.attempts_max = retries.attempts_max
        status.retry_delays_ms.extend(retries.retry_delays_ms)
        status.storage.CopyFrom(self._admin.storage())
        status.process.CopyFrom(self._process())
        if self._time is not None:
            time = self._time.status()
            status.clock_step_ms, status.retention_behind_ms = time.step_ms, time.retention_behind_ms
        return status

    @answering
    async def ConfirmClock(self, request: pb.ConfirmClockRequest) -> pb.ConfirmClockResponse:
        before = self._time.confirm(request.time_ms) if self._time is not None else TimeStatus()
        return pb.ConfirmClockResponse(behind_ms=before.behind_clock_ms)

    @answering
    async def Transfer(self, request: pb.TransferRequest) -> pb.TransferResponse:
        return await self._standing.transfer(request.to)

    @answering
    async def ReadLog(self, request: pb.ReadLogRequest) -> pb.ReadLogResponse:
        if request.only_committed:
            position, entries = await through_cold_reads(self._admin.read_committed, request.log, request.position, request.bytes_max)
            return pb.ReadLogResponse(entries=entries, position=position)
        entries = await through_cold_reads(self._standing.read_log, request.log, request.position, request.bytes_max)
        return pb.ReadLogResponse(entries=entries)

    @answering
    async def HoldWrites(self, request: pb.HoldWritesRequest) -> pb.HoldWritesResponse:
        await self._standing.hold(request.token, request.hold_ms)
        return pb.HoldWritesResponse()

    @answering
    async def DescribeHold(self, request: pb.DescribeHoldRequest) -> pb.HeldLogs:
        return await self._standing.held_logs(request.token)

    @answering
    async def ReleaseWrites(self, request: pb.ReleaseWritesRequest) -> pb.ReleaseWritesResponse:
        self._standing.release(request.token)
        return pb.ReleaseWritesResponse()

    @answering
    async def ChangeReplicas(self, request: pb.ChangeReplicasRequest) -> pb.ChangeReplicasResponse:
        return await self._standing.change(add=request.add, remove=request.remove)

    # --- ordered subjects ----------------------------------------------------------------------------------------------

    @answering
    async def Seal(self, request: pb.SealRequest) -> pb.SealResponse:
        if not request.change_id:
            raise InvalidArgument("a change that closes a partition needs an id")
        await self._lanes.require_change(request.subject, request.partition, request.change_id, request.to_version)
        sequence = await self._lanes.seal(request.subject, request.partition, request.change_id, request.to_version)
        return pb.SealResponse(sequence=sequence)

    @reading
    async def DescribeLanes(self, request: pb.DescribeLanesRequest) -> pb.DescribeLanesResponse:
        return await self._lanes.describe(request)

    @answering
    async def PlaceLanes(self, request: pb.PlaceLanesRequest) -> pb.PlaceLanesResponse:
        held = request.record_revision
        await self._lanes.place(request.subject, request.group, request.places, moves=request.moves, record_revision=held)
        return pb.PlaceLanesResponse()

    @reading
    async def DescribeParked(self, request: pb.DescribeParkedRequest) -> pb.DescribeParkedResponse:
        only = request.key if request.HasField("key") else None
        return pb.DescribeParkedResponse(keys=self._lanes.parked(request.subject, request.group, request.keys_max, only))

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


async def serve_control(
    broker: Broker,
    standing: GroupStatus,
    broker_group: str,
    host: str,
    port: int,
    *,
    also: Callable[[grpc.aio.Server], None] | None = None,
    time: ReplicaTime | None = None,
    wall: Clock | None = None,
    network: Network = NETWORK,
    access: OpenAccess | None = None,
    bounds: RpcBounds | None = None,
    process: DescribeProcess = pb.ProcessStatus,
    own: NameSource = any_server,
) -> RpcPort:
    """Serve the control port of the replica with the name `own`. `also` may add services. Raises OSError if the port is taken."""
    guard = RpcGuard(access, local_uid=lambda: only_uid(host, served.port)) if isinstance(access, AccessControl) else None
    bounds = bounds or RpcBounds(control_connections_max(limit(), network.rpc_descriptors(host)), CALLS_MAX)
    door = RpcListener(bounds) if guard is None else RpcListener(bounds, guard.refused, guard.peers)
    server = rpc_server(door, (NameCheck(own), *(() if guard is None else (guard,))))
    admin, lanes = BrokerAdmin(broker, broker_group), LaneAdmin(broker, broker_group)
    service = ControlService(admin, lanes, standing, broker_group, time=time, wall=wall, process=process)
    control_pb2_grpc.add_BrokerControlServicer_to_server(service, server)
    if also is not None:
        also(server)
    served = await network.serve(server, host, port, door)
    return served
