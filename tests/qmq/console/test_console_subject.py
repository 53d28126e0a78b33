"""The screen of a subject: its last messages, the search, the live tail."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from html import unescape

import msgspec
import pytest
from support.console import PlainBrowser, site_of

from qmq.console.config import MaskRule
from qmq.console.pages import message
from qmq.console.pages.message import ReadPlace
from qmq.console.pages.subject import TailPace, tail_events
from qmq.errors import InvalidArgument
from qmq.model import QueueId
from qmq.testing import TestCluster


async def test_the_newest_messages_are_shown_in_the_form_that_they_have(
    cluster: TestCluster, browser: PlainBrowser
) -> None:
    mq = cluster.client()
    await mq.send("orders", b'{"id": 7}', key="k-1", tags=["new"], headers={"trace": "abc"})
    await mq.send("orders", msgspec.msgpack.encode({"packed": True}))
    await mq.send("orders", b"\x00\xff\x00")
    page = await browser.get("/subjects/orders")
    for shown in (
        "JSON",
        "MessagePack",
        "hex",
        "k-1",
        "trace",
        "abc",
        "&#34;packed&#34;: true",
        "00 ff 00",
    ):
        assert shown in page.text, shown


async def test_a_search_finds_by_key_tag_header_content_and_time(
    cluster: TestCluster, browser: PlainBrowser
) -> None:
    mq = cluster.client()
    await mq.send("orders", b"the needle", key="k-1", tags=["paid"], headers={"trace": "abc"})
    await mq.send("orders", b"hay", key="k-2")
    now = datetime.now(UTC)
    for asked in ("content=needle", "key=k-1", "tag=paid", "header=trace", "header=trace%3Dabc"):
        page = await browser.get(f"/subjects/orders?{asked}")
        assert "1 found in" in page.text, asked
        assert "the needle" in page.text
    late = (now + timedelta(hours=1)).isoformat().replace("+00:00", "Z")
    assert "0 found in 0 messages" in (await browser.get(f"/subjects/orders?start={late}")).text
    assert (
        "qmq browse orders --grep needle"
        in (await browser.get("/subjects/orders?content=needle")).text
    )
    assert (await browser.get("/subjects/orders?start=soon")).status == 400


async def test_a_search_says_where_it_stopped_and_continues_there(
    cluster: TestCluster, browser: PlainBrowser, monkeypatch
) -> None:
    monkeypatch.setattr(message, "LOOKED_MAX", 5)
    # a busy machine must not end the search before the count does
    monkeypatch.setattr(message, "LOOK_S", 600.0)
    await cluster.client().send_many("orders", [b"hay"] * 10)
    page = await browser.get("/subjects/orders?key=nobody")
    assert "0 found in 5 messages" in page.text
    assert "Not everything was looked through" in page.text


async def test_a_search_passes_a_batch_with_more_matches_than_a_page(
    browser: PlainBrowser, cluster: TestCluster, monkeypatch
) -> None:
    """All messages of a batch have one time: following the link shows each message once, also of
    several batches and queues.
    """
    monkeypatch.setattr(message, "LOOK_S", 600.0)
    mq = cluster.client()
    await mq.send_many("orders", [b"hay"] * 130)
    await mq.send_many("orders", [b"hay"] * 20)
    link, shown = "?content=hay", list[int]()
    while link:
        page = (await browser.get(f"/subjects/orders{link}")).text
        shown += [int(each) for each in re.findall(r'class="place">[^@<]+@(\d+)<', page)]
        (link,) = re.findall(r'href="(\?content=hay[^"#]*after=[^"#]*)#messages"', page) or [""]
        link = unescape(link)
    assert shown == list(range(150))
    for after in ("1,x", f"1,0:{1 << 63}:group-1", "1,9999999999:0:group-1"):
        assert (await browser.get(f"/subjects/orders?content=hay&after={after}")).status == 400


async def test_a_search_without_time_for_a_message_does_not_look_complete(
    cluster: TestCluster, browser: PlainBrowser, monkeypatch
) -> None:
    await cluster.client().send("orders", b"hay")
    monkeypatch.setattr(message, "LOOK_S", 0.0)
    page = await browser.get("/subjects/orders?key=nobody")
    assert "0 found in 0 messages" in page.text
    assert "Not everything was looked through" in page.text


async def test_masked_fields_are_never_shown_and_cannot_be_searched(cluster: TestCluster) -> None:
    mq = cluster.client()
    await mq.send("payments.new", b'{"card": "4111-1111", "name": "Ann"}')
    await mq.send("payments.new", b"card=4111-1111")
    await mq.send("orders", b'{"card": "4111-1111"}')
    site = site_of(cluster, masks=(MaskRule("card", "payments."),))
    browser = await PlainBrowser(site).log_in()
    for path in (
        "/subjects/payments.new",
        "/subjects/payments.new?content=4111",
        "/subjects/payments.new?content=Ann",
    ):
        assert "4111-1111" not in (await browser.get(path)).text
    assert "0 found" in (await browser.get("/subjects/payments.new?content=4111")).text
    assert "Ann" in (await browser.get("/subjects/payments.new")).text
    assert "4111-1111" in (await browser.get("/subjects/orders")).text
    await site.close()


async def test_a_missing_subject_is_not_found(browser: PlainBrowser) -> None:
    page = await browser.get("/subjects/nowhere")
    assert page.status == 404
    assert "there is no subject" in page.text
    assert (await browser.get("/subjects/no%20name")).status == 400


async def test_the_tail_begins_with_the_newest_and_follows(cluster: TestCluster) -> None:
    mq = cluster.client()
    await mq.send("orders", b"before")
    stream = tail_events(mq, "orders", (), ReadPlace(), lambda: 1.0)
    first = (await anext(stream)).decode()
    assert "event: message" in first
    assert "before" in first
    await mq.send("orders", b"after")
    assert "after" in (await anext(stream)).decode()
    await stream.aclose()


async def test_a_tail_that_was_cut_off_continues_inside_a_batch(cluster: TestCluster) -> None:
    """Messages of a batch have one time: the browser gets those behind its last one, and none
    twice.
    """
    mq = cluster.client()
    await mq.send_many("orders", [b"<%d>" % number for number in range(6)])
    last, shown = "", list[str]()
    while len(shown) < 6:
        stream = tail_events(
            mq, "orders", (), ReadPlace.parse(last) if last else ReadPlace(), lambda: 1.0
        )
        for _ in range(2):
            found = (await anext(stream)).decode()
            last = found.partition("\n")[0].removeprefix("id: ")
            shown += re.findall(r"<(\d)>", found)
        await stream.aclose()
    assert shown == list("012345")


@pytest.mark.parametrize("text", ["", "x", "1,", "1,0:5", "1,0:-5:g", "1,0:5:g,", "-1", "9" * 30])
async def test_a_wrong_place_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="not a place"):
        ReadPlace.parse(text)


async def test_a_place_is_read_as_it_was_written() -> None:
    place = ReadPlace(1767225600000, {("group-1", 0): 42, ("g2", 7): 1})
    assert ReadPlace.parse(str(place)) == place


async def test_the_tail_shows_so_many_a_second_and_counts_the_rest() -> None:
    pace = TailPace(shown_per_s=2)
    assert [pace.take(5.1)[0] for _ in range(5)] == [True, True, False, False, False]
    assert pace.take(6.0) == (True, (2, 3))
    assert pace.take(7.0) == (True, None)


async def test_a_reader_without_a_group_stands_among_the_groups_and_is_marked(
    cluster: TestCluster, browser: PlainBrowser
) -> None:
    mq = cluster.client()
    await mq.send_many("orders", [b"x"] * 9)
    async with mq.consumer("orders", "billing") as consumer:
        await anext(consumer)
    broker = cluster.machine(cluster.master()).node.broker  # type: ignore[union-attr]
    broker.fetching.readers.note(QueueId("orders", 0), "copy", 4, 2)
    for address in ("/subjects/orders", "/"):
        text = (await browser.get(address)).text
        assert "billing" in text
        (row,) = re.findall(r"<tr>(?:(?!</tr>).)*copy <span.*?</tr>", text)
        assert 'class="badge">reader' in row
        assert '<td class="n">5</td>' in row
        assert "committed" in row
        assert "2 lost" in row
