"""retention-age, retention-size: subjects whose messages are deleted while groups lag.

One group reads at once. Two stop for longer than messages are kept: one is told what it missed and
continues, one asked to be told nothing. Somebody looks all the time which messages are kept.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final

from history.events import Operation

from campaign.checkers.retention import (
    AGE_MS,
    BATCH,
    BODY_BYTES,
    QUEUE_BYTES,
    SKIPPER,
    DeletionSeen,
    KeptRange,
    PassingBy,
    ToldExpired,
    Uncounted,
    all_read_or_told,
    has_skipped,
)
from campaign.client import Job
from campaign.programs import LEASE_MS, queue_of, send_batches
from campaign.values import Role, Workload
from campaign.workloads.handling import FEW, RETRY_S, finish, reset, take, until_stopped
from qmq.errors import MessagesExpired
from qmq.model import SubjectConfig

GROUPS: Final = ("keen", "slow")
READERS: Final = (*GROUPS, SKIPPER)
"""Groups by the number of the reader."""
PAUSE_S: Final = 0.1
MOST: Final = 200
PREFETCH: Final = 100
"""What the client holds is not deleted from its memory."""
READS: Final = 20
"""How often the slow one pulls before it rests."""
REST_S: Final = (35.0, 45.0)
"""Brokers delete every 30 s."""
LOOK_S: Final = 0.3


async def _by_age(job: Job) -> None:
    await job.client.metadata.create_subject(SubjectConfig(job.subject, retention_ms=AGE_MS))


async def _by_size(job: Job) -> None:
    config = SubjectConfig(job.subject, retention_bytes=QUEUE_BYTES)
    await job.client.metadata.create_subject(config)


def _body(value: int) -> bytes:
    return b"%d" % value + b" " * BODY_BYTES


async def _read(job: Job) -> None:
    group = READERS[job.number]

    async def read() -> None:
        try:
            async with job.client.consumer(
                job.subject,
                group,
                name=job.name,
                ack="explicit",
                prefetch=PREFETCH,
                expired="skip" if group == SKIPPER else "raise",
                lease_ms=LEASE_MS,
            ) as consumer:
                for number in itertools.count(1):
                    await finish(job, group, await take(job, group, consumer, MOST))
                    if group != "keen" and number % READS == 0:
                        await asyncio.sleep(job.random.uniform(*REST_S))
        except MessagesExpired:
            job.recorder.record(ToldExpired(process=job.name, type="ok", group=group))
            await _go_on(job, group)

    await until_stopped(job, read)


async def _go_on(job: Job, group: str) -> None:
    """Behind what was deleted. The answer to a reset is asked for again until it comes."""
    passing = PassingBy(process=job.name, type="invoke", group=group)
    while not await reset(job, passing, group, to="earliest"):
        await asyncio.sleep(RETRY_S)


async def _watch(job: Job) -> None:
    firsts: dict[str, int] = {}

    async def watch() -> None:
        while True:
            await _look_at_queues(job, firsts)
            await _look_at_groups(job)
            await asyncio.sleep(LOOK_S)

    await until_stopped(job, watch)


async def _look_at_queues(job: Job, firsts: dict[str, int]) -> None:
    begun = job.recorder.record(KeptRange(process=job.name, type="invoke"))
    found = await job.client.metadata.find_subject(job.subject)
    for each in found.description.queues if found is not None else ():
        queue = queue_of(job.subject, each.broker_group)
        job.recorder.record(
            begun.ended("ok", queue=queue, first=each.start_sequence, end=each.next_sequence)
        )
        if each.start_sequence > firsts.setdefault(queue, 0):
            firsts[queue] = each.start_sequence
            job.recorder.record(DeletionSeen(process=job.name, type="ok", queue=queue))


async def _look_at_groups(job: Job) -> None:
    for each in await job.client.metadata.describe_groups(job.subject):
        if each.group in GROUPS:
            job.recorder.record(
                Uncounted(
                    process=job.name,
                    type="ok",
                    group=each.group,
                    queue=queue_of(job.subject, each.broker_group),
                    count=each.expired,
                )
            )


def _is_drained(events: Sequence[Operation]) -> bool:
    return all_read_or_told(GROUPS)(events) and has_skipped(events)


def _workload(
    name: str,
    what: str,
    set_up: Callable[[Job], Awaitable[None]],
    checkers: tuple[str, ...],
    only: tuple[str, ...],
) -> Workload:
    return Workload(
        name=name,
        what=f"messages are deleted {what} while one group reads and another one lags",
        roles=(
            Role(name="producer", count=1, is_sender=True),
            Role(name="reader", count=len(READERS)),
            Role(name="watcher", count=1),
        ),
        programs={
            "setup": set_up,
            "producer": partial(send_batches, batch=BATCH, pause_s=PAUSE_S, body=_body),
            "reader": _read,
            "watcher": _watch,
        },
        checkers=(
            "no_phantom",
            "stored_once",
            "stable_positions",
            "acked_stays_done",
            "deleted_is_said",
            "skip_goes_on",
            *checkers,
        ),
        groups=GROUPS,
        gates={"send": 50, "poll": 50, "ack": 20, "kept": 50, "deleted": 2},
        is_drained=_is_drained,
        only=only,
    )


WORKLOADS = (
    _workload(
        "retention-age",
        "eight seconds after they were sent",
        _by_age,
        ("kept_while_young", "passed_is_old"),
        (
            *FEW,
            "power-master",
            "clock-*-master",
            "!*-and-*",
            "clock-apart",
            "restart-all",
        ),
    ),
    _workload(
        "retention-size",
        "when the queue is large",
        _by_size,
        ("kept_while_few",),
        (*FEW, "power-master", "disk-full-master", "clock-forward-master"),
    ),
)
