"""Decides whether to reshard a subject now, by one observation of its load. Returns a decision, and
sentences with the reasons. Pure.

    hot    a partition above any of the policy's `split_` figures. It is cut in two where its load
           halves. If one logical partition has more than half of the load, no cut halves it: that
           logical partition is isolated, so that other keys no longer wait behind it. A partition
           of one logical partition cannot be split.
    cold   neighbours that together stay below all of the `merge_` figures, and are at most half of
           hot by every `split_` figure. They are merged when all observations of the last
           `merge_quiet_ms` found them cold.

There is one change at a time: the hottest partition first, then the coldest neighbours. No change
follows within `cool_down_ms` of the last one, made by the policy or by an operator.

Why the changes come to an end. Let the load of each logical partition be constant. Merged
partitions together are at most half of hot, so no merge makes a partition that would be split
again. The parts of a split were together more than hot, so all of them together are never merged
again. Hot partitions therefore come from hot ones only, each narrower than the one before: splits
end, then merges end.

Worked example, by the defaults. Partition 3 [0, 512) takes 12,000 messages/s, spread evenly, and
the last change was a minute ago: it is split at 256. With 9,000 of them in logical partition 17 it
is split at 17 and 18, into 4 [0, 17), 5 [17, 18) and 6 [18, 512). If partition 5 alone reaches
10,000, it stays, and the reasons say so.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from math import isfinite
from typing import NamedTuple

from qmq.errors import InvalidArgument
from qmq_ordering.changes import merge, split
from qmq_ordering.routes import Change, PhysicalPartition, Route, cut_by_load, ranges_between


@dataclass(frozen=True, slots=True)
class ReshardPolicy:
    """The policy of splitting and merging a subject's partitions. Off by default. Raises
    InvalidArgument for impossible values.

    The defaults are Pulsar's (PIP-483: split above 10,000 messages/s or 50 MB/s in, at most one a
    minute; merge below 1,000 messages/s for five minutes; at most 64 segments), since these were
    discussed in public; Pravega waits ten minutes after each change. Neither of them has the limit
    on backlog.
    """

    is_enabled: bool = False
    """Off by default: a change closes queues for good, so only a request turns resharding on."""
    split_messages_per_s: float = 10_000.0
    """A partition with more messages per second is hot. A broker group takes more than ten times as
    many (docs/PEERS.md), so it has room for several hot partitions during a split, and for peaks
    above the average."""
    split_bytes_per_s: float = 50e6
    """The same limit in bytes. With two slaves this fills most of a gigabit link, since the master
    sends each byte twice.
    """
    split_backlog: int = 1_000_000
    """A partition in which more messages wait for the slowest group is hot. The default is 100 s of
    a hot partition's load.
    """
    merge_messages_per_s: float = 1_000.0
    """Neighbours that together take fewer messages per second are cold. A tenth of the hot limit,
    so that daily changes of load cause neither splits nor merges."""
    merge_bytes_per_s: float = 5e6
    """The same limit in bytes."""
    merge_quiet_ms: int = 300_000
    """Neighbours are merged after they were cold for this time without a break. An unneeded
    partition costs little.
    """
    cool_down_ms: int = 60_000
    """The shortest time between two changes, so that the load shows the effect of the first one."""
    partitions_min: int = 1
    """No merge makes fewer partitions than this."""
    partitions_max: int = 64
    """No split makes more partitions than this: each partition is a queue for every group, and
    lanes add consumers without more partitions.
    """

    def __post_init__(self) -> None:
        for name in ("split_messages_per_s", "split_bytes_per_s", "split_backlog"):
            if not getattr(self, name) > 0 or not isfinite(getattr(self, name)):
                raise InvalidArgument(
                    f"{name} is {getattr(self, name)}: give a number above 0, a very large "
                    "one to disable it"
                )
        for name in ("merge_messages_per_s", "merge_bytes_per_s", "merge_quiet_ms", "cool_down_ms"):
            if not getattr(self, name) >= 0 or not isfinite(getattr(self, name)):
                raise InvalidArgument(
                    f"{name} is {getattr(self, name)}: give a number of 0 or more"
                )
        if not 1 <= self.partitions_min <= self.partitions_max:
            raise InvalidArgument(
                "1 <= partitions_min <= partitions_max does not hold: "
                f"{self.partitions_min}, {self.partitions_max}"
            )

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
    """One figure for each logical partition of the range, in any unit: only the proportions matter.
    Empty: unknown.
    """


@dataclass(frozen=True, slots=True)
class LoadHistory:
    """The state between two looks at a subject's load. It is empty before the first look."""

    version: int = 0
    """The route's version at the last look.
    Another version at the next look means that the route changed.
    """
    changed_ms: int | None = None
    """When the last change was decided or first seen."""
    cold_since_ms: Mapping[tuple[int, int], int] = field(default_factory=dict)
    """Since when each pair of neighbours (numbers from left to right) is cold."""

    def encode(self) -> bytes:
        cold = [[left, right, since] for (left, right), since in sorted(self.cold_since_ms.items())]
        return json.dumps(
            {"version": self.version, "changed_ms": self.changed_ms, "cold_since_ms": cold},
            sort_keys=True,
        ).encode()

    @classmethod
    def decode(cls, data: bytes) -> LoadHistory:
        found = json.loads(data)
        return cls(
            found["version"],
            found["changed_ms"],
            {(left, right): since for left, right, since in found["cold_since_ms"]},
        )


