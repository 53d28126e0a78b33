"""The screen of dead letters: what a filter chooses, and that just that is replayed or purged, by
the caller's own rights.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence

import pytest
from support import eventually
from support.console import PlainBrowser, site_of

from qmq.client.client import Client
from qmq.console.config import LoginMode
from qmq.console.pages.dead_letters import EXAMPLES, ages
from qmq.console.sessions import ReplayJob
from qmq.testing import TestCluster


async def die(mq: Client, subject: str, bodies: Sequence[bytes], error: str) -> list[str]:
    """Messages that group billing gives up; their ids."""
    ids = [str((await mq.send(subject, body)).id) for body in bodies]
    async with mq.consumer(subject, "billing", ack="explicit") as consumer:
        for _ in bodies:
            (await anext(consumer)).reject(error)
    return ids


async def received(mq: Client, subject: str, count: int) -> list[bytes]:
    """The messages delivered to group billing, sorted."""
    async with mq.consumer(subject, "billing", ack="explicit") as consumer:
        found = []
        while len(found) < count:
            message = await anext(consumer)
            await message.ack_sync()
            found.append(message.body)
        return sorted(found)


async def until_dead_lettered(mq: Client, count: int) -> None:
    while sum(each.waiting for each in await mq.metadata.dead_letter_queues("billing")) < count:
        await asyncio.sleep(0.01)


@pytest.fixture
async def operator(cluster: TestCluster) -> AsyncIterator[PlainBrowser]:
    """A browser logged in at a console with the right to change things. There are three dead
    letters: two timed out, one is broken.
    """
    mq = cluster.client()
    await die(mq, "orders", [b"one", b"two"], "timeout of the bank")
    await die(mq, "refunds", [b"three"], "broken <b>body</b>")
    await until_dead_lettered(mq, 3)
    site = site_of(cluster, is_writable=True)
    yield await PlainBrowser(site).log_in()
    await site.close()


async def job_done(browser: PlainBrowser, page: str) -> str:
    """The page of the job, once it has ended."""
    path = re.search(r'action="(/jobs/\w+)/stop"', page)
    while path is not None and "running" in page:
        await asyncio.sleep(0.01)
        page = (await browser.get(path[1])).text
    return page


async def test_letters_are_counted_by_error_age_and_subject(operator: PlainBrowser) -> None:
    assert 'href="/dead-letters/billing"' in (await operator.get("/dead-letters")).text
    page = await operator.get("/dead-letters/billing")
    for shown in (
        "3 dead letters are chosen",
        "timeout of the bank",
        "within an hour",
        "refunds",
        "broken &lt;b&gt;body",
    ):
        assert shown in page.text, shown
    assert "<b>body" not in page.text


async def test_a_filter_in_the_address_chooses_and_shows_its_command(
    operator: PlainBrowser,
) -> None:
    page = await operator.get("/dead-letters/billing?error=timeout&subject=orders")
    assert "2 dead letters are chosen" in page.text
    assert "qmq dlq replay billing --subject orders --error timeout" in page.text
    assert "0 dead letters" in (await operator.get("/dead-letters/billing?since=2099-01-01")).text
    assert (await operator.get("/dead-letters/nobody")).status == 404
    assert (await operator.get("/dead-letters/billing?id=zz")).status == 400


async def test_a_replay_sends_only_the_letters_that_the_filter_chose(
    cluster: TestCluster, operator: PlainBrowser
) -> None:
    page = await operator.post(
        "/dead-letters/billing", {"verb": "replay", "error": "timeout", "rate": "1000"}
    )
    page_text = await job_done(operator, page.text)
    assert "2 dead letters so far" in page_text
    assert "1 dead letters are chosen" in (await operator.get("/dead-letters/billing")).text
    assert await received(cluster.client(), "orders", 2) == [b"one", b"two"]
    again = await operator.post("/dead-letters/billing", {"verb": "replay", "error": "timeout"})
    assert "0 dead letters so far" in await job_done(operator, again.text)


async def test_a_purge_asks_for_the_group_s_name(operator: PlainBrowser) -> None:
    refused = await operator.post("/dead-letters/billing", {"verb": "purge", "confirm": "biling"})
    assert refused.status == 400
    assert "Nothing was done" in refused.text
    page = await operator.post(
        "/dead-letters/billing", {"verb": "purge", "confirm": "billing", "subject": "refunds"}
    )
    assert "1 dead letters so far" in await job_done(operator, page.text)
    assert "2 dead letters are chosen" in (await operator.get("/dead-letters/billing")).text


async def test_a_replay_that_is_stopped_leaves_the_rest_for_the_next_one(
    cluster: TestCluster, operator: PlainBrowser
) -> None:
    page = await operator.post(
        "/dead-letters/billing", {"verb": "replay", "rate": "1", "error": "timeout"}
    )
    job = operator.site.sessions.callers().pop().jobs[0]
    await eventually(lambda: job.count >= 1)
    path = re.search(r'action="(/jobs/\w+/stop)"', page.text)
    assert path is not None
    assert "stopped" in (await operator.post(path[1], {})).text
    assert job.count == 1
    mq = cluster.client()
    assert await mq.dead_letters("billing").replay() == 2
    assert await received(mq, "orders", 2) == [b"one", b"two"]
    assert await received(mq, "refunds", 1) == [b"three"]


async def test_a_job_that_fails_in_any_way_is_shown_as_failed() -> None:
    async def work() -> int:
        raise OSError("no descriptors are left")

    job = ReplayJob("billing", "replay", "qmq dlq replay billing", 0)
    job.start(work())
    async with asyncio.timeout(20):
        while job.state == "running":
            await asyncio.sleep(0)
    assert (job.state, "no descriptors" in job.failure) == ("failed", True)


async def test_a_plan_tells_of_any_letter_that_cannot_be_edited(
    cluster: TestCluster, operator: PlainBrowser
) -> None:
    await die(cluster.client(), "orders", [b'{"a": 1}'] * 3, "json")
    await until_dead_lettered(cluster.client(), 6)
    page = await operator.get("/dead-letters/billing?error=json&plan=1&set=a%3D2")
    assert page.status == 200
    assert page.text.count("<details open>") == EXAMPLES
    assert (await operator.get("/dead-letters/billing?plan=1&set=a%3D2")).status == 400, (
        "three of them are no JSON"
    )


@pytest.mark.parametrize("path", ["/dead-letters/billing", "/cluster/group-1", "/jobs/1/stop"])
async def test_a_console_that_only_reads_changes_nothing(path: str, browser: PlainBrowser) -> None:
    answer = await browser.post(path, {"verb": "replay"})
    assert answer.status == 403
    assert "--writable" in answer.text


async def test_a_form_without_the_session_s_token_changes_nothing(operator: PlainBrowser) -> None:
    for csrf in ("", "guessed"):
        assert (
            await operator.post(
                "/dead-letters/billing", {"verb": "purge", "confirm": "billing", "csrf": csrf}
            )
        ).status == 403
    assert "3 dead letters are chosen" in (await operator.get("/dead-letters/billing")).text


async def test_a_caller_without_the_right_to_replay_hears_so(
    cluster: TestCluster, operator: PlainBrowser
) -> None:
    mq = cluster.client()
    tokens = {name: (await mq.access.create_token(name)).token for name in ("op:alice", "op:bob")}
    await mq.access.put_rule("op:alice", (), "cluster")
    await mq.access.put_rule("op:bob", ("describe",), "group")
    await cluster.client(token=tokens["op:alice"]).access.set_mode("enforce")
    site = site_of(cluster, login=LoginMode.TOKEN, is_writable=True)
    bob = PlainBrowser(site)
    await bob.post("/login", {"token": tokens["op:bob"], "csrf": ""})
    page = await bob.post("/dead-letters/billing", {"verb": "replay"})
    assert "E123" in await job_done(bob, page.text)
    await site.close()


def test_ages_are_of_the_last_hour_day_week_and_before() -> None:
    now_ms = 100 * 86_400_000
    dead_ms = [now_ms - ago for ago in (0, 3_599_999, 3_600_000, 86_400_000, 8 * 86_400_000)]
    assert ages(dead_ms, now_ms) == [("hour", 2), ("day", 1), ("week", 1), ("older", 1)]
