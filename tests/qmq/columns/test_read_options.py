"""The options of a read, and the errors about wrong ones."""

from __future__ import annotations

import pytest

from qmq.columns import options
from qmq.columns.model import ReadSelection
from qmq.columns.planning import Limit, Minimum
from qmq.errors import InvalidArgument, InvalidName

BASE = {"qmq.servers": "localhost:20880", "subscribe": "orders"}


def refused(given: dict[str, str], *, is_stream: bool = False) -> str:
    with pytest.raises((InvalidArgument, InvalidName)) as caught:
        options.parse(given, is_stream=is_stream)
    return str(caught.value)


def test_a_batch_query_reads_everything_and_a_stream_only_new_messages() -> None:
    batch, stream = options.parse(BASE, is_stream=False), options.parse(BASE, is_stream=True)
    assert (batch.start, batch.end, stream.start) == ("earliest", "latest", "latest")
    assert batch.choice.subjects == ("orders",)
    assert not batch.skips_lost
    assert batch.selection.is_all
    assert stream.plan.keeps_order
    assert not batch.plan.keeps_order


def test_names_are_case_insensitive_as_sparks_own() -> None:
    asked = options.parse(
        {"QMQ.Servers": "a:1", "SUBSCRIBE": "x,y , x", "STARTINGoffsets": "Earliest"},
        is_stream=True,
    )
    assert (asked.where.servers, asked.choice.subjects, asked.start) == (
        "a:1",
        ("x", "y"),
        "earliest",
    )


@pytest.mark.parametrize("name", options.NAMES)
def test_a_misspelt_option_is_refused_with_the_nearest_name(name: str) -> None:
    misspelt = name[:-1] + "q"
    assert f"did you mean {name!r}" in refused({**BASE, misspelt: "1"}) or name in (
        "keys",
        "path",
        "tags",
    )


def test_an_option_that_resembles_nothing_is_refused_with_all_names() -> None:
    assert "options: qmq.servers" in refused({**BASE, "zzz": "1"})


def test_the_place_of_the_log_is_required() -> None:
    assert "qmq.servers" in refused({"subscribe": "orders"})
    assert options.parse({"path": "/a,/b", "subscribe": "s"}, is_stream=False).where.paths == (
        "/a",
        "/b",
    )


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"subscribePattern": "x.*"}, "exactly one of subscribe, subscribePattern, assign"),
        ({"assign": "{}"}, "exactly one"),
        ({"startingOffsets": "latest"}, "would return no rows"),
        ({"endingOffsets": "earliest"}, "would return no rows"),
        ({"startingOffsets": "earliest", "startingTimestamp": "5"}, "not both"),
        ({"maxOffsetsPerTrigger": "5"}, "for streams only"),
        ({"minOffsetsPerTrigger": "5"}, "for streams only"),
        ({"minPartitions": "0"}, "1 or more"),
        ({"minPartitions": "many"}, "integer"),
        ({"failOnDataLoss": "yes"}, "true or false"),
        ({"keyFrom": "b", "keyUntil": "b"}, "below keyUntil"),
        ({"tags": '["a", 5]'}, "array of strings"),
        ({"tags": '["a"'}, "not JSON"),
    ],
)
def test_wrong_options_of_a_batch_read_are_refused(more: dict[str, str], says: str) -> None:
    assert says in refused({**BASE, **more})


@pytest.mark.parametrize("more", [{"endingOffsets": "latest"}, {"endingTimestamp": "7"}])
def test_a_stream_has_no_end(more: dict[str, str]) -> None:
    assert "for batch reads only" in refused({**BASE, **more}, is_stream=True)


@pytest.mark.parametrize(
    ("text", "delay_ms"),
    [("15m", 900_000), ("90s", 90_000), ("500MS", 500), ("7", 7), ("2 h", 7_200_000)],
)
def test_the_longest_wait_for_enough_messages_is_a_duration_as_spark_writes_it(
    text: str, delay_ms: int
) -> None:
    given = {**BASE, "minOffsetsPerTrigger": "5", "maxTriggerDelay": text}
    assert options.parse(given, is_stream=True).minimum == Minimum(5, delay_ms)


def test_messages_wait_for_a_quarter_of_an_hour_at_most_as_for_sparks_kafka_source() -> None:
    given = {**BASE, "minOffsetsPerTrigger": "5", "maxOffsetsPerTrigger": "5"}
    assert options.parse(given, is_stream=True).minimum == Minimum(5, 15 * 60_000)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"maxTriggerDelay": "5s"}, "needs option minOffsetsPerTrigger"),
        ({"minOffsetsPerTrigger": "5", "maxTriggerDelay": "soon"}, "a duration such as"),
        ({"minOffsetsPerTrigger": "5", "maxTriggerDelay": "5 weeks"}, "a duration such as"),
        ({"minOffsetsPerTrigger": "5", "maxTriggerDelay": "9" * 30}, "a duration such as"),
        ({"minOffsetsPerTrigger": "0"}, "1 or more"),
        ({"minOffsetsPerTrigger": "6", "maxOffsetsPerTrigger": "5"}, "more than maxOffsets"),
    ],
)
def test_a_wrong_minimum_is_refused(more: dict[str, str], says: str) -> None:
    assert says in refused({**BASE, **more}, is_stream=True)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"subscribe": ""}, "names no subject"),
        ({"subscribe": "a/b"}, "may hold only letters"),
        ({"subscribePattern": "("}, "not a regular expression"),
        ({"assign": '{"orders": "0@g1"}'}, "option assign must be JSON"),
        ({"assign": "nonsense"}, "not JSON"),
        ({}, "exactly one"),
    ],
)
def test_a_wrong_choice_of_subjects_is_an_error_with_advice(
    given: dict[str, str], says: str
) -> None:
    assert says in refused({"qmq.servers": "a:1", **given})


def test_selection_limits_and_plan_are_read() -> None:
    asked = options.parse(
        {
            **BASE,
            "tags": "red, green",
            "tagsAll": '["a,b"]',
            "keys": "k1",
            "keyFrom": "a",
            "keyUntil": "z",
            "includeDirected": "true",
            "maxOffsetsPerTrigger": "100",
            "maxBytesPerTrigger": "5000",
            "minPartitions": "7",
            "failOnDataLoss": "false",
        },
        is_stream=True,
    )
    assert asked.selection == ReadSelection(("red", "green"), ("a,b",), (b"k1",), b"a", b"z", True)
    assert asked.limit == Limit(100, 5000)
    assert (asked.plan.pieces_min, asked.skips_lost) == (7, True)


def test_another_log_is_asked_for_by_name() -> None:
    assert options.log_of({"qmq.log": "deliveries"}) == "deliveries"
    with pytest.raises(InvalidArgument, match="messages, deliveries, progress, schedules"):
        options.log_of({"qmq.log": "message"})
