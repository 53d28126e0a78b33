"""Checks that every stored message reached every group and was settled there, and that every message was sent.

    stored    1 2 3 4
    given     1 2   4          3 is lost
    settled   1 2   (refused)  4 is unsettled: its only acknowledgement was refused, because the lane was lost, and it was not given again

`lost` and `unsettled` judge drained histories only. A message that certainly failed must not appear: it is a phantom.
"""

from __future__ import annotations

from collections.abc import Iterator

from history.ordered.columns import seconds
from history.ordered.past import OrderedHistory
from history.past import Anomaly


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
