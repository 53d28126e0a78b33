"""A process may use QMQ's clients from several event loops, one after the other or at the same
time.
"""

from __future__ import annotations

import asyncio
import sys

from qmq.node.dev_node import Node

ONE_AFTER_THE_OTHER = """
import asyncio, sys, qmq

async def send(body):
    async with qmq.connect(sys.argv[1]) as mq:
        await mq.send("s", body)

for number in range(20):
    asyncio.run(send(b"%d" % number))
"""
AT_THE_SAME_TIME = """
import asyncio, sys, threading, qmq, qmq.blocking

async def subjects():
    async with qmq.connect(sys.argv[1]) as mq:
        for _ in range(50):
            await mq.metadata.list_subjects()

def in_a_thread():
    with qmq.blocking.connect(sys.argv[1]) as mq:
        for number in range(50):
            mq.send("s", b"%d" % number)

threads = [threading.Thread(target=in_a_thread), threading.Thread(target=lambda: asyncio.run(subjects()))]
for each in threads: each.start()
asyncio.run(subjects())
for each in threads: each.join()
"""  # noqa: E501


async def output_of(script: str, address: str) -> tuple[int | None, str]:
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        script,
        address,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await child.communicate()
    return child.returncode, output.decode()


async def test_event_loops_one_after_the_other_print_nothing(node: Node) -> None:
    assert await output_of(ONE_AFTER_THE_OTHER, node.address) == (0, "")


async def test_event_loops_at_the_same_time_print_nothing(node: Node) -> None:
    assert await output_of(AT_THE_SAME_TIME, node.address) == (0, "")
