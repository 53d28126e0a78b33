"""A correct history has no anomaly. Those with one: cases.py.

Random correct histories: a tiny broker that keeps every promise, its clients, and the lines that
they write.

The broker is a list of values for each queue and a set of acknowledged positions for each group.
Clients begin operations and end them later, so operations overlap; each operation takes effect at
some moment in between, as in a real system. Some answers get lost: the outcome is then `info`, and
a random bit decides whether the operation had its effect. At the end every unacknowledged message
is handed out once more, so the history is drained.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random

from history.checkers import check_all, lost_below
from history.events import Ack, Event, History, Poll, Record, Reset, Send, Type, from_json, to_json
from hypothesis import given
from hypothesis import strategies as st

QUEUES = ("orders/0@g1", "orders/1@g1", "orders/0@g2")
GROUPS = ("billing", "audit")
PRODUCERS = 2
CONSUMERS = 2
# An outcome and whether the operation had its effect.
FATES: tuple[tuple[Type | None, bool], ...] = (
    ("ok", True),
    ("ok", True),
    ("fail", False),
    ("info", True),
    ("info", False),
    (None, True),
)

# How often each step is taken. Resets and elections are rare, or nothing would stay acknowledged
# and no epoch would have two sends.
WEIGHTS = {
    "send": 6,
    "sent": 6,
    "poll": 10,
    "polled": 12,
    "ack": 8,
    "acked": 8,
    "reset": 0.3,
    "elect": 0.5,
}


@dataclass
class Broker:
    """Keeps every promise, and writes what its clients see."""

    lines: list[Event] = field(default_factory=list)
    stored: dict[str, list[int]] = field(default_factory=lambda: {queue: [] for queue in QUEUES})
    settled: defaultdict[str, set[tuple[str, int]]] = field(
        default_factory=lambda: defaultdict(set)
    )
    sending: defaultdict[int, list[Send]] = field(default_factory=lambda: defaultdict(list))
    polling: dict[str, tuple[Poll, str, tuple[Record, ...]]] = field(default_factory=dict)
    acking: dict[str, Ack] = field(default_factory=dict)
    held: dict[str, tuple[str, tuple[Record, ...]]] = field(default_factory=dict)
    last_value: int = 0
    epoch: int = 1

    def write(self, event: Event) -> None:
        """One line; the clock is their number."""
        self.lines.append(replace(event, t_ns=len(self.lines) + 1))

    def send(self, who: int, many: int, _: int) -> None:
        """Begin a send. A producer may have several batches in flight."""
        values = tuple(range(self.last_value + 1, self.last_value + many + 2))
        self.last_value = values[-1]
        begun = Send(process=f"p{who % PRODUCERS}", type="invoke", subject="orders", values=values)
        self.sending[who % PRODUCERS].append(begun)
        self.write(begun)

    def sent(self, who: int, where: int, fate: int) -> None:
        """The oldest batch of a producer is stored: that keeps its order."""
        if not self.sending[who % PRODUCERS]:
            return
        begun = self.sending[who % PRODUCERS].pop(0)
        end, is_effective = FATES[fate]
        queue = QUEUES[where]
        base = len(self.stored[queue])
        if is_effective:
            self.stored[queue].extend(begun.values)
        if end == "ok":
            self.write(
                begun.ended(
                    "ok", queue=queue, sequence=base, epoch=self.epoch, replica=f"r{self.epoch % 3}"
                )
            )
        elif end is not None:
            self.write(begun.ended(end))

    def poll(self, who: int, where: int, which: int) -> None:
        """Begin a poll. Its result is chosen now, so that it may be outdated when it ends."""
        group = GROUPS[which % len(GROUPS)]
        process = f"{group}-{who % CONSUMERS}"
        if process not in self.polling:
            begun = Poll(process=process, type="invoke", group=group)
            self.polling[process] = (
                begun,
                QUEUES[where],
                self.due(group, QUEUES[where])[: which + 1],
            )
            self.write(begun)

    def polled(self, who: int, _: int, which: int) -> None:
        """The consumer has the messages; or it died with them."""
        process = f"{GROUPS[which % len(GROUPS)]}-{who % CONSUMERS}"
        if process in self.polling:
            begun, queue, records = self.polling.pop(process)
            if who == 2:
                self.write(begun.ended("info"))
            else:
                self.held[process] = (queue, records)
                self.write(begun.ended("ok", queue=queue, records=records))

    def ack(self, who: int, how: int, which: int) -> None:
        """A consumer is done with what it polled last."""
        group = GROUPS[which % len(GROUPS)]
        process = f"{group}-{who % CONSUMERS}"
        queue, records = self.held.get(process, ("", ()))
        if not records or process in self.acking:
            return
        begun = Ack(process=process, type="invoke", group=group, queue=queue)
        if how:
            self.acking[process] = replace(begun, values=tuple(record.value for record in records))
        else:
            self.acking[process] = replace(
                begun, sequences=tuple(record.sequence for record in records)
            )
        self.write(self.acking[process])
        self.held.pop(process)

    def acked(self, who: int, _: int, fate: int) -> None:
        """Some acknowledgement is answered."""
        if not self.acking:
            return
        begun = self.acking.pop(sorted(self.acking)[who % len(self.acking)])
        end, is_effective = FATES[fate]
        if is_effective:
            queued = self.stored[begun.queue]
            found = {*begun.sequences, *(queued.index(value) for value in begun.values)}
            self.settled[begun.group].update((begun.queue, sequence) for sequence in found)
        if end is not None:
            self.write(begun.ended(end))

    def reset(self, _: int, __: int, which: int) -> None:
        """An operator sends a group back to the beginning."""
        group = GROUPS[which % len(GROUPS)]
        begun = Reset(process="operator", type="invoke", group=group)
        self.write(begun)
        self.settled[group].clear()
        self.write(begun.ended("ok"))

    def elect(self, *_: int) -> None:
        """Another replica is the master from here on."""
        self.epoch += 1

    def due(self, group: str, queue: str) -> tuple[Record, ...]:
        """The messages that a group has not acknowledged."""
        places = enumerate(self.stored[queue])
        return tuple(
            Record(sequence, value)
            for sequence, value in places
            if (queue, sequence) not in self.settled[group]
        )

    def drain(self) -> None:
        """Deliver all messages that are not acknowledged."""
        for group in GROUPS:
            for queue in QUEUES:
                begun = Poll(process=f"{group}-drain", type="invoke", group=group)
                self.write(begun)
                self.write(begun.ended("ok", queue=queue, records=self.due(group, queue)))


def run(seed: int, length: int) -> list[Event]:
    """A history of so many steps, drained. The same seed gives the same steps, so a shorter one is
    the beginning of a longer one.
    """
    broker, coin = Broker(), Random(seed)
    for _ in range(length):
        (name,) = coin.choices(list(WEIGHTS), list(WEIGHTS.values()))
        act: Callable[[int, int, int], None] = getattr(broker, name)
        act(coin.randrange(3), coin.randrange(3), coin.randrange(len(FATES)))
    broker.drain()
    return broker.lines


HISTORIES = st.builds(run, st.integers(0, 2**32), st.integers(0, 200))


def names(events: list[Event], *, drained: bool = True) -> set[str]:
    return set(check_all(events, drained=drained).names)


@given(HISTORIES)
def test_a_correct_history_has_no_anomaly(events: list[Event]) -> None:
    report = check_all(events, drained=True)
    assert report.ok, str(report)
    assert lost_below(History(events)) == []
    assert report.deliveries - report.delivered_twice == sum(
        map(len, History(events).seen.values())
    )


@given(HISTORIES, st.integers(0, 100))
def test_the_beginning_of_a_correct_history_has_no_anomaly(
    events: list[Event], length: int
) -> None:
    """Operations that are under way at the cut have an unknown outcome, which is never an
    anomaly.
    """
    cut = events[:length]
    assert names(cut, drained=False) <= {"lost_below"}


@given(HISTORIES)
def test_events_survive_their_lines(events: list[Event]) -> None:
    assert [from_json(to_json(event)) for event in events] == events
