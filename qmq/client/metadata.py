"""The metaserver as a client sees it: where subjects are, and administration. Calls fail over between metaservers."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable
from typing import Any, Final

import grpc
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay, wait_random_exponential

from qmq.errors import InvalidArgument, NotConnected, Unavailable
from qmq.model import SubjectConfig
from qmq.proto.v1 import control_pb2 as control
from qmq.proto.v1 import meta_pb2 as pb
from qmq.proto.v1 import meta_pb2_grpc
from qmq.rpc import CHANNEL_OPTIONS, typed_error

CALL_TIMEOUT_S: Final = 5.0
RETRY_S: Final = 3.0


class MetadataClient:
    """Asks metaservers; every call raises the typed error that the server raised, or NotConnected."""

    def __init__(self, addresses: list[str]) -> None:
        self._channels = {each: grpc.aio.insecure_channel(each, options=CHANNEL_OPTIONS) for each in addresses}
        self._turns = itertools.cycle(addresses)
        self._address = next(self._turns)

    async def _call(self, method: str, request: Any, *, retry_s: float = RETRY_S) -> Any:
        """Ask; on an unreachable server go on to the next one, with jitter, until `retry_s` is over."""
        async for attempt in AsyncRetrying(
            retry=retry_if_exception_type(Unavailable),
            stop=stop_after_delay(retry_s),
            wait=wait_random_exponential(multiplier=0.05, max=0.5),
            reraise=True,
        ):
            with attempt:
                return await self._call_once(method, request)
        raise AssertionError("the loop above returns or raises")

    async def _call_once(self, method: str, request: Any) -> Any:
        address = self._address
        call: Callable[..., Awaitable[Any]] = getattr(meta_pb2_grpc.MetaStub(self._channels[address]), method)
        try:
            return await call(request, timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as cause:
            failure = typed_error(cause, address)
            if isinstance(failure, Unavailable):
                self._address = next(self._turns)
            raise failure from cause

    async def locate(self, subject: str, *, create: bool = False) -> pb.LocateResponse:
        """Where the subject's queues are. Raises UnknownSubject, NotConnected."""
        found: pb.LocateResponse = await self._call("Locate", pb.LocateRequest(subject=subject, create_if_missing=create))
        if not found.routes:
            raise NotConnected(f"no broker has subject {subject!r} just now")
        return found

    async def create_subject(self, config: SubjectConfig) -> pb.SubjectSettings:
        """Create a subject. Raises SubjectExists, InvalidName, InvalidArgument."""
        settings = pb.SubjectSettings(
            name=config.name, retention_ms=config.retention_ms, retention_bytes=config.retention_bytes,
            body_bytes_max=config.body_bytes_max,
        )  # fmt: skip
        created: pb.CreateSubjectResponse = await self._call("CreateSubject", pb.CreateSubjectRequest(settings=settings))
        return created.settings

    async def list_subjects(self, prefix: str = "") -> list[pb.SubjectDescription]:
        """Subjects with their queues."""
        found: pb.ListSubjectsResponse = await self._call("ListSubjects", pb.ListSubjectsRequest(prefix=prefix))
        return list(found.subjects)

    async def describe_groups(self, subject: str = "", group: str = "") -> list[control.Group]:
        """What groups consumed. Raises UnknownSubject, UnknownGroup."""
        request = control.DescribeGroupsRequest(subject=subject, group=group)
        found: control.DescribeGroupsResponse = await self._call("DescribeGroups", request)
        return list(found.groups)

    async def reset_group(
        self, subject: str, group: str, *, to: str | None = None, time_ms: int | None = None, sequence: int | None = None
    ) -> list[control.Moved]:
        """Move a group: `to` is "earliest" or "latest", or give a time or a sequence. Not repeated on a lost answer."""
        request = control.ResetGroupRequest(subject=subject, group=group)
        if sequence is not None:
            request.sequence = sequence
        elif time_ms is not None:
            request.time_ms = time_ms
        elif to in ("earliest", "latest"):
            setattr(request, to, True)
        else:
            raise InvalidArgument("say where the group shall go: earliest, latest, a time or a sequence")
        found: control.ResetGroupResponse = await self._call("ResetGroup", request, retry_s=0)
        return list(found.moved)

    async def find_message(self, subject: str, message_id: str) -> control.StoredMessage:
        """A stored message by its id. Raises MessageNotFound, UnknownSubject."""
        request = control.FindMessageRequest(subject=subject, message_id=message_id)
        found: control.FindMessageResponse = await self._call("FindMessage", request)
        return found.message

    async def find_time(self, subject: str, time_ms: int) -> list[control.Moved]:
        """In each queue the first message stored at or after a time. Raises UnknownSubject."""
        request = control.FindTimeRequest(subject=subject, time_ms=time_ms)
        found: control.FindTimeResponse = await self._call("FindTime", request)
        return list(found.found)

    async def cluster(self) -> list[pb.BrokerDescription]:
        """The brokers that are there."""
        found: pb.DescribeClusterResponse = await self._call("DescribeCluster", pb.DescribeClusterRequest())
        return list(found.brokers)

    async def close(self) -> None:
        """End the connections."""
        for channel in self._channels.values():
            await channel.close()