__all__ = [
    "LoadHistory",
    "Merge",
    "PartitionLoad",
    "ReshardDecision",
    "ReshardPolicy",
    "Split",
    "decide",
]


class Split(NamedTuple):
    """Cut a partition; the arguments of `changes.split`."""

    partition: int
    at: tuple[int, ...]
    groups: tuple[str, ...]

    def change(self, route: Route, *, change_id: str, reason: str = "") -> Change:
        """The change that splits the partition on this route."""
        return split(
            route, self.partition, self.at, change_id=change_id, groups=self.groups, reason=reason
        )

    def __str__(self) -> str:
        return f"split {self.partition} at {' '.join(map(str, self.at))}" + (
            f" onto {' '.join(self.groups)}" if self.groups else ""
        )


class Merge(NamedTuple):
    """Join neighbours; the arguments of `changes.merge`."""

    partitions: tuple[int, ...]
    group: str

    def change(self, route: Route, *, change_id: str, reason: str = "") -> Change:
        """The change that merges the neighbours on this route."""
        return merge(route, self.partitions, change_id=change_id, group=self.group, reason=reason)

    def __str__(self) -> str:
        return f"merge {' '.join(map(str, self.partitions))}" + (
            f" onto {self.group}" if self.group else ""
        )


@dataclass(frozen=True, slots=True)
class ReshardDecision:
    """The change to make now, if any, and the reasons for or against a change:
    full sentences for people.
    """

    operation: Split | Merge | None
    reasons: tuple[str, ...]


class _Pair(NamedTuple):
    """Two neighbours with their loads."""

    left: PhysicalPartition
    right: PhysicalPartition
    messages_per_s: float
    bytes_per_s: float
    backlog: int

    @property
    def key(self) -> tuple[int, int]:
        return self.left.number, self.right.number


def decide(
    policy: ReshardPolicy,
    route: Route,
    loads: Sequence[PartitionLoad],
    groups: Sequence[str],
    past: LoadHistory,
    now_ms: int,
) -> tuple[ReshardDecision, LoadHistory]:
    """Return the decision, and the history for the next look. `groups`: the broker groups that may
    take partitions, least loaded first.

    Partitions without a load do not change, because their broker group did not answer. With the
    policy off, nothing changes, and the reasons say which change the policy would make. Raises
    InvalidArgument if a load does not fit its partition's range.
    """
    known = {load.number: load for load in loads}
    pairs = [pair for pair in _pairs(route, known) if _is_cold(policy, pair)]
    seen = _looked(route, pairs, past, now_ms)
    reasons: list[str] = []
    operation = _split_hottest(policy, route, known, groups, reasons) or _merge_coldest(
        policy, route, pairs, groups, seen, now_ms, reasons
    )
    reasons = reasons or [_quiet(route, known)]
    silent = [part for part in route.partitions if part.number not in known]
    reasons += [
        (
            f"Partition {part.number} is left alone: no figures came from its broker group "
            f"{part.group}."
        )
        for part in silent
    ]
    waited_ms = policy.cool_down_ms if seen.changed_ms is None else now_ms - seen.changed_ms
    if not policy.is_enabled:
        return ReshardDecision(
            None,
            (
                "Automatic resharding is off for this subject; this is what would be, were it on.",
                *reasons,
            ),
        ), seen
    if operation is not None and waited_ms < policy.cool_down_ms:
        wait = (
            f"Nothing is done yet: the last change was {_s(waited_ms)} ago, and the cool-down is "
            f"{_s(policy.cool_down_ms)}."
        )
        return ReshardDecision(None, (*reasons, wait)), seen
    return ReshardDecision(operation, tuple(reasons)), seen if operation is None else replace(
        seen, changed_ms=now_ms
    )


