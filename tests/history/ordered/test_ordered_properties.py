"""A correct ordered history has no anomaly; the same history with one false line has that line's
anomaly.

Random correct ordered histories: a tiny ordered subject that keeps every promise, its clients, and
the lines that they write.

The subject is a list of entries for each partition, a route that splits, merges, moves and fences,
and each group's settled messages. Puts begin and end later, so several are under way when a
partition is closed. Consumers get lanes, pull ahead, hand messages out and settle them. A consumer
that loses its lane becomes a zombie, which still hands out the messages that it pulled. Answers get
lost, and consumers die.

At the end fences get their command messages, and every message is handed out and settled, so the
history is drained.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from random import Random
from typing import Any, TypeVar

from history.events import Operation, Reset, from_json, to_json
from history.ordered.checkers import check_ordered
from history.ordered.events import (
    Deliver,
    Handed,
    Keyed,
    OrderedHistory,
    Part,
    Put,
    Rerouted,
    Sealed,
    Settle,
    Stored,
)
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from qmq_ordering.hashing import logical_partition
from support.forms import examples

LPS = 8
KEYS = "defgklo"
LP_OF = {key: logical_partition(key.encode(), LPS) for key in KEYS}
GROUPS = ("g", "h")
PRODUCERS = ("p0", "p1")
CONSUMERS = 3
WEIGHTS = {
    **{"put": 8, "ended": 8, "attach": 6, "give": 14, "settle": 10},
    **{"die": 1, "change": 1.2, "heal": 1},
}

Name = tuple[str, str, int]
"""Producer, key, serial."""


@dataclass
class Log:
    """A physical partition."""

    part: Part
    since: int
    entries: list[Name] = field(default_factory=list)
    is_closed: bool = False
    """Whether the partition is closed for sends."""
    is_fenced: bool = False
    sealed: int = -1
    tokens: int = 0


@dataclass
class Sending:
    """A message under way. `copy`: its first partition, which was fenced, has it too."""

    name: Name
    copy: bool = False


@dataclass(eq=False)
class Lane:
    """A grant. `pulled` are indexes of entries to hand out, `open` those in the handlers' hands."""

    group: str
    log: Log
    lps: range
    token: int
    consumer: str
    pulled: list[int]
    open: list[int] = field(default_factory=list)
    is_lost: bool = False


