"""delayed: messages with a delay of some seconds, some of which their senders cancel."""

from __future__ import annotations

import asyncio
import itertools
import time
from contextlib import suppress
from datetime import UTC, datetime
from typing import Final

from campaign.checkers.delayed import Arrive, Cancel, Later, all_arrived
from campaign.client import Job
from campaign.programs import LEASE_MS, end_of, queue_of
from campaign.values import Role, Workload
from qmq.errors import MessageNotFound, QmqError, TooLate

DELAYS_S: Final = (0.0, 0.5, 1.5, 3.0, 6.0, 10.0)
CANCELLED: Final = 0.25
"""The share that is cancelled, at a random moment around its due time."""
PAUSE_S: Final = 0.06
GROUP: Final = "due"


async def _send(job: Job) -> None:
    asked: set[asyncio.Task[None]] = set()
    for value in itertools.count(job.first_value):
        due_ms = _now_ms() + int(job.random.choice(DELAYS_S) * 1000) + job.random.randrange(500)
        delayed_id = await _send_one(job, value, due_ms)
        if delayed_id and job.random.random() < CANCELLED:
            wait_s = job.random.uniform(0.0, max(due_ms - _now_ms(), 0) / 1000 + 0.5)
            asked.add(asyncio.create_task(_cancel(job, value, delayed_id, wait_s)))
        asked = {task for task in asked if not task.done()}
        if not await job.pause(PAUSE_S * job.random.uniform(0.5, 1.5)):
            break
    await asyncio.gather(*asked)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


async def _send_one(job: Job, value: int, due_ms: int) -> str | None:
    begun = job.recorder.record(
        Later(process=job.name, type="invoke", values=(value,), due_ms=(due_ms,))
    )
    try:
        receipt = await job.client.send(
            job.subject,
            str(value).encode(),
            at=datetime.fromtimestamp(due_ms / 1000, UTC),
            acks=job.acks,
        )
    except QmqError as failure:
        job.recorder.record(begun.ended(end_of(failure)))
        return None
    job.recorder.record(begun.ended("ok"))
    return receipt.delayed_id


async def _cancel(job: Job, value: int, delayed_id: str, wait_s: float) -> None:
    await asyncio.sleep(wait_s)
    begun = job.recorder.record(Cancel(process=job.name, type="invoke", value=value, op=value))
    try:
        await job.client.delayed.cancel(delayed_id)
    except (TooLate, MessageNotFound):
        job.recorder.record(begun.ended("fail"))
    except QmqError as failure:
        job.recorder.record(begun.ended(end_of(failure)))
    else:
        job.recorder.record(begun.ended("ok"))


async def _read(job: Job) -> None:
    async def read() -> None:
        async with job.client.consumer(
            job.subject, GROUP, name=job.name, lease_ms=LEASE_MS
        ) as consumer:
            while True:
                with suppress(QmqError):
                    async for message in consumer:
                        job.recorder.record(
                            Arrive(
                                process=job.name,
                                type="ok",
                                value=int(message.body),
                                queue=queue_of(job.subject, message.broker_group),
                                sequence=message.sequence,
                                stored_ms=message.append_time_ms,
                            )
                        )

    await job.until_stopped(read())


WORKLOADS = (
    Workload(
        name="delayed",
        what="two senders delay messages for up to ten seconds and cancel a quarter of them",
        roles=(Role(name="sender", count=2, is_sender=True), Role(name="reader", count=2)),
        programs={"sender": _send, "reader": _read},
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
        uses=frozenset({"brokers", "etcds", "metas", "clients", "delays"}),
        delays=1,
        skips=frozenset({"power-all"}),
    ),
)
