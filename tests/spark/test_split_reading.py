"""Which messages a read takes from the lake, and which from the log."""

from __future__ import annotations

from random import Random

import pytest
from pyspark_qmq.lake import table
from pyspark_qmq.lake.snapshot import LakeExtent, edges, extents, joined, split

from qmq.columns.model import QueueKey, SourceQueue, Topology
from qmq.columns.options import parse
from qmq.columns.planning import PlannedRange
from qmq.errors import InvalidArgument, MessagesExpired

ONE, TWO = QueueKey("orders", 0, "g1"), QueueKey("orders", 0, "g2")


def log(start: int, end: int, key: QueueKey = ONE) -> dict[QueueKey, SourceQueue]:
    return {key: SourceQueue(key, start, end)}


def test_history_comes_from_the_lake_and_the_tail_from_the_log() -> None:
    found = split({ONE: 0}, {ONE: 100}, log(30, 100), {ONE: LakeExtent(0, 70)}, skips_lost=False)
    assert found == ([PlannedRange(ONE, 0, 70)], [PlannedRange(ONE, 70, 100)])


def test_messages_that_neither_has_fail_the_read_and_are_named() -> None:
    with pytest.raises(
        MessagesExpired,
        match=r"messages 70 to 79 of orders/0@g1 .* which has 0 to 69; .*failOnDataLoss=false",
    ):
        split({ONE: 0}, {ONE: 100}, log(80, 100), {ONE: LakeExtent(0, 70)}, skips_lost=False)
    found = split({ONE: 0}, {ONE: 100}, log(80, 100), {ONE: LakeExtent(0, 70)}, skips_lost=True)
    assert found == ([PlannedRange(ONE, 0, 70)], [PlannedRange(ONE, 80, 100)])


def test_a_queue_without_the_log_ends_where_the_lake_ends() -> None:
    held = {ONE: LakeExtent(5, 70)}
    assert joined(Topology({}), held, may_lag=False).queues == {ONE: SourceQueue(ONE, 5, 70)}
    assert split({ONE: 5}, {ONE: 70}, {}, held, skips_lost=False) == (
        [PlannedRange(ONE, 5, 70)],
        [],
    )


def test_a_table_ahead_of_the_log_is_of_another_cluster_unless_files_may_lag() -> None:
    held = {ONE: LakeExtent(0, 70)}
    with pytest.raises(InvalidArgument, match="up to 69 of orders/0@g1, and the log ends at 50"):
        joined(Topology(log(0, 50)), held, may_lag=False)
    assert joined(Topology(log(0, 50)), held, may_lag=True).queues[ONE].end == 70


def test_each_wanted_message_is_in_one_range_whatever_lake_and_log_have() -> None:
    random = Random(23)
    for _ in range(3_000):
        start, end = sorted(random.sample(range(30), 2))
        first, last = sorted(random.choices(range(end + 1), k=2))
        begin, until = sorted(random.choices(range(end + 1), k=2))
        held = extents({ONE: first}, {ONE: last})
        found = split({ONE: begin}, {ONE: until}, log(start, end), held, skips_lost=True)
        read = [
            number for each in [*found.lake, *found.log] for number in range(each.first, each.end)
        ]
        lake = set(range(first, last))
        assert sorted(read) == [
            number for number in range(begin, until) if number in lake or start <= number < end
        ]
        assert all(number in lake for each in found.lake for number in range(each.first, each.end))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (0, 100)),
        ({"startingOffsets": '{"orders":{"0":-2}}'}, (0, 100)),
        (
            {"startingOffsets": '{"orders":{"0":10}}', "endingOffsets": '{"orders":{"0":20}}'},
            (10, 20),
        ),
        ({"startingTimestamp": "500"}, (50, 100)),  # the log knows
        ({"startingTimestamp": "200"}, (0, 100)),  # only rows tell
        ({"startingTimestamp": "100", "endingTimestamp": "200"}, (0, 30)),
    ],
)
def test_a_read_starts_and_ends_where_lake_and_log_together_do(
    options: dict[str, str], expected: tuple[int, int]
) -> None:
    asked = parse({"qmq.servers": "x:1", "subscribe": "orders", **options}, is_stream=False)
    queues = Topology(log(30, 100))
    whole = joined(queues, {ONE: LakeExtent(0, 70)}, may_lag=False)
    # a message each 10 ms
    start, end = edges(asked, whole, queues, lambda _, time_ms: min(max(time_ms // 10, 30), 100))
    assert (start[ONE], end[ONE]) == expected


def test_a_table_is_complete_from_behind_the_last_messages_that_were_skipped() -> None:
    assert table.complete_from({}, {}, {ONE: 9}, {ONE: 0}) == {}
    assert table.complete_from({}, {ONE: 9}, {ONE: 30}, {ONE: 20}) == {ONE: 20}
    assert table.complete_from({ONE: 20}, {ONE: 30}, {ONE: 40}, {ONE: 30}) == {ONE: 20}
    assert table.complete_from({ONE: 20}, {ONE: 40}, {ONE: 60}, {}) == {ONE: 60}, "nothing was left"
    assert table.complete_from({ONE: 20}, {ONE: 40}, {ONE: 40}, {}) == {ONE: 20}
