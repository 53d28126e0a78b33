"""QMQ's errors over gRPC: the typed error on one side becomes the same typed error on the other."""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, Final, NoReturn, TypeVar

import grpc

from qmq.errors import (
    BY_CODE,
    AccessDenied,
    CallerError,
    CoordinationUnavailable,
    CoordinationUnknown,
    DeadlineExceeded,
    InvalidArgument,
    MessageNotFound,
    NameUnresolved,
    NotAuthenticated,
    NotConnected,
    Outcome,
    Overloaded,
    QmqError,
    Unavailable,
    UnknownGroup,
    UnknownSubject,
    WrongServer,
    from_wire,
)
from qmq.request_changes import whole_request
from qmq.security.tls import tls_failed

log = logging.getLogger("qmq.rpc")

CODE: Final = "qmq-code"
OUTCOME: Final = "qmq-outcome"
RETRY: Final = "qmq-retry-after-ms"
MESSAGE_BYTES_MAX: Final = 32 * 1024 * 1024
DETAILS_BYTES_MAX: Final = 2_000
"""The longest text of an error over gRPC. It travels in metadata, of which a client takes 8 to 16 KiB, with up to three bytes for each."""

CHANNEL_OPTIONS: Final = [
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2000),
    # This limits the time to connect, too: a call to an address that drops all packets fails after this time, not after 20 s.
    ("grpc.min_reconnect_backoff_ms", 2000),
    # A channel whose connection ended resolves the name again: another server may have the address. gRPC's default is at most every 30 s.
    ("grpc.dns_min_time_between_resolutions_ms", 1000),
]

_NOT_FOUND: Final = (UnknownSubject, UnknownGroup, MessageNotFound)
_R = TypeVar("_R")


def _status(failure: QmqError) -> grpc.StatusCode:
    """The gRPC status for an error, for gRPC's own tools. QMQ's clients read the error code from the trailers."""
    if isinstance(failure, _NOT_FOUND):
        return grpc.StatusCode.NOT_FOUND
    if isinstance(failure, AccessDenied):
        return grpc.StatusCode.PERMISSION_DENIED
    if isinstance(failure, NotAuthenticated):
        return grpc.StatusCode.UNAUTHENTICATED
    if isinstance(failure, CallerError):
        return grpc.StatusCode.INVALID_ARGUMENT
    if isinstance(failure, WrongServer):
        return grpc.StatusCode.FAILED_PRECONDITION
    if isinstance(failure, CoordinationUnknown):
        return grpc.StatusCode.UNKNOWN
    return grpc.StatusCode.UNAVAILABLE if isinstance(failure, Unavailable | CoordinationUnavailable) else grpc.StatusCode.INTERNAL


async def abort(context: grpc.aio.ServicerContext[Any, Any], failure: Exception, method: str) -> NoReturn:
    """End a call with an error. A typed error reaches the client as it is; any other becomes an internal error of the server."""
    if not isinstance(failure, QmqError):
        log.error("a call of %s failed", method, exc_info=failure)
        # The text may name files, keys or statements, which the caller must not see.
        await context.abort(grpc.StatusCode.INTERNAL, f"an internal error ({type(failure).__name__}), which the server's log explains")
    trailers = [(CODE, str(failure.code)), (OUTCOME, str(failure.outcome.value))]
    if failure.retry_after_ms:
        trailers.append((RETRY, str(failure.retry_after_ms)))
    await context.abort(_status(failure), _short(failure.message), tuple(trailers))
    raise AssertionError("abort does not return")


def _short(message: str) -> str:
    """The text of an error as it fits into metadata: an error may repeat what the caller sent."""
    whole = message.encode("utf-8", "replace")
    return whole.decode() if len(whole) <= DETAILS_BYTES_MAX else f"{whole[:DETAILS_BYTES_MAX].decode('utf-8', 'ignore')} ..."


