"""Runs all checkers in one call, and returns the report of a run.

    report = check_all(load(path), drained=True)
    assert report.ok, report

| checker | reports |
|---|---|
| lost, lost_below | a message that was acknowledged and never handed out |
| phantom | a message that was handed out, but never sent or certainly not stored |
| duplicate_stored | one value at two positions |
| inconsistent_positions | two values at one position |
| send_order | a producer's messages are stored in another order than sent, or a batch is interrupted by other messages |
| two_masters | two replicas acknowledged messages in one epoch |
| nonmonotonic_poll | a queue's one consumer got an older message after a newer one; `int_nonmonotonic_poll`: in a poll |
| poll_skip | the one consumer of a queue was not given a message between two that it got; `int_poll_skip`: in one poll |
| delivered_after_ack | a message was handed out again after its acknowledgement was answered |

The report counts, without judging: sent, acked, unknown, failed and polled values; deliveries, and
how many of them were repetitions (`delivered_twice`); values that were stored although their
outcome was unknown (`recovered`); values that were acknowledged and that no consumer has polled yet
(`unseen`); the longest gaps between acknowledged sends.

Jepsen's words for the same: lost-write is `lost` and `lost_below`, duplicate is `duplicate_stored`,
inconsistent-offsets is `inconsistent_positions`, nonmonotonic-send is `send_order` ("reordered" of
its queue tests), G1a is `phantom`.

Measures how long no send succeeded: the time between one acknowledged send and the next.

The first gap begins at the first attempt, and the last one ends at the last line of a send, so a
broker that did not come back is visible.

    t_ns   0 invoke   5 ok   9 ok   30 ok   33 invoke (no end)
    gaps   21 (9..30), 5 (0..5), 4 (5..9), 3 (30..33)

Finds messages that were lost, and messages that were never sent.

    sent ok    1 2 3 4 5      at sequences 0..4
    polled     1 2   4
    lost       3 5            if the history was drained: every message had enough time
    lost_below 3              always: the queue continued to 4 without it; 5 may still be on its way

Both checkers accept a message that *any* group saw, which proves that the log kept it. Pass
`groups` to require it of each of these groups.

Whether a place in a queue means one message forever, and a producer's messages lie there in its
order.

A *place* is a queue and a sequence. Acknowledged sends and polls both claim "value v lies at place
p", and all claims must agree:

    send ok 7 at orders/0@g1 40,  poll shows 8 at 40    inconsistent_positions: one place, two
                                                        values
    send ok 7 at orders/0@g1 40,  poll shows 7 at 55    duplicate_stored: one value, two places
                                                        (stored twice, not handed out twice)

Counts how often messages were handed out, and finds those that were handed out again after their
acknowledgement.

With at least once a second delivery is no anomaly, so it is only counted. It is an anomaly if the
group's acknowledgement had been answered *before the poll began*. A poll that was under way at that
moment proves nothing: the broker may have sent its messages earlier.

    poll [........7]                        fine: the first delivery
                       ack 7 [...ok]
    poll       [.....................7]     fine: the broker may have handed it out before the
                                            answer
                                      poll [...7]   delivered_after_ack

Finds polls that go back or leave something out: Jepsen's `nonmonotonic-poll` and `poll-skip` of its
Kafka tests, within one poll and between polls.

    sent ok                    1 2 3 4    at sequences 0..3
    polled                     1 2 4      int_poll_skip: 3 lies between two messages of one poll
    polled, then polled        1 2, 4     poll_skip: 3 lies between two polls
    polled                     1 3 2      int_nonmonotonic_poll
    polled, then polled        1 3, 2     nonmonotonic_poll (and poll_skip or int_poll_skip: 2 was left out first)

Only groups with one consumer of a queue are judged, since several share its messages. Only the
first delivery of a message counts, and only one with attempt 1: what was handed out and came back
is delivered later, and may be. A poll of unknown outcome may have taken what is missing afterwards;
a reset starts over.
"""  # noqa: E501

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from history.events import Ack, Anomaly, Event, History, Poll, Reset, Send, brief


class Gap(NamedTuple):
    """A time without an acknowledged send; its beginning is there to be compared with the notes
    about faults.
    """

    gap_ns: int
    from_ns: int