class Subject:
    """Keeps every promise, and writes what its clients see."""

    def __init__(self, coin: Random) -> None:
        self.coin = coin
        self.lines: list[Operation] = []
        self.logs: dict[int, Log] = {}
        self.route: tuple[Part, ...] = ()
        self.version = 0
        self.serials: Counter[tuple[str, str]] = Counter()
        self.sending: dict[str, list[tuple[Put, list[Sending]]]] = {
            producer: [] for producer in PRODUCERS
        }
        self.settled: dict[str, set[tuple[int, int]]] = {group: set() for group in GROUPS}
        self.lanes: list[Lane] = []
        self.zombies: list[Lane] = []
        self.lives = 0
        self.published: list[Rerouted] = []
        self._publish((Part(1, 0, LPS, "b1"),), ())

    def write(self, event: Operation) -> None:
        """One line; the clock is their number."""
        self.lines.append(replace(event, t_ns=10 * len(self.lines) + 10))

    # --- producers --------------------------------------------------------------------------------

    def put(self) -> None:
        """A producer may have several puts under way."""
        producer = self.coin.choice(PRODUCERS)
        names: list[Name] = []
        for _ in range(self.coin.randint(1, 4)):
            key = self.coin.choice(KEYS)
            self.serials[producer, key] += 1
            names.append((producer, key, self.serials[producer, key]))
        begun = Put(
            process=producer,
            type="invoke",
            subject="orders",
            messages=tuple(Keyed(*name[1:]) for name in names),
        )
        self.sending[producer].append((begun, [Sending(name) for name in names]))
        self.write(begun)

    def ended(self) -> None:
        """The oldest put of a producer is stored, which keeps the order; or none of it is."""
        producer = self.coin.choice(PRODUCERS)
        if not self.sending[producer]:
            return
        begun, sent = self.sending[producer].pop(0)
        if self.coin.random() < 0.1 and not any(each.copy for each in sent):
            return
        places = {each.name: self._append(each.name) for each in sent}
        if self.coin.random() < 0.1:
            return
        for is_copy in (False, True):
            chosen = [each.name for each in sent if each.copy is is_copy]
            if chosen:
                messages, found = (
                    tuple(Keyed(*name[1:]) for name in chosen),
                    tuple(places[name] for name in chosen),
                )
                self.write(
                    replace(
                        begun, type="ok", messages=messages, places=found, resent=is_copy or None
                    )
                )

    def _append(self, name: Name) -> Stored:
        log = self._holder(LP_OF[name[1]])
        log.entries.append(name)
        return Stored(log.part.number, len(log.entries) - 1, id_of(name))

    def _holder(self, lp: int) -> Log:
        return next(self.logs[part.number] for part in self.route if part.first <= lp < part.end)

    # --- the route --------------------------------------------------------------------------------

    def change(self) -> None:
        """A split, a merge or a move; or a fence, which closes one partition and moves it."""
        at = self.coin.randrange(len(self.route))
        part, number = self.route[at], max(self.logs) + 1
        kind = self.coin.choice(("split", "merge", "move", "fence"))
        group = self.coin.choice(("b1", "b2"))
        if kind == "split" and part.end - part.first > 1:
            cut = self.coin.randrange(part.first + 1, part.end)
            sources, targets = (
                [part],
                [
                    Part(number, part.first, cut, part.broker_group),
                    Part(number + 1, cut, part.end, group),
                ],
            )
        elif kind == "merge" and at + 1 < len(self.route):
            sources = [part, self.route[at + 1]]
            targets = [Part(number, part.first, self.route[at + 1].end, group)]
        else:
            sources, targets = [part], [Part(number, part.first, part.end, group)]
        for source in sources:
            self._close(self.logs[source.number], is_fenced=kind == "fence")
        rest = [each for each in self.route if each not in sources]
        self._publish(
            tuple(sorted((*rest, *targets), key=lambda each: each.first)),
            tuple(source.number for source in sources),
        )

    def _close(self, log: Log, *, is_fenced: bool) -> None:
        log.is_closed, log.is_fenced = True, is_fenced
        if is_fenced:
            self._commit_late(log)
        else:
            log.sealed = len(log.entries)

    def _commit_late(self, log: Log) -> None:
        """Store some of the messages that were under way to an unreachable group: of each producer
        the first few, in order.
        """
        for puts in self.sending.values():
            under_way = [
                each
                for _, sent in puts
                for each in sent
                if log.part.first <= LP_OF[each.name[1]] < log.part.end
            ]
            for each in under_way[: self.coin.randint(0, len(under_way))]:
                log.entries.append(each.name)
            for each in under_way:
                each.copy = True

    def heal(self) -> None:
        """End the fence: the broker group is back and appends the command message."""
        for log in self.logs.values():
            if log.is_fenced and log.sealed < 0:
                log.sealed = len(log.entries)

    def _publish(self, route: tuple[Part, ...], sources: tuple[int, ...]) -> None:
        self.version, self.route = self.version + 1, route
        for part in route:
            self.logs.setdefault(part.number, Log(part, self.version))
        sealed = tuple(Sealed(number, self.logs[number].sealed) for number in sources)
        event = Rerouted(
            process="nemesis",
            type="ok",
            version=self.version,
            logical_partitions=LPS,
            partitions=route,
            sources=sources,
            sealed=sealed,
        )
        self.published.append(event)
        self.write(event)

    # --- consumers --------------------------------------------------------------------------------

    def attach(self) -> None:
        """Grant an open lane to a consumer. Consumers that held a part of it lose it, perhaps
        without noticing.
        """
        group, log = self.coin.choice(GROUPS), self.coin.choice(list(self.logs.values()))
        first = self.coin.randrange(log.part.first, log.part.end)
        lps = range(first, self.coin.randint(first + 1, log.part.end))
        if all(self._is_open(group, log, lp) for lp in lps):
            self._grant(group, log, lps, f"{group}-{self.coin.randrange(CONSUMERS)}.{self.lives}")

    def _grant(self, group: str, log: Log, lps: range, consumer: str) -> Lane:
        for lane in [
            each
            for each in self.lanes
            if each.group == group and each.log is log and _overlap(each.lps, lps)
        ]:
            self.lanes.remove(lane)
            lane.is_lost = True
            self.zombies.append(lane)
        log.tokens += 1
        lane = Lane(
            group,
            log,
            lps,
            log.tokens,
            consumer,
            self._due(group, log, lps, 0)[: self.coin.randint(1, 6)],
        )
        self.lanes.append(lane)
        return lane

    def _is_open(self, group: str, log: Log, lp: int) -> bool:
        older = [
            each
            for each in self.logs.values()
            if each.since < log.since and each.part.first <= lp < each.part.end
        ]
        return all(
            each.sealed >= 0 and not self._due(group, each, range(lp, lp + 1), 0) for each in older
        )

    def _due(self, group: str, log: Log, lps: range, start: int) -> list[int]:
        end = len(log.entries)
        number = log.part.number
        return [
            at
            for at in range(start, end)
            if LP_OF[log.entries[at][1]] in lps and (number, at) not in self.settled[group]
        ]

    def give(self) -> None:
        """A consumer hands out what it pulled; if that is all, it pulls more, unless its lane is
        lost.
        """
        if not self.lanes and not self.zombies:
            return
        lane = self.coin.choice([*self.lanes, *self.lanes, *self.zombies])
        if not lane.pulled and not lane.is_lost:
            start = max(lane.open, default=-1) + 1
            lane.pulled = self._due(lane.group, lane.log, lane.lps, start)[
                : self.coin.randint(1, 6)
            ]
        chosen, lane.pulled = lane.pulled[:2], lane.pulled[2:]
        self._hand_out(lane, chosen)

    def _hand_out(self, lane: Lane, chosen: list[int]) -> None:
        lane.open += chosen
        named = [(at, *lane.log.entries[at]) for at in chosen]
        handed = tuple(
            Handed(at, key, producer, serial, 1, id_of((producer, key, serial)))
            for at, producer, key, serial in named
        )
        if handed:
            self.write(
                Deliver(
                    process=lane.consumer,
                    type="ok",
                    group=lane.group,
                    partition=lane.log.part.number,
                    first=lane.lps.start,
                    end=lane.lps.stop,
                    token=lane.token,
                    version=lane.log.since,
                    handed=handed,
                )
            )

    def settle(self) -> None:
        """Some of the held messages are done: from the oldest on, so that keys keep their order."""
        lanes = [lane for lane in (*self.lanes, *self.zombies) if lane.open]
        if lanes:
            lane = self.coin.choice(lanes)
            self._settle(lane, self.coin.randint(1, len(lane.open)))

    def _settle(self, lane: Lane, many: int) -> None:
        chosen, lane.open = lane.open[:many], lane.open[many:]
        number = lane.log.part.number
        if not lane.is_lost:
            self.settled[lane.group].update((number, at) for at in chosen)
        self.write(
            Settle(
                process=lane.consumer,
                type="fail" if lane.is_lost else "ok",
                group=lane.group,
                partition=number,
                token=lane.token,
                sequences=tuple(chosen),
                began_ns=10 * len(self.lines) + 9,
            )
        )

    def die(self) -> None:
        """A consumer dies, perhaps after an acknowledgement whose answer was lost. Its grant ends
        in time.
        """
        if self.lanes:
            lane = self.lanes.pop(self.coin.randrange(len(self.lanes)))
            self.lives += 1
            if self.coin.random() < 0.5:
                self.settled[lane.group].update((lane.log.part.number, at) for at in lane.open)

    # --- the end ----------------------------------------------------------------------------------

    def drain(self) -> None:
        """Finish everything under way: heal fences, deliver and settle all messages."""
        while any(self.sending.values()):
            self.ended()
        self.heal()
        for event in self.published:
            sealed = tuple(Sealed(number, self.logs[number].sealed) for number, _ in event.sealed)
            self.write(
                replace(
                    event,
                    sealed=sealed,
                    fenced=tuple(
                        number for number, _ in event.sealed if self.logs[number].is_fenced
                    ),
                )
            )
        for lane in self.zombies:
            if lane.open:
                self._settle(lane, len(lane.open))
        for group in GROUPS:
            for log in sorted(self.logs.values(), key=lambda each: each.since):
                lane = self._grant(
                    group, log, range(log.part.first, log.part.end), f"{group}-drain"
                )
                for lost in self.zombies:
                    self._settle(lost, len(lost.open)) if lost.open else None
                self._hand_out(lane, self._due(group, log, lane.lps, 0))
                if lane.open:
                    self._settle(lane, len(lane.open))