def answering(method: Callable[[Any, Any], Awaitable[_R]]) -> Callable[[Any, Any, Any], Awaitable[_R]]:
    """Wrap a servicer's method that raises typed errors."""

    async def answered(self: Any, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> _R:
        try:
            with whole_request():
                return await method(self, request)
        except Exception as failure:
            await abort(context, failure, method.__name__)

    return answered


def streaming(method: Callable[[Any, Any], AsyncGenerator[_R, None]]) -> Callable[[Any, Any, Any], AsyncIterator[_R]]:
    """`answering` for a method that answers with a stream."""

    async def answered(self: Any, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[_R]:
        try:
            async with aclosing(method(self, request)) as answers:
                async for answer in answers:
                    yield answer
        except Exception as failure:
            await abort(context, failure, method.__name__)

    return answered


def status_of(failure: grpc.RpcError) -> grpc.StatusCode:
    """The status with which a call ended."""
    assert isinstance(failure, grpc.aio.AioRpcError | grpc.Call), failure
    return failure.code()


def is_answer(failure: grpc.RpcError) -> bool:
    """True if the server itself raised a typed error. Otherwise the server was not reached, or did not answer."""
    assert isinstance(failure, grpc.aio.AioRpcError | grpc.Call), failure
    return any(key == CODE for key, _ in failure.trailing_metadata() or ())


def is_from_wrong_server(failure: grpc.RpcError) -> bool:
    """True if another server has the address of the meant one, and refused the call."""
    assert isinstance(failure, grpc.aio.AioRpcError | grpc.Call), failure
    return (CODE, str(WrongServer.code)) in [(key, value) for key, value in failure.trailing_metadata() or ()]


_REASON: Final = re.compile(r"OPENSSL_internal:([A-Z0-9_]+(?:: [a-z][^:\n]*)?)|(Hostname Verification Check failed)")
"""gRPC's texts for a server that TLS does not accept, with the reason of a certificate that is not trusted."""


_NEVER_SENT: Final = ("failed to connect", "connection refused", "handshake failed", "channel closed")
"""gRPC's texts for calls that reached no server."""
_UNRESOLVED: Final = ("errors resolving", "dns resolution", "hostname lookup", "address lookup")
"""gRPC's texts where a name has no address: they differ by its resolver."""


def _unreachable(details: str, address: str) -> QmqError:
    """The error for a call that had no connection, or lost it. In the second case the server may have executed the call."""
    reason = _REASON.search(details)
    if reason is not None or "handshake failed" in details.lower():
        return tls_failed(address, details if reason is None else reason[1] or reason[2])
    if any(each in details.lower() for each in _UNRESOLVED):
        return NameUnresolved.of(address, "DNS has no address for it, or does not answer: is the name right?")
    where = "is `qmq dev` running there, or `qmq meta`, `qmq broker`?"
    if "reset by peer" in details or "Socket closed" in details:
        where = (
            "it ends the connection. Does it ask for TLS (QMQ_TLS_CA), or for another certificate (QMQ_TLS_CERT, QMQ_TLS_KEY: signed by"
            " a CA that it trusts, and valid now)?"
        )
    outcome = Outcome.NOT_STORED if any(each in details.lower() for each in _NEVER_SENT) else Outcome.UNKNOWN
    return NotConnected(f"no metaserver or broker answers at {address}: {where}", outcome=outcome)


def typed_error(failure: grpc.aio.AioRpcError | grpc.RpcError, address: str) -> QmqError:
    """The error that the server raised, or the typed error for a transport failure. Also used for blocking calls."""
    assert isinstance(failure, grpc.aio.AioRpcError | grpc.Call), failure
    trailers = {str(key): str(value) for key, value in failure.trailing_metadata() or ()}
    if int(trailers.get(CODE, "0")) in BY_CODE:
        details = failure.details() or ""
        return from_wire(int(trailers[CODE]), details, int(trailers[OUTCOME]), int(trailers.get(RETRY, "0")))
    if failure.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceeded(f"no answer from {address} in time", outcome=Outcome.UNKNOWN)
    if failure.code() is grpc.StatusCode.UNAVAILABLE:
        return _unreachable(failure.details() or "", address)
    if failure.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and "RPC limit" in (failure.details() or ""):
        return Overloaded(f"{address} handles as many calls as it can: try again")
    if failure.code() is grpc.StatusCode.UNIMPLEMENTED:
        return InvalidArgument(f"{address} does not support this call: is it a QMQ metaserver of this release?")
    return QmqError(f"{address} failed: {failure.code().name}: {failure.details()}", outcome=Outcome.UNKNOWN)
