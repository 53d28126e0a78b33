"""Runs all checkers of ordered histories in one call, and returns the report of a run.

    report = check_ordered(load(path), drained=True)
    assert report.ok, report

| checker | reports |
|---|---|
| lost, unsettled | a message that was acknowledged and never given to a group; one that was given and never settled |
| phantom | a message that was given, but never sent or certainly not stored |
| skipped | a message that was given for the first time after a later one of its line |
| torn_replay | a replay that does not begin where the group was, or leaves messages out |
| zombie_ack | an acknowledgement that was confirmed although another consumer had the lane by then |
| came_back | a message that was given again although it was certainly settled |
| shared_token | one token with two holders |
| early | a partition that a group read before it had settled the earlier partitions |
| two_at_one_place, behind_seal, wrong_partition, log_order | a log with wrong content |
| stored_twice | a second copy without a fence, with another id, or not part of an in-order replay |
| stalled | writers that were blocked without a reason |

The report counts, without judging: stored, unknown and failed messages; deliveries, and how many of
them were repeated or late; messages with two copies; changes.

Checks that a group got each line in the order of sending, and that every replay was in order.

    given     1 2 3 | 2 3 4 | 4 5      fine: three grants; each begins at a message that was not
                                       surely settled, and leaves none out
    given     1 3                      skipped: 3 came for the first time although 2 had never come
    given     1 2 3 | 3 4, 2 unsettled torn_replay: the second grant begins after a message that nobody can have settled
    given     1 2 3 4 | 2 4            torn_replay: the second grant leaves 3 out

The checker judges the deliveries of each grant separately. A consumer that was stopped while it
handed messages out may wake up long after another consumer got its lane. It then hands out the rest
of its messages, among those of the other consumer. Within its grant they are in order, which is all
that it can promise; `late` counts such deliveries. First deliveries must be in order over all
grants together.

Checks that every stored message reached every group and was settled there, and that every message
was sent.

    stored    1 2 3 4
    given     1 2   4          3 is lost
    settled   1 2   (refused)  4 is unsettled: its only acknowledgement was refused, because the lane was lost, and it was not given again

`lost` and `unsettled` judge drained histories only. A message that certainly failed must not
appear: it is a phantom.

Checks that only the consumer that had a lane could settle messages there.

Deliveries prove nothing: a stopped consumer may hand out the messages that it holds long after
another consumer got its lane. But no acknowledgement may be confirmed that began after a newer
token was in use for the same logical partitions:

    c1, token 7   given 4 5 ....(stopped)............ 5 done [...ok]      zombie_ack: it began after
                                                                          token 8 was in use
    c2, token 8              given 5, settled 5
    c1, token 7   given 4, 4 done [.ok]
    c2, token 8              given 4                                      came_back: certainly settled under 7, and given out under 8

Checks that a group read a partition only when it had finished all earlier partitions of the same
logical partitions.

The first delivery under a grant shows that the grant's whole range was open. By then, each message
of each earlier partition in the chain of every logical partition of the range must have been
settled, or may have been (see `OrderedHistory`).

    partition 1 [0, 8), closed      k1 1, k2 1, k1 2
    partition 2 [0, 4), a target    k1 3
    given: k1 1, k2 1, k1 2, settled: k1 1, k1 2, then given k1 3, while k2 1 is not settled        early, if k2 is in [0, 4) as well

`strict` names the groups with a strict gate: for these a target opens only when all sources of its
change are finished.

Checks the content of the log, as far as producers' answers and consumers' deliveries show it.

A line's messages, read partition by partition in the order of versions, and there by sequence, must
be in the order of sending:

    partition 1 (version 1)   k1 1, k1 2, command message at 2
    partition 2 (version 2)   k1 3, k1 4

A message may be stored twice in one case: partition 1 was fenced before its group answered, and the
producer sent the messages of unknown outcome again. Both copies then have one id, and all later
messages are repeated as well:

    partition 1 (fenced)      k1 1, k1 2, k1 3
    partition 2               k1 2, k1 3, k1 4       fine: an in-order replay from k1 2 on
    partition 2               k1 2, k1 4             stored_twice: k1 3 is not repeated

Finds writers that were blocked without a reason.

There are two reasons: a change of the route closes the message's partition, from the seal to the
publication of the next version; or a broker group of the message's logical partition has no master.
A message that waited longer than `slow_ns` for its answer, or failed, must have been under way
during such a time, or up to `after_ns` after its end (a producer must first learn of it and find
the new route).

    change       [seal ........ published] after_ns
    k1 7      [put ................ ok]                 fine, for any duration
    k2 3                                          [put ................... ok]      stalled

The report has the longest pauses. Of a change: the longest time without an answered put in the
ranges of its sources that overlaps the change, counted from the change's beginning. Of an outage:
the same for the group's partitions. For readers: the longest time without a delivery.
"""  # noqa: E501

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, islice, pairwise

