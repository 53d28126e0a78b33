"""A broker is killed while handlers fail, and then the client too: what was done stays done, what
failed keeps attempt, delay and error.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from support.clusters import cluster

import qmq

WORKER = """
import asyncio, sys
from datetime import timedelta
import qmq

async def work(address, count):
    async with qmq.connect(address) as mq:
        consumer, taken = mq.consumer("s", "ops", ack="explicit"), []
        while len(taken) < count:
            taken += await consumer.pull()
        print("taken", flush=True)
        while command := (await asyncio.to_thread(sys.stdin.readline)).split():
            if command[0] == "take":
                (message,) = await consumer.pull(1)
                await message.ack_sync()
                print(message.body.decode(), flush=True)
            else:
                say([message for message in taken if message.broker_group == command[1]])
                await asyncio.sleep(0)  # verdicts of one round of the loop are written in the next
                print("failed", flush=True)

def say(messages):
    for number, message in enumerate(messages):
        if number % 4 == 0:
            message.ack_later()
        elif number % 4 == 1:
            message.nack(timedelta(seconds=0.5), f"engine {message.body.decode()}")
        elif number % 4 == 2:
            message.reject(ValueError(f"no flight {message.body.decode()}"))

asyncio.run(work(sys.argv[1], int(sys.argv[2])))
"""
"""Takes so many messages of "s" for group "ops", prints "taken", and reads commands, one a line:

fail GROUP     settles the messages of that broker group: every fourth is done, failed, rejected,
               unsettled; then prints "failed"
take           takes one more message, acknowledges it, and prints its body
"""
TWO = {"g1": ("g1-a",), "g2": ("g2-a",)}


@asynccontextmanager
async def worker(address: str, count: int) -> AsyncIterator[asyncio.subprocess.Process]:
    """The client's process; killed at the end."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        WORKER,
        address,
        str(count),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        process.kill()
        await process.wait()
        assert process.stdin is not None
        process.stdin.close()


async def told(process: asyncio.subprocess.Process, command: str = "") -> str:
    """Read the next line that the process prints."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(command.encode() + b"\n" if command else b"")
    async with asyncio.timeout(30):
        return (await process.stdout.readline()).decode().strip()


async def test_verdicts_given_without_a_broker_survive_the_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QMQ_STATE_DIR", str(tmp_path / "state"))
    async with cluster(tmp_path / "data", TWO) as servers, qmq.connect(servers.servers) as mq:
        await mq.metadata.create_subject(qmq.SubjectConfig("s"))
        homes: dict[str, list[bytes]] = {"g1": [], "g2": []}
        while min(map(len, homes.values())) < 8:
            body = b"%d" % sum(map(len, homes.values()))
            homes[(await mq.send("s", body)).broker_group].append(body)
        async with worker(servers.servers, sum(map(len, homes.values()))) as process:
            assert await told(process) == "taken"
            # what was handed out is in the log when a broker has told of it
            await mq.metadata.describe_groups("s", "ops")
            await servers.crash("g1-a")
            assert await told(process, "fail g1") == "failed"
            for body in (b"meanwhile", b"still"):
                assert (await mq.send("s", body)).broker_group == "g2"
                assert await told(process, "take") == body.decode(), (
                    "the other broker group is consumed meanwhile"
                )
        await servers.start("g1-a")

        mine = sorted(homes["g1"], key=int)
        _, failed, rejected, begun = (mine[first::4] for first in range(4))
        seen: dict[bytes, int] = {}
        async with mq.consumer("s", "ops") as consumer, asyncio.timeout(60):
            async for message in consumer:
                if message.broker_group == "g1":
                    seen[message.body] = message.attempt
                if set(seen) >= {*failed, *begun}:
                    break
        assert seen == dict.fromkeys([*failed, *begun], 2), (
            "one attempt older; and what was done is not handed out again"
        )
        letters = await mq.dead_letters("ops").show()
        assert {each.body: (each.error, each.attempts, each.broker_group) for each in letters} == {
            body: (f"ValueError: no flight {body.decode()}", 1, "g1") for body in rejected
        }
        assert not list((tmp_path / "state" / "verdicts").iterdir())
