"""The screens of a message and of the cluster."""

from __future__ import annotations

import logging

import pytest
from support import eventually
from support.console import PlainBrowser, site_of

from qmq.console.config import MaskRule
from qmq.testing import TestCluster


async def test_why_shows_a_messages_life_and_its_reason_to_wait(
    cluster: TestCluster, browser: PlainBrowser
) -> None:
    mq = cluster.client()
    receipt = await mq.send("orders", b'{"total": 5}', key="k")
    async with mq.consumer("orders", "billing") as consumer:
        message = await anext(aiter(consumer))
        await message.ack_sync()
        page = await browser.get(f"/messages?id={receipt.id}")
    assert page.status == 200
    for shown in (
        "created",
        "stored",
        "handed out",
        "acknowledged",
        "billing",
        "&#34;total&#34;: 5",
        f"qmq why {receipt.id}",
    ):
        assert shown in page.text, shown


async def test_an_unknown_id_is_not_found(browser: PlainBrowser) -> None:
    assert (await browser.get("/messages")).status == 200
    for message_id in ("0" * 32, "nonsense", "%3Cscript%3E"):
        page = await browser.get(f"/messages/{message_id}")
        assert page.status == 404
        assert "<script>" not in page.text


async def test_the_body_of_a_message_is_masked_by_rule(cluster: TestCluster) -> None:
    receipt = await cluster.client().send("payments", b'{"card": "4111"}')
    site = site_of(cluster, masks=(MaskRule("card"),))
    browser = await PlainBrowser(site).log_in()
    assert "4111" not in (await browser.get(f"/messages/{receipt.id}")).text
    await site.close()


async def test_the_cluster_shows_groups_with_their_replicas(browser: PlainBrowser) -> None:
    page = await browser.get("/cluster")
    for shown in ("group-1", "broker-1", "delay", "master", "read-write", "qmq transfer group-1"):
        assert shown in page.text, shown


async def test_a_mastership_is_transferred_after_the_groups_name_was_typed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "qmq.replication")
    async with TestCluster(brokers=3, delay=False) as cluster:
        site = site_of(cluster, is_writable=True)
        browser = await PlainBrowser(site).log_in()
        before = cluster.master()
        other = next(name for name in cluster.groups["group-1"] if name != before)
        assert (
            await browser.post("/cluster/group-1", {"verb": "transfer", "to": other})
        ).status == 400
        caplog.clear()
        page = await browser.post(
            "/cluster/group-1", {"verb": "transfer", "to": other, "confirm": "group-1"}
        )
        assert f"{other} leads group-1 now" in page.text
        # A later election, which a busy machine may cause, must not matter: the log says who has
        # been master.
        await eventually(lambda: f"{other} is master in epoch" in caplog.text)
        await site.close()


async def test_a_group_is_drained_and_resumed(cluster: TestCluster) -> None:
    site = site_of(cluster, is_writable=True)
    browser = await PlainBrowser(site).log_in()
    for verb, mode in (("drain", "read-only"), ("resume", "read-write")):
        await browser.post("/cluster/group-1", {"verb": verb, "confirm": "group-1"})
        found = await cluster.client().metadata.cluster()
        assert [each.mode for each in found.groups if each.broker_group == "group-1"] == [mode]
    await site.close()
