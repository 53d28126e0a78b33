"""Checks the content of the log, as far as producers' answers and consumers' deliveries show it.

A line's messages, read partition by partition in the order of versions, and there by sequence, must be in the order of sending:

    partition 1 (version 1)   k1 1, k1 2, command message at 2
    partition 2 (version 2)   k1 3, k1 4

A message may be stored twice in one case: partition 1 was fenced before its group answered, and the producer sent the messages of unknown
outcome again. Both copies then have one id, and all later messages are repeated as well:

    partition 1 (fenced)      k1 1, k1 2, k1 3
    partition 2               k1 2, k1 3, k1 4       fine: an in-order replay from k1 2 on
    partition 2               k1 2, k1 4             stored_twice: k1 3 is not repeated
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from history.ordered.past import OrderedHistory
from history.past import Anomaly

Copy = tuple[int, int, int, int]
"""Since which version its partition is there, partition, sequence, rank in its line."""


def log_order(history: OrderedHistory) -> Iterator[Anomaly]:
    """Places with two messages, after a seal or in a partition of other keys; lines that are out of order."""
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


# --- places ------------------------------------------------------------------------------------------------------------------


def _places(history: OrderedHistory) -> Iterator[Anomaly]:
    routes, line_of, told = history.routes, history.messages.line, set[tuple[int, int, int]]()
    held: defaultdict[int, dict[int, int]] = defaultdict(dict)
    for message, partition, sequence in _claims(history):
        first = held[partition].setdefault(sequence, message)
        part, sealed = routes.parts.get(partition), routes.sealed.get(partition, -1)
        lp = history.lp_of_line[line_of[message]]
        where = f"sequence {sequence} of partition {partition}"
        if first != message:
            found = Anomaly("two_at_one_place", f"{where} holds {history.name(first)} and {history.name(message)}", ())
        elif 0 <= sealed <= sequence:
            what = f"{history.name(message)} lies at {where}, which was closed by its command message at {sealed}"
            found = Anomaly("behind_seal", what, ())
        elif part is None or not part.first <= lp < part.end:
            found = Anomaly("wrong_partition", f"{history.name(message)}, of logical partition {lp}, lies at {where}: {part}", ())
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
    for message, grant, sequence in zip(columns.message, columns.grant, columns.sequence, strict=True):
        yield message, grants[grant].partition, sequence


# --- lines -------------------------------------------------------------------------------------------------------------------


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
            what = f"{history.name(early)} was sent before {history.name(late)}, but lies behind it: {_where(before)} and {_where(copy)}"
            yield Anomaly("log_order", what, ())
            return
        before = copy


def _replayed(history: OrderedHistory, line: int, copies: list[Copy]) -> Iterator[Anomaly]:
    """The copies in the order of the log: each is the next of its line, or, where a partition begins, an earlier one."""
    messages = history.by_rank[line]
    before = (-1, -1, -1, -1)
    for copy in copies:
        rank, expected = copy[3], before[3] + 1
        if rank != expected and not (rank < expected and copy[1] != before[1]):
            what = f"{history.name(messages[rank])} lies {_where(copy)}"
            if rank > expected:
                yield Anomaly("stored_twice", f"{what}, behind a replay that leaves {history.name(messages[expected])} out", ())
            else:
                yield Anomaly("stored_twice", f"{what}, right behind {history.name(messages[before[3]])} in the same partition", ())
            return
        before = copy


# --- copies ------------------------------------------------------------------------------------------------------------------


def _unexcused(history: OrderedHistory) -> Iterator[Anomaly]:
    fenced, columns = history.routes.fenced, history.messages
    for message, copies in history.copies.items():
        places = " and ".join(map(_where, copies))
        if not columns.is_resent[message] and columns.fate[message] == "ok":
            yield Anomaly("stored_twice", f"{history.name(message)} lies at {places}, and was not sent again after a fence", ())
        elif any(partition not in fenced for _, partition, _ in copies[:-1]):
            yield Anomaly("stored_twice", f"{history.name(message)} lies at {places}; not all but the last of these were fenced", ())


def _other_ids(history: OrderedHistory) -> Iterator[Anomaly]:
    columns, told = history.deliveries, set[int]()
    ids = {message: place.id for message in history.copies if (place := history.messages.place[message]) is not None}
    for delivery, message in enumerate(columns.message):
        known = ids.setdefault(message, columns.id[delivery]) if message in history.copies else columns.id[delivery]
        if known != columns.id[delivery] and message not in told:
            told.add(message)
            what = f"the copies of {history.name(message)} have two ids, {known} and {columns.id[delivery]}: {history.when(delivery)}"
            yield Anomaly("stored_twice", what, ())


def _where(copy: tuple[int, ...]) -> str:
    return f"at sequence {copy[2]} of partition {copy[1]}"
