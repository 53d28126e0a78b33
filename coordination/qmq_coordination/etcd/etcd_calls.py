"""Calls over all endpoints: which calls are repeated, and for how long.

    reads     (get, list, keep-alive, status, and grant, whose number is chosen here) are repeated until the total deadline
    changes   are repeated only while it is certain that nothing was done (see failures); otherwise they raise CoordinationUnknown
              immediately: the caller reads the outcome back (qmq_coordination.unknown_outcomes)

Each attempt uses the current endpoint, and leaves it after a failure. Between attempts there is a growing random pause, so that the clients
of a dead member do not reach the next one at the same time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

import grpc
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay, wait_random_exponential

from qmq.errors import CoordinationError, CoordinationUnknown
from qmq.request_changes import note_change
from qmq_coordination.etcd.endpoints import EtcdEndpoint
from qmq_coordination.etcd.etcd_channel import Channels, EtcdConnection, Metadata, NotReady
from qmq_coordination.etcd.etcd_methods import Method, Request, Response
from qmq_coordination.etcd.failures import CallVerdict, refusal, unanswered, verdict

Send = Callable[[EtcdConnection, float, Metadata], Awaitable[Response]]

CALL_S: Final = 1.0
"""Deadline of one attempt: a stopped member never answers, and etcd normally answers within milliseconds."""
TOTAL_S: Final = 5.0
"""Time after which a read is given up: two elections at etcd's default of 1 s, and their repetitions after split votes."""
_ATTEMPT_S_MIN: Final = 0.05


class TryAgain(Exception):
    """The attempt failed, and repeating it is harmless. The text says why."""


class EtcdCalls:
    """Makes calls. Only this class decides about retries."""

    def __init__(self, channels: Channels, call_s: float, total_s: float) -> None:
        self._channels = channels
        self._call_s = call_s
        self._total_s = total_s

    async def read(self, method: Method[Request, Response], request: Request) -> Response:
        """Make a call that changes nothing. Raises CoordinationUnavailable, or the error with which etcd refuses."""
        return await self._repeat(lambda at, timeout_s, metadata: at.unary(method, request, timeout_s, metadata), is_change=False)

    async def change(self, method: Method[Request, Response], request: Request) -> Response:
        """Make a call that changes something. Raises CoordinationUnknown, CoordinationUnavailable, or the error with which etcd refuses."""
        try:
            return await self._repeat(lambda at, timeout_s, metadata: at.unary(method, request, timeout_s, metadata), is_change=True)
        except CoordinationUnknown:
            note_change()
            raise

    async def read_at(self, endpoint: EtcdEndpoint, method: Method[Request, Response], request: Request) -> Response:
        """As `read`, by one attempt at this endpoint. Raises TryAgain instead of CoordinationUnavailable."""
        until = asyncio.get_running_loop().time() + self._call_s
        return await self._attempt(
            lambda at, timeout_s, metadata: at.unary(method, request, timeout_s, metadata), until, is_change=False, endpoint=endpoint
        )

    async def exchange(self, method: Method[Request, Response], request: Request) -> Response:
        """One message in each direction over a stream, treated as a read: keep-alives have no other form."""

        async def send(at: EtcdConnection, timeout_s: float, metadata: Metadata) -> Response:
            call = at.stream(method, metadata, requests=iter([request]), timeout_s=timeout_s)
            try:
                async for answer in call:
                    return answer
            finally:
                call.cancel()
            raise TryAgain(f"{at.endpoint.address} ended the stream without an answer")

        return await self._repeat(send, is_change=False)

    async def _repeat(self, send: Send[Response], *, is_change: bool) -> Response:
        until = asyncio.get_running_loop().time() + self._total_s
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(TryAgain),
            wait=wait_random_exponential(multiplier=0.02, max=0.5),
            stop=stop_after_delay(self._total_s),
            reraise=True,
        )
        tried: list[str] = []

        async def attempt() -> Response:
            try:
                return await self._attempt(send, until, is_change)
            except TryAgain as failure:
                tried.append(str(failure))
                raise

        try:
            return await retrying(attempt)
        except TryAgain:
            channels = self._channels
            strangers = list(channels.strangers.values())
            raise unanswered(
                tried, str(channels.rotation), self._total_s, shows_certificate=channels.shows_certificate, strangers=strangers
            ) from None

    async def _attempt(self, send: Send[Response], until: float, is_change: bool, endpoint: EtcdEndpoint | None = None) -> Response:
        timeout_s = min(self._call_s, max(_ATTEMPT_S_MIN, until - asyncio.get_running_loop().time()))
        is_sent = False
        try:
            connection = await self._channels.take(timeout_s, endpoint)
            metadata: Metadata = ()
            try:
                metadata = await self._channels.metadata(connection, timeout_s)
                await self._channels.verify(connection, metadata, timeout_s)
                is_sent = is_change
                answer = await send(connection, timeout_s, metadata)
                self._channels.check(connection, answer.header)
                return answer
            except grpc.aio.AioRpcError as failure:
                raise judge(self._channels, connection, metadata, failure, is_change=is_sent) from None
            finally:
                await self._channels.give_back(connection)
        except NotReady as failure:
            raise (CoordinationUnknown if is_sent else TryAgain)(str(failure)) from None
        except (asyncio.CancelledError, grpc.aio.UsageError) as cause:
            # Closing a channel cancels its calls, and gRPC then cancels the callers as if *they* had been cancelled.
            if not self._channels.closed.is_set() or is_cancelling():
                raise
            kind = CoordinationUnknown if is_sent and isinstance(cause, asyncio.CancelledError) else CoordinationError
            raise kind("the coordination store was closed during the call") from None


def is_cancelling() -> bool:
    """True if a CancelledError is meant for the current task."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def judge(
    channels: Channels, connection: EtcdConnection, metadata: Metadata, failure: grpc.aio.AioRpcError, *, is_change: bool
) -> Exception:
    """The error to raise after a failed call. Leaves the endpoint, or drops the token, that caused the failure."""
    details = failure.details() or ""
    found = verdict(failure.code(), details)
    text = f"{connection.endpoint.address}: {failure.code().name} {details}"
    if found is CallVerdict.REFUSED:
        return refusal(details)
    if found is CallVerdict.OLD_TOKEN:
        if channels.user is None:
            return CoordinationError(f"etcd requires a user and a password ({details}): set them")
        channels.forget_token(metadata)
        return TryAgain(text)
    channels.rotation.leave(connection.endpoint)
    if is_change and found is CallVerdict.UNKNOWN:
        return CoordinationUnknown(f"the answer to a change was lost: read back the outcome ({text})")
    return TryAgain(text)
