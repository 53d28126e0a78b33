"""The screen of lanes: the holder of each range, and the parked keys."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from support.console import PlainBrowser, parked_subject, site_of

from qmq.console.pages.routes import lane_ranges, partition_ranges, version_ranges
from qmq.testing import TestCluster


@pytest.fixture
async def writable(cluster: TestCluster) -> AsyncIterator[PlainBrowser]:
    """At a console that may change things."""
    site = site_of(cluster, is_writable=True)
    yield await PlainBrowser(site).log_in()
    await site.close()


async def test_a_lane_has_its_holder_and_its_range(
    cluster: TestCluster, writable: PlainBrowser
) -> None:
    async with parked_subject(cluster.client(), "payments", "audit", []) as consuming:
        await consuming.until_held(1)
        page = await writable.get("/subjects/payments/lanes")
        for shown in (
            "audit-1 (0 - 1023)",
            "<title>0 - 1023: audit-1</title>",
            "No key is parked.",
            "qmq group show payments audit",
        ):
            assert shown in page.text, shown
        assert 'href="/subjects/payments/lanes"' in (await writable.get("/subjects/payments")).text


async def test_a_parked_key_is_skipped_only_after_it_was_typed(
    cluster: TestCluster, writable: PlainBrowser
) -> None:
    async with parked_subject(cluster.client(), "payments", "audit", ["customer-1", "customer-2"]):
        form = {"verb": "skip", "group": "audit", "key": "customer-1"}
        assert (await writable.post("/subjects/payments/lanes", form)).status == 400
        assert (
            await writable.post("/subjects/payments/lanes", {**form, "confirm": "customer-2"})
        ).status == 400
        assert (
            await writable.post(
                "/subjects/payments/lanes", {**form, "verb": "forget", "confirm": "customer-1"}
            )
        ).status == 400
        page = await writable.get("/subjects/payments/lanes")
        assert page.text.count('<details class="message parked">') == 2
        page = await writable.post("/subjects/payments/lanes", {**form, "confirm": "customer-1"})
        assert "1 messages of the key customer-1 count as done." in page.text
        assert page.text.count('<details class="message parked">') == 1


async def test_who_may_only_read_sees_parked_keys_and_no_buttons(
    cluster: TestCluster, browser: PlainBrowser
) -> None:
    async with parked_subject(cluster.client(), "payments", "audit", ["customer-1"]):
        page = await browser.get("/subjects/payments/lanes")
        assert "qmq dlq replay payments audit customer-1" in page.text
        assert "<button>Replay in order</button>" not in page.text
        answer = await browser.post(
            "/subjects/payments/lanes", {"verb": "replay", "group": "audit", "key": "customer-1"}
        )
        assert answer.status == 403


async def test_an_unordered_subject_has_no_lanes(
    cluster: TestCluster, browser: PlainBrowser
) -> None:
    await cluster.client().send("plain", b"x")
    assert (await browser.get("/subjects/plain/lanes")).status == 400


def test_strips_are_drawn_by_their_ranges() -> None:
    places = [
        {"partition": 2, "first": 256, "end": 1024, "broker_group": "b"},
        {"partition": 1, "first": 0, "end": 256, "broker_group": "a"},
    ]
    assert [
        (each.x, each.width, each.kind) for each in partition_ranges(places, 1024, ["a", "b"])
    ] == [(0, 250, 0), (250, 750, 1)]
    frontier = [{"first": 0, "end": 512, "version": 2}, {"first": 512, "end": 1024, "version": 1}]
    assert [(each.kind, each.title) for each in version_ranges(frontier, 1024, 2)] == [
        (0, "0 - 511: v2"),
        (1, "512 - 1023: v1"),
    ]
    lanes = [
        {"first": 512, "end": 768, "consumer": "y"},
        {"first": 0, "end": 512, "consumer": "x"},
        {"first": 768, "end": 1024, "consumer": ""},
    ]
    assert [(each.x, each.kind, each.title) for each in lane_ranges(lanes, 1024)] == [
        (0, 0, "0 - 511: x"),
        (500, 1, "512 - 767: y"),
    ]
