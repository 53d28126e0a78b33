"""Serves GET /metrics and the health of the process over HTTP/1.1, in the event loop whose state it
shows.

    /livez, /healthz    200 "ok": the event loop answers
    /readyz             200 if the server serves, 503 if not; one line says why

The server understands the requests of Prometheus, a load balancer and `curl`: GET and HEAD without
a body, over connections that stay open. A request that is too long, or incomplete for too long,
ends its connection. There is no password. Where servers require certificates, a client without one
gets the health only: probes have none.

Figures are text in the format that the caller accepts. This needs prometheus_client (`pip install
qmq[metrics]`). A broker may have 10,000 subjects, and a page of all of them takes half a second to
write. The event loop that serves them cannot wait for that, and a thread would be worse: each of
the loop's system calls would then wait for the interpreter. So the page is written in the loop,
`figures.SLICE` rows at a time, and other tasks run in between. A page is therefore not a snapshot
of one moment. A figure that only one source has is written as soon as it is read, to save memory.

`Page` is for QMQ's endpoint. `Collector` does the same for an application's registry: one call
reads all metrics.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Final, NamedTuple, Protocol

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector as PrometheusCollector
from prometheus_client.utils import floatToGoString

from qmq.metrics.figures import (
    COUNTER,
    GAUGE,
    SLICE,
    Figure,
    FigureSource,
    Histogram,
    Readiness,
    Reading,
    Row,
    one,
)
from qmq.text import joined

ROWS_MAX: Final = 50_000
"""The largest number of rows of one figure on a page. Clients can create any number of names, and a
metrics page must not grow with them.
"""
LEFT_OUT: Final = Figure(
    "qmq_metrics_left_out_rows",
    GAUGE,
    (),
    (
        "Rows beyond the 50,000 that a page shows of one metric: reduce subjects or groups, or "
        "set quotas."
    ),
)
_END: Final = b"# EOF\n"


class Collector(PrometheusCollector):
    """Sources as a collector of prometheus_client;
    a figure that several sources have is one family.
    """

    def __init__(self, sources: Sequence[FigureSource]) -> None:
        self._sources = sources

    def describe(self) -> Iterable[Metric]:
        """All figures, without values."""
        names = {figure.name: figure for source in self._sources for figure in source.figures}
        return [family(figure, ()) for figure in names.values()]

    def collect(self) -> Iterable[Metric]:
        found: dict[str, tuple[Figure, list[Row]]] = {}
        for source in self._sources:
            for reading in source.read():
                if reading is not None:
                    _merge(found, reading)
        return [family(figure, rows) for figure, rows in found.values()]


class Page:
    """The sources' figures, and those of the process, as text."""

    def __init__(self, sources: Sequence[FigureSource], rows_max: int = ROWS_MAX) -> None:
        self._sources, self._rows_max = sources, rows_max
        names = Counter([figure.name for source in sources for figure in source.figures])
        self._shared = {name for name, count in names.items() if count > 1}
        self._process = CollectorRegistry()
        for kind in (ProcessCollector, PlatformCollector, GCCollector):
            kind(registry=self._process)

    async def render(self, accept: str = "") -> tuple[list[bytes], str]:
        """(the page's parts, its content type) for an `Accept` header."""
        encode, content_type = choose_encoder(accept)
        found: dict[str, tuple[Figure, list[Row]]] = {}
        parts: list[bytes] = []
        left_out = 0
        for source in self._sources:
            for reading in source.read():
                if reading is None:
                    await asyncio.sleep(0)
                elif reading.figure.name in self._shared:
                    _merge(found, reading)
                else:
                    shown = reading.rows[: self._rows_max]
                    left_out += len(reading.rows) - len(shown)
                    parts += [text async for text in _texts(encode, reading.figure, shown)]
        for figure, rows in found.values():
            left_out += max(len(rows) - self._rows_max, 0)
            parts += [text async for text in _texts(encode, figure, rows[: self._rows_max])]
        parts += [text async for text in _texts(encode, *one(LEFT_OUT, left_out))]
        return [*parts, encode(self._process)], content_type


def _merge(found: dict[str, tuple[Figure, list[Row]]], reading: Reading) -> None:
    found.setdefault(reading.figure.name, (reading.figure, []))[1].extend(reading.rows)