# --- observing ------------------------------------------------------------------------------------


def _pairs(route: Route, known: dict[int, PartitionLoad]) -> Iterator[_Pair]:
    for left, right in pairwise(route.partitions):
        a, b = known.get(left.number), known.get(right.number)
        if a is not None and b is not None:
            yield _Pair(
                left,
                right,
                a.messages_per_s + b.messages_per_s,
                a.bytes_per_s + b.bytes_per_s,
                a.backlog + b.backlog,
            )


def _is_cold(policy: ReshardPolicy, pair: _Pair) -> bool:
    """True if the pair is below all merge limits, and at most half of every split limit, so that
    merges and splits cannot alternate.
    """
    return (
        pair.messages_per_s < policy.merge_messages_per_s
        and pair.bytes_per_s < policy.merge_bytes_per_s
        and pair.messages_per_s <= policy.split_messages_per_s / 2
        and pair.bytes_per_s <= policy.split_bytes_per_s / 2
        and pair.backlog <= policy.split_backlog / 2
    )


def _looked(route: Route, cold: Sequence[_Pair], past: LoadHistory, now_ms: int) -> LoadHistory:
    """The history with this look. A time in the future, from a clock that was ahead, counts as now;
    it would block changes otherwise.
    """
    changed_ms = past.changed_ms
    if past.version not in (0, route.version):
        changed_ms = now_ms
    since = {pair.key: min(past.cold_since_ms.get(pair.key, now_ms), now_ms) for pair in cold}
    return LoadHistory(
        route.version, None if changed_ms is None else min(changed_ms, now_ms), since
    )


# --- hot ------------------------------------------------------------------------------------------


def _heat(policy: ReshardPolicy, load: PartitionLoad) -> float:
    """The largest ratio of a figure to its split limit; a partition above 1 is hot."""
    by_rate = max(
        load.messages_per_s / policy.split_messages_per_s,
        load.bytes_per_s / policy.split_bytes_per_s,
    )
    return max(by_rate, load.backlog / policy.split_backlog)


def _split_hottest(
    policy: ReshardPolicy,
    route: Route,
    known: dict[int, PartitionLoad],
    groups: Sequence[str],
    reasons: list[str],
) -> Split | None:
    """Split the hottest partition that can be split.
    Adds the reasons why others cannot to `reasons`.
    """
    hot = [
        (_heat(policy, known[part.number]), part)
        for part in route.partitions
        if part.number in known
    ]
    for heat, part in sorted(hot, key=lambda each: (-each[0], each[1].number)):
        if heat > 1:
            found = _split(policy, route, part, known[part.number], groups)
            too_much = _too_much(policy, known[part.number])
            if isinstance(found, Split):
                at = " and ".join(map(str, found.at))
                reasons.insert(
                    0,
                    (
                        f"Partition {part.number} {too_much}; it is to be split at logical "
                        f"partition {at}."
                    ),
                )
                return found
            reasons.append(f"Partition {part.number} {too_much}; {found}.")
    return None


def _split(
    policy: ReshardPolicy,
    route: Route,
    part: PhysicalPartition,
    load: PartitionLoad,
    groups: Sequence[str],
) -> Split | str:
    """The split of a hot partition, or the reason why it cannot be split."""
    if part.range.width == 1:
        return (
            f"it holds logical partition {part.range.first} only and cannot be split: the load "
            "is in keys that hash to the same place"
        )
    room = policy.partitions_max - len(route.partitions)
    if room < 1:
        return (
            f"it is not split, because the subject has {len(route.partitions)} partitions and "
            f"may have {policy.partitions_max}"
        )
    loads = load.lp_load or (0.0,) * part.range.width
    at = cut_by_load(part.range, loads, 2)
    hottest = max(range(len(loads)), key=loads.__getitem__)
    if loads[hottest] > sum(loads) / 2:
        lp = part.range.first + hottest
        if not any(each for i, each in enumerate(loads) if i != hottest):
            return (
                f"all of it is in logical partition {lp}, which cannot be split, and it delays "
                "no other keys"
            )
        isolated = [cut for cut in (lp, lp + 1) if part.range.first < cut < part.range.end]
        at = isolated if len(isolated) <= room else at
    weights = [
        sum(loads[a - part.range.first : b - part.range.first])
        for a, b in ranges_between(part.range, at)
    ]
    return Split(part.number, tuple(at), _places(weights, part.group, groups))


