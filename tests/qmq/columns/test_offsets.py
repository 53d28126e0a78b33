"""Offsets as text, and what users may write for them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qmq.columns import offsets
from qmq.columns.model import QueueKey, SourceQueue
from qmq.errors import InvalidArgument

KEYS = st.builds(
    QueueKey,
    st.sampled_from(["a", "b.c", "orders"]),
    st.integers(0, 40),
    st.sampled_from(["g1", "g-2"]),
)


def queue(subject: str, partition: int, group: str, start: int, end: int) -> SourceQueue:
    return SourceQueue(QueueKey(subject, partition, group), start, end)


QUEUES = [
    queue("orders", 0, "g1", 5, 50),
    queue("orders", 0, "g2", 0, 9),
    queue("bank", 3, "g1", 2, 7),
]


@given(st.dictionaries(KEYS, st.integers(0, 1 << 50)))
def test_offsets_survive_their_json(found: dict[QueueKey, int]) -> None:
    assert offsets.of_json(json.loads(json.dumps(offsets.to_json(found)))) == found


@given(st.dictionaries(KEYS, st.integers(0, 1 << 50), min_size=2))
def test_equal_offsets_are_equal_text(found: dict[QueueKey, int]) -> None:
    turned = dict(reversed(found.items()))
    assert json.dumps(offsets.to_json(found)) == json.dumps(offsets.to_json(turned))


def test_earliest_and_latest_are_the_ends_of_what_is_kept() -> None:
    assert offsets.resolve("startingOffsets", "earliest", QUEUES, "earliest") == {
        QUEUES[0].key: 5,
        QUEUES[1].key: 0,
        QUEUES[2].key: 2,
    }
    assert offsets.resolve("endingOffsets", "latest", QUEUES, "latest") == {
        QUEUES[0].key: 50,
        QUEUES[1].key: 9,
        QUEUES[2].key: 7,
    }


def test_a_users_json_names_queues_numbers_and_special_places() -> None:
    given_ = offsets.parse_given(
        "startingOffsets", '{"orders": {"0@g1": 23, "0@g2": -1}, "bank": {"3": -2}}'
    )
    assert offsets.resolve("startingOffsets", given_, QUEUES, "earliest") == {
        QUEUES[0].key: 23,
        QUEUES[1].key: 9,
        QUEUES[2].key: 2,
    }


def test_queues_that_a_users_json_leaves_out_begin_at_the_default() -> None:
    given_ = offsets.parse_given("endingOffsets", '{"bank": {"3@g1": 4}}')
    assert offsets.resolve("endingOffsets", given_, QUEUES, "latest") == {
        QUEUES[0].key: 50,
        QUEUES[1].key: 9,
        QUEUES[2].key: 4,
    }


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("newest", "earliest, latest, or JSON"),
        ("[1]", "must map subjects"),
        ('{"orders": 5}', "must map subjects"),
        ('{"orders": {"0@g1": -3}}', "-1 (latest) or -2 (earliest)"),
        ('{"orders": {"0@g1": true}}', "must be a sequence"),
        ('{"orders": {"0@g1": "7"}}', "must be a sequence"),
    ],
)
def test_an_invalid_offset_is_refused_with_the_valid_forms(text: str, says: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        offsets.parse_given("startingOffsets", text)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("within", "says"), [("0", "several queues"), ("7", "no queue"), ("0@g9", "queues: 0@g1, 0@g2")]
)
def test_an_ambiguous_queue_is_refused_with_a_list_of_the_queues(within: str, says: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        offsets.resolve("startingOffsets", {"orders": {within: 1}}, QUEUES, "earliest")
    assert says in str(caught.value)
