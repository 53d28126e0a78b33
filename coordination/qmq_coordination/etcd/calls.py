"""Calls over all endpoints: what a failed call proves, which calls are repeated, and for how long.

    reads     (get, list, keep-alive, status, and grant, whose number is chosen here) are repeated
              until the total deadline
    changes   are repeated only while it is certain that nothing was done; otherwise they raise
              CoordinationUnknown immediately: the caller reads the outcome back
              (qmq_coordination.coordination_store)

Each attempt uses the current endpoint, and leaves it after a failure. Between attempts there is a
growing random pause, so that the clients of a dead member do not reach the next one at the same
time.

A change whose answer is lost may have been made, so the only question is: is it *certain* that the
server did nothing? The rules, each from reading etcd 3.4/3.5 (server/etcdserver, api/v3/rpctypes)
or gRPC's core:

    REFUSED     etcd decided against the request: bad argument, compacted, lease not found,
                permission denied, no space. Final.
    OLD_TOKEN   etcd checks the token before it proposes anything: nothing was done. Authenticate
                and try again.
    NOT_DONE    "no leader" comes from the interceptor in front of the handler (we send
                `hasleader`), "too many requests" from the check in front of the proposal; "failed
                to connect" and "DNS resolution failed" mean that there was no connection to send
                on.
    UNKNOWN     all else. Above all "request timed out", "leader changed" and "server stopped": they
                look like refusals, but the proposal is under way and may still be committed. A
                broken connection and a passed deadline prove nothing either.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from enum import Enum
from typing import Final

import grpc
from tenacity import (
    AsyncRetrying,
    retry_if_exception_type,
    stop_after_delay,
    wait_random_exponential,
)

from qmq.errors import (
    Compacted,
    CoordinationError,
    CoordinationTlsFailed,
    CoordinationUnavailable,
    CoordinationUnknown,
    LeaseNotFound,
    WrongCoordinationStore,
)
from qmq.rpc.request_changes import note_change
from qmq_coordination.etcd.channel import (
    Channels,
    EtcdConnection,
    EtcdEndpoint,
    Metadata,
    Method,
    NotReady,
    Request,
    Response,
)


class LeaseExists(CoordinationError):
    """The number of a new lease is taken: by our own first request, if this one is a repetition."""


class UserOrRoleExists(CoordinationError):
    """etcd already has a user or a role of that name."""


class CallVerdict(Enum):
    """What a failure proves; see the module."""

    REFUSED = "refused"
    OLD_TOKEN = "old token"  # noqa: S105
    NOT_DONE = "not done"
    UNKNOWN = "unknown"


_OLD_TOKEN: Final = (
    "etcdserver: invalid auth token",
    "etcdserver: revision of auth store is old",
    "etcdserver: user name is empty",
)
_NOT_DONE: Final = (
    "failed to connect to all addresses",
    "DNS resolution failed",
    "etcdserver: no leader",
    "etcdserver: too many requests",
)
_REFUSING: Final = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.OUT_OF_RANGE,
        grpc.StatusCode.ALREADY_EXISTS,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.DATA_LOSS,
    }
)
_SERVER_TOO_LARGE: Final = "grpc: received message larger than max"
"""Texts of etcd's gRPC layer for a call that the handler did not see. The client's own texts begin
with "CLIENT: ", are about an answer, and prove nothing.
"""


def verdict(code: grpc.StatusCode, details: str) -> CallVerdict:
    """The verdict on a call that failed with this status."""
    if details.startswith(_OLD_TOKEN):
        return CallVerdict.OLD_TOKEN
    if details.startswith(_NOT_DONE):
        return CallVerdict.NOT_DONE
    if code is grpc.StatusCode.UNIMPLEMENTED or details.startswith(_SERVER_TOO_LARGE):
        return CallVerdict.REFUSED
    return (
        CallVerdict.REFUSED
        if code in _REFUSING and details.startswith("etcdserver: ")
        else CallVerdict.UNKNOWN
    )


_OUR_DOUBT: Final = re.compile(
    r"CERTIFICATE_VERIFY_FAILED:? ?([a-z][^:\n]*)?|(Hostname Verification Check failed)"
)
"""gRPC's texts for a member's certificate that this client does not accept."""
_OUT_OF_TIME: Final = re.compile("has expired|not yet valid")
_ITS_DOUBT: Final = re.compile(
    r"ALERT_(?:BAD_CERTIFICATE|UNKNOWN_CA|UNSUPPORTED_CERTIFICATE|CERTIFICATE_[A-Z]+)"
)
"""The TLS alerts of a member that does not accept our certificate. The kind of alert says little:
Go sends BAD_CERTIFICATE for a missing one.
"""


def unanswered(
    tried: Sequence[str],
    asked: str,
    within_s: float,
    *,
    shows_certificate: bool,
    strangers: Sequence[str] = (),
) -> CoordinationUnavailable:
    """The error of a call that no member answered. `tried` is the failure of each attempt, `asked`
    are the members' addresses, `strangers` the answers of those that belong to another cluster.
    """
    if strangers:
        hint = (
            "correct etcd's addresses (--etcd, DNS); if etcd was restored from a snapshot, "
            "restart this process"
        )
        return WrongCoordinationStore(
            f"{'; '.join(strangers)}: {hint}. Asked: {asked}. Last: {tried[-1]}"
        )
    last = next(
        (each for each in reversed(tried) if _OUR_DOUBT.search(each) or _ITS_DOUBT.search(each)),
        tried[-1],
    )
    text = f"no etcd member answered within {within_s:g} s. Asked: {asked}. Last: {last}"
    ours = _OUR_DOUBT.search(last)
    if ours is not None and ours[2]:
        hint = (
            "etcd's certificate is not for the address that is asked: name a host that is in it "
            "(--etcd), or put the address into it"
        )
    elif ours is not None and _OUT_OF_TIME.search(last) is not None:
        hint = (
            f"etcd's certificate is not valid now ({ours[1]}): replace it, or correct this "
            "machine's clock"
        )
    elif ours is not None:
        hint = (
            f"etcd's certificate is not trusted ({ours[1] or 'no reason is given'}): --etcd-ca "
            "(QMQ_ETCD_CA) must name its CA"
        )
    elif _ITS_DOUBT.search(last) is None:
        return CoordinationUnavailable(text)
    elif shows_certificate:
        hint = (
            "etcd refuses our certificate: --etcd-cert (QMQ_ETCD_CERT) must be signed by a CA "
            "that etcd trusts, and be valid now"
        )
    else:
        hint = (
            "etcd wants a client certificate, and there is none: set --etcd-cert and --etcd-key "
            "(QMQ_ETCD_CERT, QMQ_ETCD_KEY)"
        )
    return CoordinationTlsFailed(f"{hint}. {text}")


def refusal(details: str) -> CoordinationError:
    """Convert etcd's refusal to one of our errors."""
    if "lease not found" in details:
        return LeaseNotFound(f"the lease has ended ({details})")
    if "lease already exists" in details:
        return LeaseExists(f"the lease exists ({details})")
    if "name already exists" in details:
        return UserOrRoleExists(f"etcd has it already ({details})")
    if "has been compacted" in details:
        return Compacted(
            f"the revision is compacted away ({details}): list again and continue from there"
        )
    if "authentication failed" in details:
        return CoordinationError(
            f"etcd does not know the user or the password ({details}): correct the settings"
        )
    if "permission denied" in details:
        return CoordinationError(
            f"etcd denies the user this ({details}): grant its role access to the keys under "
            "the namespace"
        )
    return CoordinationError(f"etcd refused: {details}")