def id_of(name: Name) -> int:
    """A number in place of a message id."""
    producer, key, serial = name
    return int(producer[1:]) * 1_000_000 + ord(key) * 1_000 + serial


def run(seed: int, length: int) -> list[Operation]:
    """A drained history of `steps` steps."""
    coin = Random(seed)
    subject = Subject(coin)
    for _ in range(length):
        (name,) = coin.choices(list(WEIGHTS), list(WEIGHTS.values()))
        act: Callable[[], None] = getattr(subject, name)
        act()
    subject.drain()
    return subject.lines


def _overlap(one: range, other: range) -> bool:
    return one.start < other.stop and other.start < one.stop


HISTORIES = st.builds(run, st.integers(0, 2**32), st.integers(0, 250))
LONG_HISTORIES = st.builds(run, st.integers(0, 2**32), st.integers(150, 250))


T = TypeVar("T")
Lines = list[Operation]
NOWHERE = 10_000
DRAW = st.data()
# Most drawn histories have what a lie needs; those that have not are drawn again.
lies = settings(
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
    max_examples=examples(50),
)


def pick(data: st.DataObject, choices: list[T]) -> T:
    assume(choices)
    return data.draw(st.sampled_from(choices))


def names(events: Lines, *, drained: bool = True) -> set[str]:
    return set(check_ordered(events, drained=drained, groups=GROUPS).names)


