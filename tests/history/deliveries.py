"""Counts how often messages were handed out, and finds those that were handed out again after their acknowledgement.

With at least once a second delivery is no anomaly, so it is only counted. It is an anomaly if the group's acknowledgement had been answered
*before the poll began*. A poll that was under way at that moment proves nothing: the broker may have sent its messages earlier.

    poll [........7]                        fine: the first delivery
                       ack 7 [...ok]
    poll       [.....................7]     fine: the broker may have handed it out before the answer
                                      poll [...7]   delivered_after_ack

Finds polls that go back or leave something out: Jepsen's `nonmonotonic-poll` and `poll-skip` of its Kafka tests, within one poll and
between polls.

    sent ok                    1 2 3 4    at sequences 0..3
    polled                     1 2 4      int_poll_skip: 3 lies between two messages of one poll
    polled, then polled        1 2, 4     poll_skip: 3 lies between two polls
    polled                     1 3 2      int_nonmonotonic_poll
    polled, then polled        1 3, 2     nonmonotonic_poll (and poll_skip or int_poll_skip: 2 was left out first)

Only groups with one consumer of a queue are judged, since several share its messages. Only the first delivery of a message counts, and only
one with attempt 1: what was handed out and came back is delivered later, and may be. A poll of unknown outcome may have taken what is
missing afterwards; a reset starts over.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from history.events import Ack, Poll, Reset
from history.past import Anomaly, History

# An acknowledgement names messages by value, or by queue and sequence.
Name = int | tuple[str, int]
EVERY_GROUP = None


class _Memory:
    """Which acknowledgements hold for each group, while the history is walked once from its beginning to its end."""

    def __init__(self) -> None:
        self._settled: defaultdict[str, dict[Name, tuple[int, Ack]]] = defaultdict(dict)
        self._reset_at: dict[str | None, int] = {}
        self._resetting: dict[tuple[str, int | None], str | None] = {}

    def settle(self, ack: Ack, begun: int, place: int) -> None:
        """An acknowledgement counts unless a reset was under way at the same time: then their order is unknown."""
        if begun > max(self._reset_at.get(ack.group, -1), self._reset_at.get(EVERY_GROUP, -1)):
            names: list[Name] = [*ack.values, *((ack.queue, sequence) for sequence in ack.sequences)]
            self._settled[ack.group].update(dict.fromkeys(names, (place, ack)))

    def reset(self, reset: Reset, place: int) -> None:
        """A reset takes effect at some moment between its invoke and its end; meanwhile nothing can be said about its group.

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
        """The acknowledgement that was answered before this poll began. Returned once, then removed."""
        settled = self._settled.get(poll.group)
        if not settled or any(group in (poll.group, EVERY_GROUP) for group in self._resetting.values()):
            return None
        for name in names:
            place, ack = settled.get(name, (begun, None))
            if place < begun:
                for other in names:
                    settled.pop(other, None)
                return ack
        return None


def delivered_after_ack(history: History) -> list[Anomaly]:
    """Messages that were handed to a group whose acknowledgement had been answered, without a reset in between."""
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
                    what = f"{value} came to {event.group} again at {event.queue} {sequence} after it was acknowledged"
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


def _judged(poll: Poll, reading: _Reading, stored: set[int], returned: set[int]) -> Iterator[Anomaly]:
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
                yield Anomaly(f"{kind}nonmonotonic_poll", f"sequence {sequence} came after {reading.top}", evidence)
        elif reading.is_unsure:
            reading.excused_below = sequence
        elif reading.top >= 0:
            left_out = stored.intersection(range(reading.top + 1, sequence)) - reading.seen - returned
            if left_out:
                what = f"{len(left_out)} messages from sequence {min(left_out)} on were left out before {sequence}"
                yield Anomaly(f"{kind}poll_skip", what, evidence)
        reading.is_unsure = False
        reading.top = max(reading.top, sequence)
        within = True
    if within:
        reading.last = poll