def _places(weights: Sequence[float], home: str, groups: Sequence[str]) -> tuple[str, ...]:
    """Broker groups for the parts: the lightest part stays, the others move if possible, the
    heaviest to the least loaded group.
    """
    if not groups:
        return ()
    places = [home] * len(weights)
    order = sorted(range(len(weights)), key=lambda i: -weights[i])
    movers = order[:-1] if home in groups else order
    elsewhere = [group for group in groups if group != home] or [home]
    for turn, i in enumerate(movers):
        places[i] = elsewhere[turn % len(elsewhere)]
    return tuple(places)


# --- cold -----------------------------------------------------------------------------------------


def _merge_coldest(
    policy: ReshardPolicy,
    route: Route,
    cold: Sequence[_Pair],
    groups: Sequence[str],
    seen: LoadHistory,
    now_ms: int,
    reasons: list[str],
) -> Merge | None:
    """Merge the coldest neighbours that were cold for long enough. Otherwise adds to `reasons`
    which neighbours come first.
    """
    if not cold:
        return None
    quiet_ms = {pair.key: now_ms - seen.cold_since_ms[pair.key] for pair in cold}
    ripe = [pair for pair in cold if quiet_ms[pair.key] >= policy.merge_quiet_ms]
    chosen = min(
        ripe or cold,
        key=lambda pair: (0 if ripe else -quiet_ms[pair.key], pair.messages_per_s, pair.key),
    )
    little = _little(policy, chosen, quiet_ms[chosen.key])
    if len(route.partitions) <= policy.partitions_min:
        reasons.append(
            f"{little}; they stay, since the subject has {len(route.partitions)} and shall "
            f"have {policy.partitions_min}."
        )
    elif not ripe:
        reasons.append(
            f"{little}; they are to be merged when that has lasted {_s(policy.merge_quiet_ms)}."
        )
    else:
        reasons.insert(0, f"{little}; they are to be merged.")
        homes = [group for group in groups if group in (chosen.left.group, chosen.right.group)]
        return Merge(chosen.key, next(iter(homes or groups), ""))
    return None


# --- sentences ------------------------------------------------------------------------------------


def _too_much(policy: ReshardPolicy, load: PartitionLoad) -> str:
    found = []
    if load.messages_per_s > policy.split_messages_per_s:
        found.append(
            f"takes {load.messages_per_s:,.0f} messages/s, above {policy.split_messages_per_s:,.0f}"
        )
    if load.bytes_per_s > policy.split_bytes_per_s:
        found.append(
            f"takes {load.bytes_per_s:,.0f} bytes/s, above {policy.split_bytes_per_s:,.0f}"
        )
    if load.backlog > policy.split_backlog:
        found.append(f"has a backlog of {load.backlog:,} messages, above {policy.split_backlog:,}")
    return " and ".join(found)


def _little(policy: ReshardPolicy, pair: _Pair, quiet_ms: int) -> str:
    return (
        f"Partitions {pair.left.number} and {pair.right.number} have been cold for {_s(quiet_ms)}: "
        f"together {pair.messages_per_s:,.0f} messages/s and {pair.bytes_per_s:,.0f} bytes/s, "
        f"below {policy.merge_messages_per_s:,.0f} and {policy.merge_bytes_per_s:,.0f}"
    )


def _quiet(route: Route, known: dict[int, PartitionLoad]) -> str:
    loads = [known[part.number] for part in route.partitions if part.number in known]
    if not loads:
        return "Nothing is known of the load of any partition."
    busiest = max(loads, key=lambda load: load.messages_per_s)
    return (
        f"No partition is hot and no neighbours are cold: of {len(route.partitions)}, "
        f"partition {busiest.number} takes most, "
        f"{busiest.messages_per_s:,.0f} messages/s and {busiest.bytes_per_s:,.0f} bytes/s."
    )


def _s(duration_ms: int) -> str:
    return f"{max(duration_ms, 0) / 1000:,.10g} s"
