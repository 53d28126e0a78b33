"""The first screen and the subjects: what a person sees of a cluster."""

from __future__ import annotations

import json

from support.console import PlainBrowser

from qmq.testing import TestCluster


async def test_an_empty_cluster_is_well_and_says_how_to_begin(browser: PlainBrowser) -> None:
    page = await browser.get("/")
    assert page.status == 200
    assert "All is well." in page.text
    assert "qmq produce hello" in page.text
    assert "qmq cluster status" in page.text


async def test_the_overview_shows_subjects_and_groups_that_are_behind(
    cluster: TestCluster, browser: PlainBrowser
) -> None:
    mq = cluster.client()
    await mq.send_many("orders", [b"1", b"2", b"3"])
    consumer = mq.consumer("orders", group="billing")
    await (await consumer.pull(1))[0].ack_sync()
    page = await browser.get("/")
    assert 'href="/subjects/orders"' in page.text
    assert "billing" in page.text
    columns = json.loads((await browser.get("/history.json")).text)
    assert columns["lag"] == [2]


async def test_a_cluster_that_does_not_answer_is_reported_without_an_error(
    cluster: TestCluster, browser: PlainBrowser
) -> None:
    await cluster.kill("meta")
    page = await browser.get("/")
    assert page.status == 200
    assert "Not everything could be read" in page.text
    assert "All is well" not in page.text


async def test_subjects_are_filtered_by_the_address(
    cluster: TestCluster, browser: PlainBrowser
) -> None:
    mq = cluster.client()
    for name in ("orders.new", "orders.paid", "flights"):
        await mq.send(name, b"x")
    page = await browser.get("/subjects?q=orders&sort=messages")
    assert "orders.new" in page.text
    assert "orders.paid" in page.text
    assert "flights" not in page.text
    assert "2 subjects" in page.text
    assert (await browser.get("/subjects?from=x")).status == 400


async def test_pages_are_in_chinese_for_who_asks_for_it(browser: PlainBrowser) -> None:
    assert "一切正常" in (await browser.get("/", **{"accept-language": "zh-CN,zh;q=0.9"})).text
    assert "一切正常" in (await browser.get("/?lang=zh")).text
    assert "一切正常" in (await browser.get("/")).text  # it is remembered
    assert "All is well" in (await browser.get("/?lang=en")).text
