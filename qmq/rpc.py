"""QMQ's errors over gRPC: the typed error on one side becomes the same typed error on the other."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

import grpc

from qmq.errors import (
    BY_CODE,
    CallerError,
    DeadlineExceeded,
    InvalidArgument,
    MessageNotFound,
    NotConnected,
    Outcome,
    QmqError,
    Unavailable,
    UnknownGroup,
    UnknownSubject,
    from_wire,
)

log = logging.getLogger("qmq.rpc")

CODE: Final = "qmq-code"
OUTCOME: Final = "qmq-outcome"
RETRY: Final = "qmq-retry-after-ms"
MESSAGE_BYTES_MAX: Final = 32 * 1024 * 1024

SERVER_OPTIONS: Final = [
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_concurrent_streams", 1000),
    ("grpc.so_reuseport", 0),
]
CHANNEL_OPTIONS: Final = [
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2000),
]

_NOT_FOUND: Final = (UnknownSubject, UnknownGroup, MessageNotFound)
_R = TypeVar("_R")


def _status(failure: QmqError) -> grpc.StatusCode:
    if isinstance(failure, _NOT_FOUND):
        return grpc.StatusCode.NOT_FOUND
    if isinstance(failure, CallerError):
        return grpc.StatusCode.INVALID_ARGUMENT
    return grpc.StatusCode.UNAVAILABLE if isinstance(failure, Unavailable) else grpc.StatusCode.INTERNAL


def answering(method: Callable[[Any, Any], Awaitable[_R]]) -> Callable[[Any, Any, Any], Awaitable[_R]]:
    """Make a servicer's method of one that raises typed errors."""

    async def answered(self: Any, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> _R:
        try:
            return await method(self, request)
        except QmqError as failure:
            trailers = [(CODE, str(failure.code)), (OUTCOME, str(failure.outcome.value))]
            if failure.retry_after_ms:
                trailers.append((RETRY, str(failure.retry_after_ms)))
            await context.abort(_status(failure), failure.message, tuple(trailers))
        except Exception as cause:
            log.exception("a call of %s failed", method.__name__)
            await context.abort(grpc.StatusCode.INTERNAL, f"{type(cause).__name__}: {cause}")
        raise AssertionError("abort does not return")

    return answered


def typed_error(failure: grpc.aio.AioRpcError, address: str) -> QmqError:
    """The error that the server raised, or what the transport's own failure means."""
    trailers = {str(key): str(value) for key, value in failure.trailing_metadata() or ()}
    if int(trailers.get(CODE, "0")) in BY_CODE:
        details = failure.details() or ""
        return from_wire(int(trailers[CODE]), details, int(trailers[OUTCOME]), int(trailers.get(RETRY, "0")))
    if failure.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceeded(f"no answer from {address} in time", outcome=Outcome.UNKNOWN)
    if failure.code() is grpc.StatusCode.UNAVAILABLE:
        return NotConnected(f"no metaserver or broker answers at {address}: is `qmq dev` running there?")
    if failure.code() is grpc.StatusCode.UNIMPLEMENTED:
        return InvalidArgument(f"what answers at {address} does not know this call: is it a QMQ metaserver of this release?")
    return QmqError(f"{address} failed: {failure.code().name}: {failure.details()}")
