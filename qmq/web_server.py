"""Serves an ASGI application inside a running event loop: uvicorn on our own socket, without its signal handlers and logs."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import uvicorn

if TYPE_CHECKING:
    from starlette.types import ASGIApp

STOP_S: Final = 2


class _QuietServer(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals to the owner of the loop."""
        yield


class WebServer:
    """An HTTP server. Call `start`, then `stop`. `start` raises OSError if the port is taken."""

    def __init__(
        self, app: ASGIApp, host: str, port: int, *, connections_max: int, tls_cert: Path | None = None, tls_key: Path | None = None
    ) -> None:
        """`port` 0 takes a free one. The certificate's files turn TLS on."""
        self._host, self._port = host.strip("[]"), port
        self._server = _QuietServer(
            uvicorn.Config(
                app,
                http="h11",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                limit_concurrency=connections_max,
                timeout_graceful_shutdown=STOP_S,
                ssl_certfile=tls_cert,
                ssl_keyfile=tls_key,
            )
        )
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> int:
        """Listen, and serve until `stop`; returns the port."""
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        listening = socket.create_server((self._host, self._port), family=family, backlog=1024)
        port: int = listening.getsockname()[1]
        self._serving = asyncio.create_task(self._server.serve(sockets=[listening]))
        while not self._server.started and not self._serving.done():  # noqa: ASYNC110 - it has no other way to report it
            await asyncio.sleep(0.01)
        if self._serving.done():
            self._serving.result()
        return port

    async def stop(self) -> None:
        """Answer the requests under way, and stop listening. Does nothing before `start`."""
        if self._serving is not None:
            self._server.should_exit = True
            await self._serving
