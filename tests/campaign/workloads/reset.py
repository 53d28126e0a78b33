"""reset: groups are moved to the beginning, the end and a time while they consume.

The operator ends with the senders, so the last reset of each group is followed by no other one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

from history.events import Operation

from campaign.checkers.messages import all_seen
from campaign.checkers.reset import Rewind, all_again
from campaign.client import Job
from campaign.programs import consume, now_ms, send_batches
from campaign.values import Role, Workload
from campaign.workloads.handling import FEW, reset

GROUPS: Final = ("earliest", "latest", "time")
"""Each is moved in its own way; by the number of the reader."""
BATCH: Final = 5
PAUSE_S: Final = 0.1
MOST: Final = 200
RESET_S: Final = (0.7, 2.0)
BACK_MS: Final = 8_000


async def _reset(job: Job) -> None:
    while await job.pause(job.random.uniform(*RESET_S)):
        await _reset_one(job, job.random.choice(GROUPS))


async def _reset_one(job: Job, group: str) -> None:
    asked_ms = now_ms()
    at_ms = asked_ms - job.random.randrange(BACK_MS) if group == "time" else 0
    rewind = Rewind(
        process=job.name,
        type="invoke",
        group=group,
        to=group,
        at_ms=at_ms,
        now_ms=asked_ms,
        op=GROUPS.index(group),
    )
    await reset(job, rewind, group, **({"time_ms": at_ms} if at_ms else {"to": group}))


def _is_drained(events: Sequence[Operation]) -> bool:
    return all_seen(("earliest",))(events) and all_again(events)


WORKLOADS = (
    Workload(
        name="reset",
        what="three groups are moved to the beginning, the end and a time while they consume",
        roles=(
            Role(name="producer", count=1, is_sender=True),
            Role(name="operator", count=1, is_sender=True),
            Role(name="reader", count=3),
        ),
        programs={
            "producer": partial(send_batches, batch=BATCH, pause_s=PAUSE_S),
            "operator": _reset,
            "reader": partial(consume, groups=GROUPS, most=MOST),
        },
        checkers=(
            "no_loss",
            "no_phantom",
            "stored_once",
            "stable_positions",
            "acked_stays_done",
            "reset_gives_all",
            "reset_to_place",
        ),
        groups=("earliest",),
        gates={"send": 50, "poll": 50, "ack": 20, "rewind": 5},
        is_drained=_is_drained,
        only=FEW | {"stop-client", "power-master"},
    ),
)
