"""Subjects as Iceberg tables: each message once, whichever writers die."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from publishing import change_route, create_ordered, send, send_ordered, until_in_files
from pyiceberg.catalog import Catalog, load_catalog
from pyspark_qmq.lake import maintenance
from pyspark_qmq.lake.day_files import DayFile
from pyspark_qmq.lake.table import LakeTable, open_table
from pyspark_qmq.lake.task_runner import TaskOutput, TaskSource, write_tasks
from pyspark_qmq.lake.writer import LakeOptions, LakeWriter, RoundResult
from pyspark_qmq.options import ReadOptions, parse
from pyspark_qmq.planning import ReadTask
from support import NodeProcess

from qmq.errors import InvalidArgument
from qmq.proto.v1 import meta_pb2 as pb

pytestmark = pytest.mark.sampled

SMALL = LakeOptions(round_bytes=20_000)


class Lake:
    """A catalog, a node, and writers."""

    def __init__(self, catalog: Catalog, server: str) -> None:
        self.catalog = catalog
        self.server = server
        self._writers: list[LakeWriter] = []

    def asked(self, subject: str, **more: str) -> ReadOptions:
        return parse({"qmq.servers": self.server, "subscribe": subject, "startingOffsets": "earliest", **more}, is_stream=True)

    def writer(self, wanted: ReadOptions) -> LakeWriter:
        found = LakeWriter(self.catalog, wanted, SMALL)
        self._writers.append(found)
        return found

    def drain(self, wanted: ReadOptions) -> list[RoundResult]:
        done: list[RoundResult] = []
        self.writer(wanted).drain(done.append)
        return done

    def rows(self, subject: str) -> pa.Table:
        found = self.catalog.load_table(("qmq", subject)).scan().to_arrow()
        return found.sort_by([("route_version", "ascending"), ("partition", "ascending"), ("sequence", "ascending")])

    def bodies(self, subject: str) -> list[str]:
        return [each.decode() for each in self.rows(subject)["body"].to_pylist()]

    def close(self) -> None:
        for each in self._writers:
            each.close()
        self.catalog.close()


@pytest.fixture
def lake(node_process: NodeProcess, tmp_path: Path) -> Iterator[Lake]:
    node_process.start()
    catalog = load_catalog("lake", uri=f"sqlite:///{tmp_path}/catalog.db", warehouse=f"file://{tmp_path}/warehouse")
    found = Lake(catalog, node_process.address)
    yield found
    found.close()


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


def test_each_round_adds_what_came_since_and_no_round_adds_nothing(lake: Lake) -> None:
    wanted = lake.asked("orders")
    send(lake.server, "orders", ["a"])
    lake.drain(wanted)
    assert list(lake.writer(wanted).round()) == []
    send(lake.server, "orders", ["b"])
    lake.drain(wanted)
    assert lake.bodies("orders") == ["a", "b"]


def test_a_backlog_is_taken_in_rounds_of_bounded_size(lake: Lake) -> None:
    sent = [f"{number:0100}" for number in range(2000)]
    send(lake.server, "orders", sent)
    done = lake.drain(lake.asked("orders"))
    assert len(done) > 5
    assert lake.bodies("orders") == sent


def test_of_two_writers_one_commits_and_the_other_begins_again(lake: Lake) -> None:
    wanted = lake.asked("orders")
    send(lake.server, "orders", ["a"])
    lake.drain(wanted)
    first, second = lake.writer(wanted), lake.writer(wanted)
    assert list(first.round()) == list(second.round()) == []  # both know the table as it is now
    send(lake.server, "orders", ["b"])
    assert [each.is_refused for each in first.round()] == [False]
    assert [each.is_refused for each in second.round()] == [True]
    assert list(second.round()) == []
    assert lake.bodies("orders") == ["a", "b"]


def test_files_of_a_refused_commit_are_deleted(lake: Lake, tmp_path: Path) -> None:
    test_of_two_writers_one_commits_and_the_other_begins_again(lake)
    assert len(list(tmp_path.rglob("*.parquet"))) == 2


def test_what_a_writer_wrote_that_died_before_its_commit_is_in_the_table_once(lake: Lake) -> None:
    send(lake.server, "orders", ["a"])

    def dies(source: TaskSource, work: Sequence[ReadTask], output: TaskOutput) -> list[DayFile]:
        write_tasks(source, work, output)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(LakeWriter(lake.catalog, lake.asked("orders"), SMALL, run_tasks=dies).round())
    assert lake.bodies("orders") == []
    lake.drain(lake.asked("orders"))
    assert lake.bodies("orders") == ["a"]


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


def test_a_table_from_data_folders_is_the_one_from_brokers(node_process: NodeProcess, lake: Lake) -> None:
    send(lake.server, "orders", [str(number) for number in range(300)])
    until_in_files(node_process.data, "orders", 300)
    wanted = parse({"qmq.path": str(node_process.data), "subscribe": "orders", "startingOffsets": "earliest"}, is_stream=True)
    lake.drain(wanted)
    assert lake.bodies("orders") == [str(number) for number in range(300)]


def test_a_table_begins_where_the_user_says_and_keeps_that(lake: Lake) -> None:
    send(lake.server, "orders", ["a", "b"])
    wanted = lake.asked("orders", startingOffsets="latest")
    assert list(lake.writer(wanted).round()) == []
    send(lake.server, "orders", ["c"])
    lake.drain(wanted)  # another process: it would begin behind "c" if the table did not say where it began
    assert lake.bodies("orders") == ["c"]


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


def test_a_table_of_another_subject_is_refused(lake: Lake) -> None:
    open_table(lake.catalog, "qmq", "a.b")
    with pytest.raises(InvalidArgument, match=r"belongs to subject 'a\.b': choose another --namespace"):
        open_table(lake.catalog, "qmq", "a_b")


def test_the_writer_needs_no_spark() -> None:
    program = "import sys; sys.modules['pyspark'] = None; import pyspark_qmq.lake.writer, pyspark_qmq.lake.maintenance"
    subprocess.run([sys.executable, "-c", program], check=True)


# --- maintenance -----------------------------------------------------------------------------------------------------------


def filled(lake: Lake) -> LakeTable:
    """A table of one day, with many files."""
    create_ordered(lake.server, "bank", 2)
    for part in range(4):
        send_ordered(lake.server, "bank", [(f"k{number % 3}", f"{part} {number}") for number in range(50)])
        lake.drain(lake.asked("bank"))
    return open_table(lake.catalog, "qmq", "bank")


def tomorrow() -> date:
    return (datetime.now(UTC) + timedelta(days=1)).date()


def test_compaction_changes_no_row_and_sorts_by_logical_partition_and_key(lake: Lake) -> None:
    table = filled(lake)
    before = lake.rows("bank")
    done = list(maintenance.compact(table, tomorrow()))
    assert [(each.files_before, each.rows) for each in done] == [(4, 200)]
    assert lake.rows("bank").equals(before)
    (file,) = [each.file for each in lake.catalog.load_table("qmq.bank").scan().plan_files()]
    found = pq.read_table(file.file_path.removeprefix("file://"), partitioning=None).select(["logical_partition", "key"]).to_pylist()
    assert found == sorted(found, key=lambda row: (row["logical_partition"], row["key"]))


def test_a_writer_continues_behind_a_compaction(lake: Lake) -> None:
    table = filled(lake)
    running = lake.writer(lake.asked("bank"))
    assert list(running.round()) == []
    list(maintenance.compact(table, tomorrow()))
    send_ordered(lake.server, "bank", [("k0", "last")])
    assert [each.is_refused for each in running.round()] == [True]
    assert [(each.rows, each.is_refused) for each in running.round()] == [(1, False)]
    assert len(lake.rows("bank")) == 201


def test_days_that_are_not_over_are_left_alone(lake: Lake) -> None:
    table = filled(lake)
    assert list(maintenance.compact(table, datetime.now(UTC).date())) == []


def test_a_clock_that_is_ahead_expires_neither_snapshots_nor_files_of_a_writer(lake: Lake, tmp_path: Path) -> None:
    table = filled(lake)
    snapshots = len(table.iceberg.metadata.snapshots)
    (leftover := tmp_path / "warehouse/qmq/bank/data/day=2026-01-01").mkdir()
    (leftover / "uncommitted.parquet").write_bytes(b"a writer is about to commit it")
    done = maintenance.expire(table, datetime.now(UTC) + timedelta(days=365), timedelta(days=5))
    assert (done.snapshots, done.files, len(table.iceberg.metadata.snapshots)) == (0, 0, snapshots)
    assert (leftover / "uncommitted.parquet").exists()


def test_expiry_deletes_what_no_snapshot_names_and_nothing_else(lake: Lake, tmp_path: Path) -> None:
    table = filled(lake)
    list(maintenance.compact(table, tomorrow()))
    before = lake.rows("bank")
    (leftover := tmp_path / "warehouse/qmq/bank/data/day=2026-01-01").mkdir()
    (leftover / "crashed.parquet").write_bytes(b"half a file")
    assert maintenance.expire(table, datetime.now(UTC), timedelta()).files == 0  # all are younger than a day
    for path in tmp_path.rglob("*.parquet"):
        os.utime(path, (time.time() - 10 * 86_400,) * 2)
    done = maintenance.expire(table, datetime.now(UTC), timedelta())
    assert done.snapshots + len(table.iceberg.metadata.snapshots) >= 1
    assert len(list(tmp_path.rglob("*.parquet"))) == 1
    assert lake.rows("bank").equals(before)
    send_ordered(lake.server, "bank", [("k0", "last")])
    lake.drain(lake.asked("bank"))
    assert len(lake.rows("bank")) == 201
