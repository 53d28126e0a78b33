"""Figures as text, in the format that the caller accepts. Needs prometheus_client (`pip install qmq[metrics]`).

A broker may have 10,000 subjects, and a page of all of them takes half a second to write. The event loop that serves them cannot wait for
that, and a thread would be worse: each of the loop's system calls would then wait for the interpreter. So the page is written in the loop,
`figures.SLICE` rows at a time, and other tasks run in between. A page is therefore not a snapshot of one moment. A figure that only one
source has is written as soon as it is read, to save memory.

`Page` is for QMQ's endpoint. `Collector` does the same for an application's registry: one call reads all metrics.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Final

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector as PrometheusCollector
from prometheus_client.utils import floatToGoString

from qmq.metrics.figures import COUNTER, GAUGE, SLICE, Figure, FigureSource, Histogram, Reading, Row, one

ROWS_MAX: Final = 50_000
"""The largest number of rows of one figure on a page. Clients can create any number of names, and a metrics page must not grow with
them.
"""
LEFT_OUT: Final = Figure(
    "qmq_metrics_left_out_rows",
    GAUGE,
    (),
    "Rows beyond the 50,000 that a page shows of one metric: reduce subjects or groups, or set quotas.",
)
_END: Final = b"# EOF\n"


class Collector(PrometheusCollector):
    """Sources as a collector of prometheus_client; a figure that several sources have is one family."""

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


async def _texts(encode: Callable[[PrometheusCollector], bytes], figure: Figure, rows: Sequence[Row]) -> AsyncIterator[bytes]:
    for at in range(0, max(len(rows), 1), SLICE):
        yield _text(encode, figure, rows[at : at + SLICE], is_first=at == 0)
        await asyncio.sleep(0)


def _text(encode: Callable[[PrometheusCollector], bytes], figure: Figure, rows: Sequence[Row], *, is_first: bool) -> bytes:
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
        histogram.add_metric(labels, list(zip(bounds, accumulate(value.counts), strict=True)), value.sum)
    return histogram
