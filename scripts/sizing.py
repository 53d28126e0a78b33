"""How many cores, shards, GiB of memory and of disk a workload needs: `scripts/sizing --rate 50000
--body 1024 --replicas 3`.

The costs are those of docs/SIZING.md, measured by `scripts/bench`; measure them on your own machine
and pass `--core-speed`, the ratio of its speed to that of ours. Pure, but for `main`.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass
from typing import Final

GIB: Final = 1 << 30
KIB: Final = 1 << 10


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU microseconds of one core: for each message, and for each byte of it."""

    message_us: float
    byte_us: float

    def of(self, body_bytes: int) -> float:
        return self.message_us + self.byte_us * body_bytes


STORE: Final = Cost(0.13, 0.00141)
STORE_AS_MASTER: Final = Cost(0.14, 0.00221)
STORE_AS_SLAVE: Final = Cost(0.06, 0.00168)
DELIVER: Final = Cost(0.59, 0.00108)
BATCH_US: Final = 28.0
"""The cost of a batch of any content, each time that it is stored or delivered."""
BATCH_BYTES: Final = 160
"""Stored with each batch, beside the consume log's entry of 72 bytes."""
MESSAGE_BYTES: Final = 8
"""Stored with each message."""
NODE_MIB: Final = 110.0
SUBJECT_KIB: Final = 3.7
CORE_SHARE: Final = 0.6
"""Of a core that a shard should use at peak:
the rest is for failovers, retention and what comes.
"""


@dataclass(frozen=True, slots=True)
class Workload:
    """`rate` messages a second into the cluster, each read by `groups` consumer groups; `batch` is
    how many a client sends together.
    """

    rate: float
    body_bytes: int
    replicas: int = 1
    groups: int = 1
    batch: int = 100
    retention_h: float = 72.0
    subjects: int = 100
    core_speed: float = 1.0


@dataclass(frozen=True, slots=True)
class Size:
    """Cores, and shards (`qmq broker --shards`), are of each machine of a broker group; so are
    memory and disk.
    """

    master_cores: float
    slave_cores: float
    shards: int
    memory_mib: float
    disk_gib: float
    network_mib_s: float


def size_of(load: Workload) -> Size:
    """The resources of one broker group if its machine is master of all groups, as after failovers.
    Raises ValueError.
    """
    if (
        load.rate <= 0
        or load.body_bytes <= 0
        or load.replicas < 1
        or load.groups < 0
        or load.batch < 1
        or load.core_speed <= 0
    ):
        raise ValueError("rate, body, replicas, batch and core speed are positive")
    batch_us = BATCH_US / load.batch
    store = STORE if load.replicas == 1 else STORE_AS_MASTER
    master_us = (
        store.of(load.body_bytes)
        + batch_us
        + load.groups * (DELIVER.of(load.body_bytes) + batch_us)
    )
    slave_us = STORE_AS_SLAVE.of(load.body_bytes) + batch_us if load.replicas > 1 else 0.0
    stored_bytes = load.body_bytes + MESSAGE_BYTES + (BATCH_BYTES + 72) / load.batch
    master_cores = load.rate * master_us / 1e6 / load.core_speed
    return Size(
        master_cores=master_cores,
        slave_cores=load.rate * slave_us / 1e6 / load.core_speed,
        shards=max(1, math.ceil(master_cores / CORE_SHARE)),
        memory_mib=NODE_MIB * max(1, math.ceil(master_cores / CORE_SHARE))
        + load.subjects * SUBJECT_KIB / KIB,
        disk_gib=load.rate * stored_bytes * load.retention_h * 3600 / GIB,
        network_mib_s=load.rate * load.body_bytes * (load.replicas + load.groups) / (1 << 20),
    )


def main() -> None:
    options = argparse.ArgumentParser(prog="scripts/sizing", description=__doc__)
    options.add_argument("--rate", type=float, required=True, help="messages a second")
    options.add_argument("--body", type=int, default=1024, help="bytes of a message")
    options.add_argument("--replicas", type=int, default=3)
    options.add_argument(
        "--groups", type=int, default=1, help="consumer groups that read each message"
    )
    options.add_argument(
        "--batch",
        type=int,
        default=100,
        help="messages that a client sends together; 1 for lone messages",
    )
    options.add_argument("--retention-h", type=float, default=72.0)
    options.add_argument("--subjects", type=int, default=100)
    options.add_argument(
        "--core-speed", type=float, default=1.0, help="of your cores to those of docs/SIZING.md"
    )
    chosen = options.parse_args()
    load = Workload(
        chosen.rate,
        chosen.body,
        chosen.replicas,
        chosen.groups,
        chosen.batch,
        chosen.retention_h,
        chosen.subjects,
        chosen.core_speed,
    )
    try:
        found = size_of(load)
    except ValueError as failure:
        options.error(str(failure))
    sys.stdout.write(
        f"each machine of the broker group: {found.master_cores:.2f} cores as master"
        + (f", {found.slave_cores:.2f} as slave" if load.replicas > 1 else "")
        + f"; {found.shards} shards at {CORE_SHARE:.0%} of a core\n"
        f"memory {found.memory_mib:,.0f} MiB beside the page cache; disk "
        f"{found.disk_gib:,.0f} GiB for {load.retention_h:g} h\n"
        f"network {found.network_mib_s:,.0f} MiB/s of bodies, in and out of the master\n"
    )


if __name__ == "__main__":
    main()