def rewritten(events: Lines, change: Callable[[Handed, Deliver], Handed | None]) -> Lines:
    """Every delivered message as `change` has it, or not at all; a settlement is about what was
    given.
    """
    found: Lines = []
    dropped = set[tuple[str, int, int, int]]()
    for event in events:
        if isinstance(event, Deliver):
            pairs = [(row, change(row, event)) for row in event.handed]
            dropped |= {
                (event.group, event.partition, event.token, row.sequence)
                for row, new in pairs
                if new is None
            }
            event = replace(event, handed=tuple(new for _, new in pairs if new is not None))
        elif isinstance(event, Settle):
            place = (event.group, event.partition, event.token)
            event = replace(
                event,
                sequences=tuple(each for each in event.sequences if (*place, each) not in dropped),
            )
        found.append(event)
    return found


def at_end(events: Lines, *more: Operation) -> Lines:
    last_ns = events[-1].t_ns
    return [*events, *(replace(event, t_ns=last_ns + 10 * at) for at, event in enumerate(more, 1))]


def given_at(history: OrderedHistory, delivery: int) -> tuple[int, Handed]:
    """The partition, and the message as it was given."""
    columns = history.deliveries
    message = columns.message[delivery]
    producer, key = history.lines[history.messages.line[message]]
    row = Handed(
        columns.sequence[delivery],
        key,
        producer,
        history.messages.serial[message],
        1,
        columns.id[delivery],
    )
    return history.grant_of(delivery).partition, row


def handed_again(
    history: OrderedHistory,
    group: str,
    partition: int,
    *rows: Handed,
    token: int = NOWHERE,
    consumer: str = "x",
) -> Deliver:
    """A delivery under a token that is newer than all others."""
    part = history.routes.parts[partition]
    return Deliver(
        process=consumer,
        type="ok",
        group=group,
        partition=partition,
        first=part.first,
        end=part.end,
        token=token,
        version=1,
        handed=rows,
    )


def acked(events: Lines) -> list[tuple[int, int]]:
    """Every acknowledged message: the place of the line, and the index in it."""
    return [
        (at, index)
        for at, event in enumerate(events)
        if isinstance(event, Put) and event.type == "ok"
        for index in range(len(event.places))
    ]


def changed(events: Lines, at: int, **fields: Any) -> Lines:
    """The lines, of which one has other values in these fields."""
    event: Any = events[at]
    return [*events[:at], replace(event, **fields), *events[at + 1 :]]


def with_place(events: Lines, at: int, index: int, place: Stored) -> Lines:
    event: Any = events[at]
    return changed(events, at, places=(*event.places[:index], place, *event.places[index + 1 :]))


@given(HISTORIES)
def test_a_correct_ordered_history_has_no_anomaly(events: Lines) -> None:
    report = check_ordered(events, drained=True, groups=GROUPS)
    assert report.ok, str(report)


