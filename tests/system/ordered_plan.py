"""The plan of a run of ordered faults: which changes of the route, which faults, and when. Pure, drawn from a seed before the run.

Changes follow one another, and so do faults; both continue beside each other. A fault ends, and its damage is healed, before the next
fault.

| fault | action |
|---|---|
| kill-master, kill-slave, kill-meta, kill-consumer | SIGKILL, then a new start |
| stop-master, stop-consumer | SIGSTOP, for longer than its lease, then SIGCONT |
| freeze-group | SIGSTOP to all replicas of a broker group for longer than the master's lease, while its partitions are moved away |
| cut-group | all replicas are cut off from the coordination store and the metaservers for as long (needs network namespaces) |
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from random import Random
from typing import NamedTuple

from qmq.proto.v1 import meta_pb2 as pb

KILLS = {"kill-master": 3, "kill-slave": 1, "kill-meta": 2, "kill-consumer": 3, "stop-consumer": 2, "stop-master": 2}
CHANGES = {"split": 4, "merge": 3, "move": 3, "drain": 1}
PARTITIONS_MAX = 8
LONG = ("freeze-group", "cut-group")


class Step(NamedTuple):
    """A step, at the earliest this many seconds after the beginning."""

    at_s: float
    kind: str


def plan(seed: int, *, changes: int, kills: int, freezes: int, seconds: float, can_cut: bool) -> tuple[list[Step], list[Step]]:
    """Changes and faults, each spread over the time at random. However few there are, the first ones are one of each kind."""
    coin = Random(seed)
    kinds = list(CHANGES)[:3][: min(changes, 3)]
    kinds += coin.choices(list(CHANGES), list(CHANGES.values()), k=changes - len(kinds))
    faults = list(KILLS)[: min(kills, len(KILLS))]
    faults += coin.choices(list(KILLS), list(KILLS.values()), k=kills - len(faults))
    faults += [LONG[number % 2 if can_cut else 0] for number in range(freezes)]
    coin.shuffle(kinds)
    coin.shuffle(faults)
    return _spread(coin, kinds, seconds), _spread(coin, faults, seconds)


def _spread(coin: Random, kinds: Sequence[str], seconds: float) -> list[Step]:
    times = sorted(coin.uniform(0.0, seconds) for _ in kinds)
    return [Step(at_s, kind) for at_s, kind in zip(times, kinds, strict=True)]


def held_by(route: pb.OrderedRoute, group: str) -> frozenset[int]:
    """The logical partitions that a broker group has in a route."""
    parts = [part for part in route.partitions if part.broker_group == group]
    return frozenset(lp for part in parts for lp in range(part.lps.first, part.lps.end))


def is_share(lps: Collection[int], route: pb.OrderedRoute, groups: Sequence[str]) -> bool:
    """Whether these are at least half of each group's share in an even route, so that a fault of them affects writers."""
    return 2 * len(groups) * len(lps) >= route.logical_partitions


def worth_harming(route: pb.OrderedRoute, groups: Sequence[str]) -> list[str]:
    """The broker groups with such a share. There is always one."""
    return [group for group in groups if is_share(held_by(route, group), route, groups)]


def operation(coin: Random, kind: str, route: pb.OrderedRoute, groups: Sequence[str]) -> dict[str, object]:
    """A change of this kind, or of another one where this is not possible: the arguments of `change_route`."""
    parts = list(route.partitions)
    if kind == "merge" and len(parts) > 1:
        at = coin.randrange(len(parts) - 1)
        return {"merge": pb.MergeOperation(partitions=[parts[at].number, parts[at + 1].number], broker_group=coin.choice(groups))}
    wide = [part for part in parts if part.lps.end - part.lps.first > 1]
    if kind in ("split", "merge") and wide and len(parts) < PARTITIONS_MAX:
        part = coin.choice(wide)
        at = coin.randrange(part.lps.first + 1, part.lps.end)
        return {"split": pb.SplitOperation(partition=part.number, at=[at], broker_groups=[coin.choice(groups) for _ in range(2)])}
    if kind == "split" and len(parts) > 1:
        return operation(coin, "merge", route, groups)
    part = coin.choice(parts)
    others = [group for group in groups if group != part.broker_group] or list(groups)
    return {"move": pb.MoveOperation(partition=part.number, broker_group=coin.choice(others))}


def evacuation(route: pb.OrderedRoute, group: str, groups: Sequence[str], coin: Random) -> list[pb.MoveOperation]:
    """The changes that move everything away from a broker group."""
    others = [name for name in groups if name != group]
    return [
        pb.MoveOperation(partition=part.number, broker_group=coin.choice(others)) for part in route.partitions if part.broker_group == group
    ]