def availability(history: History, longest: int = 10) -> list[Gap]:
    """The longest gaps, longest first. The test decides which gap is too long."""
    times_ns = sorted(send.t_ns for send, _, _ in history.acked_sends)
    edges_ns = [send.t_ns for send in history.sends]
    if not edges_ns:
        return []
    moments = [min(edges_ns), *times_ns, max(edges_ns)]
    return heapq.nlargest(
        longest, (Gap(until - since, since) for since, until in pairwise(moments) if until > since)
    )


def lost(history: History, *, drained: bool, groups: Collection[str] = ()) -> list[Anomaly]:
    """Acknowledged values that were never delivered although consumers continued until no message
    came.
    """
    if not drained:
        return []
    found = []
    for group, seen in _readers(history, groups):
        for send, _, _ in history.acked_sends:
            missing = [value for value in send.values if value not in seen]
            if missing:
                found.append(
                    Anomaly(
                        "lost",
                        f"{_some(missing)} acknowledged, never polled by {group or 'anybody'}",
                        (send,),
                    )
                )
    return found


def lost_below(
    history: History, *, slack_ns: int = 0, groups: Collection[str] = ()
) -> list[Anomaly]:
    """Acknowledged values that no consumer got although a consumer got later values of the same
    queue. A message whose consumer died is not lost before its lease expires; nor is a delayed
    message before it is due. `slack_ns` is how long that may take: a skipped value counts only if
    it was skipped at least that long before the history's end.
    """
    found = []
    for group, seen in _readers(history, groups):
        highest = _highest(history, slack_ns, group)
        for send, queue, base in history.acked_sends:
            top, poll = highest.get(queue, (-1, None))
            missing = [
                value
                for sequence, value in enumerate(send.values, base)
                if sequence < top and value not in seen
            ]
            if missing and poll is not None:
                what = (
                    f"{_some(missing)} acknowledged, never polled by {group or 'anybody'}, who "
                    f"was at sequence {top} of {queue}"
                )
                found.append(Anomaly("lost_below", what, (send, poll)))
    return found


def phantom(history: History) -> list[Anomaly]:
    """Polled values that were never sent, or whose every send certainly failed."""
    outcomes, found, told = history.outcomes, [], set[int]()
    failed_sends: dict[int, Send] = {}
    for send in history.sends:
        if send.type == "fail":
            failed_sends.update((value, send) for value in send.values if value in outcomes.failed)
    for poll, _ in history.polls:
        for record in poll.records:
            value = record.value
            if value in outcomes.acked or value in outcomes.unknown or value in told:
                continue
            told.add(value)
            if value in outcomes.failed:
                found.append(
                    Anomaly(
                        "phantom",
                        f"{value} was polled, but its send failed for certain",
                        (failed_sends[value], poll),
                    )
                )
            else:
                found.append(Anomaly("phantom", f"{value} was polled, but never sent", (poll,)))
    return found


def _readers(
    history: History, groups: Collection[str]
) -> Iterator[tuple[str | None, Collection[int]]]:
    """The groups that must have seen everything, with the values they saw; None stands for all
    groups together.
    """
    if not groups:
        yield None, history.seen_by_any
    for group in groups:
        yield group, history.seen.get(group, frozenset())


def _highest(history: History, slack_ns: int, group: str | None) -> dict[str, tuple[int, Poll]]:
    """The highest sequence of each queue that was polled early enough, with the poll that shows
    it.
    """
    last_ns = max((event.t_ns for event in history), default=0) - slack_ns
    found: dict[str, tuple[int, Poll]] = {}
    for poll, queue in history.polls:
        if poll.t_ns <= last_ns and (group is None or poll.group == group):
            top = max(record.sequence for record in poll.records)
            if queue not in found or found[queue][0] < top:
                found[queue] = (top, poll)
    return found


def _some(values: list[int]) -> str:
    shown = ", ".join(map(str, values[:5]))
    return shown if len(values) <= 5 else f"{shown} and {len(values) - 5} more"


Place = tuple[str, int]
Claim = tuple[Place, int, Send | Poll]


