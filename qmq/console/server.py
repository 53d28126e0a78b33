"""The console as a server inside a running event loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import qmq
from qmq.client.client import Client
from qmq.console.app import ConsoleSite
from qmq.console.config import ConsoleConfig
from qmq.rpc.web_server import ServedCertificate, WebServer
from qmq.text import joined

CLIENT_NAME: Final = "qmq-console"
"""The client name that brokers and operators see."""
REQUESTS_MAX: Final = 500
"""Requests under way."""


class ConsoleServer:
    """Serves a console between `start` and `stop`. `start` raises OSError if the port is taken."""

    def __init__(self, config: ConsoleConfig, make_client: Callable[[Callable[[], str] | None], Client] | None = None) -> None:
        """`make_client` makes a client with a token's source, or with the environment's own credentials."""
        self.config = config
        self.site = ConsoleSite(config, make_client or self._client)
        self._server = WebServer(
            self.site.app,
            config.host,
            config.port,
            requests_max=REQUESTS_MAX,
            certificate=ServedCertificate.of(config.tls_cert, config.tls_key),
        )
        self.port = 0

    def _client(self, token: Callable[[], str] | None) -> Client:
        return qmq.connect(self.config.server, create_subjects=False, state_dir=False, token=token, name=CLIENT_NAME)

    @property
    def url(self) -> str:
        """The console's address for browsers; in the login mode "own", it contains the key."""
        scheme = "https" if self.config.is_tls else "http"
        return f"{scheme}://{joined(self.config.host, self.port)}{self.site.login_path()}"

    async def start(self) -> None:
        """Listen, and serve until `stop`."""
        self.port = await self._server.start()

    async def stop(self) -> None:
        """Finish running requests, end streams, and close the connections to the cluster."""
        await self._server.stop()
        await self.site.close()
