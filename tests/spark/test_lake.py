"""Subjects as Iceberg tables: each message once, whichever writers die."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from lake_support import (
    PROMISES,
    SMALL,
    Lake,
    expiry_deletes_what_no_snapshot_names_and_nothing_else,
    filled,
    lake,
    of_two_writers_one_commits_and_the_other_begins_again,
)
from publishing import change_route, create_ordered, send, send_ordered, until_in_files
from pyspark_qmq.lake import maintenance
from pyspark_qmq.lake.writer import LakeWriter
from support import NodeProcess

from qmq.columns.options import parse
from qmq.proto.v1 import meta_pb2 as pb

__all__ = ["lake"]

pytestmark = pytest.mark.sampled


def test_committed_messages_are_in_the_table_with_all_columns(lake: Lake) -> None:
    send(lake.server, "orders", ["a", "b"], ["k1", "k2"], [["x"], []], [{"h": b"1"}, {}])
    (done,) = lake.drain(lake.asked("orders"))
    found = lake.rows("orders")
    assert (done.rows, done.files, done.is_behind) == (2, 1, False)
    assert found["key"].to_pylist() == [b"k1", b"k2"]
    assert found["tags"].to_pylist() == [["x"], []]
    assert found["headers"].to_pylist() == [[("h", b"1")], []]
    assert found["sequence"].to_pylist() == [0, 1]
    assert {len(each) for each in found["message_id"].to_pylist()} == {32}


def test_a_backlog_is_taken_in_rounds_of_bounded_size(lake: Lake) -> None:
    sent = [f"{number:0100}" for number in range(2000)]
    send(lake.server, "orders", sent)
    done = lake.drain(lake.asked("orders"))
    assert len(done) > 5
    assert lake.bodies("orders") == sent


def test_files_of_a_refused_commit_are_deleted(lake: Lake, tmp_path: Path) -> None:
    of_two_writers_one_commits_and_the_other_begins_again(lake)
    assert len(list(tmp_path.rglob("*.parquet"))) == 2


def test_a_key_stays_in_order_through_a_split_and_a_merge(lake: Lake) -> None:
    create_ordered(lake.server, "bank", 1)
    wanted = lake.asked("bank")
    pairs = [(f"k{number % 7}", str(number)) for number in range(700)]
    send_ordered(lake.server, "bank", pairs[:200])
    lake.drain(wanted)
    change_route(lake.server, "bank", split=pb.SplitOperation(partition=1))
    send_ordered(lake.server, "bank", pairs[200:400])
    change_route(lake.server, "bank", merge=pb.MergeOperation(partitions=[2, 3]))
    send_ordered(lake.server, "bank", pairs[400:])
    lake.drain(wanted)
    found = lake.rows("bank")
    by_key: dict[bytes, list[int]] = {}
    for key, body in zip(found["key"].to_pylist(), found["body"].to_pylist(), strict=True):
        by_key.setdefault(key, []).append(int(body))
    assert by_key == {f"k{n}".encode(): list(range(n, 700, 7)) for n in range(7)}
    assert len(set(found["route_version"].to_pylist())) == 3


def test_a_table_from_data_folders_is_the_one_from_brokers(
    node_process: NodeProcess, lake: Lake
) -> None:
    send(lake.server, "orders", [str(number) for number in range(300)])
    until_in_files(node_process.data, "orders", 300)
    wanted = parse(
        {"qmq.path": str(node_process.data), "subscribe": "orders", "startingOffsets": "earliest"},
        is_stream=True,
    )
    lake.drain(wanted)
    assert lake.bodies("orders") == [str(number) for number in range(300)]


class Stopping(threading.Event):
    """An event that is set after some waits, and records the timeouts."""

    def __init__(self, waits: int) -> None:
        super().__init__()
        self.waits: list[float] = []
        self._left = waits

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.waits.append(timeout)
        if len(self.waits) == self._left:
            self.set()
        return self.is_set()


def test_rounds_begin_an_interval_apart_however_long_they_take(lake: Lake) -> None:
    send(lake.server, "orders", ["a"])
    times_s = iter([100.0, 103.0, 110.0, 125.0])  # each round's begin and end
    writer = LakeWriter(lake.catalog, lake.asked("orders"), SMALL, monotonic=lambda: next(times_s))
    writer.run(stopping := Stopping(2), 10.0, lambda _: None)
    writer.close()
    assert stopping.waits == [7.0, 0.0]
    assert lake.bodies("orders") == ["a"]


def test_the_writer_needs_no_spark() -> None:
    program = (
        "import sys; sys.modules['pyspark'] = None; import pyspark_qmq.lake.writer, "
        "pyspark_qmq.lake.maintenance"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


# --- maintenance ----------------------------------------------------------------------------------


def test_days_that_are_not_over_are_left_alone(lake: Lake) -> None:
    table = filled(lake)
    assert list(maintenance.compact(table, datetime.now(UTC).date())) == []


def test_a_clock_that_is_ahead_expires_neither_snapshots_nor_files_of_a_writer(
    lake: Lake, tmp_path: Path
) -> None:
    table = filled(lake)
    snapshots = len(table.iceberg.metadata.snapshots)
    (leftover := tmp_path / "warehouse/qmq/bank/data/day=2026-01-01").mkdir()
    (leftover / "uncommitted.parquet").write_bytes(b"a writer is about to commit it")
    done = maintenance.expire(table, datetime.now(UTC) + timedelta(days=365), timedelta(days=5))
    assert (done.snapshots, done.files, len(table.iceberg.metadata.snapshots)) == (0, 0, snapshots)
    assert (leftover / "uncommitted.parquet").exists()


@pytest.mark.parametrize("promise", PROMISES, ids=lambda each: each.__name__)
def test_a_promise_holds(lake: Lake, promise: Callable[[Lake], None]) -> None:
    promise(lake)


def test_expiry_deletes_what_no_snapshot_names_and_nothing_else(lake: Lake, tmp_path: Path) -> None:
    expiry_deletes_what_no_snapshot_names_and_nothing_else(lake, tmp_path)