from history.events import Anomaly, Operation
from history.ordered.events import NEVER, Grant, OrderedHistory, Outaged, seconds


def exclusivity(history: OrderedHistory) -> Iterator[Anomaly]:
    """Acknowledgements of lost lanes that counted, messages that came back after theirs, tokens
    that two consumers had.
    """
    yield from _shared_tokens(history)
    zombies = set[int]()
    yield from _zombie_acks(history, zombies)
    yield from _came_back(history, zombies)


def _shared_tokens(history: OrderedHistory) -> Iterator[Anomaly]:
    holders: dict[tuple[str, int, int], Grant] = {}
    for grant in history.grants:
        first = holders.setdefault((grant.group, grant.partition, grant.token), grant)
        if first is not grant:
            yield Anomaly(
                "shared_token",
                f"in group {grant.group} one token belongs to {first} and to {grant}",
            )


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
            when = (
                f"which began at {seconds(columns.began_ns[delivery])} and was confirmed, "
                f"although {history.grants[other]} was given"
            )
            yield Anomaly(
                "zombie_ack",
                f"{what}, {when} messages of the same logical partition from "
                f"{seconds(since_ns)} on",
            )


def _newer_in_use(history: OrderedHistory) -> dict[int, dict[int, tuple[int, int]]]:
    """For each grant and each of its logical partitions: the earliest use of a newer token there,
    and the holder of that token.
    """
    together: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
    for number, grant in enumerate(history.grants):
        together[grant.group, grant.partition].append(number)
    found: dict[int, dict[int, tuple[int, int]]] = {}
    for numbers in together.values():
        in_use: dict[int, tuple[int, int]] = {}
        numbers.sort(key=lambda each: -history.grants[each].token)
        for _, same in groupby(numbers, key=lambda each: history.grants[each].token):
            holders = list(same)
            found.update(
                (number, {lp: in_use[lp] for lp in history.grants[number].lps if lp in in_use})
                for number in holders
            )
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
            is_earlier = (
                first is None or history.grant_of(each).token < history.grant_of(first).token
            )
            if columns.end[each] == "ok" and each not in zombies and is_earlier:
                settled[place] = each
        for each in again:
            first = settled.get((history.grant_of(each).partition, columns.sequence[each]))
            if first is not None and history.grant_of(first).token < history.grant_of(each).token:
                what = (
                    f"{history.name(columns.message[each])} was settled for certain by "
                    f"{history.when(first)}"
                )
                yield Anomaly(
                    "came_back",
                    f"{what}, and given to group {group} again, by {history.when(each)}",
                )


def early(history: OrderedHistory, *, strict: Collection[str] = ()) -> Iterator[Anomaly]:
    """Partitions whose messages were delivered to a group too early; one report for each pair of
    partitions.
    """
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
                what = (
                    f"group {group} was given messages of partition {later} (since version "
                    f"{history.routes.since[later]})"
                )
                before = f"{history.name(message)}, which lies before it in partition {partition}"
                when = (
                    f"was settled at {seconds(settled_ns)}"
                    if settled_ns < NEVER
                    else "was never settled"
                )
                yield Anomaly(
                    "early",
                    f"{what} from {seconds(opened_ns)} on, in the range of {before}, and {when}",
                )


def _settled_ns(history: OrderedHistory, group: str, message: int, partition: int) -> int:
    settled = history.settled_at(group)[message]
    return (
        history.copy_settled_at(group, message, partition)
        if message in history.copies and settled
        else settled
    )