def duplicate_stored(history: History) -> list[Anomaly]:
    """Values that were seen at two places: an idempotent producer's retry was stored again."""
    homes: dict[int, Place] = {}
    moved = {
        value for place, value, _ in _claims(history) if homes.setdefault(value, place) != place
    }
    proofs: defaultdict[int, dict[Place, Send | Poll]] = defaultdict(dict)
    for place, value, event in _claims(history) if moved else ():
        if value in moved:
            proofs[value].setdefault(place, event)
    return [
        Anomaly("duplicate_stored", f"{value} lies at {_places(proof)}", tuple(proof.values()))
        for value, proof in proofs.items()
    ]


def inconsistent_positions(history: History) -> list[Anomaly]:
    """Places that showed two values."""
    holders: dict[Place, int] = {}
    torn = {
        place for place, value, _ in _claims(history) if holders.setdefault(place, value) != value
    }
    proofs: defaultdict[Place, dict[int, Send | Poll]] = defaultdict(dict)
    for place, value, event in _claims(history) if torn else ():
        if place in torn:
            proofs[place].setdefault(value, event)
    return [
        Anomaly(
            "inconsistent_positions",
            f"{_places([place])} holds {' and '.join(map(str, proof))}",
            tuple(proof.values()),
        )
        for place, proof in proofs.items()
    ]


def send_order(history: History) -> list[Anomaly]:
    """In each queue, a producer's acknowledged sends have the order of their invokes, and a batch
    has consecutive places.
    """
    return [*_rising(history), *_together(history)]


def two_masters(history: History) -> list[Anomaly]:
    """Epochs in which two replicas of a broker group acknowledged sends. The group is what follows
    the @ in the queue's name.
    """
    masters: dict[tuple[str, int], Send] = {}
    told, found = set[tuple[str, int, str]](), []
    for send, queue, _ in history.acked_sends:
        if send.epoch is None or send.replica is None:
            continue
        group = queue.rpartition("@")[2]
        first = masters.setdefault((group, send.epoch), send)
        if first.replica != send.replica and (group, send.epoch, send.replica) not in told:
            told.add((group, send.epoch, send.replica))
            what = f"epoch {send.epoch} of {group} belongs to {first.replica} and to {send.replica}"
            found.append(Anomaly("two_masters", what, (first, send)))
    return found


def _claims(history: History) -> Iterator[Claim]:
    for send, queue, base in history.acked_sends:
        for sequence, value in enumerate(send.values, base):
            yield (queue, sequence), value, send
    for poll, queue in history.polls:
        for record in poll.records:
            yield (queue, record.sequence), record.value, poll


def _places(places: dict[Place, Send | Poll] | list[Place]) -> str:
    return " and ".join(f"{queue} {sequence}" for queue, sequence in places)


def _rising(history: History) -> Iterator[Anomaly]:
    ranks = _ranks(history)
    lines: defaultdict[tuple[str, str], list[tuple[int, int, Send]]] = defaultdict(list)
    for send, queue, base in history.acked_sends:
        rank = ranks.pop(send.values[0], None) if send.values else None
        if rank is not None:
            lines[send.process, queue].append((rank, base, send))
    for (process, queue), line in lines.items():
        line.sort(key=lambda entry: entry[0])
        end, last = -1, line[0][2]
        for _, base, send in line:
            if base <= end:
                what = (
                    f"{process} sent {send.values[0]} to {queue} after {last.values[-1]}, but it "
                    f"lies before it: {base} <= {end}"
                )
                yield Anomaly("send_order", what, (last, send))
            if base + len(send.values) - 1 > end:
                end, last = base + len(send.values) - 1, send


def _ranks(history: History) -> dict[int, int]:
    """Each value's number in the order of invocation.

    A value that was tried twice has none: which attempt was stored, and so where it belongs, is not
    known.
    """
    ranks: dict[int, int] = {}
    retried = set[int]()
    for send in history.sends:
        for value in send.values:
            if value not in ranks:
                ranks[value] = len(ranks)
            elif send.type == "invoke":
                retried.add(value)
    for value in retried:
        del ranks[value]
    return ranks


