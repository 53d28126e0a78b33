"""For workloads that treat the messages of a pull one by one. No workload itself.

Acknowledgements are by place, since one value may lie at several: a dead letter that was replayed.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from typing import Any, Final

from history.events import Ack, Operation, Poll, Record, Reset, Type

import qmq
from campaign.client import Job
from campaign.programs import queue_of
from qmq.errors import QmqError, StaleDelivery

RETRY_S: Final = 0.2
FEW: Final = frozenset(
    {"none", "kill-master", "kill-all", "kill-client", "stop-master", "partition-master"}
)
"""Faults for workloads that need much of the machine."""


async def take(job: Job, group: str, consumer: qmq.Consumer, most: int) -> list[qmq.Message]:
    """One pull, which brings messages of one broker group. Raises QmqError."""
    begun = job.recorder.record(Poll(process=job.name, type="invoke", group=group))
    found = list(await consumer.pull(most, timedelta(seconds=1)))
    if found:
        records = tuple(Record(each.sequence, int(each.body), each.attempt) for each in found)
        queue = queue_of(found[0].subject, found[0].broker_group)
        job.recorder.record(begun.ended("ok", queue=queue, records=records))
    else:
        job.recorder.record(begun.ended("ok"))
    return found


async def finish(job: Job, group: str, messages: Sequence[qmq.Message]) -> None:
    """Acknowledge messages of one pull, each by itself, with a line for each outcome."""
    if not messages:
        return
    begun = job.recorder.record(
        Ack(
            process=job.name,
            type="invoke",
            group=group,
            queue=queue_of(messages[0].subject, messages[0].broker_group),
            sequences=tuple(each.sequence for each in messages),
        )
    )
    ends: defaultdict[Type, list[int]] = defaultdict(list)

    async def acknowledge(message: qmq.Message) -> None:
        try:
            await message.ack_sync()
        except StaleDelivery:
            ends["fail"].append(message.sequence)
        except QmqError:
            ends["info"].append(message.sequence)
        else:
            ends["ok"].append(message.sequence)

    await asyncio.gather(*map(acknowledge, messages))
    for end, sequences in ends.items():
        job.recorder.record(begun.ended(end, sequences=tuple(sequences)))


async def until_stopped(job: Job, work: Callable[[], Awaitable[None]]) -> None:
    """Repeat the work until SIGTERM, also after errors."""

    async def again() -> None:
        while True:
            try:
                await work()
            except QmqError:
                await asyncio.sleep(RETRY_S)

    await job.until_stopped(again())


async def reset(job: Job, operation: Operation, group: str, **to: Any) -> bool:
    """Move a group, and write down how far in each queue, as ends of the operation, within a reset.
    Returns whether it was answered.
    """
    whole = job.recorder.record(
        Reset(process=job.name, type="invoke", group=group, op=operation.op)
    )
    begun = job.recorder.record(operation)
    try:
        moved = await job.client.metadata.reset_group(job.subject, group, **to)
    except QmqError:
        job.recorder.record(begun.ended("info"))
        job.recorder.record(whole.ended("info"))
        return False
    for each in moved:
        job.recorder.record(
            begun.ended(
                "ok",
                queue=queue_of(job.subject, each.broker_group),
                from_sequence=each.from_sequence,
                to_sequence=each.to_sequence,
            )
        )
    job.recorder.record(whole.ended("ok"))
    return True


async def insist(job: Job, act: Callable[[], Awaitable[object]]) -> None:
    """Repeat an act that may be repeated until it is answered."""
    while True:
        try:
            await act()
        except QmqError:
            if not await job.pause(RETRY_S):
                return
        else:
            return