def _lying(history: OrderedHistory) -> Iterator[tuple[int, int]]:
    """For each stored message, all partitions that hold it."""
    copies, places = history.copies, history.places
    for message in history.stored:
        if message in copies:
            yield from ((message, partition) for _, partition, _ in copies[message])
        elif (place := places[message]) is not None:
            yield message, place[0]


def _opened(
    history: OrderedHistory, group: str, *, is_strict: bool
) -> dict[int, list[tuple[int, int]]]:
    """For each partition with successors, by logical partition: when the first successor was read,
    and which one.
    """
    routes = history.routes
    read: dict[int, list[int]] = {
        number: [NEVER] * routes.logical_partitions for number in routes.parts
    }
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


def _opened_by(
    history: OrderedHistory, grant: Grant, *, is_strict: bool
) -> list[tuple[int, range]]:
    """The partitions that a grant opens: its range; with a strict gate all targets of the
    change.
    """
    routes = history.routes
    if not is_strict:
        return [(grant.partition, grant.lps)]
    targets = routes.changes[routes.since[grant.partition]].targets
    return list(zip(targets, routes.lps_of(targets), strict=True))


Copy = tuple[int, int, int, int]
"""Since which version its partition is there, partition, sequence, rank in its line."""


def log_order(history: OrderedHistory) -> Iterator[Anomaly]:
    """Places with two messages, after a seal or in a partition of other keys; lines that are out of
    order.
    """
    yield from _places(history)
    for line, copies in _lines(history):
        if not any(message in history.copies for message in history.by_rank[line]):
            yield from _rising(history, line, copies)


def stored_twice(history: OrderedHistory) -> Iterator[Anomaly]:
    """Second copies that should not be, that have another id, or that are no in-order replay."""
    yield from _unexcused(history)
    yield from _other_ids(history)
    for line, copies in _lines(history):
        if any(message in history.copies for message in history.by_rank[line]):
            yield from _replayed(history, line, sorted(copies))


# --- places ---------------------------------------------------------------------------------------


def _places(history: OrderedHistory) -> Iterator[Anomaly]:
    routes, line_of, told = history.routes, history.messages.line, set[tuple[int, int, int]]()
    held: defaultdict[int, dict[int, int]] = defaultdict(dict)
    for message, partition, sequence in _claims(history):
        first = held[partition].setdefault(sequence, message)
        part, sealed = routes.parts.get(partition), routes.sealed.get(partition, -1)
        lp = history.lp_of_line[line_of[message]]
        where = f"sequence {sequence} of partition {partition}"
        if first != message:
            found = Anomaly(
                "two_at_one_place",
                f"{where} holds {history.name(first)} and {history.name(message)}",
            )
        elif 0 <= sealed <= sequence:
            what = (
                f"{history.name(message)} lies at {where}, which was closed by its command "
                f"message at {sealed}"
            )
            found = Anomaly("behind_seal", what)
        elif part is None or not part.first <= lp < part.end:
            found = Anomaly(
                "wrong_partition",
                f"{history.name(message)}, of logical partition {lp}, lies at {where}: {part}",
            )
        else:
            continue
        if (message, partition, sequence) not in told:
            told.add((message, partition, sequence))
            yield found


def _claims(history: OrderedHistory) -> Iterator[tuple[int, int, int]]:
    for message, place in enumerate(history.messages.place):
        if place is not None:
            yield message, place.partition, place.sequence
    columns, grants = history.deliveries, history.grants
    for message, grant, sequence in zip(
        columns.message, columns.grant, columns.sequence, strict=True
    ):
        yield message, grants[grant].partition, sequence


# --- lines ----------------------------------------------------------------------------------------


def _lines(history: OrderedHistory) -> Iterator[tuple[int, list[Copy]]]:
    """Each line's copies, in the order of sending."""
    since, copies, places = history.routes.since, history.copies, history.places
    for line, messages in enumerate(history.by_rank):
        found: list[Copy] = []
        for rank, message in enumerate(messages):
            place = places[message]
            if message in copies:
                found += [(*copy, rank) for copy in copies[message]]
            elif place is not None:
                found.append((since.get(place[0], 0), *place, rank))
        yield line, found