@given(HISTORIES, st.integers(0, 200))
def test_the_beginning_of_a_correct_ordered_history_has_no_anomaly(
    events: Lines, length: int
) -> None:
    """Operations that are under way at the cut have an unknown outcome, which is never an
    anomaly.
    """
    assert names(events[: length + 1], drained=False) == set()


@given(HISTORIES)
def test_ordered_events_survive_their_lines(events: Lines) -> None:
    assert [from_json(to_json(event)) for event in events] == events


def test_correct_histories_show_all_that_may_happen() -> None:
    """The checkers are not just silent because nothing difficult occurs."""
    totals: dict[str, int] = {}
    for seed in range(30):
        for name, count in check_ordered(run(seed, 250), drained=True).counts.items():
            totals[name] = totals.get(name, 0) + count
    told = ("sent again after a fence", "with two copies", "unknown", "repeated", "late", "changes")
    assert all(totals[name] > 20 for name in told), totals


@lies
@given(LONG_HISTORIES, DRAW)
def test_a_message_that_one_group_is_never_given_is_lost(
    events: Lines, data: st.DataObject
) -> None:
    at, index = pick(data, acked(events))
    event: Any = events[at]
    name, group = (event.process, *event.messages[index]), pick(data, list(GROUPS))
    lie = rewritten(
        events,
        lambda row, given: (
            None if given.group == group and (row.producer, row.key, row.serial) == name else row
        ),
    )
    found = check_ordered(lie, drained=True, groups=GROUPS)
    assert found.names["lost"] == 1
    assert set(found.names) <= {"lost", "skipped", "torn_replay", "early"}
    assert f"{name[1]} {name[2]} of {name[0]}" in next(
        each.what for each in found.anomalies if each.name == "lost"
    )


@lies
@given(LONG_HISTORIES, DRAW)
def test_a_message_that_was_never_sent_is_a_phantom(events: Lines, data: st.DataObject) -> None:
    history = OrderedHistory(events)
    delivery = pick(data, list(range(len(history.deliveries.message))))
    partition, row = given_at(history, delivery)
    lie = at_end(
        events,
        handed_again(history, "g", partition, row._replace(serial=NOWHERE, sequence=NOWHERE)),
    )
    assert names(lie) == {"phantom"}


@lies
@given(LONG_HISTORIES, DRAW)
def test_a_message_that_certainly_failed_is_a_phantom(events: Lines, data: st.DataObject) -> None:
    at, _ = pick(data, acked(events))
    lie = changed(events, at, type="fail", places=(), resent=None)
    assert names(lie) - {"stalled"} == {"phantom"}


@lies
@given(LONG_HISTORIES, DRAW)
def test_two_messages_of_a_line_that_a_group_got_in_reverse_are_out_of_order(
    events: Lines, data: st.DataObject
) -> None:
    seen = set[tuple[str, ...]]()
    pairs: list[tuple[int, int]] = []
    for at, event in enumerate(events):
        fresh = (
            [(event.group, *row[1:4]) for row in event.handed] if isinstance(event, Deliver) else []
        )
        for index, (before, name) in enumerate(pairwise(fresh), 1):
            if before[1:3] == name[1:3] and not {before, name} & seen:
                pairs.append((at, index))
        seen.update(fresh)
    at, index = pick(data, pairs)
    given: Any = events[at]
    rows = list(given.handed)
    rows[index - 1], rows[index] = rows[index], rows[index - 1]
    assert names(changed(events, at, handed=tuple(rows))) & {"skipped", "torn_replay"}


@lies
@given(LONG_HISTORIES, DRAW)
def test_a_replay_that_leaves_one_out_is_torn(events: Lines, data: st.DataObject) -> None:
    """After an operator's reset the group may see all messages again, but not the first and the
    third without the second.
    """
    history = OrderedHistory(events)
    first: dict[int, tuple[int, Handed]] = {}
    for delivery, message in enumerate(history.deliveries.message):
        first.setdefault(message, given_at(history, delivery))
    lines = [
        line[:3]
        for line in history.by_rank
        if len(line) >= 3 and len({first[each][0] for each in line[:3]}) == 1
    ]
    one, two, three = pick(
        data, [line for line in lines if not any(each in history.copies for each in line)]
    )
    partition = first[one][0]
    back = Reset(process="operator", type="ok", group="g")
    again = [first[each][1] for each in (one, two, three)]
    assert names(at_end(events, back, handed_again(history, "g", partition, *again))) == set()
    assert names(
        at_end(events, back, handed_again(history, "g", partition, again[0], again[2]))
    ) == {"torn_replay"}


