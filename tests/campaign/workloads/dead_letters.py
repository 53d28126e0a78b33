"""dead-letters: some messages fail for good, some once, some are rejected; an operator replays."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Final

from history.events import Operation

import qmq
from campaign.checkers.dead_letters import (
    ATTEMPTS_MAX,
    Again,
    DeadCopy,
    Refusal,
    Replays,
    all_buried,
)
from campaign.checkers.messages import all_seen
from campaign.client import Job
from campaign.programs import LEASE_MS, queue_of, send_batches
from campaign.values import Role, Workload
from campaign.workloads.handling import FEW, finish, insist, take, until_stopped
from qmq.errors import QmqError
from qmq.model import SubjectConfig

GROUP: Final = "workers"
LETTERS: Final = f"%dlq%{GROUP}"
BATCH: Final = 4
PAUSE_S: Final = 0.08
MOST: Final = 30
FATES: Final = 12
"""Of so many values one fails for good, one is rejected, two fail once."""
AFTER: Final = timedelta(milliseconds=200)
REPLAY_S: Final = (1.0, 3.0)


async def _set_up(job: Job) -> None:
    await job.client.metadata.create_subject(SubjectConfig(job.subject))
    await insist(
        job,
        lambda: job.client.metadata.set_group_settings(
            job.subject, GROUP, attempts_max=ATTEMPTS_MAX, retry_delays_ms=(200,)
        ),
    )


async def _work(job: Job) -> None:
    async def work() -> None:
        async with job.client.consumer(
            job.subject, GROUP, name=job.name, ack="explicit", lease_ms=LEASE_MS
        ) as consumer:
            while True:
                found = await take(job, GROUP, consumer, MOST)
                await finish(job, GROUP, [each for each in found if not _refused(job, each)])

    await until_stopped(job, work)


def _refused(job: Job, message: qmq.Message) -> bool:
    """Whether this message fails now."""
    value, letter = int(message.body), message.headers.get("qmq-replay-of")
    queue = queue_of(job.subject, message.broker_group)
    if letter is not None:
        job.recorder.record(
            Again(
                process=job.name,
                type="ok",
                place=letter.decode(),
                value=value,
                queue=queue,
                sequence=message.sequence,
            )
        )
        return False
    fate = value % FATES
    if fate > 3 or (fate > 1 and message.attempt > 1):
        return False
    how = "reject" if fate == 1 else "nack"
    job.recorder.record(
        Refusal(
            process=job.name,
            type="info",
            group=GROUP,
            queue=queue,
            sequence=message.sequence,
            value=value,
            attempt=message.attempt,
            how=how,
        )
    )
    if fate == 1:
        message.reject(f"{value} is wrong")
    else:
        message.nack(AFTER, f"{value} fails")
    return True


async def _audit(job: Job) -> None:
    async def audit() -> None:
        async with job.client.consumer(
            LETTERS, "auditors", name=job.name, lease_ms=LEASE_MS
        ) as consumer:
            async for message in consumer:
                found = message.headers
                dead_ms = found["qmq-dead-ms"].decode()
                job.recorder.record(
                    DeadCopy(
                        process=job.name,
                        type="ok",
                        place=f"{message.broker_group}/{message.sequence}/{dead_ms}",
                        value=int(message.body),
                        queue=queue_of(found["qmq-subject"].decode(), message.broker_group),
                        sequence=int(found["qmq-sequence"]),
                        attempts=int(found["qmq-attempt"]),
                    )
                )

    await until_stopped(job, audit)


async def _replay(job: Job) -> None:
    letters = job.client.dead_letters(GROUP)

    async def replay() -> None:
        while await job.pause(job.random.uniform(*REPLAY_S)):
            begun = job.recorder.record(Replays(process=job.name, type="invoke"))
            try:
                count = await letters.replay()
            except QmqError:
                job.recorder.record(begun.ended("info"))
            else:
                job.recorder.record(begun.ended("ok", count=count))

    await job.until_stopped(replay())


def _is_drained(events: Sequence[Operation]) -> bool:
    return all_seen((GROUP,))(events) and all_buried(events)


WORKLOADS = (
    Workload(
        name="dead-letters",
        what="workers fail and reject some messages; an operator replays the dead letters",
        roles=(
            Role(name="producer", count=1, is_sender=True),
            Role(name="worker", count=2),
            Role(name="auditor", count=1),
            Role(name="operator", count=1),
        ),
        programs={
            "setup": _set_up,
            "producer": partial(send_batches, batch=BATCH, pause_s=PAUSE_S),
            "worker": _work,
            "auditor": _audit,
            "operator": _replay,
        },
        checkers=(
            "no_loss",
            "no_phantom",
            "stable_positions",
            "acked_stays_done",
            "dead_or_done",
            "dead_xor_done",
            "dead_once",
            "dead_in_time",
            "dead_by_itself",
            "late_is_stale",
            "letter_as_sent",
            "replayed_once",
            "replay_comes",
        ),
        groups=(GROUP,),
        gates={"send": 30, "poll": 30, "ack": 30, "dead": 5, "replays": 2, "again": 5},
        is_drained=_is_drained,
        only=FEW | {"kill-pair", "stop-client", "power-master"},
    ),
)
