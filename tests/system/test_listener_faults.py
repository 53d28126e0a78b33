"""Listeners on a group of three replicas whose master is killed."""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import timedelta

import pytest
from support import eventually
from system.group import Group

import qmq

pytestmark = pytest.mark.xdist_group("faults")


async def test_every_message_is_handled_and_settled_although_the_master_is_killed(
    group: Group,
) -> None:
    async with qmq.connect(group.server) as mq:
        done: Counter[int] = Counter()
        rejected: Counter[int] = Counter()

        @mq.listener("listened", group="g", concurrency=16, retry_delays=[timedelta(0)])
        async def handler(number: int, context: qmq.Context) -> None:
            await asyncio.sleep(0.001)
            if number % 100 == 0:
                rejected[number] += 1
                raise qmq.Reject(f"{number} is round")
            if number % 10 == 0 and context.attempt == 1:
                raise ValueError(number)
            done[number] += 1

        await mq.send_many("listened", [b"%d" % number for number in range(5_000)])
        async with mq.listening():
            await eventually(lambda: len(done) > 500)
            master = await group.master()
            await asyncio.to_thread(group.cluster.kill, master)
            await mq.send_many("listened", [b"%d" % number for number in range(5_000, 6_000)])
            await eventually(lambda: len(done) == 5_940 and len(rejected) == 60, within_s=240)
        await asyncio.to_thread(group.cluster.start, master)
        await group.settled_peer(master)
        async with mq.consumer("listened", "g", ack="explicit") as rest:
            assert len(await rest.pull(10, timedelta(seconds=1))) == 0
        async with asyncio.timeout(60):
            dead: set[str] = set()
            while len(dead) < 60:
                dead = {each.error for each in await mq.dead_letters("g").show(1_000)}
        assert dead == {f"{number} is round" for number in rejected}