def _rising(history: OrderedHistory, line: int, copies: list[Copy]) -> Iterator[Anomaly]:
    """One report for each line."""
    before = (-1, -1, -1, -1)
    for copy in copies:
        if copy[0] < before[0] or (copy[1] == before[1] and copy[2] <= before[2]):
            early, late = history.by_rank[line][before[3]], history.by_rank[line][copy[3]]
            what = (
                f"{history.name(early)} was sent before {history.name(late)}, but lies behind "
                f"it: {_place(before)} and {_place(copy)}"
            )
            yield Anomaly("log_order", what)
            return
        before = copy


def _replayed(history: OrderedHistory, line: int, copies: list[Copy]) -> Iterator[Anomaly]:
    """The copies in the order of the log: each is the next of its line, or, where a partition
    begins, an earlier one.
    """
    messages = history.by_rank[line]
    before = (-1, -1, -1, -1)
    for copy in copies:
        rank, expected = copy[3], before[3] + 1
        if rank != expected and not (rank < expected and copy[1] != before[1]):
            what = f"{history.name(messages[rank])} lies {_place(copy)}"
            if rank > expected:
                yield Anomaly(
                    "stored_twice",
                    f"{what}, behind a replay that leaves {history.name(messages[expected])} out",
                )
            else:
                yield Anomaly(
                    "stored_twice",
                    f"{what}, right behind {history.name(messages[before[3]])} in the same "
                    "partition",
                )
            return
        before = copy


# --- copies ---------------------------------------------------------------------------------------


def _unexcused(history: OrderedHistory) -> Iterator[Anomaly]:
    fenced, columns = history.routes.fenced, history.messages
    for message, copies in history.copies.items():
        places = " and ".join(map(_place, copies))
        if not columns.is_resent[message] and columns.fate[message] == "ok":
            yield Anomaly(
                "stored_twice",
                f"{history.name(message)} lies at {places}, and was not sent again after a fence",
            )
        elif any(partition not in fenced for _, partition, _ in copies[:-1]):
            yield Anomaly(
                "stored_twice",
                f"{history.name(message)} lies at {places}; not all but the last of these "
                "were fenced",
            )


def _other_ids(history: OrderedHistory) -> Iterator[Anomaly]:
    columns, told = history.deliveries, set[int]()
    ids = {
        message: place.id
        for message in history.copies
        if (place := history.messages.place[message]) is not None
    }
    for delivery, message in enumerate(columns.message):
        known = (
            ids.setdefault(message, columns.id[delivery])
            if message in history.copies
            else columns.id[delivery]
        )
        if known != columns.id[delivery] and message not in told:
            told.add(message)
            what = (
                f"the copies of {history.name(message)} have two ids, {known} and "
                f"{columns.id[delivery]}: {history.when(delivery)}"
            )
            yield Anomaly("stored_twice", what)


def _place(copy: tuple[int, ...]) -> str:
    return f"at sequence {copy[2]} of partition {copy[1]}"


def order(history: OrderedHistory) -> Iterator[Anomaly]:
    """Messages that were delivered too early, and replays that begin too late or leave a message
    out.
    """
    for group in history.of_group:
        yield from _Reader(history, group).read()


