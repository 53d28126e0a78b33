"""The console as a server inside a running event loop: uvicorn on a socket of our own, without its signal handlers and logs."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import Final

import uvicorn

import qmq
from qmq.client.client import Client
from qmq.console.console_app import ConsoleSite
from qmq.console.console_config import ConsoleConfig

CLIENT_NAME: Final = "qmq-console"
"""What brokers and operators know its clients by."""
CONNECTIONS_MAX: Final = 500
STOP_S: Final = 2


class _QuietServer(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Whoever runs the loop handles signals."""
        yield


class ConsoleServer:
    """Serves a console. `start`, then `stop`. Raises OSError from `start` if the port is taken."""

    def __init__(self, config: ConsoleConfig, make_client: Callable[[Callable[[], str] | None], Client] | None = None) -> None:
        """`make_client` makes a client with the source of a token, or with the environment's own credentials."""
        self.config = config
        self.site = ConsoleSite(config, make_client or self._client)
        self._server: _QuietServer | None = None
        self._serving: asyncio.Task[None] | None = None
        self.port = 0

    def _client(self, token: Callable[[], str] | None) -> Client:
        return qmq.connect(self.config.server, create_subjects=False, state_dir=False, token=token, name=CLIENT_NAME)

    @property
    def url(self) -> str:
        """Where browsers find it; of the login mode "own", with the key."""
        scheme = "https" if self.config.is_tls else "http"
        return f"{scheme}://{self.config.host}:{self.port}{self.site.login_path()}"

    async def start(self) -> None:
        """Listen, and serve until `stop`."""
        listening = _listening(self.config.host, self.config.port)
        self.port = listening.getsockname()[1]
        settings = uvicorn.Config(
            self.site.app,
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=CONNECTIONS_MAX,
            timeout_graceful_shutdown=STOP_S,
            ssl_certfile=self.config.tls_cert,
            ssl_keyfile=self.config.tls_key,
        )
        self._server = _QuietServer(settings)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listening]))
        while not self._server.started and not self._serving.done():  # noqa: ASYNC110 - it says so in no other way
            await asyncio.sleep(0.01)
        if self._serving.done():
            self._serving.result()

    async def stop(self) -> None:
        """Answer what is under way, end streams, close the connections to the cluster."""
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await self._serving
        await self.site.close()


def _listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((host.strip("[]"), port))
    except BaseException:
        found.close()
        raise
    return found
