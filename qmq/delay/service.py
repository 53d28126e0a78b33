"""The delay server's administration over gRPC: serves the master's `EngineAdmin`, and any replica's
`ReplicaScheduleFiles`.

Rules:
* A replica that does not serve answers NotMaster, except to the two calls that copy the schedule.
* A cancelled message can be cancelled again: a caller that lost the answer repeats the call,
  perhaps at the next master, with the same result.
* Answers are limited: pages of lists and parts of files to 4 MiB.

`describe_schedule` is the caller's side of DescribeSchedule: it asks for the state piece by piece,
since it may be longer than an answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import grpc

from qmq.delay.admin import EngineAdmin, listing, mark_of, new_due_ms
from qmq.delay.batches import DueMessage
from qmq.delay.buckets import BucketInfo, is_file_name
from qmq.delay.files import ReplicaScheduleFiles
from qmq.delay.plan_log import is_half
from qmq.errors import InvalidArgument, MessageNotFound, NotMaster, TooLate, Unavailable
from qmq.limits import MIB
from qmq.model import CRON, ZONE, DelayedId
from qmq.proto.v1 import control_pb2, delay_pb2_grpc
from qmq.proto.v1 import delay_pb2 as pb
from qmq.rpc.channel import answering
from qmq.wire.batch_columns import BatchFlag

if TYPE_CHECKING:
    from qmq.delay.engine import DeliveryStatus

_TIME_MS_MAX: Final = (1 << 63) - 1
"""An older version accepted later ones."""
PAGE_BYTES_MAX: Final = 4 * MIB
READ_BYTES_MAX: Final = 4 * MIB


class DelayIdentity(NamedTuple):
    """The answering replica of a delay group, and the length of the group's buckets."""

    group: str
    replica: str
    bucket_ms: int


class DelayService(delay_pb2_grpc.DelayControlServicer):
    """Implements delay.proto. `admin` returns the `EngineAdmin` while this replica is a serving
    master, else None.
    """

    def __init__(
        self,
        identity: DelayIdentity,
        admin: Callable[[], EngineAdmin | None],
        files: ReplicaScheduleFiles,
    ) -> None:
        self._identity = identity
        self._admin_now = admin
        self._files = files
        self._described: tuple[bytes, int] | None = None
        """The state whose first piece was asked for last, until its last piece is."""

    def add_to(self, server: grpc.aio.Server) -> None:
        """Add the service to a server: `serve_control(..., also=service.add_to)`."""
        delay_pb2_grpc.add_DelayControlServicer_to_server(self, server)

    def _admin(self) -> EngineAdmin:
        admin = self._admin_now()
        if admin is None:
            raise NotMaster(
                f"replica {self._identity.replica} of delay group {self._identity.group} "
                "does not serve: ask the new master"
            )
        return admin

    def _id(self, text: str) -> DelayedId:
        delayed = DelayedId.parse(text)
        if delayed.group != self._identity.group:
            raise InvalidArgument(
                f"{text} is kept by delay group {delayed.group!r}, and this is "
                f"{self._identity.group!r}: ask there"
            )
        return delayed

    # --- one message ------------------------------------------------------------------------------

    @answering
    async def CancelDelayed(self, request: pb.CancelDelayedRequest) -> pb.DelayedMessage:
        delayed, admin = self._id(request.id), self._admin()
        try:
            cancelled = await admin.cancel(delayed)
        except (TooLate, MessageNotFound) as failure:
            cancelled = await _cancelled_before(admin, delayed, failure)
        return self._message(cancelled, str(delayed), "cancelled")

    @answering
    async def MoveDelayed(self, request: pb.MoveDelayedRequest) -> pb.DelayedMessage:
        delayed, due_ms = self._id(request.id), new_due_ms(request)
        return self._message(await self._admin().move(delayed, due_ms), str(delayed), "pending")

    @answering
    async def ShowDelayed(self, request: pb.ShowDelayedRequest) -> pb.DelayedMessage:
        delayed = self._id(request.id)
        found, state = await self._admin().show(delayed)
        shown = self._message(found, str(delayed), _shown_state(found, state))
        shown.body = found.body
        return shown

    def _message(self, message: DueMessage, delayed_id: str, state: str) -> pb.DelayedMessage:
        headers = message.headers
        is_recurring = bool(message.flags & BatchFlag.RECURRING)
        return pb.DelayedMessage(
            id=delayed_id,
            subject=message.subject,
            message_id=message.message_id.hex(),
            due_ms=message.due_ms,
            create_time_ms=min(message.create_time_ms, _TIME_MS_MAX),
            key=message.key,
            tags=message.tags,
            headers=[control_pb2.Header(name=name, value=value) for name, value in headers.items()],
            state=state,
            cron=headers.get(CRON, b"").decode() if is_recurring else "",
            zone=headers.get(ZONE, b"").decode() if is_recurring else "",
            group=self._identity.group,
            body_bytes=len(message.body),
        )

    # --- many -------------------------------------------------------------------------------------

    @answering
    async def ListDelayed(self, request: pb.ListDelayedRequest) -> pb.ListDelayedResponse:
        wanted, admin = listing(request), self._admin()
        found, behind = await admin.listed(wanted)
        messages = [
            self._message(each, str(admin.id_of(each)), _shown_state(each, "pending"))
            for each in found
        ]
        page = _within(messages, PAGE_BYTES_MAX)
        if len(page) < len(messages):
            behind = mark_of(page[-1])
        return pb.ListDelayedResponse(messages=page, next=str(behind) if behind is not None else "")

    @answering
    async def DescribeDelay(self, request: pb.DescribeDelayRequest) -> pb.DelayDescription:
        return self._description(self._admin().status())

    def _description(self, status: DeliveryStatus) -> pb.DelayDescription:
        pending = [each for each in status.buckets if each.pending]
        return pb.DelayDescription(
            group=self._identity.group,
            replica=self._identity.replica,
            buckets=[self._bucket(each) for each in pending],
            pending=sum([each.pending for each in pending]),
            wheel_messages=status.wheel_messages,
            wheel_bytes=status.wheel_bytes,
            horizon_ms=status.horizon_ms,
            waiting=status.waiting,
            planned=status.planned,
            lateness_p50_ms=status.lateness_p50_ms,
            lateness_p99_ms=status.lateness_p99_ms,
            delivered=status.delivered,
            troubles=[
                pb.DelayTrouble(subject=subject, waiting=waiting, reason=reason)
                for subject, waiting, reason in status.troubles
            ],
            time_ms=status.time_ms,
            clock_step_ms=status.clock_step_ms,
        )

    def _bucket(self, info: BucketInfo) -> pb.DelayBucket:
        length = self._identity.bucket_ms
        return pb.DelayBucket(
            start_ms=info.bucket * length,
            length_ms=length,
            messages=info.messages,
            pending=info.pending,
            stored_bytes=info.stored_bytes,
        )

    # --- for another replica ----------------------------------------------------------------------

    @answering
    async def DescribeSchedule(self, request: pb.DescribeScheduleRequest) -> pb.ScheduleDescription:
        if request.offset < 0:
            raise InvalidArgument(f"the offset in a state must be 0 or more, not {request.offset}")
        found = self._described if request.offset else None
        state, index = found if found is not None else await asyncio.to_thread(self._files.describe)
        piece = (
            state[request.offset : request.offset + READ_BYTES_MAX]
            if request.HasField("offset")
            else state
        )
        self._described = (state, index) if request.offset + len(piece) < len(state) else None
        return pb.ScheduleDescription(state=piece, index=index, state_bytes=len(state))

    @answering
    async def ReadSchedule(self, request: pb.ReadScheduleRequest) -> pb.ReadScheduleResponse:
        if not is_file_name(request.file):
            raise InvalidArgument(
                f"{request.file!r} is not a file of a schedule: names look like "
                "20261121T130000Z.log, .idx or .done"
            )
        if request.offset < 0:
            raise InvalidArgument(f"the offset in a file must be 0 or more, not {request.offset}")
        most = min(request.bytes_max or READ_BYTES_MAX, READ_BYTES_MAX)
        try:
            data = await asyncio.to_thread(self._files.read, request.file, request.offset, most)
        except FileNotFoundError:
            raise InvalidArgument(
                f"{request.file} does not exist or was deleted: describe the schedule again "
                "and restart the transfer"
            ) from None
        return pb.ReadScheduleResponse(data=data)


