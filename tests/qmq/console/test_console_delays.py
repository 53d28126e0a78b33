"""The calendar of delayed messages, and what can be done with one."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from urllib.parse import urlencode

from support.console import PlainBrowser, csrf_of, site_of

from qmq.client.producing.delayed import DelayBucket
from qmq.console.pages.delays import DAYS, calendar, months
from qmq.testing import TestCluster


async def test_a_delayed_message_is_in_the_calendar_and_in_its_day(
    cluster: TestCluster, browser: PlainBrowser
) -> None:
    due = datetime.now(UTC) + timedelta(days=40)
    told = await cluster.client().send("reminders", b"pay", key="k-1", at=due)
    page = await browser.get("/delays")
    assert f'aria-label="{due.date()}: 1"' in page.text
    day = f"start={due.date()}T00:00Z&end={due.date() + timedelta(days=1)}T00:00Z"
    assert str(told.delayed_id) in (await browser.get(f"/delays?{day}")).text
    assert "k-1" in (await browser.get("/delays?subject=reminders")).text
    assert str(told.delayed_id) not in (await browser.get("/delays?end=2020-01-01")).text


async def test_a_message_is_moved_and_then_cancelled_by_its_subject_s_name(
    cluster: TestCluster,
) -> None:
    mq = cluster.client()
    told = await mq.send("reminders", b"pay", delay=timedelta(days=40))
    site = site_of(cluster, is_writable=True)
    browser = await PlainBrowser(site).log_in()
    form = {"id": str(told.delayed_id)}
    assert (
        "2027-06-01T09:00"
        in (await browser.post("/delays", {**form, "verb": "move", "to": "2027-06-01T09:00Z"})).text
    )
    assert (await mq.delayed.show(str(told.delayed_id))).due == datetime(2027, 6, 1, 9, tzinfo=UTC)
    assert (
        await browser.post("/delays", {**form, "verb": "cancel", "confirm": "other"})
    ).status == 400
    assert (await mq.delayed.show(str(told.delayed_id))).state == "pending"
    await browser.post("/delays", {**form, "verb": "cancel", "confirm": "reminders"})
    assert (await mq.delayed.show(str(told.delayed_id))).state == "cancelled"
    assert (await browser.post("/delays", {**form, "verb": "move", "to": ""})).status == 400
    await site.close()


async def test_a_note_waits_for_the_page_that_a_person_asks_for(cluster: TestCluster) -> None:
    told = await cluster.client().send("reminders", b"pay", delay=timedelta(days=40))
    site = site_of(cluster, is_writable=True)
    browser = await PlainBrowser(site).log_in()
    form = {
        "id": str(told.delayed_id),
        "verb": "cancel",
        "confirm": "reminders",
        "csrf": csrf_of((await browser.get("/")).text),
    }
    answer = await browser.ask("POST", "/delays", body=urlencode(form).encode())
    assert 'class="note"' not in (await browser.ask("GET", "/cluster", {"x-live": "1"})).text, (
        "another tab reads its parts again"
    )
    assert 'class="note"' in (await browser.ask("GET", answer.headers["location"])).text
    await site.close()


def test_the_calendar_begins_with_this_week_and_counts_each_message_once() -> None:
    today = date(2026, 11, 26)  # a Thursday
    hour = timedelta(hours=1)
    starts = [
        datetime(2026, 11, 25, 23, tzinfo=UTC),
        datetime(2026, 11, 26, tzinfo=UTC),
        datetime(2027, 1, 1, 5, tzinfo=UTC),
    ]
    days, late = calendar(
        [
            DelayBucket(each, hour, 5, count, 1)
            for each, count in zip(starts, (1, 20, 300), strict=True)
        ],
        today,
    )
    assert (days[0].day, days[0].weekday, late) == (date(2026, 11, 23), 0, 1)
    assert len(days) == DAYS + 3
    assert [(each.day, each.pending, each.level) for each in days if each.pending] == [
        (today, 20, 2),
        (date(2027, 1, 1), 300, 3),
    ]
    assert months(days) == [("2026-11", 20), ("2027-01", 300)]
