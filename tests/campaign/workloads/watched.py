"""watched: a log with a watcher, who asks the metaserver again and again which replica is master,
in which epoch, and how much is committed.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from campaign.checkers.masters import MasterLook, ReplicaSeen
from campaign.checkers.messages import all_seen
from campaign.client import Job
from campaign.programs import consume, end_of, send_batches
from campaign.values import Role, Workload
from qmq.errors import QmqError

GROUP: Final = "reader"
LOOK_S: Final = 0.25


async def _watch(job: Job) -> None:
    while await job.pause(LOOK_S):
        begun = job.recorder.record(MasterLook(process=job.name, type="invoke"))
        try:
            found = await job.client.metadata.cluster()
        except QmqError as failure:
            job.recorder.record(begun.ended(end_of(failure)))
            continue
        states = tuple(
            ReplicaSeen(
                group.broker_group,
                each.replica,
                each.status.epoch,
                each.status.commit_index,
                each.status.is_serving,
            )
            for group in found.groups
            for each in group.replicas
            if each.HasField("status")
        )
        job.recorder.record(begun.ended("ok", states=states))


WORKLOADS = (
    Workload(
        name="watched",
        what="two producers, a reader, and a watcher who writes down who is master",
        roles=(
            Role(name="producer", count=2, is_sender=True),
            Role(name="reader", count=1),
            Role(name="watcher", count=1),
        ),
        programs={
            "producer": send_batches,
            "reader": partial(consume, groups=(GROUP,)),
            "watcher": _watch,
        },
        checkers=(
            "one_master",
            "commit_stays",
            "no_loss",
            "no_phantom",
            "stored_once",
            "stable_positions",
            "acked_stays_done",
        ),
        groups=(GROUP,),
        gates={"send": 50, "poll": 50, "look": 20},
        is_drained=all_seen((GROUP,)),
        only=(
            *("none", "kill-master", "kill-pair", "kill-all", "stop-*", "partition-*", "etcd-*"),
            *("clock-forward-master*", "clock-back-master*", "clock-apart", "restart-master"),
            *("restart-all", "move-master", "swap-addresses", "add-during-cut", "remove-*"),
            *("late-replica", "slow-disk-follower", "*-and-*"),
            *("!*client*", "!disk-full-*"),
        ),
    ),
)