class _Reader:
    """One group's walk through its deliveries."""

    def __init__(self, history: OrderedHistory, group: str) -> None:
        self._history = history
        self._group = group
        self._seen = bytearray(len(history.messages.line))
        self._next = [0] * len(history.lines)
        """Of each line the rank that may come for the first time."""
        if group in history.latest:
            settled = history.settled_at(group)
            self._next = [
                next((at for at, each in enumerate(line) if settled[each]), len(line))
                for line in history.by_rank
            ]
        self._last: dict[tuple[int, int], int] = {}
        """Of each grant and line the rank that was given last."""
        self._all_settled_at = history.all_settled_at(group)

    def read(self) -> Iterator[Anomaly]:
        columns, ranks, line_of = (
            self._history.deliveries,
            self._history.ranks,
            self._history.messages.line,
        )
        for delivery in self._history.of_group[self._group]:
            message = columns.message[delivery]
            line, rank = line_of[message], ranks[message]
            last = self._last.get((columns.grant[delivery], line))
            self._last[columns.grant[delivery], line] = rank
            if not self._seen[message]:
                self._seen[message] = 1
                if rank > self._next[line]:
                    yield self._skipped(delivery, line, self._next[line])
                    self._next[line] = rank + 1
                    continue
                self._next[line] = max(self._next[line], rank + 1)
            if last is not None and last <= rank <= last + 1:
                continue
            if last is not None and rank > last:
                yield self._gap(delivery, line, last)
            elif rank and self._all_settled_at[line][rank - 1] > columns.at_ns[delivery]:
                yield self._late_start(delivery, line, rank)

    def _skipped(self, delivery: int, line: int, missing: int) -> Anomaly:
        history = self._history
        message = history.deliveries.message[delivery]
        before = history.by_rank[line][missing]
        what = (
            f"group {self._group} was given {history.name(message)} for the first time, by "
            f"{history.when(delivery)}; before it was sent"
        )
        return Anomaly(
            "skipped",
            f"{what} {history.name(before)}{_where(history, before)}, which the group had "
            "not been given",
        )

    def _gap(self, delivery: int, line: int, last: int) -> Anomaly:
        history = self._history
        names = history.by_rank[line]
        message = history.name(history.deliveries.message[delivery])
        what = (
            f"group {self._group} was given {message} by {history.when(delivery)}, right behind "
            f"{history.name(names[last])}"
        )
        return Anomaly(
            "torn_replay", f"{what}: {history.name(names[last + 1])} is left out of the replay"
        )

    def _late_start(self, delivery: int, line: int, rank: int) -> Anomaly:
        history, at_ns = self._history, self._history.deliveries.at_ns[delivery]
        settled = history.settled_at(self._group)
        before = next(each for each in history.by_rank[line][:rank] if settled[each] > at_ns)
        message = history.name(history.deliveries.message[delivery])
        what = (
            f"group {self._group} was given {message} by {history.when(delivery)}, the first of "
            "its line under this token; but"
        )
        told = "never" if settled[before] >= NEVER else f"only at {seconds(settled[before])}"
        return Anomaly(
            "torn_replay",
            f"{what} {history.name(before)}, sent before it, was {told} said to be done",
        )


def late(history: OrderedHistory) -> int:
    """Deliveries under a token when a newer one had been used for the same logical partition:
    counted, not judged.
    """
    newest: dict[tuple[str, int, int], int] = {}
    columns, line_of, count = history.deliveries, history.messages.line, 0
    for message, number in zip(columns.message, columns.grant, strict=True):
        grant = history.grants[number]
        key = (grant.group, grant.partition, history.lp_of_line[line_of[message]])
        if newest.setdefault(key, grant.token) > grant.token:
            count += 1
        else:
            newest[key] = grant.token
    return count


def repeated(history: OrderedHistory) -> int:
    """Deliveries of messages that the group was given before: counted, not judged."""
    return sum(
        len(each) - len(set(map(history.deliveries.message.__getitem__, each)))
        for each in history.of_group.values()
    )


def _where(history: OrderedHistory, message: int) -> str:
    place = history.places[message]
    return f" (sequence {place[1]} of partition {place[0]})" if place else ""


def lost(history: OrderedHistory) -> Iterator[Anomaly]:
    """Acknowledged messages that a group was never given, or given and never able to settle."""
    fates, columns = history.messages.fate, history.deliveries
    for group in history.groups:
        given = set(map(columns.message.__getitem__, history.of_group.get(group, ())))
        settled = history.settled_at(group) if group in history.of_group else []
        for message in history.stored:
            if (
                message not in given
                and fates[message] == "ok"
                and not (settled and settled[message] == 0)
            ):
                yield Anomaly(
                    "lost", f"{_told(history, message)}, and group {group} was never given it"
                )
        yield from _unsettled(history, group, settled)


