"""The client's calls to metaservers, which fail over between them: the location of subjects, and
administration, also of delivery: settings of consumer groups, dead letters, pauses
(docs/DELIVERY.md).
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Final, Literal

import grpc
from qmq_ordering.lanes import Lane
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception_type,
    stop_after_attempt,
    stop_after_delay,
    wait_random_exponential,
)
from tenacity.stop import stop_base

from qmq.client.connection.connection import TIMING, ClientTiming, ReachPatience
from qmq.client.consuming.ordered.membership import Assigned, Member
from qmq.client.metadata.cache import (
    DescribedGroups,
    FoundSubject,
    Partial,
    Placement,
    Pushed,
    assigned_lane,
    lanes_of,
    placement_of,
    schema_of,
)
from qmq.errors import (
    CallerError,
    CoordinationUnknown,
    InvalidArgument,
    NotConnected,
    Outcome,
    QmqError,
    RouteConflict,
    TlsFailed,
    Unavailable,
)
from qmq.model import (
    Compatibility,
    DeclaredSchema,
    GroupSettings,
    Order,
    SchemaFormat,
    SubjectConfig,
    SubjectFlush,
    check_name,
    dead_letter_subject,
    texts,
)
from qmq.proto.v1 import access_pb2_grpc, control_pb2_grpc, meta_pb2_grpc
from qmq.proto.v1 import control_pb2 as control
from qmq.proto.v1 import delay_pb2 as delay
from qmq.proto.v1 import meta_pb2 as pb
from qmq.rpc.channel import is_answer, status_of, typed_error
from qmq.rpc.network import NETWORK, Network
from qmq.rpc.server_name import ServerName, always
from qmq.wire.number_fields import request_of
from qmq.wire.subject_settings import settings_of

CALL_TIMEOUT_S: Final = 5.0
RETRY_S: Final = 3.0


class _NoTls(stop_base):
    """Stops when all of `count` metaservers refused TLS, which retrying does not fix."""

    def __init__(self, unreachable: Mapping[str, QmqError], count: int) -> None:
        self._unreachable, self._count = unreachable, count

    def __call__(self, _: RetryCallState) -> bool:
        refused = [each for each in self._unreachable.values() if isinstance(each, TlsFailed)]
        return len(refused) == self._count


class MetaserverCalls:
    """Every call raises the typed error that the server raised, or NotConnected."""

    def __init__(
        self,
        addresses: list[str],
        network: Network = NETWORK,
        timing: ClientTiming = TIMING,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._network = network
        self._timing = timing
        self._cluster = ""
        """The cluster of the metaserver that answered first.
        Metaservers of another cluster refuse.
        """
        self._channels = {
            each: network.channel(each, lambda: ServerName(self._cluster)) for each in addresses
        }
        self._stubs: dict[str, Any] = {
            address: meta_pb2_grpc.MetaStub(channel) for address, channel in self._channels.items()
        }
        self._access_stubs: dict[str, Any] = {
            address: access_pb2_grpc.AccessStub(channel)
            for address, channel in self._channels.items()
        }
        self._patience = ReachPatience(now_s, timing.mistake_s)
        self._turns = itertools.cycle(addresses)
        self._address = next(self._turns)

    async def call(
        self,
        method: str,
        request: Any,
        *,
        retry_s: float = RETRY_S,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> Any:
        """Call a method of the metaservers. With a `retry_s` of 0, only one of them, once."""
        return await self._call(method, request, retry_s=retry_s, timeout_s=timeout_s)

    async def _call(
        self,
        method: str,
        request: Any,
        *,
        retry_s: float = RETRY_S,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> Any:
        """Call a method. If a server cannot be reached, try the next one, with jitter, until
        `retry_s` has passed and, unless it is 0, all servers were tried. If one of them may have
        made a change, the others' failures to answer do not deny it.
        """
        unreachable: dict[str, QmqError] = {}
        is_doubtful = False

        try:
            async for attempt in AsyncRetrying(
                retry=retry_if_exception_type(Unavailable),
                stop=_NoTls(unreachable, len(self._channels))
                | (
                    stop_after_delay(retry_s)
                    & stop_after_attempt(len(self._channels) if retry_s else 1)
                ),
                wait=wait_random_exponential(multiplier=0.05, max=0.5),
                reraise=True,
            ):
                with attempt:
                    try:
                        return await self._call_once(method, request, timeout_s, unreachable)
                    except QmqError as failure:
                        is_doubtful = is_doubtful or failure.outcome is Outcome.UNKNOWN
                        if (
                            is_doubtful
                            and failure.outcome is Outcome.NOT_STORED
                            and not isinstance(failure, CallerError)
                        ):
                            failure.outcome = Outcome.UNKNOWN
                        raise
        except Unavailable as failure:
            if len(unreachable) < 2 or failure not in unreachable.values():
                raise
            worst = next(
                (each for each in unreachable.values() if each.outcome is Outcome.UNKNOWN), failure
            )
            whole = "; ".join(each.message for each in unreachable.values())
            raise type(failure)(
                f"no metaserver answers: {whole}", outcome=worst.outcome
            ) from failure
        raise AssertionError("the loop above returns or raises")

    async def _call_once(
        self,
        method: str,
        request: Any,
        timeout_s: float,
        unreachable: dict[str, QmqError] | None = None,
    ) -> Any:
        """One try. `unreachable` collects the address if the error did not come
        from the metaserver.
        """
        address = self._address
        stubs = self._stubs if hasattr(self._stubs[address], method) else self._access_stubs
        call: Callable[..., Awaitable[Any]] = getattr(stubs[address], method)
        self._patience.tries(address)
        try:
            answer = await call(request, timeout=timeout_s)
            self._patience.reached(address)
            self._cluster = self._cluster or getattr(answer, "cluster", "")
            return answer
        except grpc.RpcError as cause:
            failure = typed_error(cause, address)
            if is_answer(cause):
                self._patience.reached(address)
            else:
                self._patience.failed(address, failure)
            if unreachable is not None and not is_answer(cause):
                unreachable[address] = failure
            # Of several calls that fail at the same time, one changes the server: two changes could
            # lead back to it.
            if isinstance(failure, Unavailable) and self._address == address:
                self.use_next_server()
            raise self._patience.error_for(failure, self._channels) from cause

    def use_next_server(self) -> None:
        """Use the next metaserver from now on."""
        self._address = next(self._turns)

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()


class DeliveryClient(MetaserverCalls):
    """Part of `MetadataClient`. Every call may be repeated after a lost answer."""

    # --- settings of groups -----------------------------------------------------------------------

    async def set_group_settings(
        self,
        subject: str,
        group: str,
        *,
        attempts_max: int | None = None,
        retry_delays_ms: Sequence[int] | None = None,
    ) -> pb.DescribeGroupSettingsResponse:
        """Set how a group's messages are retried, on a subject or on all ("*"). None leaves a
        setting as it is. Returns the resulting settings.

        Raises UnknownSubject, OrderMismatch (on an ordered subject, consumers set this),
        InvalidName, InvalidArgument.
        """
        default = GroupSettings()
        GroupSettings(
            default.attempts_max if attempts_max is None else attempts_max,
            default.retry_delays_ms if retry_delays_ms is None else tuple(retry_delays_ms),
        ).check()
        request = pb.SetGroupSettingsRequest(
            subject=subject, group=group, attempts_max=attempts_max, retry_delays_ms=retry_delays_ms
        )
        found: pb.DescribeGroupSettingsResponse = await self._call("SetGroupSettings", request)
        return found

    async def clear_group_settings(
        self, subject: str, group: str
    ) -> pb.DescribeGroupSettingsResponse:
        """Delete a group's settings: then those of the group on all subjects apply, or else the
        brokers' defaults. Raises InvalidName.
        """
        request = pb.SetGroupSettingsRequest(subject=subject, group=group, clears=True)
        found: pb.DescribeGroupSettingsResponse = await self._call("SetGroupSettings", request)
        return found

    async def group_settings(self, subject: str, group: str) -> pb.DescribeGroupSettingsResponse:
        """The settings that apply, and the source of each: the subject's name, "*", or "" for the
        brokers' defaults. Raises as `set_group_settings`.
        """
        request = pb.DescribeGroupSettingsRequest(subject=subject, group=group)
        found: pb.DescribeGroupSettingsResponse = await self._call("DescribeGroupSettings", request)
        return found

    async def delete_group(self, subject: str, group: str) -> int:
        """Delete a group's progress. Returns the number of queues or partitions on which the group
        had progress. A later group of the same name starts as a new one.

        The parked keys of a group of an ordered subject are deleted with it.

        Raises InvalidArgument while the group has consumers, UnknownSubject, UnknownGroup (so does
        a repeated call), NotConnected.
        """
        request = control.DeleteGroupRequest(subject=subject, group=group)
        found: control.DeleteGroupResponse = await self._call("DeleteGroup", request)
        return found.queues

    async def delete_subject(self, name: str) -> int:
        """Delete a subject with its messages and groups. Returns the number of queues from which
        data was deleted. Raises UnknownSubject, InvalidArgument.

        Raises NotConnected if a broker group does not answer: clients no longer see the subject,
        and the group deletes its data when it is back.
        """
        request = control.DropSubjectRequest(subject=name)
        found: control.DropSubjectResponse = await self._call("DeleteSubject", request)
        return found.queues

    async def purge_subject(self, name: str) -> int:
        """Delete all messages that a subject has now, for good. Returns their number. The subject
        stays, and its groups continue after these messages.

        Raises UnknownSubject, InvalidArgument; NotConnected if a broker group does not answer; the
        other broker groups have then deleted theirs.
        """
        found: control.DropSubjectResponse = await self._call(
            "PurgeSubject", control.DropSubjectRequest(subject=name)
        )
        return found.messages

    # --- dead letters -----------------------------------------------------------------------------

    async def delete_dead_letters(self, group: str) -> int:
        """Delete all current dead letters of a group. Returns the number of broker groups that had
        any. Raises InvalidName, NotConnected.
        """
        request = control.DropSubjectRequest(
            subject=dead_letter_subject(check_name("group", group))
        )
        found: control.DropSubjectResponse = await self._call("DeleteDeadLetters", request)
        return found.queues

    async def dead_letter_queues(self, group: str = "") -> Partial[pb.DeadLetterQueue]:
        """The number of dead letters of a group, or of all, on each broker group that answers.
        Raises InvalidName, NotConnected.
        """
        found: pb.DescribeDeadLettersResponse = await self._call(
            "DescribeDeadLetters", pb.DescribeDeadLettersRequest(group=group)
        )
        return Partial(found.queues, found.silent)

    # --- pauses -----------------------------------------------------------------------------------

    async def pause_group(self, subject: str, group: str, *, reason: str = "") -> bool:
        """Pause a group on a subject or on all ("*"): brokers hand it nothing until it is resumed.
        Returns whether it was not paused before.

        Raises UnknownSubject, InvalidName, InvalidArgument. The other methods for pauses raise the
        same.
        """
        return not await self._set_pause(
            pb.Pause(kind="group", subject=subject, group=group, reason=reason), is_paused=True
        )

    async def resume_group(self, subject: str, group: str) -> bool:
        """Resume a group. Returns whether it was paused on just that subject, or on "*"."""
        return await self._set_pause(
            pb.Pause(kind="group", subject=subject, group=group), is_paused=False
        )

    async def pause_consumer(
        self, subject: str, group: str, name: str, *, reason: str = ""
    ) -> bool:
        """Pause one consumer of a group. Returns as `pause_group`."""
        whom = pb.Pause(kind="consumer", subject=subject, group=group, name=name, reason=reason)
        return not await self._set_pause(whom, is_paused=True)

    async def resume_consumer(self, subject: str, group: str, name: str) -> bool:
        """Resume a consumer. Returns whether it was paused."""
        return await self._set_pause(
            pb.Pause(kind="consumer", subject=subject, group=group, name=name), is_paused=False
        )

    async def pause_client(self, name: str, *, reason: str = "") -> bool:
        """Pause all consumers of the clients with a name (`qmq.connect(..., name=...)`).
        Returns as `pause_group`.
        """
        return not await self._set_pause(
            pb.Pause(kind="client", name=name, reason=reason), is_paused=True
        )

    async def resume_client(self, name: str) -> bool:
        """Resume the clients with a name. Returns whether they were paused."""
        return await self._set_pause(pb.Pause(kind="client", name=name), is_paused=False)

    async def _set_pause(self, pause: pb.Pause, *, is_paused: bool) -> bool:
        """Set or delete a pause. Returns whether it existed before."""
        found: pb.SetPauseResponse = await self._call(
            "SetPause", pb.SetPauseRequest(pause=pause, is_paused=is_paused)
        )
        return found.was_paused

    async def pauses(self) -> list[pb.Pause]:
        """All pauses of the cluster: groups, consumers, clients."""
        found: pb.ListPausesResponse = await self._call("ListPauses", pb.ListPausesRequest())
        return list(found.pauses)


LOCATE_TIMEOUT_S: Final = 2.0
"""A metaserver that has not answered after this time is left for the next one."""
WATCH_RETRY_S: Final = (0.1, 0.5, 2.0, 5.0)
PARKED_KEYS_MAX: Final = 10_000


class MetadataClient(DeliveryClient):
    """Calls metaservers. Every call raises the typed error that the server
    raised, or NotConnected.
    """

    # --- where things are -------------------------------------------------------------------------

    async def locate(self, subject: str, *, create: bool = False) -> pb.LocateResponse:
        """Where the subject's queues are. Raises UnknownSubject, NotConnected."""
        found: pb.LocateResponse = await self._call(
            "Locate", pb.LocateRequest(subject=subject, create_if_missing=create)
        )
        if not found.routes:
            raise NotConnected(f"no broker has subject {subject!r} now: try again soon")
        return found

    async def routes(
        self, subject: str, *, create: bool = False, delayed: bool = False
    ) -> Placement:
        """Like `locate`, with a single try, for callers that retry by themselves. Raises
        UnknownSubject, NotConnected.

        `delayed`: where the subject's delayed messages go.
        """
        request = pb.LocateRequest(subject=subject, create_if_missing=create, delayed=delayed)
        found: pb.LocateResponse
        try:
            found = await self._call_once("Locate", request, LOCATE_TIMEOUT_S)
        except (CallerError, Unavailable):
            raise
        except QmqError as cause:
            # This metaserver cannot reach its store, or has an internal error: the next one may
            # know.
            self.use_next_server()
            raise NotConnected(
                f"the metaserver could not say where {subject!r} is: {cause}"
            ) from cause
        if not found.routes:
            raise NotConnected(
                f"no {'delay group takes messages of' if delayed else 'broker has'} subject "
                f"{subject!r} at the moment: try again soon"
            )
        return placement_of(subject, found)

    async def watch(self) -> AsyncIterator[Pushed]:
        """The changes that metaservers push; a stream that ends is resumed at the next metaserver.
        Ends if none of them supports it.
        """
        attempt, strangers = 0, 0
        addresses = itertools.cycle(self._channels)
        while strangers < len(self._channels):
            stub = self._stubs[next(addresses)]
            try:
                async with aclosing(stub.Watch(pb.WatchRequest())) as changes:
                    async for change in changes:
                        attempt = strangers = 0
                        yield Pushed(change.subjects, change.broker_groups)
            except grpc.RpcError as cause:
                strangers = (
                    strangers + 1 if status_of(cause) is grpc.StatusCode.UNIMPLEMENTED else 0
                )
            pause_s = WATCH_RETRY_S[min(attempt, len(WATCH_RETRY_S) - 1)]
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))  # noqa: S311 - jitter
            attempt += 1
            if not strangers:
                yield Pushed(is_gap=True)

    # --- subjects and groups ----------------------------------------------------------------------

    async def create_subject(
        self, config: SubjectConfig, *, partitions: int = 0, at_first_message: bool = False
    ) -> pb.SubjectSettings:
        """Create a subject. An ordered subject gets `partitions` partitions; 0 means one for each
        of its broker groups.

        `at_first_message`: only if the servers create subjects at their first message, otherwise
        UnknownSubject. Raises SubjectExists, InvalidName, InvalidArgument.
        """
        if partitions and config.order is Order.NONE:
            raise InvalidArgument(
                f"subject {config.name!r} is unordered: only an ordered one has partitions "
                "to choose"
            )
        settings = settings_of(config, partitions=partitions)
        created: pb.CreateSubjectResponse = await self._call(
            "CreateSubject",
            pb.CreateSubjectRequest(settings=settings, at_first_message=at_first_message),
        )
        return created.settings

    async def list_subjects(self, prefix: str = "") -> Partial[pb.SubjectDescription]:
        """Subjects with their queues, except those on broker groups that do not answer."""
        found: pb.ListSubjectsResponse = await self._call(
            "ListSubjects", pb.ListSubjectsRequest(prefix=prefix)
        )
        return Partial(found.subjects, found.silent)

    async def find_subject(self, name: str) -> FoundSubject | None:
        """The subject, without its queues on broker groups that do not answer: `silent` has those.
        None if it does not exist.
        """
        listed: pb.ListSubjectsResponse = await self._call(
            "ListSubjects", pb.ListSubjectsRequest(prefix=name, is_name=True)
        )
        found = (
            FoundSubject(each, dict(listed.silent))
            for each in listed.subjects
            if each.settings.name == name
        )
        return next(found, None)

    async def describe_groups(self, subject: str = "", group: str = "") -> DescribedGroups:
        """The progress of groups of unordered subjects, on the broker groups that answer.
        `describe_route` has those of an ordered one. Unless a group is named, `readers` has the
        readers without a group, also those of ordered subjects.

        Raises UnknownSubject, UnknownGroup; OrderMismatch for a group of an ordered subject;
        NotConnected if none answers.
        """
        request = control.DescribeGroupsRequest(subject=subject, group=group)
        return DescribedGroups(await self._call("DescribeGroups", request))

    async def reset_group(
        self,
        subject: str,
        group: str,
        *,
        to: str | None = None,
        time_ms: int | None = None,
        sequence: int | None = None,
        broker_group: str | None = None,
        directly: bool = True,
    ) -> list[control.Moved]:
        """Move a group to "earliest" or "latest" (`to`), to a time, or to a sequence. Not repeated
        after a lost answer.

        Applies to every broker group of the subject, or to `broker_group` only. `directly` calls
        that group's master without the metaserver.
        """
        target: dict[str, int | bool]
        if sequence is not None:
            target = {"sequence": sequence}
        elif time_ms is not None:
            target = {"time_ms": time_ms}
        elif to in ("earliest", "latest"):
            target = {to: True}
        else:
            raise InvalidArgument(
                "give the group's new position: earliest, latest, a time or a sequence"
            )
        request = request_of(control.ResetGroupRequest, subject=subject, group=group, **target)
        found: control.ResetGroupResponse
        if broker_group is None or not directly:
            request.broker_group = broker_group or ""
            found = await self._call("ResetGroup", request, retry_s=0)
        else:
            found = await self._reset_at_master(request, broker_group)
        return list(found.moved)

    async def _reset_at_master(
        self, request: control.ResetGroupRequest, broker_group: str
    ) -> control.ResetGroupResponse:
        address, server = await self._master(broker_group)
        async with self._network.channel(address, always(server)) as channel:
            try:
                found: control.ResetGroupResponse = await control_pb2_grpc.BrokerControlStub(
                    channel
                ).ResetGroup(request, timeout=CALL_TIMEOUT_S)
            except grpc.RpcError as cause:
                raise typed_error(cause, address) from cause
        return found

    async def _master(self, broker_group: str) -> tuple[str, ServerName]:
        """The control address and the name of a broker group's master."""
        found = await self.cluster()
        for group in found.groups:
            for replica in group.replicas:
                if group.broker_group == broker_group and replica.replica == group.master:
                    return replica.control_address, ServerName(
                        found.cluster, broker_group, replica.replica
                    )
        raise NotConnected(f"broker group {broker_group} has no master at the moment")

    async def find_message(self, subject: str, message_id: str) -> control.StoredMessage:
        """Find a stored message by its id. Raises MessageNotFound, UnknownSubject."""
        request = control.FindMessageRequest(subject=subject, message_id=message_id)
        found: control.FindMessageResponse = await self._call("FindMessage", request)
        return found.message

    async def find_every(
        self, message_id: str, subject: str = "", *, since_ms: int = 0
    ) -> control.FindMessageResponse:
        """Every place where a message is stored, in one subject or in all; delay groups included.

        Batches that delay groups delivered are searched from `since_ms` on. Raises MessageNotFound,
        UnknownSubject.
        """
        request = request_of(
            control.FindMessageRequest,
            subject=subject,
            message_id=message_id,
            every=True,
            since_ms=since_ms,
        )
        found: control.FindMessageResponse = await self._call("FindMessage", request)
        return found

    async def trace_message(
        self, place: control.StoredMessage, group: str = "", cursor: bytes = b""
    ) -> control.TraceMessageResponse:
        """The deliveries of a stored message to groups, and their verdicts, page by page: pass the
        answer's cursor for the next page. Raises MessageNotFound."""
        request = control.TraceMessageRequest(
            subject=place.subject,
            partition=place.partition,
            broker_group=place.broker_group,
            sequence=place.sequence,
            group=group,
            cursor=cursor,
        )
        found: control.TraceMessageResponse = await self._call("TraceMessage", request)
        return found

    async def find_time(self, subject: str, time_ms: int) -> list[control.Moved]:
        """In each queue, the first message stored at or after a time. Raises UnknownSubject."""
        request = request_of(control.FindTimeRequest, subject=subject, time_ms=time_ms)
        found: control.FindTimeResponse = await self._call("FindTime", request)
        return list(found.found)

    # --- ordered subjects -------------------------------------------------------------------------

    async def change_route(
        self,
        subject: str,
        *,
        split: pb.SplitOperation | None = None,
        merge: pb.MergeOperation | None = None,
        move: pb.MoveOperation | None = None,
        from_version: int = 0,
        reason: str = "",
        dry_run: bool = False,
    ) -> pb.ChangeRouteResponse:
        """Split, merge or move partitions. Returns when the next route is published, or with
        `dry_run` when it is planned.

        After a lost answer the call is repeated only if `from_version` is given, because then the
        change is made at most once. Otherwise the error is raised, and `route_history` shows
        whether the change was made.

        Raises RouteConflict, UnknownSubject, OrderMismatch, UnknownPartition, InvalidArgument;
        DeadlineExceeded with the outcome STORED if the change has begun but is not published in
        time: it continues. Other errors have the outcome UNKNOWN if the change may be made.
        """
        if sum(each is not None for each in (split, merge, move)) != 1:
            raise InvalidArgument("a change of a route is one split, one merge or one move")
        request = request_of(
            pb.ChangeRouteRequest,
            subject=subject,
            from_version=from_version,
            split=split,
            merge=merge,
            move=move,
            reason=reason,
            dry_run=dry_run,
            change_id="" if dry_run else uuid.uuid4().hex,
        )
        found: pb.ChangeRouteResponse
        if dry_run:
            found = await self._call("ChangeRoute", request)
            return found
        try:
            found = await self._call_once("ChangeRoute", request, self._timing.slow_call_s)
        except (Unavailable, CoordinationUnknown) as failure:
            if not from_version:
                raise
            return await self._change_again(request, failure)
        return found

    async def _change_again(
        self, request: pb.ChangeRouteRequest, first: QmqError
    ) -> pb.ChangeRouteResponse:
        """Repeat a change after a lost answer. The metaservers recognize the change by its id, and
        answer when it is published.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timing.slow_call_s
        found: pb.ChangeRouteResponse
        while True:
            try:
                found = await self._call("ChangeRoute", request, timeout_s=self._timing.slow_call_s)
            except RouteConflict:
                # another change leads to the next version, so this one was not made and never will
                # be
                raise
            except QmqError as failure:
                if failure.outcome is Outcome.STORED and loop.time() < deadline:
                    continue  # begun: the next answer comes when it is published
                if failure.outcome.value < first.outcome.value:
                    # refused now, but the first request made the change, or may have
                    raise first from failure
                raise
            return found

    async def describe_route(self, subject: str, version: int = 0) -> pb.DescribeRouteResponse:
        """A subject's route (0: the latest), its partitions, and the progress of groups. Raises
        UnknownSubject, OrderMismatch, InvalidArgument.
        """
        request = request_of(pb.DescribeRouteRequest, subject=subject, version=version)
        found: pb.DescribeRouteResponse = await self._call("DescribeRoute", request)
        return found

    async def route_history(self, subject: str) -> list[pb.RouteChangeInfo]:
        """The changes of the subject's route, oldest first.
        Raises UnknownSubject, OrderMismatch.
        """
        found: pb.RouteHistoryResponse = await self._call(
            "RouteHistory", pb.RouteHistoryRequest(subject=subject)
        )
        return list(found.changes)

    async def parked(
        self, subject: str, group: str, *, keys_max: int = PARKED_KEYS_MAX, key: bytes | None = None
    ) -> Partial[control.ParkedKey]:
        """The first parked keys, partition by partition, or only `key`, on the broker groups that
        answer. Raises UnknownSubject, UnknownGroup, OrderMismatch.
        """
        request = request_of(
            control.DescribeParkedRequest, subject=subject, group=group, keys_max=keys_max, key=key
        )
        found: control.DescribeParkedResponse = await self._call("DescribeParked", request)
        return Partial(found.keys, found.silent)

    async def unpark(
        self, subject: str, group: str, partition: int, key: bytes, *, replay: bool
    ) -> int:
        """Replay a parked key's messages in order, or drop them (count them as done). Returns their
        number. Not repeated after a lost answer.
        """
        request = request_of(
            control.UnparkRequest,
            subject=subject,
            group=group,
            partition=partition,
            key=key,
            replay=replay,
        )
        found: control.UnparkResponse = await self._call(
            "Unpark", request, retry_s=0, timeout_s=self._timing.slow_call_s
        )
        return found.messages

    async def set_reshard_policy(self, policy: pb.ReshardPolicy) -> pb.ReshardPolicy:
        """Set the policy by which a subject is resharded automatically. Raises UnknownSubject,
        OrderMismatch, InvalidArgument.
        """
        found: pb.ReshardPolicy = await self._call(
            "SetReshardPolicy", pb.SetReshardPolicyRequest(policy=policy)
        )
        return found

    async def explain_reshard(self, subject: str) -> pb.ExplainReshardResponse:
        """The policy, what it would do now and why, and what it did last.
        Raises UnknownSubject, OrderMismatch.
        """
        found: pb.ExplainReshardResponse = await self._call(
            "ExplainReshard", pb.ExplainReshardRequest(subject=subject)
        )
        return found

    async def sync_member(
        self,
        member: Member,
        generation: int,
        wait_ms: int,
        finished: Sequence[Lane],
        *,
        leaves: bool = False,
    ) -> Assigned:
        """Register a consumer of an ordered subject and get its assignment. One try, for callers
        that retry by themselves.

        `generation` is the assignment that the consumer knows, `finished` are lanes that it has
        settled completely. Raises UnknownSubject, OrderMismatch, InvalidArgument, NotConnected.
        """
        request = pb.SyncMemberRequest(
            subject=member.subject,
            group=member.group,
            consumer=member.name,
            incarnation=member.incarnation,
            lease_ms=member.lease_ms,
            start=member.start,
            gate=member.gate,
            generation=generation,
            wait_ms=wait_ms,
            leaves=leaves,
            condition=member.condition,
            finished=[assigned_lane(each) for each in finished],
        )
        found: pb.SyncMemberResponse
        try:
            found = await self._call_once(
                "SyncMember",
                request,
                wait_ms / 1000 + min(LOCATE_TIMEOUT_S, member.lease_ms / 8000),
            )
        except (CallerError, Unavailable):
            raise
        except QmqError as cause:
            self.use_next_server()
            raise NotConnected(
                f"the metaserver could not assign lanes to consumer {member.name!r}: {cause}"
            ) from cause
        return lanes_of(found)

    # --- delayed messages -------------------------------------------------------------------------

    async def ask_delayed(self, method: str, request: Any) -> Any:
        """One call of delay.proto. One try, for callers that retry by themselves. Raises the delay
        group's error, NotConnected.
        """
        return await self._call_once(method, request, CALL_TIMEOUT_S)

    async def list_delayed(self, request: delay.ListDelayedRequest) -> delay.ListDelayedResponse:
        """A page of pending messages. Raises InvalidArgument, NotConnected."""
        found: delay.ListDelayedResponse = await self._call("ListDelayed", request)
        return found

    async def describe_delays(self) -> pb.DescribeDelaysResponse:
        """The delay groups, and which of them did not answer. Raises NotConnected."""
        found: pb.DescribeDelaysResponse = await self._call(
            "DescribeDelays", pb.DescribeDelaysRequest()
        )
        return found

    # --- the cluster ------------------------------------------------------------------------------

    async def cluster(self) -> pb.DescribeClusterResponse:
        """The broker groups with their replicas, and for how long the metaserver has not reached
        the coordination store.
        """
        found: pb.DescribeClusterResponse = await self._call(
            "DescribeCluster", pb.DescribeClusterRequest()
        )
        return found

    async def metaservers(self) -> dict[str, pb.DescribeClusterResponse | QmqError]:
        """The status of each metaserver, by its address, or the error of asking it; all are asked
        at the same time.
        """

        async def ask(address: str) -> pb.DescribeClusterResponse | QmqError:
            try:
                found: pb.DescribeClusterResponse = await self._stubs[address].DescribeCluster(
                    pb.DescribeClusterRequest(only_metaserver=True), timeout=LOCATE_TIMEOUT_S
                )
            except grpc.RpcError as cause:
                return typed_error(cause, address)
            return found

        return dict(
            zip(
                self._channels,
                await asyncio.gather(*[ask(address) for address in self._channels]),
                strict=True,
            )
        )

    async def set_subject_flush(self, subject: str, flush: SubjectFlush) -> pb.SubjectSettings:
        """Set when the subject's producers get their acknowledgement. Raises UnknownSubject."""
        request = pb.SetSubjectFlushRequest(subject=subject, flush=flush.value)
        found: pb.SetSubjectFlushResponse = await self._call("SetSubjectFlush", request)
        return found.settings

    async def alter_subject(
        self,
        subject: str,
        *,
        retention_ms: int | Literal["default"] | None = None,
        retention_bytes: int | Literal["default"] | None = None,
        body_bytes_max: int | None = None,
    ) -> pb.SubjectSettings:
        """Change settings of a subject that is in use; None leaves one as it is, and "default" is
        the brokers' own. Brokers follow within a second or two. A shorter retention deletes
        messages then; stored bodies that are longer than the new largest one stay.

        Raises UnknownSubject; InvalidArgument, also if nothing is to change.
        """
        if (retention_ms, retention_bytes, body_bytes_max) == (None, None, None):
            raise InvalidArgument(
                f"nothing of subject {subject!r} is to change: give a retention or the largest body"
            )
        kept = {"retention_ms": retention_ms, "retention_bytes": retention_bytes}
        for name, value in kept.items():
            if value is not None and value != "default" and value <= 0:
                raise InvalidArgument(
                    f"{name} of subject {subject!r} must be positive or 'default', not {value!r}"
                )
        given = {
            name: 0 if value == "default" else value
            for name, value in {**kept, "body_bytes_max": body_bytes_max}.items()
        }
        request = request_of(pb.AlterSubjectRequest, subject=subject, **given)
        found: pb.AlterSubjectResponse = await self._call("AlterSubject", request)
        return found.settings

    async def set_subject_schema(
        self,
        subject: str,
        format: SchemaFormat,
        text: str,
        compatibility: Compatibility | None = None,
        *,
        dry_run: bool = False,
    ) -> DeclaredSchema:
        """Declare the next version of a subject's schema; the newest one again changes nothing.
        `compatibility`: default as before.
        """
        chosen = "" if compatibility is None else compatibility.value
        request = pb.SetSubjectSchemaRequest(
            subject=subject, format=format.value, text=text, compatibility=chosen, dry_run=dry_run
        )
        return schema_of(await self._call("SetSubjectSchema", request))

    async def subject_schemas(self, subject: str) -> list[DeclaredSchema]:
        """All versions of a subject's schema, the newest one last. Raises UnknownSubject;
        InvalidArgument if it has none.
        """
        found: pb.ListSubjectSchemasResponse = await self._call(
            "ListSubjectSchemas", pb.ListSubjectSchemasRequest(subject=subject)
        )
        if not found.schemas:
            raise InvalidArgument(
                f"subject {subject!r} has no schema: declare one by `qmq subject schema set "
                f"{subject}`"
            )
        return [schema_of(each) for each in found.schemas]

    async def delete_subject_schemas(self, subject: str) -> int:
        """Delete all versions of a subject's schema. Returns their number.
        Raises UnknownSubject.
        """
        request = pb.DeleteSubjectSchemasRequest(subject=subject)
        found: pb.DeleteSubjectSchemasResponse = await self._call("DeleteSubjectSchemas", request)
        return found.versions

    async def place_subject(self, subject: str, broker_groups: Sequence[str]) -> pb.SubjectSettings:
        """Set the broker groups of a subject. Messages on former groups can still be consumed.
        Raises UnknownSubject, InvalidArgument.
        """
        request = pb.PlaceSubjectRequest(
            subject=subject, broker_groups=texts("broker_groups", broker_groups)
        )
        placed: pb.PlaceSubjectResponse = await self._call("PlaceSubject", request)
        return placed.settings

    async def set_group_mode(self, broker_group: str, mode: str) -> str:
        """ "read-only" drains a broker group, "read-write" resumes it. Raises InvalidArgument."""
        request = pb.SetGroupModeRequest(broker_group=broker_group, mode=mode)
        found: pb.SetGroupModeResponse = await self._call("SetGroupMode", request)
        return found.mode

    async def transfer(self, broker_group: str, to: str = "") -> control.TransferResponse:
        """Hand a group's mastership over to a replica; the default is the most advanced one. Not
        repeated after a lost answer.
        """
        request = pb.GroupTransferRequest(broker_group=broker_group, to=to)
        found: control.TransferResponse = await self._call(
            "Transfer", request, retry_s=0, timeout_s=self._timing.slow_call_s
        )
        return found

    async def add_replica(self, broker_group: str, replica: str) -> control.ChangeReplicasResponse:
        """Add a replica to a group: first as a learner, then as a voter.
        Not repeated after a lost answer.
        """
        return await self._change_replicas(broker_group, control.ChangeReplicasRequest(add=replica))

    async def remove_replica(
        self, broker_group: str, replica: str
    ) -> control.ChangeReplicasResponse:
        """Remove a replica from a group. Not repeated after a lost answer."""
        return await self._change_replicas(
            broker_group, control.ChangeReplicasRequest(remove=replica)
        )

    async def _change_replicas(
        self, broker_group: str, change: control.ChangeReplicasRequest
    ) -> control.ChangeReplicasResponse:
        request = pb.GroupChangeReplicasRequest(broker_group=broker_group, change=change)
        found: control.ChangeReplicasResponse = await self._call(
            "ChangeReplicas", request, retry_s=0, timeout_s=self._timing.slow_call_s
        )
        return found
