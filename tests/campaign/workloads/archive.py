"""archive: the log is read again and again, whole and from any place on, while it grows.

What was acknowledged must stay there: readers of the workload `log` have read a message before its
only good copy is lost, and do not miss it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from history.events import Operation

from campaign.checkers.storage import Scan, all_kept, runs_of
from campaign.client import Job
from campaign.programs import consume, queue_of, send_batches
from campaign.values import Doubt, Role, Workload
from campaign.verdict import doubtful, without
from qmq.errors import QmqError

GROUP: Final = "reader"
WHOLE: Final = 0.4
"""The share of scans that begin at the first message."""
PAUSE_S: Final = 0.5
STRANGE: Final = -1
"""The value of a body that is no number."""


def value_of(body: bytes) -> int:
    """The value of a message."""
    return int(body) if body.isdigit() else STRANGE


async def scan(job: Job, first: int) -> int:
    """Read from a sequence to the end, and write down what is there; how many messages it read.
    Raises QmqError.
    """
    begun = job.recorder.record(Scan(process=job.name, type="invoke"))
    found: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    try:
        async for message in job.client.browse(job.subject, sequences=(first, None)):
            queue = queue_of(job.subject, message.broker_group)
            found[queue].append((message.sequence, value_of(message.body)))
    except QmqError:
        job.recorder.record(begun.ended("info"))
        raise
    for queue, places in found.items():
        job.recorder.record(
            begun.ended("ok", queue=queue, runs=runs_of(places), is_whole=first == 0)
        )
    return sum(map(len, found.values()))


async def scan_again(job: Job) -> None:
    """Whole, or from a random place on, until SIGTERM."""
    count = 0
    while await job.pause(PAUSE_S * job.random.uniform(0.5, 1.5)):
        is_whole = job.random.random() < WHOLE
        try:
            read_now = await scan(job, 0 if is_whole else job.random.randrange(count + 1))
        except QmqError:
            continue
        count = read_now if is_whole else count


async def _scan(job: Job) -> None:
    await job.until_stopped(scan_again(job))


def doubting(
    events: Sequence[Operation], doubts: Sequence[Doubt]
) -> tuple[Sequence[Operation], int]:
    """As for other messages; besides, doubtful values are in no scan."""
    values = doubtful(events, doubts)
    known = (_without(event, values) for event in without(events, values))
    return tuple(known), len(values)


def _without(event: Operation, values: frozenset[int]) -> Operation:
    if not isinstance(event, Scan) or not values:
        return event
    kept = [
        (run.sequence + at, run.value + at)
        for run in event.runs
        for at in range(run.length)
        if run.value + at not in values
    ]
    return replace(event, runs=runs_of(kept))


WORKLOADS = (
    Workload(
        name="archive",
        what="two producers send batches; a group reads them, and the whole log is read all along",
        roles=(
            Role(name="producer", count=2, is_sender=True),
            Role(name="reader", count=1),
            Role(name="scanner", count=1),
        ),
        programs={
            "producer": send_batches,
            "reader": partial(consume, groups=(GROUP,)),
            "scanner": _scan,
        },
        checkers=(
            "no_loss",
            "no_phantom",
            "stored_once",
            "stable_positions",
            "acked_stays_done",
            "still_there",
            "same_bytes",
            "no_strange_bytes",
        ),
        groups=(GROUP,),
        gates={"send": 50, "poll": 50, "scan": 5},
        is_drained=all_kept((GROUP,)),
        only=(
            *("none", "kill-all", "partition-master", "disk-empty", "disk-old"),
            *("disk-full-*-and-*", "power-*", "fsync-fails-follower", "read-fails-*", "flip-*"),
            *("late-replica", "release-group"),
            *("partition-follower-and-kill-master", "!power-master", "!power-lied-*-sync"),
            *("!flip-*-of-five",),
        ),
        doubting=doubting,
    ),
)
