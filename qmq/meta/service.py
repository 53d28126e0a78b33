"""The metaserver's service over gRPC. It reads the coordination store, and asks brokers what only they know."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

import grpc
from qmq_coordination.registry import BrokerRecord, brokers
from qmq_coordination.store import CoordinationStore
from qmq_coordination.subjects import SubjectCatalog

from qmq.broker.control import bind
from qmq.errors import MessageNotFound, NotConnected, UnknownGroup, UnknownSubject
from qmq.limits import BODY_BYTES_MAX
from qmq.model import SubjectConfig, check_name
from qmq.proto.v1 import control_pb2 as control
from qmq.proto.v1 import control_pb2_grpc, meta_pb2_grpc
from qmq.proto.v1 import meta_pb2 as pb
from qmq.rpc import CHANNEL_OPTIONS, SERVER_OPTIONS, answering, typed_error

BROKER_TIMEOUT_S: Final = 5.0


class MetaService(meta_pb2_grpc.MetaServicer):
    """See meta.proto. With `auto_create` a first send creates its subject."""

    def __init__(self, store: CoordinationStore, *, auto_create: bool) -> None:
        self._store = store
        self._catalog = SubjectCatalog(store)
        self._auto_create = auto_create
        self._channels: dict[str, grpc.aio.Channel] = {}

    # --- subjects ------------------------------------------------------------------------------------------------------

    @answering
    async def Locate(self, request: pb.LocateRequest) -> pb.LocateResponse:
        """See meta.proto."""
        name = check_name("subject", request.subject)
        config = await self._catalog.get(name)
        if config is None:
            if not (request.create_if_missing and self._auto_create):
                raise UnknownSubject(f"there is no subject {name!r}: create it with `qmq subject create {name}`")
            config = await self._catalog.create(SubjectConfig(name))
        routes = [
            pb.QueueRoute(partition=0, broker_group=each.group, data_address=each.data_address, epoch=each.epoch)
            for each in await self._brokers()
        ]
        return pb.LocateResponse(settings=settings_of(config), routes=routes)

    async def _brokers(self) -> list[BrokerRecord]:
        found = await brokers(self._store)
        if not found:
            raise NotConnected("no broker is registered: is one running, and can it reach the coordination store?")
        return found

    @answering
    async def CreateSubject(self, request: pb.CreateSubjectRequest) -> pb.CreateSubjectResponse:
        """See meta.proto."""
        config = await self._catalog.create(config_of(request.settings))
        return pb.CreateSubjectResponse(settings=settings_of(config))

    @answering
    async def ListSubjects(self, request: pb.ListSubjectsRequest) -> pb.ListSubjectsResponse:
        """See meta.proto."""
        subjects = await self._catalog.list(request.prefix)
        answers = await self._ask_all("DescribeQueues", control.DescribeQueuesRequest())
        queues: dict[str, list[control.Queue]] = {}
        for answer in answers:
            for queue in answer.queues:
                queues.setdefault(queue.subject, []).append(queue)
        return pb.ListSubjectsResponse(
            subjects=[
                pb.SubjectDescription(settings=settings_of(each), queues=queues.get(each.name, ())) for each in subjects
            ]
        )

    # --- what brokers know ---------------------------------------------------------------------------------------------

    @answering
    async def DescribeGroups(self, request: control.DescribeGroupsRequest) -> control.DescribeGroupsResponse:
        """See meta.proto."""
        await self._require_subject(request.subject)
        answers = await self._ask_all("DescribeGroups", request, UnknownGroup)
        return control.DescribeGroupsResponse(groups=[group for answer in answers for group in answer.groups])

    @answering
    async def ResetGroup(self, request: control.ResetGroupRequest) -> control.ResetGroupResponse:
        """See meta.proto."""
        await self._require_subject(request.subject)
        answers = await self._ask_all("ResetGroup", request, UnknownGroup)
        return control.ResetGroupResponse(moved=[moved for answer in answers for moved in answer.moved])

    @answering
    async def FindMessage(self, request: control.FindMessageRequest) -> control.FindMessageResponse:
        """See meta.proto."""
        await self._require_subject(request.subject)
        found: control.FindMessageResponse = (await self._ask_all("FindMessage", request, MessageNotFound))[0]
        return found

    @answering
    async def FindTime(self, request: control.FindTimeRequest) -> control.FindTimeResponse:
        """See meta.proto."""
        await self._require_subject(request.subject)
        answers = await self._ask_all("FindTime", request)
        return control.FindTimeResponse(found=[moved for answer in answers for moved in answer.found])

    @answering
    async def DescribeCluster(self, request: pb.DescribeClusterRequest) -> pb.DescribeClusterResponse:
        """See meta.proto."""
        return pb.DescribeClusterResponse(
            brokers=[
                pb.BrokerDescription(
                    broker_group=each.group, data_address=each.data_address, control_address=each.control_address,
                    epoch=each.epoch,
                )
                for each in await brokers(self._store)
            ]
        )  # fmt: skip

    async def _require_subject(self, name: str) -> None:
        if name and await self._catalog.get(name) is None:
            raise UnknownSubject(f"there is no subject {name!r}: `qmq subject list` shows which there are")

    async def _ask_all(self, method: str, request: Any, absent: type[Exception] | None = None) -> list[Any]:
        """Ask every broker. Those that answer `absent` do not count, unless all do."""
        answers, failure = [], None
        for each in await self._brokers():
            try:
                answers.append(await self._ask(each, method, request))
            except Exception as cause:
                if absent is None or not isinstance(cause, absent):
                    raise
                failure = cause
        if not answers and failure is not None:
            raise failure
        return answers

    async def _ask(self, record: BrokerRecord, method: str, request: Any) -> Any:
        address = record.control_address
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        call: Callable[..., Awaitable[Any]] = getattr(control_pb2_grpc.BrokerControlStub(channel), method)
        try:
            return await call(request, timeout=BROKER_TIMEOUT_S)
        except grpc.aio.AioRpcError as cause:
            raise typed_error(cause, address) from cause

    async def close(self) -> None:
        """End the connections to the brokers."""
        for channel in self._channels.values():
            await channel.close()


def settings_of(config: SubjectConfig) -> pb.SubjectSettings:
    """A subject's settings as a protobuf message."""
    return pb.SubjectSettings(
        name=config.name, retention_ms=config.retention_ms, retention_bytes=config.retention_bytes,
        body_bytes_max=config.body_bytes_max,
    )  # fmt: skip


def config_of(settings: pb.SubjectSettings) -> SubjectConfig:
    """The inverse. Raises InvalidName, InvalidArgument."""
    return SubjectConfig(
        settings.name,
        settings.retention_ms if settings.HasField("retention_ms") else None,
        settings.retention_bytes if settings.HasField("retention_bytes") else None,
        settings.body_bytes_max or BODY_BYTES_MAX,
    )


async def serve_meta(service: MetaService, host: str, port: int) -> tuple[grpc.aio.Server, int]:
    """Serve the metaserver's port; the server and the port it got. Raises OSError if the port is taken."""
    server = grpc.aio.server(options=SERVER_OPTIONS)
    meta_pb2_grpc.add_MetaServicer_to_server(service, server)
    bound = bind(server, host, port)
    await server.start()
    return server, bound
