"""GET /metrics: the supported part of HTTP, and large pages that delay no other request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from metric_pages import OPENMETRICS, Values, ask, get
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from qmq.metrics.endpoint import CONNECTIONS_MAX, HEAD_BYTES_MAX, MetricsServer, Page
from qmq.metrics.figures import COUNTER, GAUGE, SLICE, Figure, Readiness, Reading, one
from qmq.rpc.network import NETWORK

ROWS = 10 * SLICE + 7


class Many:
    """A metric with as many rows as on a broker with thousands of subjects."""

    figures = (
        Figure("qmq_many_total", COUNTER, ("subject",), "Many."),
        Figure("qmq_one", GAUGE, (), "One."),
    )
    fails = False

    def read(self):
        yield one(self.figures[1], 1)
        yield None
        if self.fails:
            raise RuntimeError("in this test")
        yield Reading(self.figures[0], [((f"s{number}",), number) for number in range(ROWS)])


@pytest.fixture
def stands() -> list[Readiness]:
    return [Readiness(True, "master")]


@pytest.fixture
async def endpoint(stands: list[Readiness]) -> AsyncIterator[MetricsServer]:
    found = MetricsServer([Many()], lambda: stands[0])
    await found.start("127.0.0.1", 0, NETWORK.listen)
    yield found
    await found.stop()


async def test_the_page_has_every_row_and_the_process_own_figures(endpoint: MetricsServer) -> None:
    response = await get(endpoint.port)
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    values = Values(response.body)
    assert [value for _, value in values.rows("qmq_many_total")] == list(map(float, range(ROWS)))
    assert response.body.count("# TYPE qmq_many_total") == 1
    assert values("process_start_time_seconds") > 0
    assert values("qmq_one") == 1


async def test_a_page_has_so_many_rows_of_one_figure_and_says_how_many_more_there_are() -> None:
    class More(Many):
        figures = (Figure("qmq_shared", GAUGE, ("subject",), "Of two sources."),)

        def read(self):
            yield Reading(self.figures[0], [((f"s{number}",), number) for number in range(ROWS)])

    parts, _ = await Page([Many(), More(), More()], rows_max=100).render()
    values = Values(b"".join(parts).decode())
    assert [len(values.rows(name)) for name in ("qmq_many_total", "qmq_shared")] == [100, 100]
    assert values("qmq_metrics_left_out_rows") == (ROWS - 100) + (2 * ROWS - 100)
    assert values("qmq_one") == 1


async def test_the_server_reports_liveness_and_readiness(
    endpoint: MetricsServer, stands: list[Readiness]
) -> None:
    assert (await get(endpoint.port, "/readyz"))[::2] == (200, "master\n")
    stands[0] = Readiness(False, "slave: no master is heard")
    assert (await get(endpoint.port, "/readyz"))[::2] == (503, "slave: no master is heard\n")
    for path in ("/livez", "/healthz"):
        assert (await get(endpoint.port, path))[::2] == (200, "ok\n")


async def test_who_accepts_openmetrics_gets_it(endpoint: MetricsServer) -> None:
    response = await get(
        endpoint.port, "/metrics", f"Accept: {OPENMETRICS};q=0.6, text/plain;version=0.0.4;q=0.5"
    )
    assert response.headers["content-type"].startswith("application/openmetrics-text")
    families = {family.name: family for family in text_string_to_metric_families(response.body)}
    assert len(families["qmq_many"].samples) == ROWS
    assert response.body.count("# EOF") == 1


async def test_others_work_while_a_large_page_is_written() -> None:
    turns = 0

    async def work() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    worker = asyncio.create_task(work())
    await Page([Many()]).render()
    worker.cancel()
    assert turns > ROWS // SLICE


async def test_a_connection_stays_open_for_the_next_request(endpoint: MetricsServer) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", endpoint.port)
    for path in ("/metrics", "/healthz", "/metrics?name[]=x"):
        response = await ask(reader, writer, f"GET {path} HTTP/1.1\nHost: test")
        assert (response.status, response.headers["connection"]) == (200, "keep-alive")
    response = await ask(reader, writer, "GET /healthz HTTP/1.1\nConnection: Close")
    assert (response.body, response.headers["connection"]) == ("ok\n", "close")
    assert await reader.read() == b""
    writer.close()


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        ("GET / HTTP/1.1", 404),
        ("GET /metricsx HTTP/1.1", 404),
        ("POST /metrics HTTP/1.1\nContent-Length: 3", 405),
        ("GET /metrics HTTP/2", 400),
        ("\x16\x03\x01 nonsense", 400),
        ("GET /metrics HTTP/1.1\nno colon here", 400),
    ],
)
async def test_an_unknown_request_at_the_metrics_port_gets_an_error(
    endpoint: MetricsServer, request_line: str, status: int
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", endpoint.port)
    assert (await ask(reader, writer, request_line)).status == status
    writer.close()


async def test_head_says_how_long_the_page_is_without_it(endpoint: MetricsServer) -> None:
    response = await get(endpoint.port, method="HEAD")
    assert (response.status, response.body) == (200, "")
    assert int(response.headers["content-length"]) > ROWS


async def test_a_request_without_end_ends_its_connection(endpoint: MetricsServer) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", endpoint.port)
    writer.write(b"GET /metrics HTTP/1.1\r\nX: " + b"x" * 2 * HEAD_BYTES_MAX)
    assert await reader.read() == b""
    writer.close()


async def test_requests_that_never_end_do_not_keep_the_monitoring_out(
    endpoint: MetricsServer,
) -> None:
    half_open = []
    for _ in range(CONNECTIONS_MAX):
        half_open.append(await asyncio.open_connection("127.0.0.1", endpoint.port))
        half_open[-1][1].write(b"GET /metrics HTTP/1.1\r\nX: ")
        await half_open[-1][1].drain()
    assert (await get(endpoint.port)).status == 200
    assert await half_open[0][0].read() == b""
    for _, writer in half_open:
        writer.close()


async def test_a_failing_source_is_reported_and_the_next_page_is_complete(
    monkeypatch: pytest.MonkeyPatch, endpoint: MetricsServer, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Many, "fails", True)
    assert (await get(endpoint.port)).status == 500
    assert "in this test" in caplog.text
    monkeypatch.setattr(Many, "fails", False)
    assert (await get(endpoint.port)).status == 200


async def test_stopping_ends_connections_that_wait(endpoint: MetricsServer) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", endpoint.port)
    assert (await ask(reader, writer, "GET /healthz HTTP/1.1")).status == 200
    await endpoint.stop()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", endpoint.port)
    try:
        assert await reader.read() == b""
    except ConnectionResetError:
        pass
    writer.close()