@lies
@given(LONG_HISTORIES, DRAW)
def test_an_acknowledgement_of_a_lost_lane_that_counts_is_found(
    events: Lines, data: st.DataObject
) -> None:
    refused = [
        at for at, each in enumerate(events) if isinstance(each, Settle) and each.type == "fail"
    ]
    found = names(changed(events, pick(data, refused), type="ok"))
    assert found
    assert found <= {"zombie_ack", "came_back"}


@lies
@given(LONG_HISTORIES, DRAW)
def test_a_settled_message_that_is_given_again_came_back(
    events: Lines, data: st.DataObject
) -> None:
    history = OrderedHistory(events)
    settled = [each for each, end in enumerate(history.deliveries.end) if end == "ok"]
    delivery = pick(data, settled)
    partition, row = given_at(history, delivery)
    group = history.grant_of(delivery).group
    assert names(at_end(events, handed_again(history, group, partition, row))) == {"came_back"}


@lies
@given(LONG_HISTORIES, DRAW)
def test_a_token_that_two_consumers_have_is_found(events: Lines, data: st.DataObject) -> None:
    history = OrderedHistory(events)
    newest: dict[tuple[str, int], int] = {}
    for delivery, grant in enumerate(map(history.grants.__getitem__, history.deliveries.grant)):
        best = newest.setdefault((grant.group, grant.partition), delivery)
        newest[grant.group, grant.partition] = max(
            best, delivery, key=lambda each: history.grant_of(each).token
        )
    delivery = pick(data, list(newest.values()))
    partition, row = given_at(history, delivery)
    grant = history.grant_of(delivery)
    assert names(
        at_end(events, handed_again(history, grant.group, partition, row, token=grant.token))
    ) == {"shared_token"}


@lies
@given(LONG_HISTORIES, DRAW)
def test_a_partition_that_is_read_before_the_older_one_is_settled_is_early(
    events: Lines, data: st.DataObject
) -> None:
    history = OrderedHistory(events)
    settled, messages = history.settled_at("g"), history.messages
    choices: list[tuple[int, int]] = []
    for line in history.by_rank:
        for before, after in pairwise(line):
            places = [
                place[0] for each in (before, after) if (place := messages.place[each]) is not None
            ]
            is_change = (
                len(places) == 2
                and places[0] != places[1]
                and before not in history.copies
                and after not in history.copies
            )
            if is_change and messages.invoked_ns[after] < settled[before] - 5:
                choices.append((before, after))
    before, after = pick(data, choices)
    place = messages.place[after]
    assert place is not None
    producer, key = history.lines[messages.line[after]]
    row = Handed(place.sequence, key, producer, messages.serial[after], 1, place.id)
    at_ns = settled[before] - 5
    given = replace(handed_again(history, "g", place.partition, row, token=0), t_ns=at_ns)
    where = next(at for at, event in enumerate(events) if event.t_ns > at_ns)
    assert "early" in names([*events[:where], given, *events[where:]])


@lies
@given(LONG_HISTORIES, DRAW)
def test_two_messages_at_one_place_are_found(events: Lines, data: st.DataObject) -> None:
    (at, index), (other, where) = pick(data, acked(events)), pick(data, acked(events))
    assume((at, index) != (other, where))
    place = events[other].places[where]  # type: ignore[attr-defined]
    assert "two_at_one_place" in names(with_place(events, at, index, place))


@lies
@given(LONG_HISTORIES, DRAW)
def test_a_message_behind_the_command_message_is_found(events: Lines, data: st.DataObject) -> None:
    history = OrderedHistory(events)
    sizes: dict[int, int] = {}
    for delivery in range(len(history.deliveries.message)):
        partition, row = given_at(history, delivery)
        sizes[partition] = max(sizes.get(partition, 0), row.sequence)
    partition = pick(data, [each for each in sizes if each in history.routes.sealed])
    top = Sealed(partition, sizes[partition])

    def lowered(event: Operation) -> Operation:
        if not isinstance(event, Rerouted):
            return event
        return replace(
            event,
            sealed=tuple(
                min(each, top) if each.number == partition else each for each in event.sealed
            ),
        )

    assert names(list(map(lowered, events))) == {"behind_seal"}


