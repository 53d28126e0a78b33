"""The site as a server inside a running event loop: uvicorn on a socket of our own, without its signal handlers and logs."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import uvicorn

from qmq.integrations.http.http_clients import Connect, HttpClients
from qmq.integrations.http.http_site import HttpSite

CONNECTIONS_MAX: Final = 1_000
STOP_S: Final = 2


@dataclass(frozen=True, slots=True)
class HttpConfig:
    """`port` 0 takes a free one. The certificate's files turn TLS on."""

    host: str
    port: int
    tls_cert: Path | None = None
    tls_key: Path | None = None
    allows_anonymous: bool = True
    """Whether a request without a token is sent to the cluster without one; else it is refused here."""


class _QuietServer(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Whoever runs the loop handles signals."""
        yield


class HttpServer:
    """`start`, then `stop`. Raises OSError from `start` if the port is taken."""

    def __init__(self, config: HttpConfig, connect: Connect) -> None:
        self._config = config
        self._site = HttpSite(HttpClients(connect, allows_anonymous=config.allows_anonymous))
        self._server: _QuietServer | None = None
        self._serving: asyncio.Task[None] | None = None
        self.port = 0

    @property
    def url(self) -> str:
        """Where callers find it."""
        return f"{'http' if self._config.tls_cert is None else 'https'}://{self._config.host}:{self.port}"

    async def start(self) -> None:
        """Listen, and serve until `stop`."""
        family = socket.AF_INET6 if ":" in self._config.host else socket.AF_INET
        listening = socket.create_server((self._config.host, self._config.port), family=family, backlog=1024)
        self.port = listening.getsockname()[1]
        settings = uvicorn.Config(
            self._site.app,
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=CONNECTIONS_MAX,
            timeout_graceful_shutdown=STOP_S,
            ssl_certfile=self._config.tls_cert,
            ssl_keyfile=self._config.tls_key,
        )
        self._server = _QuietServer(settings)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listening]))
        while not self._server.started and not self._serving.done():  # noqa: ASYNC110 - it says so in no other way
            await asyncio.sleep(0.01)
        if self._serving.done():
            self._serving.result()

    async def stop(self) -> None:
        """Answer what is under way, give back what requests hold, disconnect."""
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await self._serving
        await self._site.close()