def _unsettled(history: OrderedHistory, group: str, settled: list[int]) -> Iterator[Anomaly]:
    columns, told = history.deliveries, set[int]()
    for delivery in history.of_group.get(group, ()):
        message = columns.message[delivery]
        if (
            columns.end[delivery] == "fail"
            and settled[message] > history.last_ns
            and message not in told
        ):
            told.add(message)
            what = (
                f"{history.name(message)} was given to {history.when(delivery)} in group "
                f"{group}; its acknowledgement was refused, and the"
            )
            yield Anomaly("unsettled", f"{what} message never came again")


def phantom(history: OrderedHistory) -> Iterator[Anomaly]:
    """Messages that were delivered to a group, and never sent, or whose sending certainly
    failed.
    """
    for event, index in history.strangers:
        handed = event.handed[index]
        what = (
            f"{event.process} was given {handed.key} {handed.serial} of {handed.producer}, "
            f"sequence {handed.sequence} of partition"
        )
        yield Anomaly(
            "phantom", f"{what} {event.partition}, at {seconds(event.t_ns)}; nobody sent it"
        )
    columns, fates, told = history.deliveries, history.messages.fate, set[int]()
    for delivery, message in enumerate(columns.message):
        if fates[message] == "fail" and message not in told:
            told.add(message)
            what = (
                f"{history.name(message)} certainly failed, and was given to "
                f"{history.when(delivery)}"
            )
            yield Anomaly("phantom", what)


def _told(history: OrderedHistory, message: int) -> str:
    place = history.messages.place[message]
    where = f", as sequence {place.sequence} of partition {place.partition}" if place else ""
    return (
        f"{history.name(message)} was acknowledged at "
        f"{seconds(history.messages.ended_ns[message])}{where}"
    )


SLOW_NS = 1_000_000_000
AFTER_NS = 2_000_000_000
MARGIN_NS = 30_000_000_000
"""How far around a change its pause is looked for."""


@dataclass(frozen=True, slots=True)
class Excuse:
    """A time during which writers of some logical partitions may pause."""

    lps: frozenset[int]
    since_ns: int
    until_ns: int


@dataclass(frozen=True, slots=True)
class Pauses:
    """Lengths of pauses in nanoseconds, one item for each pause."""

    found_ns: tuple[int, ...]

    @property
    def figures(self) -> dict[str, float]:
        """A row of a table."""
        return {
            "p50": self.quantile(0.5),
            "p99": self.quantile(0.99),
            "max": self.quantile(1.0),
            "of": len(self.found_ns),
        }

    def quantile(self, share: float) -> float:
        """Seconds: 0.5 gives the median, 1.0 the longest; 0 if there was no occasion."""
        ordered = sorted(self.found_ns)
        return (
            round(ordered[min(int(len(ordered) * share), len(ordered) - 1)] / 1e9, 4)
            if ordered
            else 0.0
        )


def stalled(
    history: OrderedHistory, *, slow_ns: int = SLOW_NS, after_ns: int = AFTER_NS
) -> Iterator[Anomaly]:
    """Messages that waited or failed without an excuse; for each logical partition the longest wait
    is reported, with the number of messages.
    """
    columns, excuses = history.messages, excuses_of(history)
    slow: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for message, line in enumerate(columns.line):
        fate, since_ns, until_ns = (
            columns.fate[message],
            columns.invoked_ns[message],
            columns.ended_ns[message],
        )
        if fate != "invoke" and (fate != "ok" or until_ns - since_ns > slow_ns):
            lp = history.lp_of_line[line]
            if not any(_covers(each, lp, since_ns, until_ns, after_ns) for each in excuses):
                slow[lp].append((until_ns - since_ns, message))
    for lp, found in slow.items():
        waited_ns, message = max(found)
        since = seconds(columns.invoked_ns[message])
        what = (
            f"{history.name(message)}, of logical partition {lp}, waited {waited_ns / 1e9:.3f} s "
            f"from {since} on"
        )
        also = f"; so did {len(found) - 1} more there" if len(found) > 1 else ""
        yield Anomaly(
            "stalled",
            f"{what} and ended as {columns.fate[message]}, while no change or outage touched "
            f"it{also}",
        )


def _covers(excuse: Excuse, lp: int, since_ns: int, until_ns: int, after_ns: int) -> bool:
    return (
        lp in excuse.lps and since_ns <= excuse.until_ns + after_ns and excuse.since_ns <= until_ns
    )