Send = Callable[[EtcdConnection, float, Metadata], Awaitable[Response]]

CALL_S: Final = 1.0
"""Deadline of one attempt: a stopped member never answers,
and etcd normally answers within milliseconds.
"""
TOTAL_S: Final = 5.0
"""Time after which a read is given up: two elections at etcd's default of 1 s, and their
repetitions after split votes.
"""
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
        """Make a call that changes nothing. Raises CoordinationUnavailable, or the error with which
        etcd refuses.
        """
        return await self._repeat(
            lambda at, timeout_s, metadata: at.unary(method, request, timeout_s, metadata),
            is_change=False,
        )

    async def change(self, method: Method[Request, Response], request: Request) -> Response:
        """Make a call that changes something. Raises CoordinationUnknown, CoordinationUnavailable,
        or the error with which etcd refuses.
        """
        try:
            return await self._repeat(
                lambda at, timeout_s, metadata: at.unary(method, request, timeout_s, metadata),
                is_change=True,
            )
        except CoordinationUnknown:
            note_change()
            raise

    async def read_at(
        self, endpoint: EtcdEndpoint, method: Method[Request, Response], request: Request
    ) -> Response:
        """As `read`, by one attempt at this endpoint.
        Raises TryAgain instead of CoordinationUnavailable.
        """
        until = asyncio.get_running_loop().time() + self._call_s
        return await self._attempt(
            lambda at, timeout_s, metadata: at.unary(method, request, timeout_s, metadata),
            until,
            is_change=False,
            endpoint=endpoint,
        )

    async def exchange(self, method: Method[Request, Response], request: Request) -> Response:
        """One message in each direction over a stream, treated as a read:
        keep-alives have no other form.
        """

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
                tried,
                str(channels.rotation),
                self._total_s,
                shows_certificate=channels.shows_certificate,
                strangers=strangers,
            ) from None

    async def _attempt(
        self,
        send: Send[Response],
        until: float,
        is_change: bool,
        endpoint: EtcdEndpoint | None = None,
    ) -> Response:
        timeout_s = min(
            self._call_s, max(_ATTEMPT_S_MIN, until - asyncio.get_running_loop().time())
        )
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
                raise error_after(
                    self._channels, connection, metadata, failure, is_change=is_sent
                ) from None
            finally:
                await self._channels.release(connection)
        except NotReady as failure:
            raise (CoordinationUnknown if is_sent else TryAgain)(str(failure)) from None
        except (asyncio.CancelledError, grpc.aio.UsageError) as cause:
            # Closing a channel cancels its calls, and gRPC then cancels the callers as if *they*
            # had been cancelled.
            if not self._channels.closed.is_set() or is_cancelling():
                raise
            kind = (
                CoordinationUnknown
                if is_sent and isinstance(cause, asyncio.CancelledError)
                else CoordinationError
            )
            raise kind("the coordination store was closed during the call") from None


def is_cancelling() -> bool:
    """True if a CancelledError is meant for the current task."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def error_after(
    channels: Channels,
    connection: EtcdConnection,
    metadata: Metadata,
    failure: grpc.aio.AioRpcError,
    *,
    is_change: bool,
) -> Exception:
    """The error to raise after a failed call. Leaves the endpoint, or drops the token, that caused
    the failure.
    """
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
        return CoordinationUnknown(
            f"the answer to a change was lost: read back the outcome ({text})"
        )
    return TryAgain(text)
