"""recreated: a subject is deleted and created again while clients send and consume.

The operator ends with the senders, so the last life of the subject is followed by no other one.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import Final

from campaign.checkers.recreated import Founding, JoinedAnew, Raze, all_of_last_life
from campaign.client import Job
from campaign.programs import LEASE_MS, send
from campaign.values import Role, Workload
from campaign.workloads.handling import FEW, RETRY_S, finish, take, until_stopped
from qmq.errors import QmqError, SubjectExists, UnknownSubject
from qmq.model import SubjectConfig

GROUP: Final = "settlers"
BATCH: Final = 5
PAUSE_S: Final = 0.1
MOST: Final = 100
PULLS: Final = 8
"""A consumer lives so long, at most: a client may hand out what it holds of a deleted subject."""
LIFE_S: Final = (2.0, 5.0)
SHORT_S: Final = 15.0
"""A batch that has no subject is given up after this time."""


async def _set_up(job: Job) -> None:
    await job.client.metadata.create_subject(SubjectConfig(job.subject))


async def _send(job: Job) -> None:
    values = itertools.count(job.first_value)
    while await job.pause(PAUSE_S):
        try:
            async with job.client.producer(
                job.subject, delivery_timeout_s=SHORT_S, acks=job.acks
            ) as producer:
                for _ in range(PULLS):
                    await send(job, producer, tuple(itertools.islice(values, BATCH)))
                    if not await job.pause(PAUSE_S * job.random.uniform(0.5, 1.5)):
                        return
        except QmqError:
            continue


async def _read(job: Job) -> None:
    async def read() -> None:
        job.recorder.record(JoinedAnew(process=job.name, type="ok", group=GROUP))
        async with job.client.consumer(
            job.subject, GROUP, name=job.name, ack="explicit", lease_ms=LEASE_MS
        ) as consumer:
            for _ in range(PULLS):
                await finish(job, GROUP, await take(job, GROUP, consumer, MOST))

    await until_stopped(job, read)


async def _operate(job: Job) -> None:
    while await job.pause(job.random.uniform(*LIFE_S)):
        await _raze(job)
        await _found(job)


async def _raze(job: Job) -> None:
    """Delete it, and do not rest before that is answered: without an answer it may go on."""
    while True:
        begun = job.recorder.record(Raze(process=job.name, type="invoke"))
        try:
            await job.client.metadata.delete_subject(job.subject)
        except UnknownSubject:
            job.recorder.record(begun.ended("ok"))
            return
        except QmqError:
            job.recorder.record(begun.ended("info"))
            await asyncio.sleep(RETRY_S)
        else:
            job.recorder.record(begun.ended("ok"))
            return


async def _found(job: Job) -> None:
    while True:
        begun = job.recorder.record(Founding(process=job.name, type="invoke"))
        try:
            await job.client.metadata.create_subject(SubjectConfig(job.subject))
        except SubjectExists:
            job.recorder.record(begun.ended("fail"))
            return
        except QmqError:
            job.recorder.record(begun.ended("info"))
            await asyncio.sleep(RETRY_S)
        else:
            job.recorder.record(begun.ended("ok"))
            return


WORKLOADS = (
    Workload(
        name="recreated",
        what="a subject is deleted and created again while clients send and consume",
        roles=(
            Role(name="producer", count=2, is_sender=True),
            Role(name="operator", count=1, is_sender=True),
            Role(name="settler", count=2),
        ),
        programs={
            "setup": _set_up,
            "producer": _send,
            "operator": _operate,
            "settler": _read,
        },
        checkers=("no_phantom", "stable_positions", "nothing_of_the_old", "recreated_keeps"),
        groups=(GROUP,),
        gates={"send": 30, "poll": 30, "raze": 3},
        is_drained=all_of_last_life,
        only=FEW | {"kill-pair", "etcd-no-quorum", "partition-no-answers"},
    ),
)
