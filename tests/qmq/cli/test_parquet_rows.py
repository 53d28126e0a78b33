"""Well-formed Parquet files that other programs wrote: any subset of columns, and columns of other
types.
"""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from qmq.cli.transfer.parquet_rows import parquet_records, row_count
from qmq.errors import InvalidArgument

BODIES: Final = pa.array([b"one", b"two"])
OTHERS: Final = {
    "id": pa.array([f"{number:032x}" for number in (1, 2)]),
    "key": pa.array([b"k", None]),
    "tags": pa.array([["t"], []]),
    "more": pa.array([1, 2]),
}


@pytest.mark.parametrize("count", range(len(OTHERS) + 1))
def test_only_the_body_must_be_there(tmp_path: Path, count: int) -> None:
    path = tmp_path / "some.parquet"
    for names in combinations(OTHERS, count):
        pq.write_table(pa.table({"body": BODIES} | {name: OTHERS[name] for name in names}), path)
        assert [each.body for each in parquet_records(path, 0)] == [b"one", b"two"]
        assert [each.body for each in parquet_records(path, 1)] == [b"two"]
        assert row_count(path) == 2


@pytest.mark.parametrize(
    "kind",
    [pa.string(), pa.large_binary(), pa.binary(3), pa.dictionary(pa.int32(), pa.binary())],
    ids=str,
)
def test_a_body_may_have_any_type_of_bytes(tmp_path: Path, kind: pa.DataType) -> None:
    path = tmp_path / "some.parquet"
    pq.write_table(pa.table({"body": BODIES.cast(kind)}), path)
    assert [each.body for each in parquet_records(path, 0)] == [b"one", b"two"]


@pytest.mark.parametrize(
    "values",
    [[1.5, 2.5], [[b"a"], [b"b"]], [{"a": b"b"}, {"a": b"c"}]],
    ids=["numbers", "lists", "structs"],
)
@pytest.mark.parametrize("name", ["body", "key"])
def test_a_column_that_is_no_bytes_is_refused(
    tmp_path: Path, name: str, values: list[object]
) -> None:
    path = tmp_path / "some.parquet"
    pq.write_table(pa.table({"body": BODIES} | {name: pa.array(values)}), path)
    with pytest.raises(InvalidArgument):
        list(parquet_records(path, 0))
