"""The metaserver as a client sees it: where subjects are, and administration. Calls fail over between metaservers."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Final

import grpc
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay, wait_random_exponential

from qmq.client.locator import Pushed
from qmq.client.routes import Route
from qmq.errors import CallerError, InvalidArgument, NotConnected, QmqError, Unavailable
from qmq.model import SubjectConfig
from qmq.proto.v1 import control_pb2 as control
from qmq.proto.v1 import control_pb2_grpc, meta_pb2_grpc
from qmq.proto.v1 import meta_pb2 as pb
from qmq.rpc import CHANNEL_OPTIONS, typed_error

CALL_TIMEOUT_S: Final = 5.0
LOCATE_TIMEOUT_S: Final = 2.0
"""A metaserver that hangs is left for the next one by then."""
SLOW_CALL_TIMEOUT_S: Final = 60.0
"""Handing over a mastership, or letting a replica catch up before it counts."""
RETRY_S: Final = 3.0
WATCH_RETRY_S: Final = (0.1, 0.5, 2.0, 5.0)


class MetadataClient:
    """Asks metaservers; every call raises the typed error that the server raised, or NotConnected."""

    def __init__(self, addresses: list[str]) -> None:
        self._channels = {each: grpc.aio.insecure_channel(each, options=CHANNEL_OPTIONS) for each in addresses}
        self._turns = itertools.cycle(addresses)
        self._address = next(self._turns)

    async def _call(
        self, method: str, request: Any, *, retry_s: float = RETRY_S, timeout_s: float = CALL_TIMEOUT_S
    ) -> Any:
        """Ask; on an unreachable server go on to the next one, with jitter, until `retry_s` is over."""
        async for attempt in AsyncRetrying(
            retry=retry_if_exception_type(Unavailable),
            stop=stop_after_delay(retry_s),
            wait=wait_random_exponential(multiplier=0.05, max=0.5),
            reraise=True,
        ):
            with attempt:
                return await self._call_once(method, request, timeout_s)
        raise AssertionError("the loop above returns or raises")

    async def _call_once(self, method: str, request: Any, timeout_s: float) -> Any:
        address = self._address
        call: Callable[..., Awaitable[Any]] = getattr(meta_pb2_grpc.MetaStub(self._channels[address]), method)
        try:
            return await call(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as cause:
            failure = typed_error(cause, address)
            if isinstance(failure, Unavailable):
                self.turn()
            raise failure from cause

    def turn(self) -> None:
        """Ask the next metaserver from now on."""
        self._address = next(self._turns)

    # --- where things are ----------------------------------------------------------------------------------------------

    async def locate(self, subject: str, *, create: bool = False) -> pb.LocateResponse:
        """Where the subject's queues are. Raises UnknownSubject, NotConnected."""
        found: pb.LocateResponse = await self._call("Locate", pb.LocateRequest(subject=subject, create_if_missing=create))
        if not found.routes:
            raise NotConnected(f"no broker has subject {subject!r} just now")
        return found

    async def routes(self, subject: str, *, create: bool = False) -> list[Route]:
        """The same for those who keep pauses and ask again by themselves: one try. Raises UnknownSubject, NotConnected."""
        request = pb.LocateRequest(subject=subject, create_if_missing=create)
        found: pb.LocateResponse
        try:
            found = await self._call_once("Locate", request, LOCATE_TIMEOUT_S)
        except (CallerError, Unavailable):
            raise
        except QmqError as cause:
            # A metaserver that is cut off from its store, or stumbles: the next one may know.
            self.turn()
            raise NotConnected(f"the metaserver could not say where {subject!r} is: {cause}") from cause
        if not found.routes:
            raise NotConnected(f"no broker has subject {subject!r} just now")
        return [
            Route(each.broker_group, each.data_address, each.epoch, each.is_writable)
            for each in found.routes
            if each.partition == 0
        ]

    async def watch(self) -> AsyncIterator[Pushed]:
        """What metaservers push, for ever; resumed at the next one when a stream ends. Ends if none of them knows how to push."""
        attempt, strangers = 0, 0
        addresses = itertools.cycle(self._channels)
        while strangers < len(self._channels):
            stub = meta_pb2_grpc.MetaStub(self._channels[next(addresses)])
            try:
                async for change in stub.Watch(pb.WatchRequest()):
                    attempt = strangers = 0
                    yield Pushed(change.subjects, change.broker_groups)
            except grpc.aio.AioRpcError as cause:
                strangers = strangers + 1 if cause.code() is grpc.StatusCode.UNIMPLEMENTED else 0
            await asyncio.sleep(WATCH_RETRY_S[min(attempt, len(WATCH_RETRY_S) - 1)] * random.uniform(0.5, 1.0))  # noqa: S311 - jitter
            attempt += 1
            if not strangers:
                yield Pushed(is_gap=True)

    # --- subjects and groups -------------------------------------------------------------------------------------------

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
        self, subject: str, group: str, *, to: str | None = None, time_ms: int | None = None, sequence: int | None = None,
        broker_group: str | None = None,
    ) -> list[control.Moved]:  # fmt: skip
        """Move a group: `to` is "earliest" or "latest", or give a time or a sequence. Not repeated on a lost answer.

        On every broker group that has the subject, or on one: then that one's master is asked directly.
        """
        request = control.ResetGroupRequest(subject=subject, group=group)
        if sequence is not None:
            request.sequence = sequence
        elif time_ms is not None:
            request.time_ms = time_ms
        elif to in ("earliest", "latest"):
            setattr(request, to, True)
        else:
            raise InvalidArgument("say where the group shall go: earliest, latest, a time or a sequence")
        found: control.ResetGroupResponse
        if broker_group is None:
            found = await self._call("ResetGroup", request, retry_s=0)
        else:
            found = await self._reset_at_master(request, broker_group)
        return list(found.moved)

    async def _reset_at_master(self, request: control.ResetGroupRequest, broker_group: str) -> control.ResetGroupResponse:
        address = await self._control_address(broker_group)
        async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
            try:
                found: control.ResetGroupResponse = await control_pb2_grpc.BrokerControlStub(channel).ResetGroup(
                    request, timeout=CALL_TIMEOUT_S
                )
            except grpc.aio.AioRpcError as cause:
                raise typed_error(cause, address) from cause
        return found

    async def _control_address(self, broker_group: str) -> str:
        for group in (await self.cluster()).groups:
            for replica in group.replicas:
                if group.broker_group == broker_group and replica.replica == group.master:
                    return replica.control_address
        raise NotConnected(f"broker group {broker_group} has no master just now")

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

    # --- the cluster ---------------------------------------------------------------------------------------------------

    async def cluster(self) -> pb.DescribeClusterResponse:
        """The broker groups, each with its replicas; and for how long the metaserver has not heard the coordination store."""
        found: pb.DescribeClusterResponse = await self._call("DescribeCluster", pb.DescribeClusterRequest())
        return found

    async def place_subject(self, subject: str, broker_groups: Sequence[str]) -> pb.SubjectSettings:
        """Choose where a subject lives. What is stored elsewhere stays consumable there. Raises UnknownSubject, InvalidArgument."""
        request = pb.PlaceSubjectRequest(subject=subject, broker_groups=broker_groups)
        placed: pb.PlaceSubjectResponse = await self._call("PlaceSubject", request)
        return placed.settings

    async def set_group_mode(self, broker_group: str, mode: str) -> str:
        """"read-only" drains a broker group, "read-write" resumes it. Raises InvalidArgument."""
        request = pb.SetGroupModeRequest(broker_group=broker_group, mode=mode)
        found: pb.SetGroupModeResponse = await self._call("SetGroupMode", request)
        return found.mode

    async def transfer(self, broker_group: str, to: str = "") -> control.TransferResponse:
        """Hand a group's mastership over, to the most advanced replica unless one is named. Not repeated on a lost answer."""
        request = pb.GroupTransferRequest(broker_group=broker_group, to=to)
        found: control.TransferResponse = await self._call("Transfer", request, retry_s=0, timeout_s=SLOW_CALL_TIMEOUT_S)
        return found

    async def add_replica(self, broker_group: str, replica: str) -> control.ChangeReplicasResponse:
        """Let a replica join a group: it learns, then counts. Not repeated on a lost answer."""
        return await self._change_replicas(broker_group, control.ChangeReplicasRequest(add=replica))

    async def remove_replica(self, broker_group: str, replica: str) -> control.ChangeReplicasResponse:
        """Have a replica leave a group. Not repeated on a lost answer."""
        return await self._change_replicas(broker_group, control.ChangeReplicasRequest(remove=replica))

    async def _change_replicas(
        self, broker_group: str, change: control.ChangeReplicasRequest
    ) -> control.ChangeReplicasResponse:
        request = pb.GroupChangeReplicasRequest(broker_group=broker_group, change=change)
        found: control.ChangeReplicasResponse = await self._call(
            "ChangeReplicas", request, retry_s=0, timeout_s=SLOW_CALL_TIMEOUT_S
        )
        return found

    async def close(self) -> None:
        """End the connections."""
        for channel in self._channels.values():
            await channel.close()