def _together(history: History) -> Iterator[Anomaly]:
    """In polls of a batch, value i is i places after value 0; this also holds if the outcome of the
    send is unknown.
    """
    homes: dict[int, Place] = {}
    for poll, queue in history.polls:
        for record in poll.records:
            homes.setdefault(record.value, (queue, record.sequence))
    torn = [(send, pair) for send in _batches(history) if (pair := _torn_pair(send, homes))]
    polls = history.first_polls({value for _, pair in torn for value in pair})
    for send, (early, late) in torn:
        what = f"{early} and {late} of one batch lie at {_places([homes[early], homes[late]])}"
        evidence = (
            (send, polls[early])
            if polls[early] is polls[late]
            else (send, polls[early], polls[late])
        )
        yield Anomaly("send_order", what, evidence)


def _batches(history: History) -> Iterator[Send]:
    """Batches as they were stored: a send that was answered, else what was attempted."""
    acked = history.outcomes.acked
    told = set[int]()
    for send in history.sends:
        is_batch = send.type == "ok" or (send.type == "invoke" and acked.isdisjoint(send.values))
        if is_batch and len(send.values) > 1 and send.values[0] not in told:
            told.add(send.values[0])
            yield send


def _torn_pair(send: Send, homes: dict[int, Place]) -> tuple[int, int] | None:
    """Two values of a batch in one queue whose distance is wrong."""
    origins: dict[str, tuple[int, int]] = {}
    for index, value in enumerate(send.values):
        if value in homes:
            queue, sequence = homes[value]
            origin, early = origins.setdefault(queue, (sequence - index, value))
            if origin != sequence - index:
                return early, value
    return None


# An acknowledgement names messages by value, or by queue and sequence.
Name = int | tuple[str, int]
EVERY_GROUP = None


class _Memory:
    """Which acknowledgements hold for each group, while the history is walked once from its
    beginning to its end.
    """

    def __init__(self) -> None:
        self._settled: defaultdict[str, dict[Name, tuple[int, Ack]]] = defaultdict(dict)
        self._reset_at: dict[str | None, int] = {}
        self._resetting: dict[tuple[str, int | None], str | None] = {}

    def settle(self, ack: Ack, begun: int, place: int) -> None:
        """An acknowledgement counts unless a reset was under way at the same time: then their order
        is unknown.
        """
        if begun > max(self._reset_at.get(ack.group, -1), self._reset_at.get(EVERY_GROUP, -1)):
            names: list[Name] = [
                *ack.values,
                *((ack.queue, sequence) for sequence in ack.sequences),
            ]
            self._settled[ack.group].update(dict.fromkeys(names, (place, ack)))

    def reset(self, reset: Reset, place: int) -> None:
        """A reset takes effect at some moment between its invoke and its end; meanwhile nothing can
        be said about its group.

        Without a certain end that lasts until the same process was answered: it has to try again.
        """
        key = (reset.process, reset.op)
        if reset.type in ("invoke", "info"):
            self._resetting[key] = reset.group
        else:
            self._resetting.pop(key, None)
        if reset.type != "ok":
            return
        self._reset_at[reset.group] = place
        for group in list(self._settled) if reset.group is EVERY_GROUP else [reset.group]:
            self._settled.pop(group, None)

    def ack_before(self, poll: Poll, begun: int, names: tuple[Name, ...]) -> Ack | None:
        """The acknowledgement that was answered before this poll began. Returned once, then
        removed.
        """
        settled = self._settled.get(poll.group)
        if not settled or any(
            group in (poll.group, EVERY_GROUP) for group in self._resetting.values()
        ):
            return None
        for name in names:
            place, ack = settled.get(name, (begun, None))
            if place < begun:
                for other in names:
                    settled.pop(other, None)
                return ack
        return None


def delivered_after_ack(history: History) -> list[Anomaly]:
    """Messages that were handed to a group whose acknowledgement had been answered, without a reset
    in between.
    """
    memory, found = _Memory(), []
    for place, (event, begun) in enumerate(zip(history, history.beginnings, strict=True)):
        if isinstance(event, Reset):
            memory.reset(event, place)
        elif event.type == "ok" and isinstance(event, Ack):
            memory.settle(event, begun, place)
        elif event.type == "ok" and isinstance(event, Poll):
            for sequence, value, _ in event.records:
                ack = memory.ack_before(event, begun, (value, (event.queue or "", sequence)))
                if ack is not None:
                    what = (
                        f"{value} came to {event.group} again at {event.queue} {sequence} after "
                        "it was acknowledged"
                    )
                    found.append(Anomaly("delivered_after_ack", what, (ack, event)))
    return found


