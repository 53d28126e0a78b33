"""half: messages of transactions, which wait until they are committed or rolled back.

A sender decides most of its messages, leaves some to the one that checks back, and some to nobody:
these are cancelled when they are due. Some are decided by both, differently.
"""

from __future__ import annotations

import asyncio
import itertools
from datetime import UTC, datetime, timedelta
from typing import Final

import qmq
from campaign.checkers.delayed import Later
from campaign.checkers.half import HalfCommit, all_decided_arrived
from campaign.client import Job
from campaign.programs import TIMEOUT_S, ask, now_ms
from campaign.values import Role, Workload
from campaign.workloads.due import DELAYS, USES, cancel, read_due
from campaign.workloads.handling import until_stopped

GROUP: Final = "transactions"
DUE_S: Final = 15.0
PAUSE_S: Final = 0.08
OLD_S: Final = 4.0
"""So long a message waits for its sender's decision before it is checked."""
CHECK_S: Final = 0.5
COMMIT, ROLLBACK, CHECKED, NOBODY, BOTH = range(5)


def _fate(value: int) -> int:
    """What a transaction comes to: all processes know it by the value, as by a database."""
    return (COMMIT, COMMIT, ROLLBACK, CHECKED, CHECKED, NOBODY, BOTH)[value % 7]


async def _send(job: Job) -> None:
    deciding: set[asyncio.Task[None]] = set()
    async with job.client.delayed_producer(
        job.subject, delivery_timeout_s=TIMEOUT_S, acks=job.acks, is_half=True
    ) as producer:
        for value in itertools.count(job.first_value):
            delayed_id = await _send_one(job, producer, value)
            if delayed_id is not None and _fate(value) in (COMMIT, ROLLBACK, BOTH):
                deciding.add(asyncio.create_task(_decide_later(job, value, delayed_id)))
            deciding = {task for task in deciding if not task.done()}
            if not await job.pause(PAUSE_S * job.random.uniform(0.5, 1.5)):
                break
    await asyncio.gather(*deciding)


async def _send_one(job: Job, producer: qmq.DelayedProducer, value: int) -> str | None:
    due_ms, body = now_ms() + int(DUE_S * 1000), str(value)

    async def send() -> str | None:
        ticket = producer.send(body.encode(), key=body, due_ms=due_ms)
        place = producer.place_of_last(ticket)
        return (await ticket).receipt(place).delayed_id

    later = Later(process=job.name, type="invoke", values=(value,), due_ms=(due_ms,))
    _, delayed_id = await ask(job, later, send)
    return delayed_id


async def _decide_later(job: Job, value: int, delayed_id: str) -> None:
    await asyncio.sleep(job.random.uniform(0.0, OLD_S * 1.5))
    if _fate(value) == ROLLBACK:
        await cancel(job, value, delayed_id)
    else:
        await _commit(job, value, delayed_id)


async def _commit(job: Job, value: int, delayed_id: str) -> None:
    decision = HalfCommit(process=job.name, type="invoke", value=value, op=value)
    await ask(job, decision, lambda: job.client.delayed.move(delayed_id, timedelta(0)))


async def _check(job: Job) -> None:
    """Check back: decide what has waited too long, as its transaction came out."""
    asked: set[str] = set()

    async def check() -> None:
        while True:
            old = datetime.now(UTC) + timedelta(seconds=DUE_S - OLD_S)
            waiting = [
                each
                async for each in job.client.delayed.list(job.subject, end=old, is_half=True)
                if each.id not in asked
            ]
            for each in waiting:
                asked.add(each.id)
                value = int(each.key or "")
                if _fate(value) in (COMMIT, CHECKED):
                    await _commit(job, value, each.id)
                elif _fate(value) in (ROLLBACK, BOTH):
                    await cancel(job, value, each.id)
            await asyncio.sleep(CHECK_S)

    await until_stopped(job, check)


WORKLOADS = (
    Workload(
        name="half",
        what="half messages are committed, rolled back, checked back, or left undecided",
        roles=(
            Role(name="sender", count=2, is_sender=True),
            Role(name="checkback", count=1),
            Role(name="reader", count=2),
        ),
        programs={
            "sender": _send,
            "checkback": _check,
            "reader": lambda job: read_due(job, GROUP),
        },
        checkers=(
            "committed_comes",
            "half_waits",
            "due_once",
            "cancelled_or_delivered",
            "due_no_phantom",
        ),
        groups=(GROUP,),
        gates={"later": 50, "commit": 20, "cancel": 5, "arrive": 20},
        is_drained=all_decided_arrived,
        uses=USES,
        delays=1,
        only=DELAYS,
    ),
)
