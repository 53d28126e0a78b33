"""Measures how long no send succeeded: the time between one acknowledged send and the next.

The first gap begins at the first attempt, and the last one ends at the last line of a send, so a broker that did not come back is visible.

    t_ns   0 invoke   5 ok   9 ok   30 ok   33 invoke (no end)
    gaps   21 (9..30), 5 (0..5), 4 (5..9), 3 (30..33)

Finds messages that were lost, and messages that were never sent.

    sent ok    1 2 3 4 5      at sequences 0..4
    polled     1 2   4
    lost       3 5            if the history was drained: every message had enough time
    lost_below 3              always: the queue continued to 4 without it; 5 may still be on its way

Both checkers accept a message that *any* group saw, which proves that the log kept it. Pass `groups` to require it of each of these groups.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator
from itertools import pairwise
from typing import NamedTuple

from history.events import Poll, Send
from history.past import Anomaly, History


class Gap(NamedTuple):
    """A time without an acknowledged send; its beginning is there to be compared with the notes about faults."""

    gap_ns: int
    from_ns: int


def availability(history: History, longest: int = 10) -> list[Gap]:
    """The longest gaps, longest first. The test decides which gap is too long."""
    times_ns = sorted(send.t_ns for send, _, _ in history.acked_sends)
    edges_ns = [send.t_ns for send in history.sends]
    if not edges_ns:
        return []
    moments = [min(edges_ns), *times_ns, max(edges_ns)]
    return heapq.nlargest(longest, (Gap(until - since, since) for since, until in pairwise(moments) if until > since))


def lost(history: History, *, drained: bool, groups: Collection[str] = ()) -> list[Anomaly]:
    """Acknowledged values that were never delivered although consumers continued until no message came."""
    if not drained:
        return []
    found = []
    for group, seen in _readers(history, groups):
        for send, _, _ in history.acked_sends:
            missing = [value for value in send.values if value not in seen]
            if missing:
                found.append(Anomaly("lost", f"{_some(missing)} acknowledged, never polled by {group or 'anybody'}", (send,)))
    return found


def lost_below(history: History, *, slack_ns: int = 0, groups: Collection[str] = ()) -> list[Anomaly]:
    """Acknowledged values that no consumer got although a consumer got later values of the same queue. A message whose consumer died is not
    lost before its lease expires; nor is a delayed message before it is due. `slack_ns` is how long that may take: a skipped value counts
    only if it was skipped at least that long before the history's end.
    """
    found = []
    for group, seen in _readers(history, groups):
        highest = _highest(history, slack_ns, group)
        for send, queue, base in history.acked_sends:
            top, poll = highest.get(queue, (-1, None))
            missing = [value for sequence, value in enumerate(send.values, base) if sequence < top and value not in seen]
            if missing and poll is not None:
                what = f"{_some(missing)} acknowledged, never polled by {group or 'anybody'}, who was at sequence {top} of {queue}"
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
                found.append(Anomaly("phantom", f"{value} was polled, but its send failed for certain", (failed_sends[value], poll)))
            else:
                found.append(Anomaly("phantom", f"{value} was polled, but never sent", (poll,)))
    return found


def _readers(history: History, groups: Collection[str]) -> Iterator[tuple[str | None, Collection[int]]]:
    """The groups that must have seen everything, with the values they saw; None stands for all groups together."""
    if not groups:
        yield None, history.seen_by_any
    for group in groups:
        yield group, history.seen.get(group, frozenset())


def _highest(history: History, slack_ns: int, group: str | None) -> dict[str, tuple[int, Poll]]:
    """The highest sequence of each queue that was polled early enough, with the poll that shows it."""
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
