"""Benchmarks of the console: a page of a large cluster, a search by content, and what an open page costs a broker.

`.venv/bin/python scripts/bench/console.py` runs them (10,000 subjects, 1,000 groups, 1 GiB); QMQ_BENCH_SUBJECTS, _GROUPS and _MIB make them
smaller. Chromium is measured where there is one.
"""

from __future__ import annotations

import asyncio
import html
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
import urllib.request
from http.cookiejar import CookieJar
from pathlib import Path
from typing import Any

import qmq
from bench.many import cpu_s
from bench.processes import Node

SUBJECTS = int(os.environ.get("QMQ_BENCH_SUBJECTS", "10000"))
GROUPS = int(os.environ.get("QMQ_BENCH_GROUPS", "1000"))
MIB = int(os.environ.get("QMQ_BENCH_MIB", "1024"))
OPEN_S = 30.0
BODY_BYTES = 1_000


class Console:
    """A `qmq console` process."""

    def __init__(self, address: str) -> None:
        command = [sys.executable, "-m", "qmq.cli", "console", "--server", address, "--port", "0"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().removeprefix("the console is at ").strip()
        self.base = self.url.split("/login")[0]
        self._opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))
        self._opener.open(self.url).read()

    def get(self, path: str) -> float:
        """Seconds until the whole page has arrived."""
        begun_s = time.monotonic()
        self._opener.open(self.base + path).read()
        return time.monotonic() - begun_s

    def find(self, path: str, text: str) -> float:
        """Seconds until a search has found a text in a body. A search that reaches its bounds continues, as its page offers."""
        begun_s = time.monotonic()
        page = self._opener.open(self.base + path).read().decode()
        while not re.search(rf'<span class="line">[^<]*{text}', page):
            further = re.search(r'<a href="([?][^"]*)#messages">', page)
            assert further is not None, f"{text} is not found"
            page = self._opener.open(self.base + path.partition("?")[0] + html.unescape(further[1])).read().decode()
        return time.monotonic() - begun_s

    def resident_mib(self) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) / 1024

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()


async def fill(address: str) -> None:
    """Many subjects of one message, and groups on the first of them."""
    async with qmq.connect(address) as mq:
        for first in range(0, SUBJECTS, 200):
            await asyncio.gather(*[mq.send(f"subject-{number:05d}", b"x") for number in range(first, min(first + 200, SUBJECTS))])
        for number in range(GROUPS):
            async with mq.consumer(f"subject-{number:05d}", f"group-{number:04d}") as consumer:
                await consumer.pull(1)


async def fill_log(address: str) -> None:
    """Send MIB of messages without the text of the search, and one last message with it."""
    body = b'{"order": 1, "text": "' + b"a" * (BODY_BYTES - 24) + b'"}'
    async with qmq.connect(address) as mq:
        left = MIB * (1 << 20) // BODY_BYTES
        while left > 0:
            await mq.send_many("log", [body] * min(left, 10_000))
            left -= 10_000
        await mq.send("log", b'{"needle": true}')


FIRST_PAINT = """new Promise(resolve => new PerformanceObserver((entries, observer) => {
    const found = entries.getEntriesByName("first-contentful-paint")[0];
    if (found) { observer.disconnect(); resolve(found.startTime); }
}).observe({type: "paint", buffered: true}))"""
"""Chromium reports a paint a moment after the page is loaded; the observer also gets an earlier one."""


async def first_paint(console: Console, path: str) -> float:
    """First contentful paint in Chromium, in seconds."""
    from playwright.async_api import async_playwright

    async with async_playwright() as driver:
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = await driver.chromium.launch(executable_path=shutil.which("chromium"), args=[*arguments, "--disable-gpu"])
        page = await browser.new_page()
        await page.goto(console.url)
        await page.goto(console.base + path)
        found: float = await page.evaluate(FIRST_PAINT)
        await browser.close()
        return found / 1000


def large_cluster() -> dict[str, Any]:
    node = Node("--no-delay")
    try:
        asyncio.run(fill(node.address))
        console = Console(node.address)
        try:
            pages = {path: console.get(path) for path in ("/", "/subjects", "/subjects/subject-00001")}
            again = {path: round(statistics.median(console.get(path) for _ in range(5)), 3) for path in pages}
            found: dict[str, Any] = {
                "first answer, s": {path: round(took, 3) for path, took in pages.items()},
                "later answers, median, s": again,
            }
            if shutil.which("chromium"):
                found["first paint, s"] = {path: round(asyncio.run(first_paint(console, path)), 3) for path in pages}
            before, begun_s = cpu_s(node), time.monotonic()
            while time.monotonic() - begun_s < OPEN_S:  # what an open page asks
                console.get("/")
                console.get("/history.json")
                time.sleep(3)
            found["an open overview, % of a core of the node"] = round(100 * (cpu_s(node) - before) / (time.monotonic() - begun_s), 2)
            before, begun_s = cpu_s(node), time.monotonic()
            time.sleep(10)
            found["no page open, % of a core of the node"] = round(100 * (cpu_s(node) - before) / (time.monotonic() - begun_s), 2)
            found["console, MiB"] = round(console.resident_mib())
            return found
        finally:
            console.stop()
    finally:
        node.stop()


def search() -> dict[str, Any]:
    node = Node("--no-delay")
    try:
        asyncio.run(fill_log(node.address))
        console = Console(node.address)
        try:
            before = cpu_s(node), cpu_s(console)
            took = [console.find("/subjects/log?content=needle", "needle") for _ in range(3)]
            return {
                f"content search of {MIB} MiB, s": [round(each, 2) for each in took],
                "CPU of the node and of the console for one search, s": [
                    round((cpu_s(of) - used) / len(took), 2) for of, used in zip((node, console), before, strict=True)
                ],
                "console, MiB": round(console.resident_mib()),
            }
        finally:
            console.stop()
    finally:
        node.stop()


if __name__ == "__main__":
    wanted = sys.argv[1:] or ["search", "large"]
    figures = {name: {"search": search, "large": large_cluster}[name]() for name in wanted}
    print(json.dumps(figures, indent=2))
