"""Checks that only the consumer that had a lane could settle messages there.

Deliveries prove nothing: a stopped consumer may hand out the messages that it holds long after another consumer got its lane. But no
acknowledgement may be confirmed that began after a newer token was in use for the same logical partitions:

    c1, token 7   given 4 5 ....(stopped)............ 5 done [...ok]      zombie_ack: it began after token 8 was in use
    c2, token 8              given 5, settled 5
    c1, token 7   given 4, 4 done [.ok]
    c2, token 8              given 4                                      came_back: certainly settled under 7, and given out under 8

Checks that a group read a partition only when it had finished all earlier partitions of the same logical partitions.

The first delivery under a grant shows that the grant's whole range was open. By then, each message of each earlier partition in the chain
of every logical partition of the range must have been settled, or may have been (see `past`).

    partition 1 [0, 8), closed      k1 1, k2 1, k1 2
    partition 2 [0, 4), a target    k1 3
    given: k1 1, k2 1, k1 2, settled: k1 1, k1 2, then given k1 3, while k2 1 is not settled        early, if k2 is in [0, 4) as well

`strict` names the groups with a strict gate: for these a target opens only when all sources of its change are finished.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from itertools import groupby

from history.ordered.events import NEVER, Grant, seconds
from history.ordered.past import OrderedHistory
from history.past import Anomaly


def exclusivity(history: OrderedHistory) -> Iterator[Anomaly]:
    """Acknowledgements of lost lanes that counted, messages that came back after theirs, tokens that two consumers had."""
    yield from _shared_tokens(history)
    zombies = set[int]()
    yield from _zombie_acks(history, zombies)
    yield from _came_back(history, zombies)


def _shared_tokens(history: OrderedHistory) -> Iterator[Anomaly]:
    holders: dict[tuple[str, int, int], Grant] = {}
    for grant in history.grants:
        first = holders.setdefault((grant.group, grant.partition, grant.token), grant)
        if first is not grant:
            yield Anomaly("shared_token", f"in group {grant.group} one token belongs to {first} and to {grant}", ())


def _zombie_acks(history: OrderedHistory, zombies: set[int]) -> Iterator[Anomaly]:
    columns, line_of = history.deliveries, history.messages.line
    newer = _newer_in_use(history)
    for delivery, end in enumerate(columns.end):
        grant = columns.grant[delivery]
        in_use = newer.get(grant)
        if end != "ok" or in_use is None:
            continue
        lp = history.lp_of_line[line_of[columns.message[delivery]]]
        since_ns, other = in_use.get(lp, (NEVER, grant))
        if columns.began_ns[delivery] > since_ns:
            zombies.add(delivery)
            by, name = history.grants[grant], history.name(columns.message[delivery])
            what = f"{name} was acknowledged by {by} in group {by.group}"
            when = f"which began at {seconds(columns.began_ns[delivery])} and was confirmed, although {history.grants[other]} was given"
            yield Anomaly("zombie_ack", f"{what}, {when} messages of the same logical partition from {seconds(since_ns)} on", ())


def _newer_in_use(history: OrderedHistory) -> dict[int, dict[int, tuple[int, int]]]:
    """For each grant and each of its logical partitions: the earliest use of a newer token there, and the holder of that token."""
    together: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
    for number, grant in enumerate(history.grants):
        together[grant.group, grant.partition].append(number)
    found: dict[int, dict[int, tuple[int, int]]] = {}
    for numbers in together.values():
        in_use: dict[int, tuple[int, int]] = {}
        numbers.sort(key=lambda each: -history.grants[each].token)
        for _, same in groupby(numbers, key=lambda each: history.grants[each].token):
            holders = list(same)
            found.update((number, {lp: in_use[lp] for lp in history.grants[number].lps if lp in in_use}) for number in holders)
            for number in holders:
                grant = history.grants[number]
                for lp in grant.lps:
                    in_use[lp] = min(in_use.get(lp, (NEVER, number)), (grant.first_ns, number))
    return found


def _came_back(history: OrderedHistory, zombies: set[int]) -> Iterator[Anomaly]:
    columns = history.deliveries
    for group, deliveries in history.of_group.items():
        if group in history.reset_groups or None in history.reset_groups:
            continue
        counts = Counter(map(columns.message.__getitem__, deliveries))
        again = [each for each in deliveries if counts[columns.message[each]] > 1]
        settled: dict[tuple[int, int], int] = {}
        for each in again:
            place = history.grant_of(each).partition, columns.sequence[each]
            first = settled.get(place)
            is_earlier = first is None or history.grant_of(each).token < history.grant_of(first).token
            if columns.end[each] == "ok" and each not in zombies and is_earlier:
                settled[place] = each
        for each in again:
            first = settled.get((history.grant_of(each).partition, columns.sequence[each]))
            if first is not None and history.grant_of(first).token < history.grant_of(each).token:
                what = f"{history.name(columns.message[each])} was settled for certain by {history.when(first)}"
                yield Anomaly("came_back", f"{what}, and given to group {group} again, by {history.when(each)}", ())


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
