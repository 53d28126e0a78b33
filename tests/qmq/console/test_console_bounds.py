"""A page's requests to the cluster do not grow with the number of subjects and groups."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from support.console import PlainBrowser, SteppedClock, site_of

from qmq.client.client import Client
from qmq.console.cluster_look import REST_S_MAX
from qmq.rpc.channel import RpcChannel
from qmq.testing import TestCluster

PAGES = (
    "/",
    "/history.json",
    "/subjects",
    "/subjects?q=s&sort=messages",
    "/subjects/s-000",
    "/dead-letters",
    "/delays",
    "/cluster",
)
BACKGROUND = 6
"""Calls that a metaserver and the brokers make by themselves while a page is read."""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each method was called: of the metaserver by the console, and of the brokers by the
    metaserver.
    """
    counts: Counter[str] = Counter()
    unary = RpcChannel.unary_unary

    def counted(
        self: RpcChannel, method: str, *serializers: Any, **options: Any
    ) -> Callable[..., Any]:
        ask = unary(self, method, *serializers, **options)

        def asked(*arguments: Any, **named: Any) -> Any:
            counts[method] += not method.endswith("/Locate")  # the client that fills the cluster
            return ask(*arguments, **named)

        return asked

    monkeypatch.setattr(RpcChannel, "unary_unary", counted)
    return counts


async def fill(mq: Client, subjects: range, groups: range) -> None:
    """A message to each subject; each group takes one."""
    await asyncio.gather(*[mq.send(f"s-{number:03d}", b"x") for number in subjects])
    for number in groups:
        async with mq.consumer(f"s-{number:03d}", f"g-{number:03d}", ack="explicit") as consumer:
            await (await consumer.pull(1))[0].ack_sync()


async def test_pages_of_90_subjects_and_20_groups_ask_no_more_than_of_3_and_2(
    cluster: TestCluster, calls: Counter[str]
) -> None:
    mq, clock = cluster.client(), SteppedClock()
    site = site_of(cluster, clock)
    browser = await PlainBrowser(site).log_in()

    async def asked_by(path: str) -> Counter[str]:
        clock.now_s += REST_S_MAX + 1  # The page looks again.
        calls.clear()
        assert (await browser.get(path)).status == 200, path
        return Counter(calls)

    await fill(mq, range(3), range(2))
    for path in PAGES:
        await asked_by(path)  # Connects, and asks who this is.
    few = {path: await asked_by(path) for path in PAGES}
    await fill(mq, range(3, 90), range(2, 20))
    many = {path: await asked_by(path) for path in PAGES}
    for path in PAGES:
        assert few[path].total() > 0, path
        assert many[path].total() <= few[path].total() + BACKGROUND, (path, many[path] - few[path])
    page = await browser.get("/subjects")
    assert "90 subjects" in page.text
    await site.close()
