"""`qmq lake follow` as a process that is killed: each message is in the table once, in its key's
order.
"""

from __future__ import annotations

import random
from pathlib import Path

import pyarrow as pa
import pytest
from support import NodeProcess, forms
from system.group import SECURE, secured
from system.lake_run import BAD_EVERY, anomalies, lake_run


@pytest.mark.long
@pytest.mark.parametrize("is_typed", [False, True], ids=["bytes", "typed"])
async def test_every_message_is_in_the_table_once_though_writers_are_killed(
    node_process: NodeProcess, tmp_path: Path, is_typed: bool
) -> None:
    kills = 30 if forms.FORM == "all" else 4
    seed = random.Random(forms.SEED).randrange(10**6)
    async with secured(node_process, tmp_path, secure=SECURE):
        node_process.start()
        found = await lake_run(
            node_process.address,
            tmp_path,
            rows=10_000,
            kills=kills,
            changes=2,
            seed=seed,
            is_typed=is_typed,
        )
    assert found.anomalies == [], seed
    assert (found.rows, found.sum, found.kills, found.changes) == (
        10_000,
        sum(range(10_000)),
        kills,
        2,
    )
    assert found.rejected == (10_000 // BAD_EVERY if is_typed else 0)


def test_a_missing_doubled_or_misplaced_row_is_found() -> None:
    def table(*numbers: int) -> pa.Table:
        columns = {
            "route_version": [1] * len(numbers),
            "partition": [1] * len(numbers),
            "sequence": list(range(len(numbers))),
        }
        return pa.table(
            columns
            | {
                "key": [b"k"] * len(numbers),
                "body": [b"%d" % n for n in numbers],
                "logical_partition": [774] * len(numbers),
            }
        )

    assert anomalies(table(0, 1, 2), 3) == []
    assert anomalies(table(0, 2), 3) == ["1 is missing"]
    assert anomalies(table(0, 1, 1, 2), 3) == ["1 is there 2 times"]
    assert anomalies(table(0, 2, 1), 3) == ["1 of key b'k' stands behind 2"]
