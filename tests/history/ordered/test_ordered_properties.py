"""A correct ordered history has no anomaly. Those with one: test_ordered_checkers.py.

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
from random import Random

from history.events import Operation, from_json, to_json
from history.ordered.checkers import check_ordered
from history.ordered.events import (
    Deliver,
    Handed,
    Keyed,
    Part,
    Put,
    Rerouted,
    Sealed,
    Settle,
    Stored,
)
from hypothesis import given
from hypothesis import strategies as st
from qmq_ordering.hashing import logical_partition

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
Lines = list[Operation]


def names(events: Lines, *, drained: bool = True) -> set[str]:
    return set(check_ordered(events, drained=drained, groups=GROUPS).names)


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