def excuses_of(history: OrderedHistory) -> list[Excuse]:
    """Every change and every outage of the history."""
    return [
        *changes_of(history),
        *(
            Excuse(held(history, each, each.until_ns), each.since_ns, each.until_ns)
            for each in history.outages
        ),
    ]


def changes_of(history: OrderedHistory) -> list[Excuse]:
    """Each change with the ranges of its sources, if its times were recorded."""
    found: list[Excuse] = []
    for change in history.routes.changes.values():
        if change.began_ns is not None:
            lps = frozenset(lp for lps in history.routes.lps_of(change.sources) for lp in lps)
            found.append(
                Excuse(
                    lps,
                    change.began_ns,
                    NEVER if change.published_ns is None else change.published_ns,
                )
            )
    return found


def held(history: OrderedHistory, outage: Outaged, until_ns: int) -> frozenset[int]:
    """The partitions that the group held from the beginning of the outage until `until_ns`."""
    return history.routes.held_by(outage.group, outage.since_ns, until_ns)


# --- figures --------------------------------------------------------------------------------------


def write_pauses(history: OrderedHistory) -> dict[str, Pauses]:
    """By occasion: how long no put was answered to the sources of a change, or to what a broker
    group held when its outage began.

    A change has to wait for an outage of its ranges. The two together count as one separate
    occasion.
    """
    columns = history.messages
    ends = sorted(
        (columns.ended_ns[each], columns.line[each])
        for each, fate in enumerate(columns.fate)
        if fate == "ok"
    )
    return _pauses(history, ends, _occasions(history))


def read_pauses(history: OrderedHistory, group: str) -> dict[str, Pauses]:
    """The same for a group: how long it was given nothing."""
    columns, line_of = history.deliveries, history.messages.line
    ends = [
        (columns.at_ns[each], line_of[columns.message[each]])
        for each in history.of_group.get(group, ())
    ]
    return _pauses(history, ends, _occasions(history))


def _occasions(history: OrderedHistory) -> dict[str, list[Excuse]]:
    found: defaultdict[str, list[Excuse]] = defaultdict(list)
    outages = [
        (each.kind, Excuse(held(history, each, each.since_ns), each.since_ns, each.until_ns))
        for each in history.outages
    ]
    for change in changes_of(history):
        meets = any(
            change.lps & each.lps
            and change.since_ns <= each.until_ns
            and each.since_ns <= change.until_ns
            for _, each in outages
        )
        found["a change in an outage" if meets else "a change"].append(change)
    for kind, outage in outages:
        found[kind].append(outage)
    return found


def _pauses(
    history: OrderedHistory, ends: Sequence[tuple[int, int]], occasions: Mapping[str, list[Excuse]]
) -> dict[str, Pauses]:
    times_ns = [at_ns for at_ns, _ in ends]
    found: dict[str, Pauses] = {}
    for kind, excuses in occasions.items():
        longest = [_longest_ns(history, ends, times_ns, each) for each in excuses]
        found[kind] = Pauses(tuple(each for each in longest if each))
    return found


def _longest_ns(
    history: OrderedHistory, ends: Sequence[tuple[int, int]], times_ns: list[int], excuse: Excuse
) -> int:
    """The longest pause that overlaps the span; 0 if there is no pause around the span."""
    first = bisect_left(times_ns, excuse.since_ns - MARGIN_NS)
    last = bisect_right(times_ns, min(excuse.until_ns, history.last_ns) + MARGIN_NS)
    own = [at_ns for at_ns, line in ends[first:last] if history.lp_of_line[line] in excuse.lps]
    gaps = [
        late - max(early, excuse.since_ns)
        for early, late in pairwise(own)
        if late > excuse.since_ns and early <= excuse.until_ns
    ]
    return max(gaps, default=0)


