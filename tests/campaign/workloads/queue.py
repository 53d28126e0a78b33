"""queue: consumers of one group share its messages under leases.

Every acknowledged send is delivered, nothing comes back after its acknowledgement, and in the end
all is consumed.
"""

from __future__ import annotations

from functools import partial

from campaign.checkers.messages import all_acknowledged
from campaign.programs import consume, send_batches
from campaign.values import Role, Workload

GROUP = "workers"
MOST = 60
"""Messages a pull: few enough that all consumers get some."""


WORKLOADS = (
    Workload(
        name="queue",
        what="two producers send batches; three consumers of one group share them under leases",
        roles=(Role(name="producer", count=2, is_sender=True), Role(name="worker", count=3)),
        programs={"producer": send_batches, "worker": partial(consume, groups=(GROUP,), most=MOST)},
        checkers=(
            "no_loss",
            "no_phantom",
            "stored_once",
            "stable_positions",
            "acked_stays_done",
            "all_consumed",
            "late_is_stale",
        ),
        groups=(GROUP,),
        gates={"send": 50, "poll": 50, "ack": 50},
        is_drained=all_acknowledged((GROUP,)),
        only=(
            *("none", "kill-*", "stop-*", "partition-master", "partition-deaf"),
            *("partition-no-answers", "partition-from-etcd", "etcd-no-quorum", "power-all*"),
            *("clock-*-master", "clock-*-client", "restart-master", "restart-all"),
            *("release-group", "flip-actions-*", "kill-client-and-kill-master"),
            *("stop-client-and-partition-master", "clock-back-master-and-kill-one"),
            *("!*kill-meta", "!stop-one", "!clock-forward-master-and-*"),
        ),
    ),
)
