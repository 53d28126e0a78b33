"""Serves GET /metrics and the health of the process over HTTP/1.1, in the event loop whose state it shows.

    /livez, /healthz    200 "ok": the event loop answers
    /readyz             200 if the server serves, 503 if not; one line says why

The server understands the requests of Prometheus, a load balancer and `curl`: GET and HEAD without a body, over connections that stay open.
A request that is too long, or incomplete for too long, ends its connection. There is no password. Where servers require certificates, a
client without one gets the health only: probes have none.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, NamedTuple, Protocol

from qmq.metrics.exposition import Page
from qmq.metrics.figures import FigureSource
from qmq.metrics.readiness import Readiness
from qmq.text import joined

log = logging.getLogger("qmq.metrics")

PATH: Final = "/metrics"
LIVE: Final = ("/livez", "/healthz")
READY: Final = "/readyz"
HEAD_BYTES_MAX: Final = 16 * 1024
IDLE_S: Final = 90.0
"""A connection without a request for this long is closed. Prometheus asks at least once a minute, as a rule."""
CONNECTIONS_MAX: Final = 100
"""The largest number of connections; beyond it, a new one replaces the one that has been without a request for longest."""
_TEXT: Final = "text/plain; charset=utf-8"


class HttpRequest(NamedTuple):
    """The request line and the headers, with names in lower case."""

    method: str
    target: str
    version: str
    headers: dict[str, str]

    @classmethod
    def parse(cls, head: bytes) -> HttpRequest | None:
        """Parse a request; None if this is not HTTP/1."""
        lines = head.decode("latin-1").split("\r\n")
        words = lines[0].split(" ")
        if len(words) != 3 or words[2] not in ("HTTP/1.0", "HTTP/1.1"):
            return None
        headers: dict[str, str] = {}
        for line in filter(None, lines[1:]):
            name, colon, value = line.partition(":")
            if not colon:
                return None
            name = name.lower()
            headers[name] = f"{headers[name]},{value.strip()}" if name in headers else value.strip()
        return cls(words[0], words[1], words[2], headers)

    @property
    def stays(self) -> bool:
        """True if the connection stays open after the answer."""
        wish = self.headers.get("connection", "").lower()
        return wish == "keep-alive" if self.version == "HTTP/1.0" else wish != "close"


class HttpAnswer(NamedTuple):
    status: str
    content_type: str
    body: Sequence[bytes] = ()


class PortListener(Protocol):
    """The interface of a listener at a port, such as `qmq.rpc.network.ServerListener`."""

    port: int

    def close(self) -> None: ...


Listen = Callable[[str, int, Callable[[], asyncio.BaseProtocol]], Awaitable[PortListener]]
"""Listens on a host and a port, and makes a protocol for each connection: `Network.listen`."""


class MetricsServer:
    """Serves the figures of some sources, and the health of the process. Call `start`, then `stop`."""

    def __init__(self, sources: Sequence[FigureSource], readiness: Callable[[], Readiness] = lambda: Readiness(True, "ok")) -> None:
        """`readiness` is called in the event loop, often: it must only read memory."""
        self._page = Page(sources)
        self._readiness = readiness
        self._listener: PortListener | None = None
        self._needs_certificate = False
        self._writers: set[asyncio.StreamWriter] = set()
        self._waiting: dict[asyncio.StreamWriter, None] = {}
        """The connections that wait for their next request, the longest waiting first."""
        self.host, self.port = "", 0

    @property
    def address(self) -> str:
        return joined(self.host, self.port)

    async def start(self, host: str, port: int, listen: Listen, *, needs_certificate: bool = False) -> None:
        """Listen; `port` 0 takes a free one, see `port`. With `needs_certificate`, a client without one gets the health only.

        Raises OSError if the port is taken.
        """
        self._needs_certificate = needs_certificate
        self._listener = await listen(host, port, self._accept)
        self.host, self.port = host, self._listener.port

    async def stop(self) -> None:
        """Stop serving; answers under way are cut off."""
        if self._listener is not None:
            self._listener.close()
        for writer in list(self._writers):
            writer.transport.abort()
        while self._writers:  # noqa: ASYNC110 - their tasks end in this round or the next
            await asyncio.sleep(0)

    def _accept(self) -> asyncio.StreamReaderProtocol:
        return asyncio.StreamReaderProtocol(asyncio.StreamReader(limit=HEAD_BYTES_MAX), self._serve)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            if len(self._writers) <= CONNECTIONS_MAX or self._make_room():
                while await self._serve_one(reader, writer):
                    pass
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, TimeoutError, OSError):
            pass  # the peer has disconnected, or does not speak HTTP
        finally:
            self._writers.discard(writer)
            writer.close()

    def _make_room(self) -> bool:
        """Close the connection that has been without a request for longest; False if all are being answered."""
        longest = next(iter(self._waiting), None)
        if longest is not None:
            del self._waiting[longest]
            longest.transport.abort()
        return longest is not None

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Serve one request. Returns True if another one may follow."""
        self._waiting[writer] = None
        try:
            async with asyncio.timeout(IDLE_S):
                head = await reader.readuntil(b"\r\n\r\n")
        finally:
            self._waiting.pop(writer, None)
        request = HttpRequest.parse(head)
        answer = HttpAnswer("400 Bad Request", _TEXT) if request is None else await self._answer(request, writer)
        stays = request is not None and request.stays and not _has_body(request)
        lines = [
            f"HTTP/1.1 {answer.status}",
            f"Content-Type: {answer.content_type}",
            f"Content-Length: {sum(map(len, answer.body))}",
            f"Connection: {'keep-alive' if stays else 'close'}",
            *(["Allow: GET, HEAD"] if answer.status.startswith("405") else []),
        ]
        writer.write("\r\n".join([*lines, "", ""]).encode())
        async with asyncio.timeout(IDLE_S):
            for part in answer.body if request is None or request.method != "HEAD" else ():
                writer.write(part)
                await writer.drain()
        return stays

    async def _answer(self, request: HttpRequest, writer: asyncio.StreamWriter) -> HttpAnswer:
        path = request.target.partition("?")[0]
        if path not in (PATH, READY, *LIVE):
            return HttpAnswer("404 Not Found", _TEXT, [f"there is {PATH}, {LIVE[0]} and {READY}\n".encode()])
        if request.method not in ("GET", "HEAD"):
            return HttpAnswer("405 Method Not Allowed", _TEXT)
        if path in LIVE:
            return HttpAnswer("200 OK", _TEXT, [b"ok\n"])
        if path == READY:
            is_ready, says = self._readiness()
            return HttpAnswer("200 OK" if is_ready else "503 Service Unavailable", _TEXT, [f"{says}\n".encode()])
        if self._needs_certificate and not writer.get_extra_info("peercert"):
            return HttpAnswer("403 Forbidden", _TEXT, [b"metrics are for clients with a certificate of the cluster's CA\n"])
        try:
            body, content_type = await self._page.render(request.headers.get("accept", ""))
        except Exception:
            log.exception("reading the metrics failed")
            return HttpAnswer("500 Internal Server Error", _TEXT, [b"reading the metrics failed; see the log\n"])
        return HttpAnswer("200 OK", content_type, body)


def _has_body(request: HttpRequest) -> bool:
    """True if the request has a body. Bodies are not read, so the request after a body cannot be found."""
    return request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers
