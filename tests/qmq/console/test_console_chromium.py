"""The console in Debian's Chromium: journeys, sizes and accessibility. QMQ_SCREENSHOTS=1 writes the
pictures of docs/CONSOLE.md.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
from support import eventually, hostile, needs
from support.console import Stage, parked_subject

from qmq.client.consuming.ordered.message import OrderedMessage
from qmq.model import Order, SubjectConfig

axe = pytest.importorskip(
    "axe_playwright_python.async_playwright", reason="scripts/setup installs it"
)

pytestmark = [
    needs.chromium,
    pytest.mark.xdist_group("chromium"),
    pytest.mark.asyncio(loop_scope="module"),
]

PICTURES = Path(__file__).resolve().parents[3] / "docs" / "images"


def screens(stage: Stage) -> list[str]:
    return [
        "/",
        "/subjects",
        "/subjects/orders",
        "/subjects/hostile?content=script",
        "/dead-letters",
        "/dead-letters/accounting",
        f"/messages/{stage.invoice}",
        "/cluster",
        "/delays",
        "/subjects/accounts/route?verb=split&partitions=1",
        "/subjects/accounts/lanes",
    ]


NAMES = (
    "overview",
    "subjects",
    "subject",
    "search",
    "dead-letters",
    "group-letters",
    "message",
    "cluster",
    "delays",
    "route",
    "lanes",
)
CURVES = ("overview", "subject")
"""Screens with curves."""


async def test_the_printed_address_lets_in_and_leaves_no_key_behind(
    stage: Stage, page: Any
) -> None:
    assert page.url == f"{stage.base}/"
    assert await page.locator("h1").inner_text() == "Is all well?"


@pytest.mark.parametrize("at", range(len(NAMES)), ids=NAMES)
async def test_a_screen_fits_every_width_and_has_no_accessibility_violation(
    at: int, stage: Stage, page: Any
) -> None:
    await page.goto(stage.base + screens(stage)[at])
    for width in (360, 2560, 1280):
        await page.set_viewport_size({"width": width, "height": 900})
        assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth"), (
            f"{width} px"
        )
    if os.environ.get("QMQ_SCREENSHOTS") and NAMES[at] != "search":
        await take_pictures(page, NAMES[at])
    for scheme in ("light", "dark"):
        await page.emulate_media(color_scheme=scheme)
        results = await axe.Axe().run(page)
        assert results.violations_count == 0, results.generate_report()


async def take_pictures(page: Any, name: str) -> None:
    """The pictures of the documentation: of each screen, and of some on a phone in the dark."""
    if name in CURVES:
        # two looks at the cluster of a busy machine
        await page.locator(".chart canvas").first.wait_for(timeout=130_000)
    await page.screenshot(path=PICTURES / f"console-{name}.png", scale="css")
    if name in ("overview", "delays"):
        await page.emulate_media(color_scheme="dark")
        await page.set_viewport_size({"width": 390, "height": 844})
        await page.screenshot(path=PICTURES / f"console-{name}-phone.png", scale="css")
        await page.set_viewport_size({"width": 1280, "height": 900})


@pytest.mark.smoke
async def test_from_the_overview_to_a_message_by_clicks(stage: Stage, page: Any) -> None:
    await page.locator("#busiest ~ div a", has_text="orders").first.click()
    await page.wait_for_url("**/subjects/orders")
    first = page.locator("details.message").first
    await first.locator("summary").click()
    assert '"total"' in await first.locator("pre").inner_text()
    await first.locator("dl a").click()
    await page.wait_for_url("**/messages/*")
    assert "stored" in await page.locator(".life").inner_text()


async def test_a_search_is_in_the_address_and_outlives_a_reload(stage: Stage, page: Any) -> None:
    await page.goto(f"{stage.base}/subjects/orders")
    await page.get_by_label("Key", exact=True).fill("customer-3")
    await page.get_by_role("button", name="Search").click()
    await page.wait_for_url("**key=customer-3**")
    found = await page.locator("details.message").count()
    assert found == 4
    await page.reload()
    assert await page.locator("details.message").count() == found


async def test_subjects_are_filtered_by_the_keyboard_alone(stage: Stage, page: Any) -> None:
    await page.keyboard.press("g")
    await page.keyboard.press("s")
    await page.wait_for_url("**/subjects")
    await page.keyboard.press("/")
    await page.keyboard.type("hostile-b")
    await page.keyboard.press("Enter")
    await page.wait_for_url("**q=hostile-b**")
    assert await page.locator("tbody tr").count() == 1


async def test_the_overview_has_keys_curves_and_dark_colours(page: Any) -> None:
    await page.keyboard.press("Tab")
    assert await page.evaluate("document.activeElement.className") == "skip"
    await page.keyboard.press("?")
    assert await page.locator("#help").is_visible()
    await page.keyboard.press("Escape")
    assert not await page.locator("#help").is_visible()
    seen = []
    for scheme in ("light", "dark"):
        await page.emulate_media(color_scheme=scheme)
        seen.append(await page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert seen == ["rgb(255, 255, 255)", "rgb(16, 22, 28)"]
    await page.locator(".chart canvas").first.wait_for()


async def test_the_live_tail_shows_what_comes_and_stops(stage: Stage, page: Any) -> None:
    await page.goto(f"{stage.base}/subjects/orders")
    await page.get_by_role("button", name="Start").click()
    await page.locator(".tail li").first.wait_for()
    await stage.mq.send("orders", b"fresh from the test")
    await page.locator(".tail li", has_text="fresh from the test").wait_for()
    await page.get_by_role("button", name="Stop").click()
    assert await page.get_by_role("button", name="Start").is_visible()


async def test_a_new_subject_appears_without_a_reload(stage: Stage, page: Any) -> None:
    await page.goto(f"{stage.base}/subjects?q=newcomer")
    assert await page.locator("tbody tr").count() == 0
    await stage.mq.send("newcomer", b"hello")
    # a busy machine rests longest
    await page.locator("tbody tr", has_text="newcomer").wait_for(timeout=65_000)


async def test_the_page_says_that_the_console_does_not_answer_until_it_does(
    stage: Stage, page: Any
) -> None:
    await page.route("**/*", lambda route: route.abort())
    await page.locator("#stale").wait_for()
    await page.unroute("**/*")
    await page.locator("#stale").wait_for(state="detached")
    page.complaints.clear()  # the browser logs each request that was aborted


async def test_the_language_is_switched_and_kept(stage: Stage, page: Any) -> None:
    await page.get_by_role("link", name="中文").click()
    assert await page.locator("h1").inner_text() == "一切正常吗" + "\uff1f"
    await page.goto(f"{stage.base}/subjects")
    assert await page.locator("h1").inner_text() == "主题"
    assert await page.evaluate("document.documentElement.lang") == "zh-CN"


async def test_a_command_line_is_copied_as_it_stands(stage: Stage, page: Any) -> None:
    await page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    await page.goto(f"{stage.base}/subjects/orders?content=total")
    await page.locator("[data-copy]").first.click()
    assert await page.evaluate("navigator.clipboard.readText()") == "qmq browse orders --grep total"


async def test_dead_letters_are_narrowed_by_error_and_one_is_replayed(
    stage: Stage, page: Any
) -> None:
    await page.goto(f"{stage.base}/dead-letters")
    await page.get_by_role("link", name="billing").click()
    assert (
        f"{len(hostile.TEXTS)} dead letters are chosen" in await page.locator("main").inner_text()
    )
    await page.locator("[aria-labelledby=by-error] a", has_text="7 * 7").click()
    assert "1 dead letters are chosen" in await page.locator("main").inner_text()
    await page.get_by_role("button", name="Show what would be sent").first.click()
    assert "1 dead letters would be sent again" in await page.locator("main").inner_text()
    await page.get_by_role("button", name="Replay").click()
    await page.wait_for_url("**/jobs/*")
    await page.locator("#job", has_text="done: 1 dead letters").wait_for()
    async with stage.mq.consumer(
        "hostile", "billing", name="billing-1", ack="explicit"
    ) as consumer:
        message = await anext(consumer)
        while b"7 * 7" not in message.body:
            message.release()
            message = await anext(consumer)
        message.reject("again")
    while sum(each.waiting for each in await stage.mq.metadata.dead_letter_queues("billing")) < len(
        hostile.TEXTS
    ):
        await asyncio.sleep(0.01)


async def test_a_purge_without_the_name_does_nothing(stage: Stage, page: Any) -> None:
    await page.goto(f"{stage.base}/dead-letters/billing")
    await page.get_by_role("button", name="Purge").click()
    assert "/jobs/" not in page.url  # the browser asks for the name
    await page.get_by_label("Type billing to confirm").fill("another")
    await page.get_by_role("button", name="Purge").click()
    await page.locator(".failure").wait_for()
    assert "Nothing was done" in await page.locator(".failure").inner_text()
    page.complaints.clear()  # the browser logs that the answer was an error


async def test_a_plan_of_a_replay_is_in_the_address_and_sends_nothing(
    stage: Stage, page: Any
) -> None:
    await page.goto(f"{stage.base}/dead-letters/billing")
    await page.get_by_label("A second, at most").fill("2")
    await page.get_by_role("button", name="Show what would be sent").first.click()
    await page.wait_for_url("**plan=1**rate=2**")
    await page.reload()
    text = await page.locator(".plan").inner_text()
    assert f"{len(hostile.TEXTS)} dead letters would be sent again" in text
    assert f"At this rate that takes {len(hostile.TEXTS) // 2} s." in text
    assert sum(
        each.waiting for each in await stage.mq.metadata.dead_letter_queues("billing")
    ) == len(hostile.TEXTS)


async def test_a_letter_is_edited_as_a_whole_and_the_plan_shows_before_and_after(
    stage: Stage, page: Any
) -> None:
    await page.goto(f"{stage.base}/dead-letters/billing?error=javascript")
    await page.locator("details.message summary").first.click()
    old = await page.get_by_label("Another body").first.input_value()
    await page.get_by_label("Another body").first.fill("<b>mended</b>")
    await page.locator(".edit button").first.click()
    await page.locator(".plan").wait_for()
    assert await page.locator(".plan pre").all_inner_texts() == [old, "<b>mended</b>"]
    assert (
        "--body '<b>mended</b>'"
        in await page.locator(".command code", has_text="dlq replay").inner_text()
    )


async def test_work_that_ended_with_the_console_is_begun_again_from_its_address(
    stage: Stage, page: Any
) -> None:
    await page.goto(f"{stage.base}/jobs/of-an-earlier-console?group=billing&error=svg&rate=5")
    await page.get_by_role("link", name="Continue with the same plan").click()
    assert "1 dead letters would be sent again" in await page.locator(".plan").inner_text()


async def test_a_recurring_message_shows_its_next_runs(stage: Stage, page: Any) -> None:
    await page.goto(f"{stage.base}/delays?subject=reminders")
    recurring = page.locator("details.message", has_text="0 9 * * *")
    await recurring.locator("summary").click()
    assert (await recurring.locator("dl").inner_text()).count("Z") >= 6


async def test_a_click_on_the_ring_chooses_a_boundary_and_the_plan_comes_before_the_change(
    stage: Stage, page: Any
) -> None:
    await page.goto(f"{stage.base}/subjects/accounts/route")
    box = await page.locator("[data-ring]").bounding_box()
    at = 0.445 * box["width"]  # within the outer ring, straight to the right: a quarter of the turn
    await page.mouse.click(box["x"] + box["width"] / 2 + at, box["y"] + box["height"] / 2)
    assert abs(int(await page.get_by_label("Cut at").input_value()) - 256) <= 1
    await page.keyboard.press("Enter")
    await page.wait_for_url("**verb=split**")
    assert "What version" in await page.locator("main").inner_text()
    assert "qmq route split accounts" in await page.locator("main").inner_text()


@pytest.mark.sampled
async def test_a_split_under_a_backlog_is_watched_until_each_lane_reads_the_new_version(
    stage: Stage, page: Any
) -> None:
    mq, messages = stage.mq, 400
    await mq.metadata.create_subject(
        SubjectConfig("trades", order=Order.STRICT, logical_partitions=1024), partitions=1
    )
    opened = {"desk-1": asyncio.Event(), "desk-2": asyncio.Event()}

    async def consume(name: str) -> None:
        async def handle(_: OrderedMessage) -> None:
            await opened[name].wait()

        await mq.ordered_consumer("trades", "desk", name=name, gate="lanes").run(handle)

    consumers = [asyncio.create_task(consume(name)) for name in opened]
    while len(holders := await held(stage, "trades")) < 2:
        await asyncio.sleep(0.01)
    await asyncio.gather(
        *[
            mq.send("trades", b"%d" % number, key=f"account-{number % 80}")
            for number in range(messages)
        ]
    )
    await page.goto(f"{stage.base}/subjects/trades/route?verb=split&partitions=1&at=512")
    assert (
        f"Group desk has {messages} messages left there" in await page.locator("main").inner_text()
    )
    await page.get_by_label("Type trades to confirm").fill("trades")
    await page.get_by_role("button", name="Do it").click()
    await page.locator(
        "#route .life", has_text=f"command message of partition 1 at sequence {messages}"
    ).wait_for()
    await page.locator(
        "#route .life", has_text=f"Group desk: gate lanes, {messages} messages left"
    ).wait_for()
    lanes = await page.context.request.get(f"{stage.base}/subjects/trades/lanes")
    assert f"{messages} messages left" in await lanes.text(), "the command message is none of them"
    opened[holders[512]].set()
    gates = page.locator("#route .life svg title")
    await page.locator("#route .life svg", has_text="512 - 1023: v2").wait_for(state="attached")
    assert await gates.all_text_contents() == ["0 - 511: v1", "512 - 1023: v2"]
    opened[holders[0]].set()
    await page.locator(
        "#route .life", has_text="Every consumer group reads the new version."
    ).wait_for()
    for each in consumers:
        each.cancel()
    await asyncio.gather(*consumers, return_exceptions=True)


async def held(stage: Stage, subject: str) -> dict[int, str]:
    """The consumers of a subject's lanes, by the first logical partition that each holds."""
    groups = (await stage.mq.metadata.describe_route(subject)).groups
    return {
        each.lps.first: each.consumer
        for group in groups
        for partition in group.partitions
        for each in partition.holders
    }


async def test_a_parked_key_is_replayed_in_order_and_another_skipped_by_its_name(
    stage: Stage, page: Any
) -> None:
    async with parked_subject(
        stage.mq, "payments", "audit", ["customer-1", "customer-2"]
    ) as consuming:
        await stage.mq.send("payments", b"later", key="customer-1")
        await page.goto(f"{stage.base}/subjects/payments")
        await page.get_by_role("link", name="Lanes").click()
        await page.wait_for_url("**/subjects/payments/lanes")
        assert "audit-1 (0 - 1023)" in await page.locator("#lanes").inner_text()
        first, second = [
            page.locator("details.parked", has_text=key) for key in ("customer-1", "customer-2")
        ]
        async with asyncio.timeout(30):
            while "messages: 2" not in await first.locator("summary").inner_text():
                await page.reload()
        consuming.bad.clear()
        await first.locator("summary").click()
        await first.get_by_role("button", name="Replay in order").click()
        await page.locator(
            ".note", has_text="2 messages of the key customer-1 are given back, in order."
        ).wait_for()
        await eventually(lambda: len(consuming.seen) >= 2)
        assert consuming.seen == [b"to customer-1", b"later"]
        await skip(page, "")
        # the browser asks for the key: this is the note of the replay
        assert await page.locator(".note").count() == 1
        await skip(page, "customer-1")
        assert "Nothing was done" in await page.locator(".failure").inner_text()
        page.complaints.clear()  # the browser logs that the answer was an error
        await page.goto(f"{stage.base}/subjects/payments/lanes")
        assert await second.count() == 1
        await skip(page, "customer-2")
        await page.locator(
            ".note", has_text="1 messages of the key customer-2 count as done."
        ).wait_for()
        assert "No key is parked." in await page.locator("main").inner_text()
        assert consuming.seen == [b"to customer-1", b"later"]


async def skip(page: Any, typed: str) -> None:
    """Skip customer-2, with `typed` for its name."""
    parked = page.locator("details.parked", has_text="customer-2")
    await parked.evaluate("each => { each.open = true; }")
    await parked.get_by_label("Type customer-2 to confirm").fill(typed)
    await parked.get_by_role("button", name="Skip for good").click()


async def test_messages_are_searched_by_tag_header_and_content(stage: Stage, page: Any) -> None:
    for label, text, found in (
        ("Tag", "new", 30),
        ("Header", "trace", 0),
        ("Content", '"order": 7,', 1),
    ):
        await page.goto(f"{stage.base}/subjects/orders")
        await page.get_by_label(label, exact=True).fill(text)
        await page.keyboard.press("Enter")
        await page.wait_for_url(f"**{label.lower()}=**")
        assert f"{found} found" in await page.locator("main").inner_text()


async def test_the_back_button_leads_to_the_search_that_was_left(stage: Stage, page: Any) -> None:
    await page.goto(f"{stage.base}/subjects/orders?key=customer-3")
    await page.locator("details.message summary").first.click()
    await page.locator("details.message dl a").first.click()
    await page.wait_for_url("**/messages/*")
    await page.go_back()
    assert await page.get_by_label("Key", exact=True).input_value() == "customer-3"


async def test_a_phone_reaches_every_screen_from_the_menu(stage: Stage, page: Any) -> None:
    await page.set_viewport_size({"width": 360, "height": 740})
    for name in ("Subjects", "Dead letters", "Delays", "Message", "Cluster", "Overview"):
        await page.get_by_role("navigation").get_by_role("link", name=name, exact=True).click()
        assert await page.locator("nav [aria-current=page]").inner_text() == name


async def test_pages_are_whole_without_scripts(stage: Stage) -> None:
    context = await stage.browser.new_context(java_script_enabled=False)
    page = await context.new_page()
    await page.goto(stage.console.url)
    await page.goto(f"{stage.base}/subjects/orders?key=customer-3")
    assert await page.locator("details.message").count() == 4
    await context.close()