@lies
@given(LONG_HISTORIES, DRAW)
def test_a_message_in_a_partition_of_other_keys_is_found(
    events: Lines, data: st.DataObject
) -> None:
    at, index = pick(data, acked(events))
    event: Any = events[at]
    lp = LP_OF[event.messages[index].key]
    parts = [
        each
        for each in OrderedHistory(events).routes.parts.values()
        if not each.first <= lp < each.end
    ]
    lie = with_place(
        events, at, index, Stored(pick(data, parts).number, NOWHERE, event.places[index].id)
    )
    assert names(lie) & {"wrong_partition", "behind_seal"}
    assert names(lie) <= {"wrong_partition", "behind_seal", "stored_twice", "early"}


@lies
@given(LONG_HISTORIES, DRAW)
def test_a_line_that_lies_in_another_order_is_found(events: Lines, data: st.DataObject) -> None:
    """Two messages of one put took each other's name everywhere but where they were sent."""
    history = OrderedHistory(events)
    lines = [line for line in history.by_rank if not any(each in history.copies for each in line)]
    pairs = [
        pair
        for line in lines
        for pair in pairwise(line)
        if len({history.messages.invoked_ns[each] for each in pair}) == 1
    ]
    early, late = pick(data, pairs)
    one, two = history.messages.serial[early], history.messages.serial[late]
    producer, key = history.lines[history.messages.line[early]]
    swap = {one: two, two: one}

    def renamed(row: Handed, _: Deliver) -> Handed:
        return (
            row._replace(serial=swap.get(row.serial, row.serial))
            if (row.producer, row.key) == (producer, key)
            else row
        )

    lie = rewritten(events, renamed)
    for place, event in enumerate(lie):
        if isinstance(event, Put) and event.type == "ok" and event.process == producer:
            found = tuple(
                Keyed(each.key, swap.get(each.serial, each.serial)) if each.key == key else each
                for each in event.messages
            )
            lie[place] = replace(event, messages=found)
    assert "log_order" in names(lie)


@lies
@given(LONG_HISTORIES, DRAW)
def test_a_second_copy_without_a_fence_is_found(events: Lines, data: st.DataObject) -> None:
    """The false line is the last one, so that it causes no other anomaly."""
    history = OrderedHistory(events)
    newest = {part for part in history.routes.parts if part not in history.routes.sealed}
    first = [line[0] for line in history.by_rank if line]
    places = [
        (message, place)
        for message in first
        if history.messages.fate[message] == "ok"
        and (place := history.messages.place[message]) is not None
        and place.partition in newest
    ]
    message, place = pick(data, places)
    producer, key = history.lines[history.messages.line[message]]
    row = Handed(NOWHERE, key, producer, history.messages.serial[message], 1, place.id)
    assert names(at_end(events, handed_again(history, "g", place.partition, row))) == {
        "stored_twice"
    }


@lies
@given(LONG_HISTORIES, DRAW)
def test_a_second_copy_with_another_id_is_found(events: Lines, data: st.DataObject) -> None:
    history = OrderedHistory(events)
    message = pick(data, sorted(history.copies))
    _, partition, sequence = history.copies[message][0]
    lie = rewritten(
        events,
        lambda row, given: (
            row._replace(id=7) if (given.partition, row.sequence) == (partition, sequence) else row
        ),
    )
    assert names(lie) == {"stored_twice"}


@lies
@given(LONG_HISTORIES, DRAW)
def test_a_second_copy_that_was_not_sent_again_is_found(events: Lines, data: st.DataObject) -> None:
    history = OrderedHistory(events)
    copied = [
        at
        for at, event in enumerate(events)
        if isinstance(event, Put)
        and event.resent
        and any(history.find(event.process, *each) in history.copies for each in event.messages)
    ]
    at = pick(data, copied)
    assert names(changed(events, at, resent=None)) == {"stored_twice"}


@lies
@given(LONG_HISTORIES, DRAW)
def test_a_put_that_waits_without_a_reason_is_found(events: Lines, data: st.DataObject) -> None:
    at, _ = pick(data, acked(events))
    assert names(changed(events, at, t_ns=events[at].t_ns + 10**10)) == {"stalled"}
