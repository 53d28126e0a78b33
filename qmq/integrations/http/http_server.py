"""The site as a server inside a running event loop."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from qmq.integrations.http.http_clients import Connect, HttpClients
from qmq.integrations.http.http_site import HttpSite, refusal
from qmq.text_numbers import joined
from qmq.web_server import WebServer

REQUESTS_MAX: Final = 1_000
"""Requests under way."""


@dataclass(frozen=True, slots=True)
class HttpConfig:
    """`port` 0 takes a free one. The certificate's files turn TLS on."""

    host: str
    port: int
    tls_cert: Path | None = None
    tls_key: Path | None = None
    allows_anonymous: bool = True
    """Whether a request without a token is passed to the cluster without one; otherwise the request is refused here."""


class HttpServer:
    """`start`, then `stop`. Raises OSError from `start` if the port is taken."""

    def __init__(self, config: HttpConfig, connect: Connect) -> None:
        self._config = config
        self._site = HttpSite(HttpClients(connect, allows_anonymous=config.allows_anonymous))
        self._server = WebServer(
            self._site.app,
            config.host,
            config.port,
            requests_max=REQUESTS_MAX,
            refuse=refusal,
            tls_cert=config.tls_cert,
            tls_key=config.tls_key,
        )
        self.port = 0

    @property
    def url(self) -> str:
        """The address for callers."""
        return f"{'http' if self._config.tls_cert is None else 'https'}://{joined(self._config.host, self.port)}"

    async def start(self) -> None:
        """Listen, and serve until `stop`."""
        self.port = await self._server.start()

    async def stop(self) -> None:
        """Finish the requests under way, give back held messages, and disconnect."""
        await self._server.stop()
        await self._site.close()
