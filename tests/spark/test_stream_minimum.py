"""`minOffsetsPerTrigger` and `maxTriggerDelay`: a stream waits for enough messages, up to a time.
Without a JVM, and with a clock in the test's hand.
"""

from __future__ import annotations

import pytest
from file_support import Traffic, mark
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    ReadMinRows,
)
from pyspark.sql.types import StructType
from pyspark_qmq.stream import LogStreamReader

from qmq.columns.options import parse


class WaitingStream:
    """The source of a stream of at least ten messages a micro-batch, or after a minute."""

    def __init__(self, traffic: Traffic, **options: str) -> None:
        self.now_s = 1000.0
        self._traffic = traffic
        asked = parse(
            {
                "path": str(traffic.folder),
                "subscribe": "a",
                "startingOffsets": "earliest",
                "minOffsetsPerTrigger": "10",
                "maxTriggerDelay": "1m",
                **options,
            },
            is_stream=True,
        )
        self.reader = LogStreamReader(asked, StructType(), lambda: self.now_s)
        self.reader.stop()  # forgets what an earlier one knew
        self.send(1)
        self.at = self.reader.initialOffset()

    def send(self, count: int) -> None:
        self._traffic.send("a", count=count)
        mark(self._traffic.store)

    def trigger(self, limit: ReadLimit | None = None) -> int:
        """The number of messages of the next micro-batch; 0: Spark runs none."""
        limit = limit or self.reader.getDefaultReadLimit()
        before, self.at = self.at, self.reader.latestOffset(self.at, limit)
        if before == self.at:
            return 0
        return self.at["a"]["0@g1"] - before["a"]["0@g1"]


def test_few_messages_wait_until_there_are_enough(traffic: Traffic) -> None:
    stream = WaitingStream(traffic)
    assert stream.trigger() == 0
    stream.send(8)
    assert stream.trigger() == 0
    stream.send(1)
    assert stream.trigger() == 10
    assert stream.trigger() == 0


def test_few_messages_wait_no_longer_than_the_delay_from_when_the_first_is_seen(
    traffic: Traffic,
) -> None:
    stream = WaitingStream(traffic)
    assert stream.trigger() == 0
    stream.now_s += 59
    stream.send(1)
    assert stream.trigger() == 0
    stream.now_s += 1
    assert stream.trigger() == 2
    stream.now_s += 3600
    assert stream.trigger() == 0, "nothing waits"
    stream.send(1)
    assert stream.trigger() == 0, "an idle hour is no wait"
    stream.now_s += 60
    assert stream.trigger() == 1


def test_what_a_limit_leaves_waits_for_enough_messages_again(traffic: Traffic) -> None:
    stream = WaitingStream(traffic, maxOffsetsPerTrigger="12")
    stream.send(19)
    assert stream.trigger() == 12
    assert stream.trigger() == 0, "eight are too few"
    stream.now_s += 60
    assert stream.trigger() == 8


def test_queries_that_end_by_themselves_do_not_wait(traffic: Traffic) -> None:
    once = WaitingStream(traffic)
    assert once.trigger(ReadAllAvailable()) == 1, "as Trigger.Once asks"
    stream = WaitingStream(traffic)
    stream.reader.prepareForTriggerAvailableNow()
    assert stream.trigger() == 2
    assert stream.trigger() == 0


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ({}, ReadMinRows(10)),
        ({"maxOffsetsPerTrigger": "12"}, ReadMaxRows(12)),
        ({"maxBytesPerTrigger": "900"}, ReadMaxBytes(900)),
    ],
)
def test_the_limit_that_spark_is_told_is_never_that_of_a_query_that_ends(
    traffic: Traffic, options: dict[str, str], limit: ReadLimit
) -> None:
    assert WaitingStream(traffic, **options).reader.getDefaultReadLimit() == limit
