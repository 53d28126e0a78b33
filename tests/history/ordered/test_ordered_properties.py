"""A correct ordered history has no anomaly; the same history with one false line has that line's anomaly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any, TypeVar

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from support.forms import examples

from history.events import Operation, Reset, from_json, to_json
from history.ordered import Deliver, Handed, Keyed, OrderedHistory, Put, Rerouted, Sealed, Settle, Stored, check_ordered
from history.ordered.generated import GROUPS, HISTORIES, LONG_HISTORIES, LP_OF, run

T = TypeVar("T")
Lines = list[Operation]
NOWHERE = 10_000
DRAW = st.data()
# Most drawn histories have what a lie needs; those that have not are drawn again.
lies = settings(suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow], max_examples=examples(50))


def pick(data: st.DataObject, choices: list[T]) -> T:
    assume(choices)
    return data.draw(st.sampled_from(choices))


def names(events: Lines, *, drained: bool = True) -> set[str]:
    return set(check_ordered(events, drained=drained, groups=GROUPS).names)


def rewritten(events: Lines, change: Callable[[Handed, Deliver], Handed | None]) -> Lines:
    """Every delivered message as `change` has it, or not at all; a settlement is about what was given."""
    found: Lines = []
    dropped = set[tuple[str, int, int, int]]()
    for event in events:
        if isinstance(event, Deliver):
            pairs = [(row, change(row, event)) for row in event.handed]
            dropped |= {(event.group, event.partition, event.token, row.sequence) for row, new in pairs if new is None}
            event = replace(event, handed=tuple(new for _, new in pairs if new is not None))
        elif isinstance(event, Settle):
            place = (event.group, event.partition, event.token)
            event = replace(event, sequences=tuple(each for each in event.sequences if (*place, each) not in dropped))
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
    row = Handed(columns.sequence[delivery], key, producer, history.messages.serial[message], 1, columns.id[delivery])
    return history.grant_of(delivery).partition, row


def handed_again(history: OrderedHistory, group: str, partition: int, *rows: Handed, token: int = NOWHERE, consumer: str = "x") -> Deliver:
    """A delivery under a token that is newer than all others."""
    part = history.routes.parts[partition]
    return Deliver(
        process=consumer, type="ok", group=group, partition=partition, first=part.first, end=part.end, token=token, version=1, handed=rows
    )


def acked(events: Lines) -> list[tuple[int, int]]:
    """Every acknowledged message: the place of the line, and the index in it."""
    return [
        (at, index)
        for at, event in enumerate(events)
        if isinstance(event, Put) and event.type == "ok"
        for index in range(len(event.places))
    ]


def with_place(events: Lines, at: int, index: int, place: Stored) -> Lines:
    event: Any = events[at]
    places = (*event.places[:index], place, *event.places[index + 1 :])
    return [*events[:at], replace(event, places=places), *events[at + 1 :]]


@given(HISTORIES)
def test_a_correct_ordered_history_has_no_anomaly(events: Lines) -> None:
    report = check_ordered(events, drained=True, groups=GROUPS)
    assert report.ok, str(report)


@given(HISTORIES, st.integers(0, 200))
def test_the_beginning_of_a_correct_ordered_history_has_no_anomaly(events: Lines, length: int) -> None:
    """Operations that are under way at the cut have an unknown outcome, which is never an anomaly."""
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
    assert all(totals[name] > 20 for name in ("unknown", "sent again after a fence", "with two copies", "repeated", "late", "changes")), (
        totals
    )


@lies
@given(LONG_HISTORIES, DRAW)
def test_a_message_that_one_group_is_never_given_is_lost(events: Lines, data: st.DataObject) -> None:
    at, index = pick(data, acked(events))
    event: Any = events[at]
    name, group = (event.process, *event.messages[index]), pick(data, list(GROUPS))
    lie = rewritten(events, lambda row, given: None if given.group == group and (row.producer, row.key, row.serial) == name else row)
    found = check_ordered(lie, drained=True, groups=GROUPS)
    assert found.names["lost"] == 1
    assert set(found.names) <= {"lost", "skipped", "torn_replay", "early"}
    assert f"{name[1]} {name[2]} of {name[0]}" in next(each.what for each in found.anomalies if each.name == "lost")


@lies
@given(LONG_HISTORIES, DRAW)
def test_a_message_that_was_never_sent_is_a_phantom(events: Lines, data: st.DataObject) -> None:
    history = OrderedHistory(events)
    delivery = pick(data, list(range(len(history.deliveries.message))))
    partition, row = given_at(history, delivery)
    lie = at_end(events, handed_again(history, "g", partition, row._replace(serial=NOWHERE, sequence=NOWHERE)))
    assert names(lie) == {"phantom"}


@lies
@given(LONG_HISTORIES, DRAW)
def test_a_message_that_certainly_failed_is_a_phantom(events: Lines, data: st.DataObject) -> None:
    at, _ = pick(data, acked(events))
    lie = [*events[:at], replace(events[at], type="fail", places=(), resent=None), *events[at + 1 :]]  # type: ignore[call-arg]
    assert names(lie) - {"stalled"} == {"phantom"}


@lies
@given(LONG_HISTORIES, DRAW)
def test_two_messages_of_a_line_that_a_group_got_in_reverse_are_out_of_order(events: Lines, data: st.DataObject) -> None:
    seen = set[tuple[str, ...]]()
    pairs: list[tuple[int, int]] = []
    for at, event in enumerate(events):
        fresh = [(event.group, *row[1:4]) for row in event.handed] if isinstance(event, Deliver) else []
        for index, (before, name) in enumerate(pairwise(fresh), 1):
            if before[1:3] == name[1:3] and not {before, name} & seen:
                pairs.append((at, index))
        seen.update(fresh)
    at, index = pick(data, pairs)
    given: Any = events[at]
    rows = list(given.handed)
    rows[index - 1], rows[index] = rows[index], rows[index - 1]
    lie = [*events[:at], replace(given, handed=tuple(rows)), *events[at + 1 :]]
    assert names(lie) & {"skipped", "torn_replay"}


@lies
@given(LONG_HISTORIES, DRAW)
def test_a_replay_that_leaves_one_out_is_torn(events: Lines, data: st.DataObject) -> None:
    """After an operator's reset the group may see all messages again, but not the first and the third without the second."""
    history = OrderedHistory(events)
    first: dict[int, tuple[int, Handed]] = {}
    for delivery, message in enumerate(history.deliveries.message):
        first.setdefault(message, given_at(history, delivery))
    lines = [line[:3] for line in history.by_rank if len(line) >= 3 and len({first[each][0] for each in line[:3]}) == 1]
    one, two, three = pick(data, [line for line in lines if not any(each in history.copies for each in line)])
    partition = first[one][0]
    back = Reset(process="operator", type="ok", group="g")
    again = [first[each][1] for each in (one, two, three)]
    assert names(at_end(events, back, handed_again(history, "g", partition, *again))) == set()
    assert names(at_end(events, back, handed_again(history, "g", partition, again[0], again[2]))) == {"torn_replay"}


