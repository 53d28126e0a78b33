"""log: every reader's group has one consumer and reads everything, as one reads a log.

Order, no loss, no phantom, nothing stored twice, and no message that came
back after its acknowledgement.
"""

from __future__ import annotations

from functools import partial

from campaign.checkers.messages import all_seen
from campaign.programs import consume, send_batches
from campaign.values import Role, Workload

GROUPS = ("reader0", "reader1")


WORKLOADS = (
    Workload(
        name="log",
        what="two producers send batches; two groups of one consumer each read everything in order",
        roles=(Role(name="producer", count=2, is_sender=True), Role(name="reader", count=2)),
        programs={"producer": send_batches, "reader": partial(consume, groups=GROUPS)},
        checkers=(
            "no_loss",
            "no_phantom",
            "stored_once",
            "stable_positions",
            "send_order",
            "read_in_order",
            "acked_stays_done",
        ),
        groups=GROUPS,
        gates={"send": 50, "poll": 50, "ack": 20},
        is_drained=all_seen(GROUPS),
        only=(
            *("none", "kill-*", "stop-*", "partition-*", "!partition-bridge"),
            *("!partition-inside-etcd", "etcd-*", "restart-*", "move-*", "release-*"),
            *("disk-full-*", "slow-disk-master", "slow-disk-all*", "fsync-fails-*"),
            *(
                "write-fails-*",
                "read-fails-master",
                "power-*",
                "clock-apart",
                "clock-strobe-client",
            ),
            *("clock-strobe-meta", "remove-last-majority", "late-replica", "!power-behind"),
            *("!power-lied-follower-sync", "!*-and-*", "!kill-one", "!stop-one", "!release-group"),
        ),
    ),
)
