"""How a call travels over gRPC: an asyncio channel that does not use `grpc.aio`, the form of
errors, and directed messages.

`grpc.aio` keeps one completion queue for the whole process, and every event loop of the process
reads that queue. With two loops, one after the other (two calls of `asyncio.run`) or at the same
time (`qmq.blocking` beside asyncio), a loop receives completions of a closed loop, or the other
loop has emptied the queue; each time gRPC prints a traceback (grpc issues 25364 and 42357).

`RpcChannel` calls through gRPC's blocking interface, whose threads know no event loop, and passes
each result to the calling loop. Servers use `grpc.aio`: a server process has one event loop.

A gRPC channel keeps the addresses that it has resolved, and the certificates that it was made with.
`RenewedChannel` replaces it

    when the process's certificates have changed when another server has the address: the call is
    repeated once, because the other server did nothing when the server cannot be reached, at most
    once a second

Calls that are under way finish on the old channel, which is closed after the last of them.

QMQ's typed error on one side becomes the same typed error on the other.

A directed message is for one consumer group, and all other groups skip it. `group_of` and the
functions after it recognise such messages:

* A batch is directed as a whole (`BatchFlag.DIRECTED`), to the group that the header `qmq-group`
  names, the same in all its messages.
* The broker need not read each batch: the consume log's entry of a directed batch has all bits of
  its tag bloom filter set, `LOOK_INSIDE`, and only then is the batch read. An undirected batch
  whose tags set all bits is read as well, at no other cost.
* Messages of ordered subjects are never directed: a key's order holds for all groups.
"""

from __future__ import annotations

import asyncio
import logging
import re
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager, suppress
from struct import unpack_from
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
    InvalidName,
    MessageNotFound,
    NameUnresolved,
    NotAuthenticated,
    NotConnected,
    OrderMismatch,
    Outcome,
    Overloaded,
    QmqError,
    Unavailable,
    UnknownGroup,
    UnknownSubject,
    WrongServer,
    from_wire,
)
from qmq.model import ATTEMPT, GROUP, check_group
from qmq.rpc.request_changes import whole_request
from qmq.rpc.server_name import METADATA_KEY, NameSource, any_server
from qmq.security.principal import TokenSource, no_token
from qmq.security.tls import Credentials, tls_failed
from qmq.text import whole_number
from qmq.wire.batch import BatchView, Envelope
from qmq.wire.batch_columns import BatchFlag, Layout, RegionHeader, bytes_column, parse_header

log = logging.getLogger("qmq.rpc")

CODE: Final = "qmq-code"
OUTCOME: Final = "qmq-outcome"
RETRY: Final = "qmq-retry-after-ms"
MESSAGE_BYTES_MAX: Final = 32 * 1024 * 1024
DETAILS_BYTES_MAX: Final = 2_000
"""The longest text of an error over gRPC. It travels in metadata, of which a client takes 8 to 16
KiB, with up to three bytes for each.
"""

CHANNEL_OPTIONS: Final = [
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2000),
    # This limits the time to connect, too: a call to an address that drops all packets fails after
    # this time, not after 20 s.
    ("grpc.min_reconnect_backoff_ms", 2000),
    # A channel whose connection ended resolves the name again: another server may have the address.
    # gRPC's default is at most every 30 s.
    ("grpc.dns_min_time_between_resolutions_ms", 1000),
]

_NOT_FOUND: Final = (UnknownSubject, UnknownGroup, MessageNotFound)
_R = TypeVar("_R")


def _status(failure: QmqError) -> grpc.StatusCode:
    """The gRPC status for an error, for gRPC's own tools. QMQ's clients read the error code from
    the trailers.
    """
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
    return (
        grpc.StatusCode.UNAVAILABLE
        if isinstance(failure, Unavailable | CoordinationUnavailable)
        else grpc.StatusCode.INTERNAL
    )


