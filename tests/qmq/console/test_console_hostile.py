"""Text in a name, a header, a key, a body or an address cannot run on any page of the console: in
Chromium, on every screen. The check is stronger than "no script ran": a page has no element and no
attribute that comes from such text.
"""

from __future__ import annotations

import shlex
from datetime import timedelta
from typing import Any, Final
from urllib.parse import quote

import pytest
from markupsafe import escape
from support import hostile, needs
from support.console import PlainBrowser, Stage, SteppedClock, csrf_of, site_of

from qmq.console.cluster_look import REST_S_MAX
from qmq.model import Order, SubjectConfig
from qmq.proto.v1 import meta_pb2 as pb
from qmq.testing import TestCluster
from qmq.text import visible

chromium = [
    needs.chromium,
    pytest.mark.xdist_group("chromium"),
    pytest.mark.asyncio(loop_scope="module"),
]
IDS = [str(number) for number in range(len(hostile.TEXTS))]
MADE_BY_TEXT = """() => {
    for (const each of document.querySelectorAll("details")) each.open = true;
    const found = document.querySelectorAll(`script:not([src="/static/app.js"]), img, iframe, base, object, embed, style,
        meta[http-equiv], main b b, [onerror], [onload], [onfocus], [onmouseover], [srcdoc],
        [href^="javascript:" i], [href^="//"], [action^="//"]`);
    return [window.hacked ?? null, ...[...found].map((each) => each.outerHTML.slice(0, 100))];
}"""  # noqa: E501


SCREENS: Final = (
    "/",
    "/subjects/hostile",
    "/subjects/hostile-bodies",
    "/subjects/vault/lanes",
    "/subjects/vault/route",
    "/dead-letters/billing",
    "/cluster",
)
PLANT: Final = """async () => {
    const script = document.createElement("script");
    script.textContent = "window.hacked = 1";
    document.body.append(script);
    const place = document.createElement("div");
    place.innerHTML = "<img src=/x onerror='window.hacked = 1'><a href='javascript:window.hacked = 1'>x</a>";
    const failed = new Promise((done) => place.firstChild.addEventListener("error", done));
    document.body.append(place);
    place.lastChild.click();
    await failed;
    return window.hacked ?? null;
}"""  # noqa: E501
"""What markup in a page would be: a page whose templates escaped nothing."""


def addresses(text: str, message_id: str) -> list[str]:
    """Every screen, with the text wherever its address takes one."""
    it = quote(text, safe="")
    return [
        f"/?lang={it}&{it}={it}",
        f"/subjects?q={it}&sort={it}",
        f"/subjects?from={it}",
        f"/subjects/{it}",
        f"/subjects/hostile?content={it}",
        f"/subjects/hostile?key={it}&tag={it}&header=trace%3D{it}",
        f"/subjects/hostile?start={it}&end={it}",
        f"/subjects/vault/route?verb={it}",
        f"/subjects/vault/route?verb=split&partitions={it}&at={it}&parts={it}",
        f"/subjects/vault/route?verb=move&partitions=1&to={it}",
        f"/subjects/{it}/lanes",
        f"/dead-letters/{it}",
        f"/dead-letters/billing?error={it}&plan=1",
        f"/dead-letters/billing?subject={it}&id={it}",
        f"/dead-letters/billing?since={it}",
        f"/dead-letters/billing?plan=1&set={it}&unset={it}&rate={it}",
        f"/dead-letters/billing?plan=1&edit=body&body={it}",
        f"/delays?subject={it}",
        f"/delays?start={it}&end={it}",
        f"/messages/{message_id}",
        f"/messages/{message_id}?subject={it}",
        f"/messages/{it}",
        f"/messages?id={it}",
        f"/jobs/{it}?group=billing&error={it}&rate={it}",
        f"/jobs/{it}?group={it}",
        f"/nothing/{it}",
    ]


async def check(page: Any, address: str) -> None:
    """Check that no text of a page has become markup."""
    await page.goto(address, wait_until="domcontentloaded")
    assert await page.evaluate(MADE_BY_TEXT) == [None], address
    # The browser logs each answer that is an error; anything else that it logs stays.
    page.complaints[:] = [
        each for each in page.complaints if not each.startswith("Failed to load resource")
    ]
    assert page.complaints == [], address


