"""Checks that a group got each line in the order of sending, and that every replay was in order.

    given     1 2 3 | 2 3 4 | 4 5      fine: three grants; each begins at a message that was not surely settled, and leaves none out
    given     1 3                      skipped: 3 came for the first time although 2 had never come
    given     1 2 3 | 3 4, 2 unsettled torn_replay: the second grant begins after a message that nobody can have settled
    given     1 2 3 4 | 2 4            torn_replay: the second grant leaves 3 out

The checker judges the deliveries of each grant separately. A consumer that was stopped while it handed messages out may wake up long after
another consumer got its lane. It then hands out the rest of its messages, among those of the other consumer. Within its grant they are in
order, which is all that it can promise; `late` counts such deliveries. First deliveries must be in order over all grants together.

Checks that every stored message reached every group and was settled there, and that every message was sent.

    stored    1 2 3 4
    given     1 2   4          3 is lost
    settled   1 2   (refused)  4 is unsettled: its only acknowledgement was refused, because the lane was lost, and it was not given again

`lost` and `unsettled` judge drained histories only. A message that certainly failed must not appear: it is a phantom.
"""

from __future__ import annotations

from collections.abc import Iterator

from history.ordered.events import NEVER, seconds
from history.ordered.past import OrderedHistory
from history.past import Anomaly


def order(history: OrderedHistory) -> Iterator[Anomaly]:
    """Messages that were delivered too early, and replays that begin too late or leave a message out."""
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
            self._next = [next((at for at, each in enumerate(line) if settled[each]), len(line)) for line in history.by_rank]
        self._last: dict[tuple[int, int], int] = {}
        """Of each grant and line the rank that was given last."""
        self._all_settled_at = history.all_settled_at(group)

    def read(self) -> Iterator[Anomaly]:
        columns, ranks, line_of = self._history.deliveries, self._history.ranks, self._history.messages.line
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
        what = f"group {self._group} was given {history.name(message)} for the first time, by {history.when(delivery)}; before it was sent"
        return Anomaly("skipped", f"{what} {history.name(before)}{_where(history, before)}, which the group had not been given", ())

    def _gap(self, delivery: int, line: int, last: int) -> Anomaly:
        history = self._history
        names = history.by_rank[line]
        message = history.name(history.deliveries.message[delivery])
        what = f"group {self._group} was given {message} by {history.when(delivery)}, right behind {history.name(names[last])}"
        return Anomaly("torn_replay", f"{what}: {history.name(names[last + 1])} is left out of the replay", ())

    def _late_start(self, delivery: int, line: int, rank: int) -> Anomaly:
        history, at_ns = self._history, self._history.deliveries.at_ns[delivery]
        settled = history.settled_at(self._group)
        before = next(each for each in history.by_rank[line][:rank] if settled[each] > at_ns)
        message = history.name(history.deliveries.message[delivery])
        what = f"group {self._group} was given {message} by {history.when(delivery)}, the first of its line under this token; but"
        told = "never" if settled[before] >= NEVER else f"only at {seconds(settled[before])}"
        return Anomaly("torn_replay", f"{what} {history.name(before)}, sent before it, was {told} said to be done", ())


def late(history: OrderedHistory) -> int:
    """Deliveries under a token when a newer one had been used for the same logical partition: counted, not judged."""
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
    return sum(len(each) - len(set(map(history.deliveries.message.__getitem__, each))) for each in history.of_group.values())


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
            if message not in given and fates[message] == "ok" and not (settled and settled[message] == 0):
                yield Anomaly("lost", f"{_told(history, message)}, and group {group} was never given it", ())
        yield from _unsettled(history, group, settled)


def _unsettled(history: OrderedHistory, group: str, settled: list[int]) -> Iterator[Anomaly]:
    columns, told = history.deliveries, set[int]()
    for delivery in history.of_group.get(group, ()):
        message = columns.message[delivery]
        if columns.end[delivery] == "fail" and settled[message] > history.last_ns and message not in told:
            told.add(message)
            what = (
                f"{history.name(message)} was given to {history.when(delivery)} in group {group}; its acknowledgement was refused, and the"
            )
            yield Anomaly("unsettled", f"{what} message never came again", ())


def phantom(history: OrderedHistory) -> Iterator[Anomaly]:
    """Messages that were delivered to a group, and never sent, or whose sending certainly failed."""
    for event, index in history.strangers:
        handed = event.handed[index]
        what = f"{event.process} was given {handed.key} {handed.serial} of {handed.producer}, sequence {handed.sequence} of partition"
        yield Anomaly("phantom", f"{what} {event.partition}, at {seconds(event.t_ns)}; nobody sent it", ())
    columns, fates, told = history.deliveries, history.messages.fate, set[int]()
    for delivery, message in enumerate(columns.message):
        if fates[message] == "fail" and message not in told:
            told.add(message)
            what = f"{history.name(message)} certainly failed, and was given to {history.when(delivery)}"
            yield Anomaly("phantom", what, ())


def _told(history: OrderedHistory, message: int) -> str:
    place = history.messages.place[message]
    where = f", as sequence {place.sequence} of partition {place.partition}" if place else ""
    return f"{history.name(message)} was acknowledged at {seconds(history.messages.ended_ns[message])}{where}"
