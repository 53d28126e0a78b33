"""moved: delayed messages whose time is changed before it has come; some are cancelled then."""

from __future__ import annotations

import asyncio
import itertools
from typing import Final

from campaign.checkers.delayed import Later
from campaign.checkers.moved import Postponing, all_moved_arrived
from campaign.client import Job
from campaign.programs import ask, now_ms
from campaign.values import Role, Workload
from campaign.workloads.due import DELAYS, USES, cancel, read_due, send_for, time_of

GROUP: Final = "moved"
DELAYS_S: Final = (1.5, 3.0, 6.0, 9.0)
FAR_MS: Final = 86_400_000
FAR: Final = 0.4
"""The share that is due a day later, until it is moved."""
MOVED: Final = 0.7
CANCELLED: Final = 0.15
PAUSE_S: Final = 0.08


async def _send(job: Job) -> None:
    changing: set[asyncio.Task[None]] = set()
    for value in itertools.count(job.first_value):
        is_far = job.random.random() < FAR
        delay_ms = FAR_MS if is_far else int(job.random.choice(DELAYS_S) * 1000)
        due_ms = now_ms() + delay_ms + job.random.randrange(500)
        later = Later(process=job.name, type="invoke", values=(value,), due_ms=(due_ms,))
        delayed_id = await send_for(job, later, value, due_ms)
        if delayed_id is not None and (is_far or job.random.random() < MOVED):
            changing.add(asyncio.create_task(_change(job, value, delayed_id)))
        changing = {task for task in changing if not task.done()}
        if not await job.pause(PAUSE_S * job.random.uniform(0.5, 1.5)):
            break
    await asyncio.gather(*changing)


async def _change(job: Job, value: int, delayed_id: str) -> None:
    """Move it once or twice, then perhaps cancel it; until it is too late."""
    for _ in range(job.random.choice((1, 1, 2))):
        await asyncio.sleep(job.random.uniform(0.0, 2.0))
        if not await _move(job, value, delayed_id):
            return
    if job.random.random() < CANCELLED:
        await asyncio.sleep(job.random.uniform(0.0, 3.0))
        await cancel(job, value, delayed_id)


async def _move(job: Job, value: int, delayed_id: str) -> bool:
    """Whether it may have been moved."""
    due_ms = now_ms() + job.random.randrange(500, 6_000)
    moving = Postponing(process=job.name, type="invoke", value=value, until_ms=due_ms, op=value)
    end, _ = await ask(job, moving, lambda: job.client.delayed.move(delayed_id, time_of(due_ms)))
    return end != "fail"


WORKLOADS = (
    Workload(
        name="moved",
        what="two senders move delayed messages to other times, many from a day away",
        roles=(Role(name="sender", count=2, is_sender=True), Role(name="reader", count=2)),
        programs={"sender": _send, "reader": lambda job: read_due(job, GROUP)},
        checkers=(
            "moved_comes",
            "moved_in_time",
            "due_once",
            "cancelled_or_delivered",
            "due_no_phantom",
        ),
        groups=(GROUP,),
        gates={"later": 50, "postpone": 30, "cancel": 1, "arrive": 50},
        is_drained=all_moved_arrived,
        uses=USES,
        delays=1,
        only=DELAYS,
    ),
)
