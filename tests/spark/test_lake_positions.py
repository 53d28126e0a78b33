"""A table records its position in each queue, and keeps the record when other tools change the
table.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark_qmq.lake import table
from pyspark_qmq.lake.table import PROPERTY, Snapshot

from qmq.columns.model import QueueKey
from qmq.errors import LogDamaged

KEY = QueueKey("s", 0, "g1")
KEYS = st.builds(QueueKey, st.just("s"), st.integers(0, 99), st.sampled_from(["g1", "g-2", "a.b"]))


def at(sequence: int) -> dict[str, str]:
    return {PROPERTY: table.encode_positions("s", {KEY: sequence})}


@given(st.dictionaries(KEYS, st.integers(0, 1 << 60)))
def test_positions_survive_their_text(found: dict[QueueKey, int]) -> None:
    assert table.decode_positions("s", table.encode_positions("s", found)) == found


def test_a_new_table_has_none() -> None:
    assert table.newest("s", None, lambda _: None, {}) == {}


def test_snapshots_of_other_tools_are_passed_over() -> None:
    chain = {1: Snapshot(None, at(10)), 2: Snapshot(1, {}), 3: Snapshot(2, {})}
    assert table.newest("s", 3, chain.get, at(99)) == {KEY: 10}


def test_a_table_that_was_rolled_back_is_filled_again() -> None:
    chain = {1: Snapshot(None, at(10)), 2: Snapshot(1, at(20))}
    assert table.newest("s", 1, chain.get, at(20)) == {KEY: 10}


def test_the_tables_own_property_counts_when_all_ancestors_have_expired() -> None:
    assert table.newest("s", 3, {3: Snapshot(2, {})}.get, at(20)) == {KEY: 20}


def test_a_snapshot_that_qmq_lake_did_not_write_is_an_error() -> None:
    with pytest.raises(LogDamaged, match="was not written by qmq lake"):
        table.newest("s", 3, {3: Snapshot(2, {})}.get, {})


@pytest.mark.parametrize("text", ["", "[]", '{"0@g1":"x"}', '{"g1":1}', "null"])
def test_a_torn_property_is_an_error(text: str) -> None:
    with pytest.raises(LogDamaged):
        table.decode_positions("s", text)
