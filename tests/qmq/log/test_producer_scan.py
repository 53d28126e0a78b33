"""Looking for a producer's batches in a consume log: the scan by columns agrees with a slow one,
over files, memory and retention.
"""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from qmq.log.consume_log import ConsumeLog, IndexEntry
from qmq.log.disk import Disk
from qmq.model import Partition, QueueId


@pytest.mark.parametrize("seed", range(10))
def test_the_scan_by_columns_finds_what_a_slow_one_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr("qmq.log.consume_log.FILE_ENTRIES", 8)
    coin = Random(seed)
    index = ConsumeLog(Disk(), tmp_path, QueueId("s", Partition(0)))
    producers = [7, 1 << 63, (1 << 64) - 1]
    for number in range(coin.randrange(60)):
        index.append(
            IndexEntry(
                number, number * 200, 1, coin.choice(producers), coin.randrange(20), 0, 0, 200, 1
            )
        )
        if coin.random() < 0.1:
            spill = index.spill()
            assert spill is not None
            index.write_spill(spill)
            index.spilled(spill)
    index.first = coin.randrange(index.persisted + 1)
    entries = [entry for _, entry in index.scan(index.first)]
    for producer in producers:
        found, before = list[IndexEntry](), index.count
        while before > index.first:
            before, sent = index.of_producer(producer, before)
            found += sent
        expected = [entry for entry in entries if entry.producer_id == producer][::-1]
        assert found == expected
        assert index.newest_of(producer) == max(
            [each.batch_sequence for each in expected], default=-1
        )
        for number in range(20):
            assert index.find_batch(producer, number, 0) == next(
                (each for each in expected if each.batch_sequence == number), None
            )


def test_a_table_equals_the_entries_of_the_consume_log(tmp_path: Path) -> None:
    index = ConsumeLog(Disk(), tmp_path, QueueId("s", Partition(0)))
    for number in range(10):
        index.append(IndexEntry(number, 2, 3, 4, 5, (1 << 64) - 1, 7, 8, 9))
    assert [IndexEntry._make(each) for each in index.table(3, 4).tolist()] == index.entries(3, 4)
