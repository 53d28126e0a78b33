"""million: 10^6 messages are sent as fast as they go, and all of them are read back.

Under flip-messages-one-of-five this is the case in which NATS JetStream 2.12.1 lost messages
(Jepsen): a bit flips in one file of one of five copies.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final

from history.events import Operation, Send

from campaign.checkers.storage import all_kept
from campaign.client import Job
from campaign.programs import TIMEOUT_S, send
from campaign.values import Role, Workload
from campaign.workloads.archive import scan_again

MESSAGES: Final = 1_000_000
PRODUCERS: Final = 2
BATCH: Final = 1_000
PAUSE_S: Final = 0.5
"""Between batches behind the million: something must be answered after the last fault, too."""


async def _send(job: Job) -> None:
    values = itertools.count(job.first_value)
    async with job.client.producer(
        job.subject, delivery_timeout_s=TIMEOUT_S, acks=job.acks
    ) as producer:
        for number in itertools.count():
            await send(job, producer, tuple(itertools.islice(values, BATCH)))
            is_behind = number >= MESSAGES // PRODUCERS // BATCH
            if not await job.pause(PAUSE_S if is_behind else 0.0):
                return


async def _scan(job: Job) -> None:
    await job.until_stopped(scan_again(job))


def _is_drained(events: Sequence[Operation]) -> bool:
    count = sum(
        len(event.values) for event in events if isinstance(event, Send) and event.type == "ok"
    )
    return count >= MESSAGES and all_kept(())(events)


WORKLOADS = (
    Workload(
        name="million",
        what="a million messages are sent in large batches, and the whole log is read all along",
        roles=(
            Role(name="producer", count=PRODUCERS, is_sender=True),
            Role(name="scanner", count=1),
        ),
        programs={"producer": _send, "scanner": _scan},
        checkers=(
            "no_phantom",
            "stored_once",
            "stable_positions",
            "still_there",
            "same_bytes",
            "no_strange_bytes",
        ),
        groups=(),
        gates={"send": 500, "scan": 5},
        is_drained=_is_drained,
        only=("flip-messages-one-of-five",),
        seconds=120.0,
        is_long=True,
    ),
)
