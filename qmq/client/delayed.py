"""Cancel, move, show and list pending delayed messages. Requests go through a metaserver to the master of the delay group.

If the answer to a change is lost, the client repeats the request until it knows the outcome, or until its time limit:

* Cancel: a cancelled message answers as cancelled, so repeating is harmless. TooLate means that the message is delivered, whichever request
  came first.
* Move: the new due time is fixed at the first request, so repeating changes nothing more. If the first request moved the message and it was
  delivered since, the second one gets TooLate: then the client asks for the message's due time, and if that is not known, the error's
  outcome is unknown.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

import grpc

from qmq.client import due_times
from qmq.client.connection import TIMING, ClientTiming, pause_s
from qmq.client.delayed_message import DelayedMessage, DelayStats, message_of, stats_of
from qmq.client.due_times import When
from qmq.errors import InvalidArgument, NotConnected, Outcome, QmqError, TooLate, Unavailable
from qmq.model import DelayedId, check_name
from qmq.proto.v1 import delay_pb2 as pb
from qmq.rpc import CODE

if TYPE_CHECKING:
    from qmq.client.metadata import MetadataClient

PAGE: Final = 500


class Delayed:
    """Pending delayed messages: `Client.delayed`. An `id` is a receipt's `delayed_id`."""

    def __init__(
        self, metadata: Callable[[], MetadataClient], now_ns: Callable[[], int] = time.time_ns, timing: ClientTiming = TIMING
    ) -> None:
        self._metadata = metadata
        self._now_ns = now_ns
        self._timing = timing

    async def cancel(self, id: str | DelayedId) -> DelayedMessage:
        """Cancel a delayed message, or all further runs of a recurring one. Cancelling it again has the same result.

        Raises TooLate if the message is on its way or delivered, MessageNotFound, InvalidArgument; Unavailable (see its `outcome`),
        ClientClosed.
        """
        found = await self._ask("CancelDelayed", pb.CancelDelayedRequest(id=_id_text(id)))
        return message_of(found)

    async def move(self, id: str | DelayedId, when: When) -> DelayedMessage:
        """Change the due time, by a timedelta from now or a datetime; a time in the past means now. For a recurring message this moves the
        next run only: the runs between its time by the schedule and the new one come after it, late, and none comes twice.

        Raises as `cancel`, and DelayTooLong.
        """
        request = pb.MoveDelayedRequest(id=_id_text(id), due_ms=max(due_times.due_ms(when, self._now_ns()), 1))
        try:
            found = await self._ask("MoveDelayed", request)
        except TooLate as late:
            if late.outcome is not Outcome.UNKNOWN:
                raise
            found = await self._moved(request, late)
        return message_of(found)

    async def _moved(self, request: pb.MoveDelayedRequest, late: TooLate) -> pb.DelayedMessage:
        """The message, if this client's request moved it before it was delivered."""
        try:
            found: pb.DelayedMessage = await self._ask("ShowDelayed", pb.ShowDelayedRequest(id=request.id))
        except QmqError:
            raise late from None
        if found.due_ms != request.due_ms:
            raise late
        return found

    async def show(self, id: str | DelayedId) -> DelayedMessage:
        """The message and its state. Raises MessageNotFound, InvalidArgument, Unavailable, ClientClosed."""
        found = await self._ask("ShowDelayed", pb.ShowDelayedRequest(id=_id_text(id)))
        return message_of(found)

    async def list(
        self,
        subject: str = "",
        start: datetime | None = None,
        end: datetime | None = None,
        limit: int | None = None,
        *,
        is_half: bool = False,
        silent: dict[str, str] | None = None,
    ) -> AsyncIterator[DelayedMessage]:
        """Pending messages of a subject (default: all subjects) that are due from `start` on and before `end`, ordered by due time, without
        bodies; at most `limit`. With `is_half`, only half messages, which wait for a decision: see `Client.delayed_producer`.

        Raises InvalidName, InvalidArgument; NotConnected if a delay group does not answer, because the list would be incomplete. With a
        dict as `silent` an incomplete list is returned if at least one group answers; the dict then says which groups are missing, and why.
        """
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 0):
            raise InvalidArgument(f"limit is a number of messages, not {limit!r}")
        request = pb.ListDelayedRequest(
            subject=check_name("subject", subject) if subject else "",
            from_ms=0 if start is None else max(due_times.time_ms(start, "start"), 1),
            to_ms=0 if end is None else max(due_times.time_ms(end, "end"), 1),
            is_half=is_half,
        )
        left = limit
        while left is None or left > 0:
            request.messages_max = PAGE if left is None else min(left, PAGE)
            page = await self._metadata().list_delayed(request)
            if page.silent and silent is None:
                raise NotConnected(
                    f"{', '.join(sorted(page.silent))} did not answer, so those messages are missing: {'; '.join(page.silent.values())}"
                )
            if silent is not None:
                silent.update(page.silent)
            for found in page.messages:
                yield message_of(found)
            left = None if left is None else left - len(page.messages)
            if not page.next:
                return
            request.after = page.next

    async def stats(self) -> DelayStats:
        """Pending messages, lateness of deliveries, and which delay groups did not answer. Raises NotConnected, ClientClosed."""
        return stats_of(await self._metadata().describe_delays())

    async def _ask(self, method: str, request: Any) -> Any:
        """The answer. A failure after an earlier try that may have done the request has an unknown outcome, except TooLate to a cancel."""
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        is_uncertain, attempt = False, 0
        while True:
            try:
                return await self._metadata().ask_delayed(method, request)
            except Unavailable as failure:
                is_uncertain |= method != "ShowDelayed" and _may_be_done(failure)
                rest_s = pause_s(self._timing.decide_retry_s, attempt) * random.uniform(0.7, 1.3)  # noqa: S311 - jitter, not a secret
                if loop.time() + rest_s > begun_s + self._timing.decide_s:
                    raise _in_doubt(failure) if is_uncertain else failure from failure
            except QmqError as failure:
                if is_uncertain and not (method == "CancelDelayed" and isinstance(failure, TooLate)):
                    raise _in_doubt(failure) from failure
                raise
            attempt += 1
            await asyncio.sleep(rest_s)


def _id_text(given: object) -> str:
    """The id as text. Raises InvalidArgument if it is malformed."""
    return str(given if isinstance(given, DelayedId) else DelayedId.parse(given))  # type: ignore[arg-type]


def _may_be_done(failure: Unavailable) -> bool:
    """Whether the delay group may have done the request. A broken connection says nothing about it."""
    cause = failure.__cause__
    trailers = cause.trailing_metadata() or () if isinstance(cause, grpc.aio.AioRpcError | grpc.Call) else ()
    is_said = CODE in {key for key, _ in trailers}
    return failure.outcome is Outcome.UNKNOWN or not is_said


def _in_doubt(failure: QmqError) -> QmqError:
    found = type(failure)(f"{failure.message} (an earlier answer was lost, so it may have been done)", outcome=Outcome.UNKNOWN)
    found.code = failure.code
    return found
