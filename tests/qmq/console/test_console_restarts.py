"""10,000 dead letters are replayed by a filter while the console is killed and started again: each
once.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections import Counter
from http.cookiejar import CookieJar

import pytest

import qmq
from qmq.node.dev_node import Node

LETTERS = 10_000


class Console:
    """A `qmq console --writable` process, and a user who is logged in there."""

    def __init__(self, address: str) -> None:
        command = [
            sys.executable,
            "-m",
            "qmq.cli",
            "console",
            "--server",
            address,
            "--port",
            "0",
            "--writable",
        ]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        url = self.process.stdout.readline().removeprefix("the console is at ").strip()
        self.base = url.split("/login")[0]
        self._opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))
        self.get("/login" + url.split("/login")[1])

    def get(self, path: str) -> str:
        with self._opener.open(self.base + path) as answer:
            return str(answer.read().decode())

    def replay(self, error: str) -> str:
        """Begin a replay; the address of its page."""
        csrf = re.search(r'name="csrf" value="([^"]+)"', self.get("/"))
        assert csrf is not None
        form = urllib.parse.urlencode(
            {"csrf": csrf[1], "verb": "replay", "error": error, "rate": "0"}
        ).encode()
        with self._opener.open(self.base + "/dead-letters/billing", form) as answer:
            return str(answer.url).removeprefix(self.base)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


async def done_of(console: Console, job: str) -> tuple[int, bool]:
    """The number of letters that a job has sent, and whether it has ended."""
    text = await asyncio.to_thread(console.get, job)
    count = re.search(r"([\d,]+) dead letters so far", text)
    assert count is not None, text
    return int(count[1].replace(",", "")), "<strong>running" not in text


@pytest.mark.long
async def test_letters_are_replayed_each_once_while_the_console_is_killed(node: Node) -> None:
    bodies = [b"%05d" % number for number in range(LETTERS)]
    async with qmq.connect(node.address) as mq:
        await mq.send_many("orders", [*bodies, b"another"])
        async with mq.consumer("orders", "billing", ack="explicit", prefetch=20_000) as consumer:
            left = LETTERS + 1
            while left:
                for message in await consumer.pull(1_000):
                    message.reject(
                        "broken" if message.body == b"another" else "timeout of the bank"
                    )
                    left -= 1
        letters = mq.dead_letters("billing")

        async def waiting() -> int:
            return sum(each.waiting for each in await letters.describe())

        while await waiting() < LETTERS + 1:
            await asyncio.sleep(0.05)
        for until in (1, 3_000):
            console = await asyncio.to_thread(Console, node.address)
            job = await asyncio.to_thread(console.replay, "timeout")
            while True:
                done, is_over = await done_of(console, job)
                if done >= until or is_over:
                    break
            console.kill()
        console = await asyncio.to_thread(Console, node.address)
        while await waiting() > 1:
            job = await asyncio.to_thread(console.replay, "timeout")
            while not (await done_of(console, job))[1]:
                await asyncio.sleep(0.05)
        console.kill()
        assert Counter(
            [message.body async for message in letters.read_directed("orders", 0, {})]
        ) == Counter(bodies)