@lies
@given(LONG_HISTORIES, DRAW)
def test_an_acknowledgement_of_a_lost_lane_that_counts_is_found(events: Lines, data: st.DataObject) -> None:
    at = pick(data, [at for at, event in enumerate(events) if isinstance(event, Settle) and event.type == "fail"])
    lie = [*events[:at], replace(events[at], type="ok"), *events[at + 1 :]]
    found = names(lie)
    assert found & {"zombie_ack", "came_back"}
    assert found <= {"zombie_ack", "came_back"}


@lies
@given(LONG_HISTORIES, DRAW)
def test_a_settled_message_that_is_given_again_came_back(events: Lines, data: st.DataObject) -> None:
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
        newest[grant.group, grant.partition] = max(best, delivery, key=lambda each: history.grant_of(each).token)
    delivery = pick(data, list(newest.values()))
    partition, row = given_at(history, delivery)
    grant = history.grant_of(delivery)
    assert names(at_end(events, handed_again(history, grant.group, partition, row, token=grant.token))) == {"shared_token"}


@lies
@given(LONG_HISTORIES, DRAW)
def test_a_partition_that_is_read_before_the_older_one_is_settled_is_early(events: Lines, data: st.DataObject) -> None:
    history = OrderedHistory(events)
    settled, messages = history.settled_at("g"), history.messages
    choices: list[tuple[int, int]] = []
    for line in history.by_rank:
        for before, after in pairwise(line):
            places = [place[0] for each in (before, after) if (place := messages.place[each]) is not None]
            is_change = len(places) == 2 and places[0] != places[1] and before not in history.copies and after not in history.copies
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
        return replace(event, sealed=tuple(min(each, top) if each.number == partition else each for each in event.sealed))

    lie = list(map(lowered, events))
    assert names(lie) == {"behind_seal"}


