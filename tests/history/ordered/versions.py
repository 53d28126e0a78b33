"""Checks that a group read a partition only when it had finished all earlier partitions of the same logical partitions.

The first delivery under a grant shows that the grant's whole range was open. By then, each message of each earlier partition in the chain
of every logical partition of the range must have been settled, or may have been (see `past`).

    partition 1 [0, 8), closed      k1 1, k2 1, k1 2
    partition 2 [0, 4), a target    k1 3
    given: k1 1, k2 1, k1 2, settled: k1 1, k1 2, then given k1 3, while k2 1 is not settled        early, if k2 is in [0, 4) as well

`strict` names the groups with a strict gate: for these a target opens only when all sources of its change are finished.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from history.ordered.columns import NEVER, Grant, seconds
from history.ordered.past import OrderedHistory
from history.past import Anomaly


def early(history: OrderedHistory, *, strict: Collection[str] = ()) -> Iterator[Anomaly]:
    """Partitions whose messages were delivered to a group too early; one report for each pair of partitions."""
    for group in history.of_group:
        opened = _opened(history, group, is_strict=group in strict)
        told = set[tuple[int, int]]()
        for message, partition in _lying(history):
            limits = opened.get(partition)
            if limits is None:
                continue
            opened_ns, later = limits[history.lp_of_line[history.messages.line[message]]]
            settled_ns = _settled_ns(history, group, message, partition)
            if settled_ns > opened_ns and (partition, later) not in told:
                told.add((partition, later))
                what = f"group {group} was given messages of partition {later} (since version {history.routes.since[later]})"
                before = f"{history.name(message)}, which lies before it in partition {partition}"
                when = f"was settled at {seconds(settled_ns)}" if settled_ns < NEVER else "was never settled"
                yield Anomaly("early", f"{what} from {seconds(opened_ns)} on, in the range of {before}, and {when}", ())


def _settled_ns(history: OrderedHistory, group: str, message: int, partition: int) -> int:
    settled = history.settled_at(group)[message]
    return history.copy_settled_at(group, message, partition) if message in history.copies and settled else settled


def _lying(history: OrderedHistory) -> Iterator[tuple[int, int]]:
    """For each stored message, all partitions that hold it."""
    copies, places = history.copies, history.places
    for message in history.stored:
        if message in copies:
            yield from ((message, partition) for _, partition, _ in copies[message])
        elif (place := places[message]) is not None:
            yield message, place[0]


def _opened(history: OrderedHistory, group: str, *, is_strict: bool) -> dict[int, list[tuple[int, int]]]:
    """For each partition with successors, by logical partition: when the first successor was read, and which one."""
    routes = history.routes
    read: dict[int, list[int]] = {number: [NEVER] * routes.logical_partitions for number in routes.parts}
    for grant in history.grants:
        if grant.group == group and grant.partition in read:
            for partition, lps in _opened_by(history, grant, is_strict=is_strict):
                for lp in lps:
                    read[partition][lp] = min(read[partition][lp], grant.first_ns)
    found: dict[int, list[tuple[int, int]]] = {}
    for lp, chain in enumerate(routes.chains):
        soonest = (NEVER, 0)
        for number in reversed(chain):
            found.setdefault(number, [(NEVER, 0)] * routes.logical_partitions)[lp] = soonest
            soonest = min(soonest, (read[number][lp], number))
    return found


def _opened_by(history: OrderedHistory, grant: Grant, *, is_strict: bool) -> list[tuple[int, range]]:
    """The partitions that a grant opens: its range; with a strict gate all targets of the change."""
    routes = history.routes
    if not is_strict:
        return [(grant.partition, grant.lps)]
    targets = routes.changes[routes.since[grant.partition]].targets
    return list(zip(targets, routes.lps_of(targets), strict=True))