def delivered_twice(history: History) -> int:
    """The number of repeated deliveries of a value to a group."""
    return deliveries(history) - sum(map(len, history.seen.values()))


def deliveries(history: History) -> int:
    """The number of deliveries, including repetitions."""
    return sum(len(poll.records) for poll, _ in history.polls)


def recovered(history: History) -> int:
    """How many values were stored after all although their producer never knew."""
    return len(history.outcomes.unknown & history.seen_by_any)


@dataclass(slots=True)
class _Reading:
    """How far the one consumer of a queue is."""

    seen: set[int] = field(default_factory=set)
    """Sequences."""
    top: int = -1
    last: Poll | None = None
    is_unsure: bool = False
    """Whether a poll before the next one may have taken messages that were not recorded."""
    excused_below: int = 0


def wrong_polls(history: History) -> list[Anomaly]:
    """Every such anomaly, in the order of the history."""
    return list(_anomalies(history))


def _anomalies(history: History) -> Iterator[Anomaly]:
    alone, stored, returned = _alone(history), _stored(history), _returned(history)
    readings: defaultdict[tuple[str, str], _Reading] = defaultdict(_Reading)
    under_way: set[tuple[str, int | None]] = set()
    for event in history:
        if isinstance(event, Reset) and event.type != "fail":
            for where in [where for where in readings if event.group in (None, where[0])]:
                del readings[where]
        if not isinstance(event, Poll):
            continue
        operation = event.process, event.op
        if event.type == "info" or (event.type == "invoke" and operation in under_way):
            for (group, _), reading in readings.items():
                reading.is_unsure |= group == event.group
        under_way.add(operation) if event.type == "invoke" else under_way.discard(operation)
        if event.type == "ok" and event.queue is not None and (event.group, event.queue) in alone:
            where = event.group, event.queue
            yield from _judged(event, readings[where], stored[event.queue], returned[where])


def _alone(history: History) -> set[tuple[str, str]]:
    """The pairs of group and queue with exactly one consumer."""
    consumers: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    for poll, queue in history.polls:
        consumers[poll.group, queue].add(poll.process)
    return {where for where, found in consumers.items() if len(found) == 1}


def _stored(history: History) -> defaultdict[str, set[int]]:
    """The sequences of each queue that were acknowledged to producers."""
    found: defaultdict[str, set[int]] = defaultdict(set)
    for send, queue, base in history.acked_sends:
        found[queue].update(range(base, base + len(send.values)))
    return found


def _returned(history: History) -> defaultdict[tuple[str, str], set[int]]:
    """The sequences whose first delivery to a group that anybody saw was not their first."""
    found: defaultdict[tuple[str, str], set[int]] = defaultdict(set)
    first: set[tuple[str, str, int]] = set()
    for poll, queue in history.polls:
        for record in poll.records:
            key = poll.group, queue, record.sequence
            if key not in first and record.attempt > 1:
                found[poll.group, queue].add(record.sequence)
            first.add(key)
    return found


def _judged(
    poll: Poll, reading: _Reading, stored: set[int], returned: set[int]
) -> Iterator[Anomaly]:
    within = False
    for record in poll.records:
        sequence = record.sequence
        is_first = sequence not in reading.seen
        reading.seen.add(sequence)
        if not is_first or sequence in returned:
            continue
        evidence = (poll,) if within or reading.last is None else (reading.last, poll)
        kind = "int_" if within else ""
        if sequence < reading.top:
            if sequence >= reading.excused_below:
                yield Anomaly(
                    f"{kind}nonmonotonic_poll",
                    f"sequence {sequence} came after {reading.top}",
                    evidence,
                )
        elif reading.is_unsure:
            reading.excused_below = sequence
        elif reading.top >= 0:
            left_out = (
                stored.intersection(range(reading.top + 1, sequence)) - reading.seen - returned
            )
            if left_out:
                what = (
                    f"{len(left_out)} messages from sequence {min(left_out)} on were left out "
                    f"before {sequence}"
                )
                yield Anomaly(f"{kind}poll_skip", what, evidence)
        reading.is_unsure = False
        reading.top = max(reading.top, sequence)
        within = True
    if within:
        reading.last = poll