@lies
@given(LONG_HISTORIES, DRAW)
def test_a_message_in_a_partition_of_other_keys_is_found(events: Lines, data: st.DataObject) -> None:
    at, index = pick(data, acked(events))
    event: Any = events[at]
    lp = LP_OF[event.messages[index].key]
    parts = [each for each in OrderedHistory(events).routes.parts.values() if not each.first <= lp < each.end]
    lie = with_place(events, at, index, Stored(pick(data, parts).number, NOWHERE, event.places[index].id))
    assert names(lie) & {"wrong_partition", "behind_seal"}
    assert names(lie) <= {"wrong_partition", "behind_seal", "stored_twice", "early"}


@lies
@given(LONG_HISTORIES, DRAW)
def test_a_line_that_lies_in_another_order_is_found(events: Lines, data: st.DataObject) -> None:
    """Two messages of one put took each other's name everywhere but where they were sent."""
    history = OrderedHistory(events)
    lines = [line for line in history.by_rank if not any(each in history.copies for each in line)]
    pairs = [pair for line in lines for pair in pairwise(line) if len({history.messages.invoked_ns[each] for each in pair}) == 1]
    early, late = pick(data, pairs)
    one, two = history.messages.serial[early], history.messages.serial[late]
    producer, key = history.lines[history.messages.line[early]]
    swap = {one: two, two: one}

    def renamed(row: Handed, _: Deliver) -> Handed:
        return row._replace(serial=swap.get(row.serial, row.serial)) if (row.producer, row.key) == (producer, key) else row

    lie = rewritten(events, renamed)
    for place, event in enumerate(lie):
        if isinstance(event, Put) and event.type == "ok" and event.process == producer:
            found = tuple(Keyed(each.key, swap.get(each.serial, each.serial)) if each.key == key else each for each in event.messages)
            lie[place] = replace(event, messages=found)
    assert "log_order" in names(lie)


@lies
@given(LONG_HISTORIES, DRAW)
def test_a_second_copy_without_a_fence_is_found(events: Lines, data: st.DataObject) -> None:
    """The false line is the last one, so that it causes no other anomaly."""
    history = OrderedHistory(events)
    newest = {part for part in history.routes.parts if part not in history.routes.sealed}
    places = [(line[0], history.messages.place[line[0]]) for line in history.by_rank if line and history.messages.fate[line[0]] == "ok"]
    message, place = pick(data, [(message, place) for message, place in places if place is not None and place.partition in newest])
    producer, key = history.lines[history.messages.line[message]]
    row = Handed(NOWHERE, key, producer, history.messages.serial[message], 1, place.id)
    assert names(at_end(events, handed_again(history, "g", place.partition, row))) == {"stored_twice"}


@lies
@given(LONG_HISTORIES, DRAW)
def test_a_second_copy_with_another_id_is_found(events: Lines, data: st.DataObject) -> None:
    history = OrderedHistory(events)
    message = pick(data, sorted(history.copies))
    _, partition, sequence = history.copies[message][0]
    lie = rewritten(events, lambda row, given: row._replace(id=7) if (given.partition, row.sequence) == (partition, sequence) else row)
    assert names(lie) == {"stored_twice"}


@lies
@given(LONG_HISTORIES, DRAW)
def test_a_second_copy_that_was_not_sent_again_is_found(events: Lines, data: st.DataObject) -> None:
    history = OrderedHistory(events)
    again = [at for at, event in enumerate(events) if isinstance(event, Put) and event.resent]
    copied = [at for at in again if any(history.find(events[at].process, *each) in history.copies for each in events[at].messages)]  # type: ignore[attr-defined]
    at = pick(data, copied)
    lie = [*events[:at], replace(events[at], resent=None), *events[at + 1 :]]  # type: ignore[call-arg]
    assert names(lie) == {"stored_twice"}


@lies
@given(LONG_HISTORIES, DRAW)
def test_a_put_that_waits_without_a_reason_is_found(events: Lines, data: st.DataObject) -> None:
    at, _ = pick(data, acked(events))
    lie = [*events[:at], replace(events[at], t_ns=events[at].t_ns + 10**10), *events[at + 1 :]]
    assert names(lie) == {"stalled"}