class TestInChromium:
    pytestmark = chromium

    @pytest.mark.sampled
    @pytest.mark.parametrize("at", range(len(hostile.TEXTS)), ids=IDS)
    async def test_a_text_in_an_address_and_in_a_message_is_text(
        self, at: int, stage: Stage, page: Any
    ) -> None:
        text = hostile.TEXTS[at]
        for address in addresses(text, stage.ids[at]):
            await check(page, stage.base + address)
        await page.goto(f"{stage.base}/messages/{stage.ids[at]}")
        shown = await page.locator("dl.facts").first.evaluate("each => each.textContent")
        assert shown.count(visible(text)) >= 4, "key, tag, a header's name, its value"

    @pytest.mark.sampled
    @pytest.mark.parametrize("at", range(len(hostile.TEXTS)), ids=IDS)
    async def test_a_text_on_the_page_of_a_job_and_at_the_login_is_text(
        self, at: int, stage: Stage, page: Any
    ) -> None:
        text, it = hostile.TEXTS[at], quote(hostile.TEXTS[at], safe="")
        csrf = csrf_of(await page.content())
        form = {
            "csrf": csrf,
            "verb": "replay",
            "error": f"no letter has this error: {text}",
            "rate": "1",
        }
        answer = await page.context.request.post(
            f"{stage.base}/dead-letters/billing", form=form, headers={"origin": stage.base}
        )
        assert "/jobs/" in answer.url
        await check(page, answer.url)
        # as the command line that does the same has it
        command = shlex.quote(visible(form["error"]))
        assert command in await page.locator("main").evaluate("each => each.textContent")
        await page.context.clear_cookies()
        for address in (
            f"/login?next={it}",
            f"/login?key={it}",
            f"/subjects/hostile?content={it}",
            f"/login/{it}",
        ):
            await check(page, stage.base + address)

    @pytest.mark.parametrize("path", SCREENS)
    async def test_all_texts_on_one_screen_are_text(
        self, path: str, stage: Stage, page: Any
    ) -> None:
        await check(page, stage.base + path)

    async def test_bodies_that_come_while_a_page_looks_are_text(
        self, stage: Stage, page: Any
    ) -> None:
        await stage.mq.send("hostile-tail", b"the first")
        await page.goto(f"{stage.base}/subjects/hostile-tail")
        await page.get_by_role("button", name="Start").click()
        rows = page.locator(".tail li")
        await rows.first.wait_for()
        for number, body in enumerate(hostile.BODIES, start=1):
            await stage.mq.send(
                "hostile-tail", body, key=hostile.TEXTS[number % len(hostile.TEXTS)]
            )
            await rows.nth(number).wait_for()
        assert await page.evaluate(MADE_BY_TEXT) == [None]

    @pytest.mark.sampled
    @pytest.mark.parametrize("at", range(len(hostile.TEXTS)), ids=IDS)
    async def test_a_text_of_a_delayed_message_and_in_a_reason_is_text(
        self, at: int, stage: Stage, page: Any
    ) -> None:
        text, later, moved = hostile.TEXTS[at], f"later-{at}", f"moved-{at}"
        await stage.mq.send(
            later,
            text.encode(),
            key=text,
            tags=[text],
            headers={"trace": text, text: text},
            delay=timedelta(days=9),
        )
        await stage.mq.metadata.create_subject(
            SubjectConfig(moved, order=Order.STRICT, logical_partitions=64), partitions=1
        )
        reason, move = text.replace("\0", ""), pb.MoveOperation(partition=1, broker_group="group-1")
        await stage.mq.metadata.change_route(moved, move=move, reason=reason)
        for path, shown in (
            (f"/delays?subject={later}", text),
            (f"/subjects/{moved}/route", reason),
        ):
            await check(page, stage.base + path)
            assert visible(shown) in await page.locator("main").evaluate(
                "each => each.textContent"
            ), path

    @pytest.mark.parametrize(
        "path", [*SCREENS, "/delays", "/messages", "/subjects", "/dead-letters", "/login"]
    )
    async def test_markup_that_did_reach_a_page_would_run_no_script(
        self, path: str, stage: Stage, page: Any
    ) -> None:
        await page.goto(stage.base + path)
        assert await page.evaluate(PLANT) is None
        assert page.url.startswith(stage.base)
        refused = [each for each in page.complaints if "Content Security Policy" in each]
        # the inline script, the event handler, the javascript: address
        assert len(refused) >= 3, page.complaints
        page.complaints.clear()


async def test_the_reasons_that_people_give_are_text(cluster: TestCluster) -> None:
    mq, clock = cluster.client(), SteppedClock()
    site = site_of(cluster, clock)
    browser = await PlainBrowser(site).log_in()
    await mq.send_many("orders", [b"1", b"2"])
    async with mq.consumer("orders", "billing", ack="explicit") as consumer:
        await (await consumer.pull(1))[0].ack_sync()
    await mq.metadata.create_subject(
        SubjectConfig("accounts", order=Order.STRICT, logical_partitions=1024), partitions=1
    )
    for partition, text in enumerate(hostile.TEXTS, start=1):
        reason = text.replace("\0", "")
        await mq.metadata.pause_group("orders", "billing", reason=reason)
        clock.now_s += REST_S_MAX + 1  # the page looks again
        move = pb.MoveOperation(partition=partition, broker_group="group-1")
        await mq.metadata.change_route("accounts", move=move, reason=reason)
        for path in ("/", "/subjects/accounts/route"):
            assert str(escape(visible(reason))) in (await browser.get(path)).text, path
    await site.close()
