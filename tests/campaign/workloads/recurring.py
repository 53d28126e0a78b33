"""recurring: messages that run every minute, most ticks of which are due when they are sent."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable
from typing import Final
from zlib import crc32

from history.events import Operation

import qmq
from campaign.checkers.recurring import CronRun, Recurrence, Revoke, WallClock, all_ran
from campaign.client import Job
from campaign.programs import ask, now_ms, queue_of
from campaign.values import Role, Workload
from campaign.workloads.due import DELAYS, USES, note_all, send_for

GROUP: Final = "clockwork"
EVERY_MINUTE: Final = "* * * * *"
ZONES: Final = ("UTC", "Europe/Berlin", "Asia/Tokyo", "America/New_York")
"""All are a whole number of minutes from UTC, so a minute begins everywhere at once."""
AGO_S: Final = (120, 1_500)
PAUSE_S: Final = 1.0
REVOKED: Final = 0.3
LOOK_S: Final = 1.0


async def _send(job: Job) -> None:
    revoking: set[asyncio.Task[None]] = set()
    for value in itertools.count(job.first_value):
        delayed_id = await _send_one(job, value)
        if delayed_id is not None and job.random.random() < REVOKED:
            revoking.add(asyncio.create_task(_revoke(job, value, delayed_id)))
        revoking = {task for task in revoking if not task.done()}
        if not await job.pause(PAUSE_S * job.random.uniform(0.5, 1.5)):
            break
    await asyncio.gather(*revoking)


async def _send_one(job: Job, value: int) -> str | None:
    start_ms = now_ms() - job.random.randrange(*AGO_S) * 1000
    recurs = Recurrence(process=job.name, type="invoke", value=value, start_ms=start_ms)
    zone = job.random.choice(ZONES)
    return await send_for(job, recurs, value, start_ms, cron=EVERY_MINUTE, zone=zone)


async def _revoke(job: Job, value: int, delayed_id: str) -> None:
    await asyncio.sleep(job.random.uniform(0.0, 20.0))
    await ask(
        job,
        Revoke(process=job.name, type="invoke", value=value, op=value),
        lambda: job.client.delayed.cancel(delayed_id),
        known=lambda: {"now_ms": now_ms()},
    )


async def _read(job: Job) -> None:
    def run(message: qmq.Message) -> Operation:
        return CronRun(
            process=job.name,
            type="ok",
            value=int(message.body),
            queue=queue_of(job.subject, message.broker_group),
            sequence=message.sequence,
            stored_ms=message.append_time_ms,
            id=crc32(str(message.id).encode()),
        )

    await job.until_stopped(_beside_clock(job, note_all(job, GROUP, run)))


async def _beside_clock(job: Job, work: Awaitable[None]) -> None:
    async def look() -> None:
        while True:
            job.recorder.record(WallClock(process=job.name, type="ok", now_ms=now_ms()))
            await asyncio.sleep(LOOK_S)

    await asyncio.gather(work, look())


WORKLOADS = (
    Workload(
        name="recurring",
        what="a sender makes messages that run every minute, from some time ago on",
        roles=(Role(name="sender", count=1, is_sender=True), Role(name="reader", count=2)),
        programs={"sender": _send, "reader": _read},
        checkers=(
            "every_tick_comes",
            "tick_once",
            "tick_in_time",
            "revoked_ends",
            "run_no_phantom",
        ),
        groups=(GROUP,),
        gates={"recur": 10, "revoke": 1, "run": 50},
        is_drained=all_ran,
        uses=USES,
        delays=1,
        only=DELAYS,
    ),
)
