"""A stream after retention deleted what its checkpoint needs: errors and behaviour. A real store,
real files, a real Spark.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from file_support import Traffic, folder_in_memory, forget_old, mark
from pyspark.sql import DataFrame, SparkSession


@pytest.fixture
def traffic() -> Iterator[Traffic]:
    """A store with small segments."""
    with folder_in_memory() as folder:
        found = Traffic(folder, Random(1))
        yield found
        found.store.close()


class Reading:
    """A stream over a store's files; keeps the sequences it was given."""

    def __init__(self, spark: SparkSession, folder: Path, checkpoint: Path) -> None:
        self._spark, self._folder, self._checkpoint = spark, folder, checkpoint
        self.sequences: list[int] = []

    def run(self, **options: str) -> None:
        frame = (
            self._spark.readStream.format("qmq")
            .options(**{"subscribe": "a", "startingOffsets": "earliest"})
            .options(**options)
        )
        query = (
            frame.load(str(self._folder))
            .writeStream.foreachBatch(self._keep)
            .option("checkpointLocation", str(self._checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()

    def _keep(self, frame: DataFrame, number: int) -> None:
        self.sequences += sorted(row["sequence"] for row in frame.select("sequence").collect())


def lose_the_beginning(traffic: Traffic) -> int:
    """Send more messages, and let retention delete all but the newest. Returns the oldest remaining
    sequence.
    """
    for _ in range(100):
        traffic.send("a", count=5)
    forget_old(traffic.store, retention_ms=200)
    mark(traffic.store)
    queue = traffic.store.queue("a", 0)
    assert queue is not None
    return queue.start_sequence


def test_a_stream_names_the_missing_range_and_continues_with_the_rest_if_asked(
    spark: SparkSession, traffic: Traffic, tmp_path: Path
) -> None:
    traffic.send("a", count=5)
    mark(traffic.store)
    reading = Reading(spark, traffic.folder, tmp_path)
    reading.run()
    oldest = lose_the_beginning(traffic)
    assert oldest > 5
    with pytest.raises(
        Exception, match=rf"E110.*messages 5 to {oldest - 1} of a/0@.*failOnDataLoss=false"
    ):
        reading.run()
    assert reading.sequences == [0, 1, 2, 3, 4], "nothing was given that would hide the loss"
    reading.run(failOnDataLoss="false")
    assert reading.sequences == [0, 1, 2, 3, 4, *range(oldest, traffic.end("a"))]