SHOWN_MAX = 10
FOUND_MAX = 1000
"""How many anomalies each checker reports at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderedReport:
    """What a run showed. Counts are of messages, except deliveries and their verdicts."""

    drained: bool
    counts: dict[str, int]
    write_pauses: dict[str, Pauses]
    """By occasion: a change, or a kind of outage."""
    read_pauses: dict[str, dict[str, Pauses]]
    """The same, by group."""
    anomalies: tuple[Anomaly, ...]

    @property
    def ok(self) -> bool:
        """True if no promise was broken. A run without any message is ok too: check the counts."""
        return not self.anomalies

    @property
    def names(self) -> Counter[str]:
        """How often each anomaly was found."""
        return Counter(anomaly.name for anomaly in self.anomalies)

    @property
    def figures(self) -> dict[str, dict[str, float]]:
        """The pauses: quantiles in seconds, and of how many."""
        named = {
            f"writes paused by {kind}, s": pauses for kind, pauses in self.write_pauses.items()
        }
        for group, found in self.read_pauses.items():
            named |= {f"{group} paused by {kind}, s": pauses for kind, pauses in found.items()}
        return {name: pauses.figures for name, pauses in named.items() if pauses.found_ns}

    def to_json(self, shown_max: int = SHOWN_MAX) -> dict[str, object]:
        """The report as plain values, with the number of all anomalies and the first few of each
        name.
        """
        shown = [str(found) for found in self._first(shown_max)]
        return {
            "ok": self.ok,
            "drained": self.drained,
            **self.counts,
            **self.figures,
            "found": dict(self.names),
            "anomalies": shown,
        }

    def __str__(self) -> str:
        verdict = (
            ", ".join(f"{name} {count:,}" for name, count in self.names.items()) or "no anomaly"
        )
        head = f"{verdict} ({'drained' if self.drained else 'not drained'})"
        told = ", ".join(f"{name} {count:,}" for name, count in self.counts.items())
        pauses = [
            f"{name}: {', '.join(f'{text} {value}' for text, value in found.items())}"
            for name, found in self.figures.items()
        ]
        return "\n".join([head, told, *pauses, *map(str, self._first(SHOWN_MAX))])

    def _first(self, shown_max: int) -> Iterator[Anomaly]:
        told: Counter[str] = Counter()
        for anomaly in self.anomalies:
            told[anomaly.name] += 1
            if told[anomaly.name] <= shown_max:
                yield anomaly


def check_ordered(
    events: Iterable[Operation] | OrderedHistory,
    *,
    drained: bool,
    groups: Collection[str] = (),
    strict: Collection[str] = (),
    latest: Collection[str] = (),
    slow_ns: int = SLOW_NS,
    after_ns: int = AFTER_NS,
) -> OrderedReport:
    """Every checker over one history.

    `drained`: consumers continued until nothing came, so everything acknowledged must have been
    given and settled. `groups` must see everything (by default those that saw anything), `strict`
    are those with a strict gate, `latest` those that began at the route's end.

    Raises ValueError for a history that proves nothing: see `OrderedHistory`.
    """
    history = (
        events
        if isinstance(events, OrderedHistory)
        else OrderedHistory(events, groups=groups, latest=latest)
    )
    checks: list[Iterator[Anomaly]] = [
        lost(history) if drained else iter(()),
        phantom(history),
        order(history),
        exclusivity(history),
        early(history, strict=strict),
        log_order(history),
        stored_twice(history),
        stalled(history, slow_ns=slow_ns, after_ns=after_ns),
    ]
    return OrderedReport(
        drained=drained,
        counts=_counts(history),
        write_pauses=write_pauses(history),
        read_pauses={group: read_pauses(history, group) for group in history.groups},
        anomalies=tuple(found for check in checks for found in islice(check, FOUND_MAX)),
    )


def _counts(history: OrderedHistory) -> dict[str, int]:
    fates = Counter(history.messages.fate)
    return {
        "sent": len(history.messages.fate),
        "acknowledged": fates["ok"],
        "unknown": fates["info"] + fates["invoke"],
        "failed": fates["fail"],
        "stored": len(history.stored),
        "sent again after a fence": sum(history.messages.is_resent),
        "with two copies": len(history.copies),
        "deliveries": len(history.deliveries.message),
        "repeated": repeated(history),
        "late": late(history),
        "changes": len(history.routes.changes) - 1,
        "outages": len(history.outages),
    }
