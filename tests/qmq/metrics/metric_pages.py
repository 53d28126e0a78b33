"""Reading /metrics as Prometheus does: a request over TCP, and the page through prometheus_client's
own parser.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from qmq.metrics.endpoint import Page
from qmq.metrics.figures import FigureSource

OPENMETRICS = "application/openmetrics-text;version=1.0.0"


class Response(NamedTuple):
    """An HTTP response."""

    status: int
    headers: Mapping[str, str]
    body: str


async def ask(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    request: str,
    *,
    has_body: bool = True,
) -> Response:
    """One request over an open connection."""
    writer.write(request.replace("\n", "\r\n").encode() + b"\r\n\r\n")
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = {
        name.lower(): value.strip()
        for name, _, value in (line.partition(":") for line in head[1:] if line)
    }
    body = await reader.readexactly(int(headers["content-length"])) if has_body else b""
    return Response(int(head[0].split()[1]), headers, body.decode())


async def get(port: int, path: str = "/metrics", *headers: str, method: str = "GET") -> Response:
    """A request over a new connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        return await ask(
            reader,
            writer,
            "\n".join([f"{method} {path} HTTP/1.1", "Host: test", *headers]),
            has_body=method != "HEAD",
        )
    finally:
        writer.close()
        await writer.wait_closed()


class Values:
    """A page's samples."""

    def __init__(self, text: str) -> None:
        self.families = {family.name: family for family in text_string_to_metric_families(text)}
        self._samples = [sample for family in self.families.values() for sample in family.samples]

    def rows(self, name: str) -> list[tuple[dict[str, str], float]]:
        """All rows of a metric."""
        return [(sample.labels, sample.value) for sample in self._samples if sample.name == name]

    def __call__(self, name: str, **labels: str) -> float:
        """The only value with these labels."""
        (found,) = [value for its, value in self.rows(name) if labels.items() <= its.items()]
        return found

    @property
    def names(self) -> set[str]:
        """The names of all samples."""
        return {sample.name for sample in self._samples}


async def scrape(port: int) -> Values:
    """The page of an endpoint."""
    response = await get(port)
    assert response.status == 200
    return Values(response.body)


async def read(sources: Iterable[FigureSource]) -> Values:
    """The page of sources, without a network."""
    parts, _ = await Page(list(sources)).render()
    return Values(b"".join(parts).decode())
