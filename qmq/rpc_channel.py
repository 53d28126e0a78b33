"""An asyncio gRPC channel that does not use `grpc.aio`.

`grpc.aio` keeps one completion queue for the whole process, and every event loop of the process reads that queue. With two loops, one
after the other (two calls of `asyncio.run`) or at the same time (`qmq.blocking` beside asyncio), a loop receives completions of a closed
loop, or the other loop has emptied the queue; each time gRPC prints a traceback (grpc issues 25364 and 42357).

`RpcChannel` calls through gRPC's blocking interface, whose threads know no event loop, and passes each result to the calling loop.
Servers use `grpc.aio`: a server process has one event loop.

A gRPC channel keeps the addresses that it has resolved, and the certificates that it was made with. `RenewedChannel` replaces it

    when the process's certificates have changed
    when another server has the address: the call is repeated once, because the other server did nothing
    when the server cannot be reached, at most once a second

Calls that are under way finish on the old channel, which is closed after the last of them.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final, Protocol

import grpc

from qmq.rpc import CHANNEL_OPTIONS, is_answer, is_from_wrong_server, status_of
from qmq.server_name import METADATA_KEY, NameSource, any_server
from qmq.token_source import TokenSource, no_token

AHEAD: Final = 4
"""The number of messages of a stream that are read ahead of the caller."""

_ONE_REQUEST: Final = "RpcChannel calls methods with one request only"

RENEW_S: Final = 1.0
"""A channel that cannot reach its server is not replaced before it is this old: gRPC's own pauses between attempts hold meanwhile."""

Metadata = tuple[tuple[str, str], ...]
Guard = Callable[[], None]
"""Called before each unary call. It may raise an error, with which the call then fails."""


class ChannelCertificates(Protocol):
    """The certificates of a process, as `qmq.security.tls.Credentials` has them."""

    @property
    def version(self) -> int:
        """A number that changes when the certificates do."""
        ...

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """gRPC credentials made from the current certificates."""
        ...


class RenewedChannel:
    """The gRPC channel to an address, for calls of one thread at a time."""

    def __init__(self, address: str, credentials: ChannelCertificates | None = None, now_s: Callable[[], float] = time.monotonic) -> None:
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
            found = grpc.secure_channel(self._address, self._credentials.channel_credentials(), options=CHANNEL_OPTIONS)
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
        """Resolve the address again if the failure does not come from the meant server. Of several calls that fail together, one does."""
        if channel is not self._present:
            return
        if is_answer(failure):
            is_lost = is_from_wrong_server(failure)
        else:
            is_lost = status_of(failure) is grpc.StatusCode.UNAVAILABLE and self._now_s() - self._opened_s >= RENEW_S
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
        """The number of open channels: one, and those that were replaced and have calls under way."""
        return len(self._under_way)

    def close(self) -> None:
        """Cancel the calls that are under way, and disconnect."""
        for each in list(self._under_way):
            each.close()
        self._under_way.clear()


class RpcChannel(grpc.aio.Channel):
    """Connects to `address` on the first call, with TLS if there are `credentials`. Close it, or use it with `async with`."""

    def __init__(
        self,
        address: str,
        server: NameSource = any_server,
        guard: Guard | None = None,
        credentials: ChannelCertificates | None = None,
        token: TokenSource = no_token,
    ) -> None:
        """`server` returns the name of the server that the next call means. `token` returns the token that is sent with each call; an empty
        one is not sent.
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
        """Return a function that takes a request and `timeout` in seconds, and is awaited, as in `grpc.aio.Channel`."""

        async def once(request: Any, timeout: float | None) -> Any:
            if self._guard is not None:
                self._guard()
            with self._channel.calling() as channel:
                callable_ = channel.unary_unary(method, *serializers, **options)
                return await _answer(callable_.future(request, timeout=timeout, metadata=self._metadata()))

        async def ask(request: Any, timeout: float | None = None) -> Any:
            begin_s = time.monotonic()
            try:
                return await once(request, timeout)
            except grpc.RpcError as failure:
                if not is_from_wrong_server(failure):
                    raise
            return await once(request, None if timeout is None else max(timeout - (time.monotonic() - begin_s), 0.0))

        return ask

    def unary_stream(self, method: str, *serializers: Any, **options: Any) -> Any:
        """Return a function that takes a request and `timeout` in seconds, and is iterated, as in `grpc.aio.Channel`."""

        async def ask(request: Any, timeout: float | None = None) -> AsyncIterator[Any]:
            with self._channel.calling() as channel:
                call = channel.unary_stream(method, *serializers, **options)(request, timeout=timeout, metadata=self._metadata())
                async for each in _answers(call):
                    yield each

        return ask

    def _metadata(self) -> Metadata:
        return metadata_of(self._token(), self._server().pack())

    # QMQ's control plane has no calls of these kinds, and its clients do not watch the state of a channel.

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
    call.add_done_callback(lambda _: _tell(loop, _resolve, ended))
    try:
        await ended
    except asyncio.CancelledError:
        call.cancel()
        raise
    return call.result()


def _resolve(ended: asyncio.Future[None]) -> None:
    if not ended.done():
        ended.set_result(None)


def _tell(loop: asyncio.AbstractEventLoop, callback: Callable[..., None], *arguments: object) -> None:
    """Call back in a loop. A closed loop is ignored: nothing waits in it any more."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(callback, *arguments)


async def _answers(call: Any) -> AsyncIterator[Any]:
    """The messages of a stream; a thread reads them, at most `AHEAD` messages ahead. Raises grpc.RpcError."""
    loop = asyncio.get_running_loop()
    arrived: asyncio.Queue[tuple[Any, BaseException | None]] = asyncio.Queue()
    room = threading.Semaphore(AHEAD)

    def read() -> None:
        failure: BaseException | None = None
        try:
            for each in call:
                _tell(loop, arrived.put_nowait, (each, None))
                room.acquire()
        except grpc.RpcError as cause:
            failure = cause
        _tell(loop, arrived.put_nowait, (None, failure or StopAsyncIteration()))

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
