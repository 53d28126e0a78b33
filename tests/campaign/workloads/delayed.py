"""delayed: messages with a delay of some seconds, some of which their senders cancel."""

from __future__ import annotations

import asyncio
import itertools
from typing import Final

from campaign.checkers.delayed import Later, all_arrived, doubting
from campaign.client import Job
from campaign.programs import now_ms
from campaign.values import Role, Workload
from campaign.workloads.due import USES, cancel, read_due, send_for

DELAYS_S: Final = (0.0, 0.5, 1.5, 3.0, 6.0, 10.0)
CANCELLED: Final = 0.25
"""The share that is cancelled, at a random moment around its due time."""
PAUSE_S: Final = 0.06
GROUP: Final = "due"


async def _send(job: Job) -> None:
    asked: set[asyncio.Task[None]] = set()
    for value in itertools.count(job.first_value):
        due_ms = now_ms() + int(job.random.choice(DELAYS_S) * 1000) + job.random.randrange(500)
        later = Later(process=job.name, type="invoke", values=(value,), due_ms=(due_ms,))
        delayed_id = await send_for(job, later, value, due_ms)
        if delayed_id and job.random.random() < CANCELLED:
            wait_s = job.random.uniform(0.0, max(due_ms - now_ms(), 0) / 1000 + 0.5)
            asked.add(asyncio.create_task(_cancel(job, value, delayed_id, wait_s)))
        asked = {task for task in asked if not task.done()}
        if not await job.pause(PAUSE_S * job.random.uniform(0.5, 1.5)):
            break
    await asyncio.gather(*asked)


async def _cancel(job: Job, value: int, delayed_id: str, wait_s: float) -> None:
    await asyncio.sleep(wait_s)
    await cancel(job, value, delayed_id)


WORKLOADS = (
    Workload(
        name="delayed",
        what="two senders delay messages for up to ten seconds and cancel a quarter of them",
        roles=(Role(name="sender", count=2, is_sender=True), Role(name="reader", count=2)),
        programs={"sender": _send, "reader": lambda job: read_due(job, GROUP)},
        checkers=(
            "due_comes",
            "never_early",
            "due_once",
            "cancelled_or_delivered",
            "due_no_phantom",
        ),
        groups=(GROUP,),
        gates={"later": 50, "cancel": 3, "arrive": 50},
        is_drained=all_arrived,
        only=(
            *("none", "kill-master", "kill-all", "kill-client", "kill-delay-master"),
            *("stop-*-master", "stop-client", "!stop-client-and-*", "partition-master"),
            *("partition-no-answers", "partition-from-etcd", "etcd-no-quorum", "power-master"),
            *("power-all", "power-all-flushed", "power-all-slow-flushed", "disk-full-master"),
            *(
                "clock-*",
                "!clock-strobe-meta",
                "!clock-forward-client",
                "!clock-back-client",
                "restart-all",
            ),
            *("release-all", "*-and-*-delay-master", "*-delay-master-and-*"),
            *("!clock-*-and-partition-*", "!clock-*-and-kill-one", "!clock-drift-master"),
            *("!clock-strobe-master",),
        ),
        uses=USES,
        delays=1,
        doubting=doubting,
    ),
)