def _shown_state(message: DueMessage, state: str) -> str:
    """A message's state as shown to people. A pending half message has the state "half"."""
    return "half" if state == "pending" and is_half(message) else state


async def _cancelled_before(
    admin: EngineAdmin, delayed: DelayedId, failure: Exception
) -> DueMessage:
    """The message, if it is cancelled already. Raises the failure otherwise."""
    try:
        found, state = await admin.show(delayed)
    except MessageNotFound:
        raise failure from None
    if state != "cancelled":
        raise failure
    return found


def _within(messages: Iterable[pb.DelayedMessage], bytes_max: int) -> list[pb.DelayedMessage]:
    """As many messages as fit into an answer; at least one."""
    kept: list[pb.DelayedMessage] = []
    size = 0
    for message in messages:
        size += message.ByteSize()
        if kept and size > bytes_max:
            break
        kept.append(message)
    return kept


TRIES: Final = 5
"""A checkpoint that is written between two pieces makes them useless."""


async def describe_schedule(stub: Any, *, timeout_s: float) -> pb.ScheduleDescription:
    """The whole state. `timeout_s` is for one piece. Raises grpc.RpcError; Unavailable if
    checkpoints follow each other too fast.
    """
    for _ in range(TRIES):
        found: pb.ScheduleDescription = await stub.DescribeSchedule(
            pb.DescribeScheduleRequest(offset=0), timeout=timeout_s
        )
        pieces, size = [found.state], len(found.state)
        piece = found
        while size < found.state_bytes and piece.state:
            piece = await stub.DescribeSchedule(
                pb.DescribeScheduleRequest(offset=size), timeout=timeout_s
            )
            if (piece.index, piece.state_bytes) != (found.index, found.state_bytes):
                break
            pieces.append(piece.state)
            size += len(piece.state)
        if size >= found.state_bytes:
            return pb.ScheduleDescription(
                state=b"".join(pieces), index=found.index, state_bytes=found.state_bytes
            )
    raise Unavailable(
        "the replica writes checkpoints faster than its schedule's state can be read: ask "
        "again later"
    )
