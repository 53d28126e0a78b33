"""The screen of a route: the plan comes before the change, and the change is the planned one or
none.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from support.console import PlainBrowser, site_of

from qmq.console.pages.routes import RouteRequest
from qmq.errors import InvalidArgument
from qmq.model import Order, SubjectConfig
from qmq.testing import TestCluster


@pytest.fixture
async def ordered(cluster: TestCluster) -> AsyncIterator[PlainBrowser]:
    """At a console that may change things, with an ordered subject."""
    mq = cluster.client()
    await mq.metadata.create_subject(
        SubjectConfig("accounts", order=Order.STRICT, logical_partitions=1024)
    )
    await mq.send("accounts", b"open", key="k")
    site = site_of(cluster, is_writable=True)
    yield await PlainBrowser(site).log_in()
    await site.close()


async def test_a_route_is_drawn_with_its_partitions(ordered: PlainBrowser) -> None:
    page = await ordered.get("/subjects/accounts/route")
    assert page.status == 200
    for shown in ("<rect", "0 - 1023", "group-1", "qmq route show accounts"):
        assert shown in page.text, shown
    assert 'href="/subjects/accounts/route"' in (await ordered.get("/subjects/accounts")).text


async def test_a_plan_shows_what_a_split_would_do_and_does_nothing(
    cluster: TestCluster, ordered: PlainBrowser
) -> None:
    page = await ordered.get("/subjects/accounts/route?verb=split&partitions=1&at=512")
    for shown in ("qmq route split accounts 1 --at 512", "qmq route merge accounts"):
        assert shown in page.text, shown
    assert (await cluster.client().metadata.describe_route("accounts")).route.version == 1
    for wrong in (
        "verb=split&partitions=9",
        "verb=drop&partitions=1",
        "verb=merge&partitions=1",
        "verb=move&partitions=1",
        "verb=split&partitions=x",
    ):
        assert (await ordered.get(f"/subjects/accounts/route?verb={wrong}")).status == 400, wrong


async def test_a_split_is_made_once_after_the_subjects_name_was_typed(
    cluster: TestCluster, ordered: PlainBrowser
) -> None:
    form = {"verb": "split", "partitions": "1", "at": "512", "version": "1"}
    assert (await ordered.post("/subjects/accounts/route", form)).status == 400
    page = await ordered.post("/subjects/accounts/route", {**form, "confirm": "accounts"})
    assert "Version 2" in page.text
    described = await cluster.client().metadata.describe_route("accounts")
    assert [(each.lps.first, each.lps.end) for each in described.route.partitions] == [
        (0, 512),
        (512, 1024),
    ]
    again = await ordered.post("/subjects/accounts/route", {**form, "confirm": "accounts"})
    assert again.status == 400
    assert "E114" in again.text or "E116" in again.text


async def test_an_unordered_subject_has_no_route(
    cluster: TestCluster, ordered: PlainBrowser
) -> None:
    await cluster.client().send("plain", b"x")
    assert (await ordered.get("/subjects/plain/route")).status == 400


def test_a_request_says_its_command_line() -> None:
    assert (
        RouteRequest("split", (1,), parts=3, to="g").line("s")
        == "qmq route split s 1 --to g --partitions 3"
    )
    assert RouteRequest("merge", (1, 2)).line("s") == "qmq route merge s 1 2"
    with pytest.raises(InvalidArgument):
        RouteRequest.of({"verb": "split", "partitions": "-1"})