class _Only(PrometheusCollector):
    """A single family."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> Iterator[Metric]:
        yield self._metric


async def _texts(
    encode: Callable[[PrometheusCollector], bytes], figure: Figure, rows: Sequence[Row]
) -> AsyncIterator[bytes]:
    for at in range(0, max(len(rows), 1), SLICE):
        yield _text(encode, figure, rows[at : at + SLICE], is_first=at == 0)
        await asyncio.sleep(0)


def _text(
    encode: Callable[[PrometheusCollector], bytes],
    figure: Figure,
    rows: Sequence[Row],
    *,
    is_first: bool,
) -> bytes:
    """Some rows of a figure as text; the header comes with the first ones only."""
    text = encode(_Only(family(figure, rows))).removesuffix(_END)
    if is_first:
        return text
    return b"".join([line for line in text.splitlines(keepends=True) if not line.startswith(b"# ")])


def family(figure: Figure, rows: Iterable[Row]) -> Metric:
    """A figure as prometheus_client has it."""
    if figure.kind == COUNTER:
        counter = CounterMetricFamily(figure.name, figure.meaning, labels=figure.labels)
        for labels, value in rows:
            assert not isinstance(value, Histogram), figure
            counter.add_metric(labels, value)
        return counter
    if figure.kind == GAUGE:
        gauge = GaugeMetricFamily(figure.name, figure.meaning, labels=figure.labels)
        for labels, value in rows:
            assert not isinstance(value, Histogram), figure
            gauge.add_metric(labels, value)
        return gauge
    histogram = HistogramMetricFamily(figure.name, figure.meaning, labels=figure.labels)
    for labels, value in rows:
        assert isinstance(value, Histogram), figure
        bounds = [*map(floatToGoString, value.bounds), "+Inf"]
        histogram.add_metric(
            labels, list(zip(bounds, accumulate(value.counts), strict=True)), value.sum
        )
    return histogram


log = logging.getLogger("qmq.metrics")

PATH: Final = "/metrics"
LIVE: Final = ("/livez", "/healthz")
READY: Final = "/readyz"
HEAD_BYTES_MAX: Final = 16 * 1024
IDLE_S: Final = 90.0
"""A connection without a request for this long is closed. Prometheus asks at least once a minute,
as a rule.
"""
CONNECTIONS_MAX: Final = 100
"""The largest number of connections; beyond it, a new one replaces the one that has been without a
request for longest.
"""
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
    """Serves the figures of some sources, and the health of the process.
    Call `start`, then `stop`.
    """

    def __init__(
        self,
        sources: Sequence[FigureSource],
        readiness: Callable[[], Readiness] = lambda: Readiness(True, "ok"),
    ) -> None:
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

    async def start(
        self, host: str, port: int, listen: Listen, *, needs_certificate: bool = False
    ) -> None:
        """Listen; `port` 0 takes a free one, see `port`. With `needs_certificate`, a client without
        one gets the health only.

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
        """Close the connection that has been without a request for longest;
        False if all are being answered.
        """
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
        answer = (
            HttpAnswer("400 Bad Request", _TEXT)
            if request is None
            else await self._answer(request, writer)
        )
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
            return HttpAnswer(
                "404 Not Found", _TEXT, [f"there is {PATH}, {LIVE[0]} and {READY}\n".encode()]
            )
        if request.method not in ("GET", "HEAD"):
            return HttpAnswer("405 Method Not Allowed", _TEXT)
        if path in LIVE:
            return HttpAnswer("200 OK", _TEXT, [b"ok\n"])
        if path == READY:
            is_ready, says = self._readiness()
            return HttpAnswer(
                "200 OK" if is_ready else "503 Service Unavailable", _TEXT, [f"{says}\n".encode()]
            )
        if self._needs_certificate and not writer.get_extra_info("peercert"):
            return HttpAnswer(
                "403 Forbidden",
                _TEXT,
                [b"metrics are for clients with a certificate of the cluster's CA\n"],
            )
        try:
            body, content_type = await self._page.render(request.headers.get("accept", ""))
        except Exception:
            log.exception("reading the metrics failed")
            return HttpAnswer(
                "500 Internal Server Error", _TEXT, [b"reading the metrics failed; see the log\n"]
            )
        return HttpAnswer("200 OK", content_type, body)


def _has_body(request: HttpRequest) -> bool:
    """True if the request has a body. Bodies are not read,
    so the request after a body cannot be found.
    """
    return (
        request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers
    )
