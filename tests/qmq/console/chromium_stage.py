"""The shared parts of the tests in Debian's Chromium: one cluster with content for each screen, one console, one browser, a page a test.

A page that logs an error or a violation of the Content Security Policy fails its test.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import pytest_asyncio
from support import hostile
from support.console import clients_of, parked_subject

from qmq.client.client import Client
from qmq.console.config import ConsoleConfig
from qmq.console.server import ConsoleServer
from qmq.testing import TestCluster


@dataclass
class Stage:
    """The cluster, console and browser that all tests share."""

    cluster: TestCluster
    mq: Client
    console: ConsoleServer
    browser: Any
    ids: list[str]
    """The ids of the hostile messages."""
    invoice: str
    """The id of a message that was given up."""

    @property
    def base(self) -> str:
        return f"http://127.0.0.1:{self.console.port}"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage() -> AsyncIterator[Stage]:
    playwright = pytest.importorskip("playwright.async_api", reason="scripts/setup installs it")
    async with TestCluster() as cluster, playwright.async_playwright() as driver:
        mq = cluster.client(name="shop")
        ids = await filled(mq)
        invoice = await given_up_invoices(mq)
        await reminders(mq)
        console = ConsoleServer(ConsoleConfig(cluster.address, port=0, is_writable=True), clients_of(cluster))
        await console.start()
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = await driver.chromium.launch(executable_path=shutil.which("chromium"), args=[*arguments, "--disable-gpu"])
        async with parked_subject(mq, "accounts", "ledger", ["customer-1"], partitions=2) as consuming:
            await consuming.until_held(2)
            yield Stage(cluster, mq, console, browser, ids, invoice)
        await browser.close()
        await console.stop()


async def filled(mq: Client) -> list[str]:
    """A cluster with something on each screen; the ids of hostile messages."""
    for number in range(30):
        await mq.send("orders", b'{"order": %d, "total": "%d.00 EUR"}' % (number, number * 7), key=f"customer-{number % 7}", tags=["new"])
    ids = []
    for text in hostile.TEXTS:
        told = await mq.send("hostile", text.encode(), key=text, tags=[text], headers={"trace": text, text: text})
        ids.append(str(told.id))
    for body in hostile.BODIES:
        await mq.send("hostile-bodies", body)
    async with mq.consumer("hostile", "billing", name="billing-1", ack="explicit") as consumer:
        for _ in hostile.TEXTS:
            message = await anext(consumer)
            message.reject(f"cannot read {message.key}")
    async with mq.consumer("orders", "shipping", name="shipping-1", ack="explicit") as consumer:
        await (await anext(consumer)).ack_sync()
    async with parked_subject(mq, "vault", "audit", hostile.TEXTS):
        pass
    while sum(each.waiting for each in await mq.metadata.dead_letter_queues("billing")) < len(hostile.TEXTS):
        await asyncio.sleep(0.01)
    return ids


FAILURES = ("the customer is not known", "the bank did not answer within 3 s", "the amount is negative")


async def given_up_invoices(mq: Client) -> str:
    """Dead letters of an ordinary kind; the id of one."""
    count = 12
    for number in range(count):
        body = b'{"invoice": %d, "customer": "C-%d", "amount": %d}' % (number, 1_000 + 37 * number, 40 - 7 * number)
        told = await mq.send("invoices", body, key=f"customer-{number % 5}", tags=["monthly"], headers={"trace": f"{number:04x}"})
    async with mq.consumer("invoices", "accounting", name="accounting-1", ack="explicit") as consumer:
        for number in range(count):
            (await anext(consumer)).reject(FAILURES[number * number % 3 if number % 2 else 2])
    while sum(each.waiting for each in await mq.metadata.dead_letter_queues("accounting")) < count:
        await asyncio.sleep(0.01)
    return str(told.id)


async def reminders(mq: Client) -> None:
    """Delayed messages over two years, most of them soon, and a recurring one."""
    days = [1 + number * number * 690 // 3_600 for number in range(60)]
    await asyncio.gather(
        *[mq.send("reminders", b"pay, please", key=f"customer-{each}", delay=timedelta(days=each, hours=2)) for each in days]
    )
    await mq.send("reminders", b"tidy up", cron="0 9 * * *", zone="Europe/Berlin")


@pytest_asyncio.fixture(loop_scope="module")
async def page(stage: Stage) -> AsyncIterator[Any]:
    """Logged in; it fails the test for what the browser complains about."""
    context = await stage.browser.new_context(viewport={"width": 1280, "height": 800}, locale="en")
    opened, complaints = await context.new_page(), []
    opened.on("console", lambda each: complaints.append(each.text) if each.type == "error" else None)
    opened.on("pageerror", lambda each: complaints.append(str(each)))
    opened.on("dialog", lambda each: complaints.append(f"a dialog opened: {each.message}"))
    opened.set_default_timeout(60_000)
    await opened.goto(stage.console.url)
    opened.complaints = complaints
    yield opened
    await context.close()
    assert complaints == []
