"""An asyncio gRPC channel that does not use `grpc.aio`.

`grpc.aio` keeps one completion queue for the whole process, and every event loop of the process reads that queue. With two loops, one
after the other (two calls of `asyncio.run`) or at the same time (`qmq.blocking` beside asyncio), a loop receives completions of a closed
loop, or the other loop has emptied the queue; each time gRPC prints a traceback (grpc issues 25364 and 42357).

`RpcChannel` calls through gRPC's blocking interface, whose threads know no event loop, and passes each result to the calling loop.
Servers use `grpc.aio`: a server process has one event loop.

With TLS, the channel is replaced when the process's certificates change, because a gRPC channel keeps the certificates that it was made
with. Calls that are under way finish on the old channel.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any, Final, Protocol

import grpc

from qmq.rpc import CHANNEL_OPTIONS
from qmq.token_source import TokenSource, no_token

AHEAD: Final = 4
"""The number of messages of a stream that are read ahead of the caller."""

_ONE_REQUEST: Final = "RpcChannel calls methods with one request only"

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


class RpcChannel(grpc.aio.Channel):
    """Connects to `address` on the first call, with TLS if there are `credentials`. Close it, or use it with `async with`."""

    def __init__(
        self,
        address: str,
        guard: Guard | None = None,
        credentials: ChannelCertificates | None = None,
        token: TokenSource = no_token,
    ) -> None:
        """`token` returns the token that is sent with each call; an empty one is not sent."""
        self._address, self._guard, self._credentials, self._token = address, guard, credentials, token
        self._version = 0
        self._before: list[grpc.Channel] = []
        """Channels with older certificates, which may have calls under way."""
        self._channel = self._open()

    def _open(self) -> grpc.Channel:
        if self._credentials is None:
            return grpc.insecure_channel(self._address, options=CHANNEL_OPTIONS)
        self._version = self._credentials.version
        return grpc.secure_channel(self._address, self._credentials.channel_credentials(), options=CHANNEL_OPTIONS)

    def _present(self) -> grpc.Channel:
        """The channel with the current certificates."""
        if self._credentials is not None and self._credentials.version != self._version:
            self._before.append(self._channel)
            self._channel = self._open()
        return self._channel

    async def __aenter__(self) -> RpcChannel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        """Cancel the calls that are under way, and disconnect. `grace` is ignored."""
        for each in (*self._before, self._channel):
            each.close()

    def unary_unary(self, method: str, *serializers: Any, **options: Any) -> Any:
        """Return a function that takes a request and `timeout` in seconds, and is awaited, as in `grpc.aio.Channel`."""

        async def ask(request: Any, timeout: float | None = None) -> Any:
            if self._guard is not None:
                self._guard()
            callable_ = self._present().unary_unary(method, *serializers, **options)
            return await _answer(callable_.future(request, timeout=timeout, metadata=bearer(self._token())))

        return ask

    def unary_stream(self, method: str, *serializers: Any, **options: Any) -> Any:
        """Return a function that takes a request and `timeout` in seconds, and is iterated, as in `grpc.aio.Channel`."""
        return lambda request, timeout=None: _answers(
            self._present().unary_stream(method, *serializers, **options)(request, timeout=timeout, metadata=bearer(self._token()))
        )

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


def bearer(token: str) -> tuple[tuple[str, str], ...] | None:
    """The metadata that shows a token."""
    return (("authorization", f"Bearer {token}"),) if token else None


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