SHOWN_MAX = 10

__all__ = [
    "Anomaly",
    "History",
    "Report",
    "availability",
    "check_all",
    "delivered_after_ack",
    "delivered_twice",
    "deliveries",
    "duplicate_stored",
    "inconsistent_positions",
    "lost",
    "lost_below",
    "phantom",
    "recovered",
    "send_order",
    "two_masters",
    "wrong_polls",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a run showed. Counts are of distinct values, except deliveries and delivered_twice."""

    drained: bool
    sent: int
    acked: int
    unknown: int
    failed: int
    polled: int
    deliveries: int
    delivered_twice: int
    recovered: int
    unseen: int
    gaps: tuple[Gap, ...]
    anomalies: tuple[Anomaly, ...]

    @property
    def ok(self) -> bool:
        """True if no promise was broken. A run without any message is ok too: check `acked`."""
        return not self.anomalies

    @property
    def counts(self) -> dict[str, int]:
        """The figures by name."""
        names = (
            "sent",
            "acked",
            "unknown",
            "failed",
            "polled",
            "deliveries",
            "delivered_twice",
            "recovered",
            "unseen",
        )
        return {name: getattr(self, name) for name in names}

    @property
    def names(self) -> Counter[str]:
        """How often each anomaly was found."""
        return Counter(anomaly.name for anomaly in self.anomalies)

    def to_json(self, shown_max: int = SHOWN_MAX) -> dict[str, object]:
        """The report as plain values, with the number of all anomalies and the first few of each
        name.
        """
        shown = [
            {"name": found.name, "what": found.what, "evidence": [*map(brief, found.evidence)]}
            for found in self._first(shown_max)
        ]
        gaps = [gap._asdict() for gap in self.gaps]
        return {
            "ok": self.ok,
            "drained": self.drained,
            **self.counts,
            "gaps": gaps,
            "found": dict(self.names),
            "anomalies": shown,
        }

    def __str__(self) -> str:
        figures = ", ".join(f"{name} {count:,}" for name, count in self.counts.items())
        longest = f"; longest gap {self.gaps[0].gap_ns / 1e6:,.1f} ms" if self.gaps else ""
        verdict = (
            ", ".join(f"{name} {count:,}" for name, count in self.names.items()) or "no anomaly"
        )
        head = f"{verdict} ({'drained' if self.drained else 'not drained'})"
        return "\n".join([head, figures + longest, *map(str, self._first(SHOWN_MAX))])

    def _first(self, shown_max: int) -> Iterable[Anomaly]:
        told: Counter[str] = Counter()
        for anomaly in self.anomalies:
            told[anomaly.name] += 1
            if told[anomaly.name] <= shown_max:
                yield anomaly


def check_all(
    events: Iterable[Event], *, drained: bool, slack_ns: int = 0, groups: Collection[str] = ()
) -> Report:
    """Every checker over one history.

    `drained`: consumers continued until nothing came, so everything acknowledged must have been
    seen. If not, `lost_below` judges instead (it finds a part of the same, so it is left out of a
    drained history), with `slack_ns` for leases and delays.
    """
    history = events if isinstance(events, History) else History(events)
    anomalies = [
        *(
            lost(history, drained=True, groups=groups)
            if drained
            else lost_below(history, slack_ns=slack_ns, groups=groups)
        ),
        *phantom(history),
        *duplicate_stored(history),
        *inconsistent_positions(history),
        *send_order(history),
        *wrong_polls(history),
        *delivered_after_ack(history),
        *two_masters(history),
    ]
    acked, unknown, failed = map(len, history.outcomes)
    return Report(
        drained=drained,
        sent=acked + unknown + failed,
        acked=acked,
        unknown=unknown,
        failed=failed,
        polled=len(history.seen_by_any),
        deliveries=deliveries(history),
        delivered_twice=delivered_twice(history),
        recovered=recovered(history),
        unseen=len(history.outcomes.acked - history.seen_by_any),
        gaps=tuple(availability(history)),
        anomalies=tuple(anomalies),
    )