async def abort(
    context: grpc.aio.ServicerContext[Any, Any], failure: Exception, method: str
) -> NoReturn:
    """End a call with an error. A typed error reaches the client as it is; any other becomes an
    internal error of the server.
    """
    if not isinstance(failure, QmqError):
        log.error("a call of %s failed", method, exc_info=failure)
        # The text may name files, keys or statements, which the caller must not see.
        await context.abort(
            grpc.StatusCode.INTERNAL,
            f"an internal error ({type(failure).__name__}), which the server's log explains",
        )
    trailers = [(CODE, str(failure.code)), (OUTCOME, str(failure.outcome.value))]
    if failure.retry_after_ms:
        trailers.append((RETRY, str(failure.retry_after_ms)))
    await context.abort(_status(failure), _short(failure.message), tuple(trailers))
    raise AssertionError("abort does not return")


def _short(message: str) -> str:
    """The text of an error as it fits into metadata: an error may repeat what the caller sent."""
    whole = message.encode("utf-8", "replace")
    return (
        whole.decode()
        if len(whole) <= DETAILS_BYTES_MAX
        else f"{whole[:DETAILS_BYTES_MAX].decode('utf-8', 'ignore')} ..."
    )


def answering(
    method: Callable[[Any, Any], Awaitable[_R]],
) -> Callable[[Any, Any, Any], Awaitable[_R]]:
    """Wrap a servicer's method that raises typed errors."""

    async def answered(self: Any, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> _R:
        try:
            with whole_request():
                return await method(self, request)
        except Exception as failure:
            await abort(context, failure, method.__name__)

    return answered


def streaming(
    method: Callable[[Any, Any], AsyncGenerator[_R, None]],
) -> Callable[[Any, Any, Any], AsyncIterator[_R]]:
    """`answering` for a method that answers with a stream."""

    async def answered(
        self: Any, request: Any, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[_R]:
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
    """True if the server itself raised a typed error. Otherwise the server was not reached, or did
    not answer.
    """
    assert isinstance(failure, grpc.aio.AioRpcError | grpc.Call), failure
    return any(key == CODE for key, _ in failure.trailing_metadata() or ())


def is_from_wrong_server(failure: grpc.RpcError) -> bool:
    """True if another server has the address of the meant one, and refused the call."""
    assert isinstance(failure, grpc.aio.AioRpcError | grpc.Call), failure
    return (CODE, str(WrongServer.code)) in [
        (key, value) for key, value in failure.trailing_metadata() or ()
    ]


_REASON: Final = re.compile(
    r"OPENSSL_internal:([A-Z0-9_]+(?:: [a-z][^:\n]*)?)|(Hostname Verification Check failed)"
)
"""gRPC's texts for a server that TLS does not accept,
with the reason of a certificate that is not trusted.
"""


_NEVER_SENT: Final = (
    "failed to connect",
    "connection refused",
    "handshake failed",
    "channel closed",
)
"""gRPC's texts for calls that reached no server."""
_UNRESOLVED: Final = ("errors resolving", "dns resolution", "hostname lookup", "address lookup")
"""gRPC's texts where a name has no address: they differ by its resolver."""


def _unreachable(details: str, address: str) -> QmqError:
    """The error for a call that had no connection, or lost it. In the second case the server may
    have executed the call.
    """
    reason = _REASON.search(details)
    if reason is not None or "handshake failed" in details.lower():
        return tls_failed(address, details if reason is None else reason[1] or reason[2])
    if any(each in details.lower() for each in _UNRESOLVED):
        return NameUnresolved.of(
            address, "DNS has no address for it, or does not answer: is the name right?"
        )
    where = "is `qmq dev` running there, or `qmq meta`, `qmq broker`?"
    if "reset by peer" in details or "Socket closed" in details:
        where = (
            "it ends the connection. Does it ask for TLS (QMQ_TLS_CA), or for another certificate "
            "(QMQ_TLS_CERT, QMQ_TLS_KEY: signed by a CA that it trusts, and valid now)?"
        )
    outcome = (
        Outcome.NOT_STORED
        if any(each in details.lower() for each in _NEVER_SENT)
        else Outcome.UNKNOWN
    )
    return NotConnected(f"no metaserver or broker answers at {address}: {where}", outcome=outcome)


def typed_error(failure: grpc.aio.AioRpcError | grpc.RpcError, address: str) -> QmqError:
    """The error that the server raised, or the typed error for a transport failure. Also used for
    blocking calls.
    """
    assert isinstance(failure, grpc.aio.AioRpcError | grpc.Call), failure
    trailers = {str(key): str(value) for key, value in failure.trailing_metadata() or ()}
    if int(trailers.get(CODE, "0")) in BY_CODE:
        details = failure.details() or ""
        return from_wire(
            int(trailers[CODE]), details, int(trailers[OUTCOME]), int(trailers.get(RETRY, "0"))
        )
    if failure.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceeded(f"no answer from {address} in time", outcome=Outcome.UNKNOWN)
    if failure.code() is grpc.StatusCode.UNAVAILABLE:
        return _unreachable(failure.details() or "", address)
    if failure.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and "RPC limit" in (
        failure.details() or ""
    ):
        return Overloaded(f"{address} handles as many calls as it can: try again")
    if failure.code() is grpc.StatusCode.UNIMPLEMENTED:
        return InvalidArgument(
            f"{address} does not support this call: is it a QMQ metaserver of this release?"
        )
    return QmqError(
        f"{address} failed: {failure.code().name}: {failure.details()}", outcome=Outcome.UNKNOWN
    )


AHEAD: Final = 4
"""The number of messages of a stream that are read ahead of the caller."""

_ONE_REQUEST: Final = "RpcChannel calls methods with one request only"

RENEW_S: Final = 1.0
"""A channel that cannot reach its server is not replaced before it is this old: gRPC's own pauses
between attempts hold meanwhile.
"""

Metadata = tuple[tuple[str, str], ...]
Guard = Callable[[], None]
"""Called before each unary call. It may raise an error, with which the call then fails."""


class RenewedChannel:
    """The gRPC channel to an address, for calls of one thread at a time."""

    def __init__(
        self,
        address: str,
        credentials: Credentials | None = None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._address, self._credentials, self._now_s = address, credentials, now_s
        self._version = 0
        self._under_way: dict[grpc.Channel, int] = {}
        """The number of calls under way, by channel: the present one, and older ones with calls."""
        self._present = self._open()

    def _open(self) -> grpc.Channel:
        self._opened_s = self._now_s()
        if self._credentials is None:
            found = grpc.insecure_channel(self._address, options=CHANNEL_OPTIONS)
        else:
            self._version = self._credentials.version
            found = grpc.secure_channel(
                self._address, self._credentials.channel_credentials(), options=CHANNEL_OPTIONS
            )
        self._under_way[found] = 0
        return found

    @contextmanager
    def calling(self) -> Iterator[grpc.Channel]:
        """The channel for one call. Closes it behind the call if it is replaced meanwhile."""
        if self._credentials is not None and self._credentials.version != self._version:
            self._replace()
        found = self._present
        self._under_way[found] = self._under_way.get(found, 0) + 1
        try:
            yield found
        except grpc.RpcError as failure:
            self._failed(found, failure)
            raise
        finally:
            if found in self._under_way:
                self._under_way[found] -= 1
                self._close_unused(found)

    def _failed(self, channel: grpc.Channel, failure: grpc.RpcError) -> None:
        """Resolve the address again if the failure does not come from the meant server. Of several
        calls that fail together, one does.
        """
        if channel is not self._present:
            return
        if is_answer(failure):
            is_lost = is_from_wrong_server(failure)
        else:
            is_lost = (
                status_of(failure) is grpc.StatusCode.UNAVAILABLE
                and self._now_s() - self._opened_s >= RENEW_S
            )
        if is_lost:
            self._replace()

    def _replace(self) -> None:
        before, self._present = self._present, self._open()
        self._close_unused(before)

    def _close_unused(self, channel: grpc.Channel) -> None:
        if channel is not self._present and not self._under_way[channel]:
            del self._under_way[channel]
            channel.close()

    @property
    def channels(self) -> int:
        """The number of open channels: one,
        and those that were replaced and have calls under way.
        """
        return len(self._under_way)

    def close(self) -> None:
        """Cancel the calls that are under way, and disconnect."""
        for each in list(self._under_way):
            each.close()
        self._under_way.clear()


class RpcChannel(grpc.aio.Channel):
    """Connects to `address` on the first call, with TLS if there are `credentials`. Close it, or
    use it with `async with`.
    """

    def __init__(
        self,
        address: str,
        server: NameSource = any_server,
        guard: Guard | None = None,
        credentials: Credentials | None = None,
        token: TokenSource = no_token,
    ) -> None:
        """`server` returns the name of the server that the next call means. `token` returns the
        token that is sent with each call; an empty one is not sent.
        """
        self._server, self._guard, self._token = server, guard, token
        self._channel = RenewedChannel(address, credentials)

    async def __aenter__(self) -> RpcChannel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        """Cancel the calls that are under way, and disconnect. `grace` is ignored."""
        self._channel.close()

    def unary_unary(self, method: str, *serializers: Any, **options: Any) -> Any:
        """Return a function that takes a request and `timeout` in seconds, and is awaited,
        as in `grpc.aio.Channel`.
        """

        async def once(request: Any, timeout: float | None) -> Any:
            if self._guard is not None:
                self._guard()
            with self._channel.calling() as channel:
                callable_ = channel.unary_unary(method, *serializers, **options)
                return await _answer(
                    callable_.future(request, timeout=timeout, metadata=self._metadata())
                )

        async def ask(request: Any, timeout: float | None = None) -> Any:
            begin_s = time.monotonic()
            try:
                return await once(request, timeout)
            except grpc.RpcError as failure:
                if not is_from_wrong_server(failure):
                    raise
            return await once(
                request,
                None if timeout is None else max(timeout - (time.monotonic() - begin_s), 0.0),
            )

        return ask

    def unary_stream(self, method: str, *serializers: Any, **options: Any) -> Any:
        """Return a function that takes a request and `timeout` in seconds, and is iterated,
        as in `grpc.aio.Channel`.
        """

        async def ask(request: Any, timeout: float | None = None) -> AsyncIterator[Any]:
            with self._channel.calling() as channel:
                call = channel.unary_stream(method, *serializers, **options)(
                    request, timeout=timeout, metadata=self._metadata()
                )
                async for each in _answers(call):
                    yield each

        return ask

    def _metadata(self) -> Metadata:
        return metadata_of(self._token(), self._server().pack())

    # QMQ's control plane has no calls of these kinds, and its clients do not watch the state of a
    # channel.

    def stream_unary(self, *_: Any, **__: Any) -> Any:
        """Generated stubs create these; calling one fails."""
        return _unsupported

    def stream_stream(self, *_: Any, **__: Any) -> Any:
        """Generated stubs create these; calling one fails."""
        return _unsupported

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        raise NotImplementedError(_ONE_REQUEST)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        raise NotImplementedError(_ONE_REQUEST)

    async def channel_ready(self) -> None:
        raise NotImplementedError(_ONE_REQUEST)


def metadata_of(token: str, server: str) -> Metadata:
    """The metadata that shows a token and names the meant server (`ServerName.pack`)."""
    shown: Metadata = (("authorization", f"Bearer {token}"),) if token else ()
    return (*shown, (METADATA_KEY, server)) if server else shown


def _unsupported(*_: Any, **__: Any) -> Any:
    raise NotImplementedError(_ONE_REQUEST)


async def _answer(call: Any) -> Any:
    """The result of a call under way. Raises grpc.RpcError."""
    loop = asyncio.get_running_loop()
    ended = loop.create_future()
    call.add_done_callback(lambda _: _call_in(loop, _resolve, ended))
    try:
        await ended
    except asyncio.CancelledError:
        call.cancel()
        raise
    return call.result()


def _resolve(ended: asyncio.Future[None]) -> None:
    if not ended.done():
        ended.set_result(None)


def _call_in(
    loop: asyncio.AbstractEventLoop, callback: Callable[..., None], *arguments: object
) -> None:
    """Call back in a loop. A closed loop is ignored: nothing waits in it any more."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(callback, *arguments)


async def _answers(call: Any) -> AsyncIterator[Any]:
    """The messages of a stream; a thread reads them, at most `AHEAD` messages ahead.
    Raises grpc.RpcError.
    """
    loop = asyncio.get_running_loop()
    arrived: asyncio.Queue[tuple[Any, BaseException | None]] = asyncio.Queue()
    room = threading.Semaphore(AHEAD)

    def read() -> None:
        failure: BaseException | None = None
        try:
            for each in call:
                _call_in(loop, arrived.put_nowait, (each, None))
                room.acquire()
        except grpc.RpcError as cause:
            failure = cause
        _call_in(loop, arrived.put_nowait, (None, failure or StopAsyncIteration()))

    threading.Thread(target=read, name="qmq-rpc-stream", daemon=True).start()
    try:
        while True:
            each, end = await arrived.get()
            if isinstance(end, StopAsyncIteration):
                return
            if end is not None:
                raise end
            yield each
            room.release()
    finally:
        call.cancel()
        room.release()


LOOK_INSIDE: Final = 0xFFFF_FFFF_FFFF_FFFF
"""The value of the bloom filter of a directed batch."""
_ORDERED = int(BatchFlag.ORDERED)
_ATTEMPTS_MAX: Final = 999_999_999
_NOWHERE: Final = Envelope(0, 0, 0, -1, 0, 0, 0, 0)


def group_of(region: bytes) -> bytes | None:
    """The group that a stored batch is for, from its first message; None if it is for all."""
    header = parse_header(region)
    if not header.is_directed:
        return None
    layout = Layout.walk(region, header)
    if layout.header_list < 0:
        return b""
    count: int = unpack_from("<i", region, layout.header_list + 4)[0]
    names = bytes_column(region, layout.header_name, layout.header_name_data, count)
    values = bytes_column(region, layout.header_value, layout.header_value_data, count)
    return dict(zip(names, values, strict=True)).get(GROUP.encode(), b"")


def check(region: bytes, header: RegionHeader, *, to_partition: bool) -> None:
    """Check a directed batch before it is stored. Its columns have been checked.

    Raises:
        OrderMismatch: the subject is ordered.
        InvalidArgument: a message does not name its group, or the messages name different groups.
    """
    if to_partition or header.flags & _ORDERED:
        raise OrderMismatch(
            "a directed message is for one group, but all groups of an ordered subject see "
            "the same messages: send it undirected"
        )
    found = BatchView(_NOWHERE, region).headers() or [{}]
    groups = {each.get(GROUP) for each in found}
    group = groups.pop()
    if group is None or groups:
        raise InvalidArgument(
            f"all messages of a directed batch must name the same group in the header {GROUP}"
        )
    try:
        check_group(group.decode())
    except (UnicodeDecodeError, InvalidName):
        raise InvalidArgument(
            f"the header {GROUP} of a directed message is a group's name, not {group[:200]!r}"
        ) from None


def failures(headers: Mapping[str, bytes]) -> int:
    """The number of failed deliveries of a directed message before it was sent
    again, from its headers.
    """
    return whole_number(headers.get(ATTEMPT, b""), _ATTEMPTS_MAX) or 0
