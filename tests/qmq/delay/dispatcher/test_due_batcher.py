"""How batches are made of due messages."""

from __future__ import annotations

import random

from fake_brokers import due
from hypothesis import given
from hypothesis import strategies as st

from qmq import model
from qmq.delay.batches import DueMessage, SchedulePlace
from qmq.delay.due_window import DueBatcher, Limits, encoded, size_of, sort_of
from qmq.delay.plan_log import Draft
from qmq.wire.batch import BatchView, Envelope, Kind
from qmq.wire.batch_columns import BatchFlag

ERA = 1 << 32
DIRECTED = int(BatchFlag.DIRECTED)


def batcher(
    messages: list[DueMessage],
    most: int = 100,
    size: int = 1 << 20,
    suspects: dict[SchedulePlace, int] | None = None,
) -> DueBatcher:
    made = DueBatcher(Limits(most, size), suspects)
    made.messages.extend(messages)
    return made


def taken(made: DueBatcher) -> list[list[int]]:
    found = []
    while made:
        messages, size = made.take()
        assert size == sum(map(size_of, messages))
        found.append([message.place.ordinal for message in messages])
    return found


def test_batches_are_cut_by_count_and_bytes_and_a_larger_message_goes_alone() -> None:
    messages = [due(n) for n in range(7)]
    assert taken(batcher(messages, most=3)) == [[0, 1, 2], [3, 4, 5], [6]]
    assert taken(batcher(messages, size=2 * size_of(messages[0]))) == [[0, 1], [2, 3], [4, 5], [6]]
    large = [due(0), due(1, body=b"x" * 10_000), due(2)]
    assert taken(batcher(large, size=1_000)) == [[0], [1], [2]]


def test_create_times_too_far_apart_go_to_separate_batches_of_full_size() -> None:
    messages = [due(n, key=b"%d" % n, create_time_ms=(n % 3) * ERA + n) for n in range(30)]
    batches = taken(batcher(messages))
    assert [len(each) for each in batches] == [10, 10, 10]
    for each in batches:
        draft = Draft("s", 0, "g", 1, 2, [messages[n] for n in each])
        assert view_of(draft).create_times_ms() == [messages[n].create_time_ms for n in each]


def test_a_key_that_was_passed_over_is_not_overtaken() -> None:
    messages = [
        due(1, key=b"k"),
        due(2, key=b"l", flags=DIRECTED, headers={model.GROUP: b"g"}),
        due(3, key=b"l"),
        due(4, key=b"k"),
        due(5),
        due(6, flags=DIRECTED, headers={model.GROUP: b"g"}),
        due(7, flags=DIRECTED, headers={model.GROUP: b"h"}),
    ]
    assert taken(batcher(messages)) == [[1, 4, 5], [2, 6], [3], [7]]


def test_suspects_go_in_batches_of_the_size_that_is_left_to_them() -> None:
    messages = [due(n) for n in range(10)]
    suspects = {SchedulePlace(7, n): 2 for n in range(4)} | {SchedulePlace(7, 4): 1}
    assert taken(batcher(messages, suspects=suspects)) == [[0, 1], [2, 3], [4], [5, 6, 7, 8, 9]]


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2), st.integers(0, 2)), max_size=60),
    st.integers(1, 9),
    st.randoms(),
)
def test_every_message_leaves_once_each_key_in_order_and_batches_are_of_one_sort(
    kinds: list[tuple[int, int, int]], most: int, chance: random.Random
) -> None:
    messages = [
        due(
            n,
            key=b"%d" % key if key else b"",
            create_time_ms=era * ERA,
            flags=DIRECTED if group else int(BatchFlag.ORDERED),
            headers={model.GROUP: b"%d" % group} if group else {},
        )
        for n, (key, era, group) in enumerate(kinds)
    ]
    made, left = batcher(messages, most=most), set[int]()
    if messages and chance.random() < 0.5:
        left = {chance.randrange(len(messages))}
        assert all(made.withdraw(SchedulePlace(7, n)) for n in left)
        assert not any(made.withdraw(SchedulePlace(7, n)) for n in left)
    batches = taken(made)
    flat = [n for each in batches for n in each]
    assert sorted(flat) == [n for n in range(len(messages)) if n not in left]
    assert all(
        len({sort_of(messages[n]) for n in each}) == 1 and len(each) <= most for each in batches
    )
    for key in {message.key for message in messages} - {b""}:
        mine = [n for n in flat if messages[n].key == key]
        assert mine == sorted(mine)


def view_of(draft: Draft) -> BatchView:
    envelope, region = encoded(draft)
    return BatchView(Envelope(Kind.DATA, len(envelope) + len(region), 0, 0, 1, 1, 1, 0), region)
