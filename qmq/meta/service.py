"""The metaserver's gRPC service: requests in, answers or typed errors out. `catalog` decides;
`calls` calls brokers.

Queries about messages go to the masters of all groups that may have some of the subject. If the
answer would be wrong without a group, the call fails with the name of the missing group. A found
message is returned even if other groups are silent. Descriptions for people leave out silent groups
and name them.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass

from qmq_coordination.view import ClusterView

from qmq.errors import InvalidArgument, MessageNotFound, OrderMismatch, UnknownGroup, UnknownSubject
from qmq.meta.calls import (
    CHANGE_S,
    Brokers,
    Delays,
    describe_dead_letters,
    find_every,
    trace_message,
)
from qmq.meta.catalog import ClusterCatalog, SchemaService
from qmq.meta.deletion import Deletion
from qmq.meta.delivery import DeliveryService
from qmq.meta.description import ClusterDescription, route_of
from qmq.meta.ordered.service import OrderedService
from qmq.meta.watchers import Watchers
from qmq.model import Order, check_name
from qmq.proto.v1 import control_pb2 as control
from qmq.proto.v1 import delay_pb2 as delay
from qmq.proto.v1 import meta_pb2 as pb
from qmq.proto.v1 import meta_pb2_grpc
from qmq.rpc.channel import answering, streaming
from qmq.wire.subject_settings import changes_of, config_of, flush_of, settings_of


@dataclass(frozen=True, slots=True)
class MetaParts:
    """The parts of a metaserver that answer requests."""

    cluster: ClusterCatalog
    view: ClusterView
    brokers: Brokers
    watchers: Watchers
    ordered: OrderedService
    delays: Delays
    delivery: DeliveryService
    deletion: Deletion
    description: ClusterDescription
    schemas: SchemaService


class MetaService(meta_pb2_grpc.MetaServicer):
    def __init__(self, parts: MetaParts) -> None:
        self._parts = parts

    # --- subjects ---------------------------------------------------------------------------------

    @answering
    async def Locate(self, request: pb.LocateRequest) -> pb.LocateResponse:
        config, routes = await self._parts.cluster.locate(
            check_name("subject", request.subject),
            create=request.create_if_missing,
            delayed=request.delayed,
        )
        found = pb.LocateResponse(
            settings=settings_of(config),
            routes=routes,
            hosts=() if request.delayed else self._parts.cluster.hosts(config),
            cluster=self._parts.view.cluster,
        )
        if config.order is not Order.NONE:
            state = await self._parts.cluster.ordered(config)
            assert state.route is not None
            found.route.CopyFrom(route_of(state.route, state.fenced))
        return found

    @streaming
    async def Watch(self, request: pb.WatchRequest) -> AsyncGenerator[pb.WatchResponse, None]:
        async for changes in self._parts.watchers.watch():
            yield changes

    @answering
    async def CreateSubject(self, request: pb.CreateSubjectRequest) -> pb.CreateSubjectResponse:
        asked = config_of(request.settings)
        if request.at_first_message:
            await self._parts.cluster.require_creation(asked.name)
        config = await self._parts.cluster.create(asked, partitions=request.settings.partitions)
        return pb.CreateSubjectResponse(settings=settings_of(config))

    @answering
    async def PlaceSubject(self, request: pb.PlaceSubjectRequest) -> pb.PlaceSubjectResponse:
        config = await self._parts.cluster.place(
            check_name("subject", request.subject), tuple(request.broker_groups)
        )
        return pb.PlaceSubjectResponse(settings=settings_of(config))

    @answering
    async def SetSubjectFlush(
        self, request: pb.SetSubjectFlushRequest
    ) -> pb.SetSubjectFlushResponse:
        config = await self._parts.cluster.set_flush(
            check_name("subject", request.subject), flush_of(request.flush)
        )
        return pb.SetSubjectFlushResponse(settings=settings_of(config))

    @answering
    async def AlterSubject(self, request: pb.AlterSubjectRequest) -> pb.AlterSubjectResponse:
        config = await self._parts.cluster.alter(
            check_name("subject", request.subject), changes_of(request)
        )
        return pb.AlterSubjectResponse(settings=settings_of(config))

    @answering
    async def SetSubjectSchema(self, request: pb.SetSubjectSchemaRequest) -> pb.SubjectSchema:
        return await self._parts.schemas.declare(request)

    @answering
    async def ListSubjectSchemas(
        self, request: pb.ListSubjectSchemasRequest
    ) -> pb.ListSubjectSchemasResponse:
        return await self._parts.schemas.list(request)

    @answering
    async def DeleteSubjectSchemas(
        self, request: pb.DeleteSubjectSchemasRequest
    ) -> pb.DeleteSubjectSchemasResponse:
        return await self._parts.schemas.delete(request)

    @answering
    async def DeleteSubject(
        self, request: control.DropSubjectRequest
    ) -> control.DropSubjectResponse:
        return control.DropSubjectResponse(
            queues=await self._parts.deletion.delete_subject(request.subject)
        )

    @answering
    async def PurgeSubject(
        self, request: control.DropSubjectRequest
    ) -> control.DropSubjectResponse:
        queues, messages = await self._parts.deletion.purge_subject(request.subject)
        return control.DropSubjectResponse(queues=queues, messages=messages)

    @answering
    async def DeleteDeadLetters(
        self, request: control.DropSubjectRequest
    ) -> control.DropSubjectResponse:
        return control.DropSubjectResponse(
            queues=await self._parts.deletion.delete_dead_letters(request.subject)
        )

    @answering
    async def ListSubjects(self, request: pb.ListSubjectsRequest) -> pb.ListSubjectsResponse:
        if request.is_name:
            named = self._parts.view.subject(request.prefix)
            subjects = [named] if named is not None else []
        else:
            subjects = self._parts.view.subjects(request.prefix)
        groups = sorted(
            {group for config in subjects for group in self._parts.cluster.hosts(config)}
        )
        queues: dict[str, list[control.Queue]] = {}
        silent: dict[str, str] = {}
        if groups:
            asked = control.DescribeQueuesRequest(subject=request.prefix if request.is_name else "")
            answers = await self._parts.brokers.ask_masters(groups, "DescribeQueues", asked)
            silent = answers.silent
            for answer in answers.found.values():
                for queue in answer.queues:
                    queues.setdefault(queue.subject, []).append(queue)
        return pb.ListSubjectsResponse(
            subjects=[
                pb.SubjectDescription(settings=settings_of(each), queues=queues.get(each.name, ()))
                for each in subjects
            ],
            silent=silent,
        )

    # --- asking brokers ---------------------------------------------------------------------------

    async def _hosts(self, subject: str) -> tuple[str, ...]:
        """The groups to call: all groups if no subject is named."""
        if not subject:
            return tuple(self._parts.cluster.group_names())
        return self._parts.cluster.hosts(await self._parts.cluster.subject(subject))

    @answering
    async def DescribeGroups(
        self, request: control.DescribeGroupsRequest
    ) -> control.DescribeGroupsResponse:
        hosts = await self._hosts(request.subject)
        if (
            request.subject
            and request.group
            and (await self._parts.cluster.subject(request.subject)).order is not Order.NONE
        ):
            raise OrderMismatch(
                f"subject {request.subject!r} is ordered: its groups are described with its route, "
                f"by `MetadataClient.describe_route` or `qmq group show {request.subject} "
                f"{request.group}`"
            )
        answers = await self._parts.brokers.ask_masters(
            hosts, "DescribeGroups", request, absent=(UnknownGroup,)
        )
        found = answers.partial()
        return control.DescribeGroupsResponse(
            groups=[group for answer in found for group in answer.groups],
            readers=[reader for answer in found for reader in answer.readers],
            silent=answers.silent,
        )

    @answering
    async def ResetGroup(self, request: control.ResetGroupRequest) -> control.ResetGroupResponse:
        """See meta.proto. Moves nothing unless every group that may have messages answers first."""
        if (
            await self._parts.cluster.subject(check_name("subject", request.subject))
        ).order is not Order.NONE:
            return await self._parts.ordered.reset_group(request)
        hosts = await self._hosts(check_name("subject", request.subject))
        if request.broker_group:
            if request.broker_group not in hosts:
                names = ", ".join(hosts)
                raise InvalidArgument(
                    f"broker group {request.broker_group!r} has nothing of "
                    f"{request.subject!r}: name one of {names}"
                )
            hosts = (request.broker_group,)
        asked = control.DescribeGroupsRequest(subject=request.subject, group=request.group)
        known = await self._parts.brokers.ask_masters(
            hosts, "DescribeGroups", asked, absent=(UnknownGroup,)
        )
        known.complete()
        if request.HasField("sequence") and len(known.found) > 1:
            raise InvalidArgument(
                f"a sequence belongs to one broker group, not to {', '.join(known.found)}: "
                "name one, or give a time"
            )
        absent = UnknownGroup, UnknownSubject
        answers = await self._parts.brokers.ask_masters(
            hosts, "ResetGroup", request, absent=absent, is_change=True, at_most_once=True
        )
        answers.require_all(
            f"moved on {', '.join(answers.found)}, but not everywhere: reset again"
            if answers.found
            else ""
        )
        return control.ResetGroupResponse(
            moved=[moved for answer in answers.complete() for moved in answer.moved]
        )

    @answering
    async def DeleteGroup(self, request: control.DeleteGroupRequest) -> control.DeleteGroupResponse:
        """See meta.proto. Deletes nothing unless every broker group that may know the group answers
        first, and none has a consumer.
        """
        subject = check_name("subject", request.subject)
        if (await self._parts.cluster.subject(subject)).order is not Order.NONE:
            return await self._parts.ordered.delete_group(request)
        hosts = await self._hosts(subject)
        asked = control.DescribeGroupsRequest(subject=subject, group=request.group)
        known = await self._parts.brokers.ask_masters(
            hosts, "DescribeGroups", asked, absent=(UnknownGroup,)
        )
        consumers = sorted(
            {
                each.name
                for answer in known.complete()
                for group in answer.groups
                for each in group.consumers
            }
        )
        if consumers:
            raise InvalidArgument(
                f"group {request.group!r} has consumers on {subject!r}; stop them first: "
                f"{', '.join(consumers)}"
            )
        answers = await self._parts.brokers.ask_masters(
            hosts, "DeleteGroup", request, absent=(UnknownGroup,), is_change=True
        )
        answers.require_all(
            f"deleted on {', '.join(answers.found)}, but not everywhere: delete again"
            if answers.found
            else ""
        )
        return control.DeleteGroupResponse(
            queues=sum(answer.queues for answer in answers.complete())
        )

    @answering
    async def FindMessage(self, request: control.FindMessageRequest) -> control.FindMessageResponse:
        if request.every:
            hosts = await self._hosts(
                check_name("subject", request.subject) if request.subject else ""
            )
            return await find_every(
                self._parts.brokers, (*hosts, *self._parts.delays.groups()), request
            )
        hosts = await self._hosts(check_name("subject", request.subject))
        answers = await self._parts.brokers.ask_masters(
            hosts, "FindMessage", request, absent=(MessageNotFound, UnknownSubject)
        )
        for answer in answers.found.values():
            found: control.FindMessageResponse = answer
            return found
        answers.require_all(f"not on {', '.join(answers.absent)}" if answers.absent else "")
        raise MessageNotFound(
            f"no kept message of {request.subject!r} has the id {request.message_id}: it was "
            "never stored, or retention deleted it"
        )

    @answering
    async def TraceMessage(
        self, request: control.TraceMessageRequest
    ) -> control.TraceMessageResponse:
        return await trace_message(self._parts.brokers, request)

    @answering
    async def FindTime(self, request: control.FindTimeRequest) -> control.FindTimeResponse:
        hosts = await self._hosts(check_name("subject", request.subject))
        answers = await self._parts.brokers.ask_masters(hosts, "FindTime", request)
        return control.FindTimeResponse(
            found=[moved for answer in answers.complete() for moved in answer.found]
        )

    # --- broker groups ----------------------------------------------------------------------------

    @answering
    async def DescribeCluster(
        self, request: pb.DescribeClusterRequest
    ) -> pb.DescribeClusterResponse:
        return await (
            self._parts.description.of_metaserver()
            if request.only_metaserver
            else self._parts.description.of_all()
        )

    @answering
    async def SetGroupMode(self, request: pb.SetGroupModeRequest) -> pb.SetGroupModeResponse:
        mode = await self._parts.cluster.set_mode(request.broker_group, request.mode)
        return pb.SetGroupModeResponse(mode=mode.value)

    @answering
    async def Transfer(self, request: pb.GroupTransferRequest) -> control.TransferResponse:
        state = await self._parts.cluster.group(request.broker_group)
        forwarded = control.TransferRequest(to=request.to)
        done: control.TransferResponse = await self._parts.brokers.ask_master(
            state.name, "Transfer", forwarded, timeout_s=CHANGE_S, is_change=True
        )
        return done

    @answering
    async def ChangeReplicas(
        self, request: pb.GroupChangeReplicasRequest
    ) -> control.ChangeReplicasResponse:
        state = await self._parts.cluster.group(request.broker_group)
        check_name("replica", request.change.add or request.change.remove)
        done: control.ChangeReplicasResponse = await self._parts.brokers.ask_master(
            state.name, "ChangeReplicas", request.change, timeout_s=CHANGE_S, is_change=True
        )
        return done

    # --- ordered subjects -------------------------------------------------------------------------

    @answering
    async def ChangeRoute(self, request: pb.ChangeRouteRequest) -> pb.ChangeRouteResponse:
        return await self._parts.ordered.change_route(request)

    @answering
    async def DescribeRoute(self, request: pb.DescribeRouteRequest) -> pb.DescribeRouteResponse:
        return await self._parts.ordered.describe_route(request)

    @answering
    async def RouteHistory(self, request: pb.RouteHistoryRequest) -> pb.RouteHistoryResponse:
        return await self._parts.ordered.route_history(request)

    @answering
    async def SyncMember(self, request: pb.SyncMemberRequest) -> pb.SyncMemberResponse:
        return await self._parts.ordered.sync_member(request)

    @answering
    async def DescribeParked(
        self, request: control.DescribeParkedRequest
    ) -> control.DescribeParkedResponse:
        return await self._parts.ordered.describe_parked(request)

    @answering
    async def Unpark(self, request: control.UnparkRequest) -> control.UnparkResponse:
        return await self._parts.ordered.unpark(request)

    @answering
    async def SetReshardPolicy(self, request: pb.SetReshardPolicyRequest) -> pb.ReshardPolicy:
        return await self._parts.ordered.set_reshard_policy(request)

    @answering
    async def ExplainReshard(self, request: pb.ExplainReshardRequest) -> pb.ExplainReshardResponse:
        return await self._parts.ordered.explain_reshard(request)

    # --- settings of groups, pauses ---------------------------------------------------------------

    @answering
    async def SetGroupSettings(
        self, request: pb.SetGroupSettingsRequest
    ) -> pb.DescribeGroupSettingsResponse:
        return await self._parts.delivery.set_settings(request)

    @answering
    async def DescribeGroupSettings(
        self, request: pb.DescribeGroupSettingsRequest
    ) -> pb.DescribeGroupSettingsResponse:
        return await self._parts.delivery.describe(request.subject, request.group)

    @answering
    async def SetPause(self, request: pb.SetPauseRequest) -> pb.SetPauseResponse:
        return await self._parts.delivery.set_pause(request)

    @answering
    async def ListPauses(self, request: pb.ListPausesRequest) -> pb.ListPausesResponse:
        return pb.ListPausesResponse(pauses=self._parts.delivery.pauses())

    @answering
    async def DescribeDeadLetters(
        self, request: pb.DescribeDeadLettersRequest
    ) -> pb.DescribeDeadLettersResponse:
        return await describe_dead_letters(
            self._parts.brokers, self._parts.cluster.group_names(), request.group
        )

    # --- delayed messages -------------------------------------------------------------------------

    @answering
    async def CancelDelayed(self, request: delay.CancelDelayedRequest) -> delay.DelayedMessage:
        return await self._parts.delays.one("CancelDelayed", request)

    @answering
    async def MoveDelayed(self, request: delay.MoveDelayedRequest) -> delay.DelayedMessage:
        return await self._parts.delays.one("MoveDelayed", request)

    @answering
    async def ShowDelayed(self, request: delay.ShowDelayedRequest) -> delay.DelayedMessage:
        return await self._parts.delays.one("ShowDelayed", request)

    @answering
    async def ListDelayed(self, request: delay.ListDelayedRequest) -> delay.ListDelayedResponse:
        return await self._parts.delays.listed(request)

    @answering
    async def DescribeDelays(self, request: pb.DescribeDelaysRequest) -> pb.DescribeDelaysResponse:
        return await self._parts.delays.describe()
