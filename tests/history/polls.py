"""Finds polls that go back or leave something out: Jepsen's `nonmonotonic-poll` and `poll-skip` of its Kafka tests, within one poll and
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

from history.events import Poll, Reset
from history.past import Anomaly, History


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
