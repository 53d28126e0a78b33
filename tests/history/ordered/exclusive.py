"""Checks that only the consumer that had a lane could settle messages there.

Deliveries prove nothing: a stopped consumer may hand out the messages that it holds long after another consumer got its lane. But no
acknowledgement may be confirmed that began after a newer token was in use for the same logical partitions:

    c1, token 7   given 4 5 ....(stopped)............ 5 done [...ok]      zombie_ack: it began after token 8 was in use
    c2, token 8              given 5, settled 5
    c1, token 7   given 4, 4 done [.ok]
    c2, token 8              given 4                                      came_back: certainly settled under 7, and given out under 8
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import groupby

from history.ordered.columns import NEVER, Grant, seconds
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
