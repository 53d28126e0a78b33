"""The load, policy and history for automatic resharding. Values only; `resharding` decides."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import isfinite
from typing import NamedTuple

from qmq.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class ReshardPolicy:
    """The policy of splitting and merging a subject's partitions. Off by default. Raises InvalidArgument for impossible values.

    The defaults are Pulsar's (PIP-483: split above 10,000 messages/s or 50 MB/s in, at most one a minute; merge below 1,000 messages/s for
    five minutes; at most 64 segments), since these were discussed in public; Pravega waits ten minutes after each change. Neither of them
    has the limit on backlog.
    """

    is_enabled: bool = False
    """Off by default: a change closes queues for good, so only a request turns resharding on."""
    split_messages_per_s: float = 10_000.0
    """A partition with more messages per second is hot. A broker group takes more than ten times as many (docs/PEERS.md), so it has room
    for several hot partitions during a split, and for peaks above the average."""
    split_bytes_per_s: float = 50e6
    """The same limit in bytes. With two slaves this fills most of a gigabit link, since the master sends each byte twice."""
    split_backlog: int = 1_000_000
    """A partition in which more messages wait for the slowest group is hot. The default is 100 s of a hot partition's load."""
    merge_messages_per_s: float = 1_000.0
    """Neighbours that together take fewer messages per second are cold. A tenth of the hot limit, so that daily changes of load cause
    neither splits nor merges."""
    merge_bytes_per_s: float = 5e6
    """The same limit in bytes."""
    merge_quiet_ms: int = 300_000
    """Neighbours are merged after they were cold for this time without a break. An unneeded partition costs little."""
    cool_down_ms: int = 60_000
    """The shortest time between two changes, so that the load shows the effect of the first one."""
    partitions_min: int = 1
    """No merge makes fewer partitions than this."""
    partitions_max: int = 64
    """No split makes more partitions than this: each partition is a queue for every group, and lanes add consumers without more partitions.
    """

    def __post_init__(self) -> None:
        for name in ("split_messages_per_s", "split_bytes_per_s", "split_backlog"):
            if not getattr(self, name) > 0 or not isfinite(getattr(self, name)):
                raise InvalidArgument(f"{name} is {getattr(self, name)}: give a number above 0, a very large one to disable it")
        for name in ("merge_messages_per_s", "merge_bytes_per_s", "merge_quiet_ms", "cool_down_ms"):
            if not getattr(self, name) >= 0 or not isfinite(getattr(self, name)):
                raise InvalidArgument(f"{name} is {getattr(self, name)}: give a number of 0 or more")
        if not 1 <= self.partitions_min <= self.partitions_max:
            raise InvalidArgument(f"1 <= partitions_min <= partitions_max does not hold: {self.partitions_min}, {self.partitions_max}")

    def encode(self) -> bytes:
        return json.dumps(asdict(self), sort_keys=True).encode()

    @classmethod
    def decode(cls, data: bytes) -> ReshardPolicy:
        return cls(**json.loads(data))


class PartitionLoad(NamedTuple):
    """A partition's load: averages over a time that the caller chooses."""

    number: int
    messages_per_s: float
    bytes_per_s: float
    backlog: int
    """The largest backlog of any group."""
    lp_load: tuple[float, ...]
    """One figure for each logical partition of the range, in any unit: only the proportions matter. Empty: unknown."""


@dataclass(frozen=True, slots=True)
class LoadHistory:
    """The state between two looks at a subject's load. It is empty before the first look."""

    version: int = 0
    """The route's version at the last look. Another version at the next look means that the route changed."""
    changed_ms: int | None = None
    """When the last change was decided or first seen."""
    cold_since_ms: Mapping[tuple[int, int], int] = field(default_factory=dict)
    """Since when each pair of neighbours (numbers from left to right) is cold."""

    def encode(self) -> bytes:
        cold = [[left, right, since] for (left, right), since in sorted(self.cold_since_ms.items())]
        return json.dumps({"version": self.version, "changed_ms": self.changed_ms, "cold_since_ms": cold}, sort_keys=True).encode()

    @classmethod
    def decode(cls, data: bytes) -> LoadHistory:
        found = json.loads(data)
        return cls(found["version"], found["changed_ms"], {(left, right): since for left, right, since in found["cold_since_ms"]})
