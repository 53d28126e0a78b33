"""Lakes of subjects: their catalogs, their writers, and what they hold."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from publishing import create_ordered, send, send_ordered
from pyiceberg.catalog import Catalog, load_catalog
from pyspark_qmq.lake import maintenance
from pyspark_qmq.lake.catalog import open_catalog
from pyspark_qmq.lake.day_files import DayFile
from pyspark_qmq.lake.table import LakeTable, open_table
from pyspark_qmq.lake.task_runner import TaskOutput, TaskSource, write_tasks
from pyspark_qmq.lake.writer import LakeOptions, LakeWriter, RoundResult
from pyspark_qmq.lake_reader import LakeReader
from pyspark_qmq.reader import LogReader
from pyspark_qmq.source_schema import default_schema
from support import NodeProcess

import qmq.blocking
from qmq.columns.options import ReadOptions, parse
from qmq.columns.planning import ReadTask
from qmq.errors import InvalidArgument

SMALL = LakeOptions(round_bytes=20_000)


class Lake:
    """A catalog, a node, and writers."""

    def __init__(self, catalog: Catalog, server: str) -> None:
        self.catalog = catalog
        self.server = server
        self._writers: list[LakeWriter] = []

    def asked(self, subject: str, **more: str) -> ReadOptions:
        return parse(
            {
                "qmq.servers": self.server,
                "subscribe": subject,
                "startingOffsets": "earliest",
                **more,
            },
            is_stream=True,
        )

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
        return found.sort_by(
            [("route_version", "ascending"), ("partition", "ascending"), ("sequence", "ascending")]
        )

    def bodies(self, subject: str) -> list[str]:
        return [each.decode() for each in self.rows(subject)["body"].to_pylist()]

    def close(self) -> None:
        for each in self._writers:
            each.close()
        self.catalog.close()


def tomorrow() -> date:
    return (datetime.now(UTC) + timedelta(days=1)).date()


SCHEMA = default_schema(with_headers=True)


ORDER = [("partition", "ascending"), ("sequence", "ascending")]


class HistoryReader:
    """Reads in this process what Spark's driver and executors read."""

    def __init__(self, lake: Lake, folder: Path) -> None:
        self.lake = lake
        self.uri = f"sqlite:///{folder}/catalog.db"

    def options(self, subject: str, **more: str) -> dict[str, str]:
        return {"qmq.servers": self.lake.server, "subscribe": subject, "qmq.lake": self.uri, **more}

    def reader(self, options: dict[str, str]) -> LakeReader | LogReader:
        asked = parse(options, is_stream=False)
        return (
            LogReader(asked, SCHEMA)
            if asked.lake is None
            else LakeReader(asked, asked.lake, SCHEMA)
        )

    def rows(self, options: dict[str, str]) -> pa.Table:
        found = self.reader(options)
        batches = [batch for each in found.partitions() for batch in found.read(each)]
        return pa.Table.from_batches(
            batches, batches[0].schema if batches else pa.schema([("body", pa.binary())])
        )

    def both(self, subject: str, **more: str) -> pa.Table:
        """Read from lake and log, sorted. Checks that the log alone, which has all messages, gives
        the same rows.
        """
        found = self.rows(self.options(subject, **more)).sort_by(ORDER)
        log = {
            key: value for key, value in self.options(subject, **more).items() if key != "qmq.lake"
        }
        assert found.equals(self.rows(log).sort_by(ORDER))
        return found

    def bodies(self, subject: str, **more: str) -> list[str]:
        """Read from lake and log, sorted."""
        return sorted(
            each.decode() for each in self.rows(self.options(subject, **more))["body"].to_pylist()
        )

    def follow(self, subject: str, **more: str) -> None:
        self.lake.drain(self.lake.asked(subject, **more))

    def expire_log(self, subject: str) -> None:
        """Delete all of a subject's messages from the log, like retention."""

        async def work() -> None:
            async with qmq.connect(self.lake.server) as mq:
                await mq.metadata.purge_subject(subject)

        asyncio.run(work())


def each_round_adds_what_came_since_and_no_round_adds_nothing(lake: Lake) -> None:
    wanted = lake.asked("orders")
    send(lake.server, "orders", ["a"])
    lake.drain(wanted)
    assert list(lake.writer(wanted).round()) == []
    send(lake.server, "orders", ["b"])
    lake.drain(wanted)
    assert lake.bodies("orders") == ["a", "b"]


def of_two_writers_one_commits_and_the_other_begins_again(lake: Lake) -> None:
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


def what_a_writer_wrote_that_died_before_its_commit_is_in_the_table_once(lake: Lake) -> None:
    send(lake.server, "orders", ["a"])

    def dies(source: TaskSource, work: Sequence[ReadTask], output: TaskOutput) -> list[DayFile]:
        write_tasks(source, work, output)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(LakeWriter(lake.catalog, lake.asked("orders"), SMALL, run_tasks=dies).round())
    assert lake.bodies("orders") == []
    lake.drain(lake.asked("orders"))
    assert lake.bodies("orders") == ["a"]


def a_table_begins_where_the_user_says_and_keeps_that(lake: Lake) -> None:
    send(lake.server, "orders", ["a", "b"])
    wanted = lake.asked("orders", startingOffsets="latest")
    assert list(lake.writer(wanted).round()) == []
    send(lake.server, "orders", ["c"])
    # another process: it would begin behind "c" if the table did not say where it began
    lake.drain(wanted)
    assert lake.bodies("orders") == ["c"]


def a_table_of_another_subject_is_refused(lake: Lake) -> None:
    open_table(lake.catalog, "qmq", "a.b")
    with pytest.raises(
        InvalidArgument, match=r"belongs to subject 'a\.b': choose another --namespace"
    ):
        open_table(lake.catalog, "qmq", "a_b")


def filled(lake: Lake) -> LakeTable:
    """A table of one day, with many files."""
    create_ordered(lake.server, "bank", 2)
    for part in range(4):
        send_ordered(
            lake.server, "bank", [(f"k{number % 3}", f"{part} {number}") for number in range(50)]
        )
        lake.drain(lake.asked("bank"))
    return open_table(lake.catalog, "qmq", "bank")


def compaction_changes_no_row_and_sorts_by_logical_partition_and_key(lake: Lake) -> None:
    table = filled(lake)
    before = lake.rows("bank")
    done = list(maintenance.compact(table, tomorrow()))
    assert [(each.files_before, each.rows) for each in done] == [(4, 200)]
    assert lake.rows("bank").equals(before)
    (file,) = [each.file for each in lake.catalog.load_table("qmq.bank").scan().plan_files()]
    found = (
        pq.read_table(file.file_path.removeprefix("file://"), partitioning=None)
        .select(["logical_partition", "key"])
        .to_pylist()
    )
    assert found == sorted(found, key=lambda row: (row["logical_partition"], row["key"]))


def a_writer_continues_behind_a_compaction(lake: Lake) -> None:
    table = filled(lake)
    running = lake.writer(lake.asked("bank"))
    assert list(running.round()) == []
    list(maintenance.compact(table, tomorrow()))
    send_ordered(lake.server, "bank", [("k0", "last")])
    assert [each.is_refused for each in running.round()] == [True]
    assert [(each.rows, each.is_refused) for each in running.round()] == [(1, False)]
    assert len(lake.rows("bank")) == 201


def expiry_deletes_what_no_snapshot_names_and_nothing_else(lake: Lake, tmp_path: Path) -> None:
    table = filled(lake)
    list(maintenance.compact(table, tomorrow()))
    before = lake.rows("bank")
    (leftover := tmp_path / "warehouse/qmq/bank/data/day=2026-01-01").mkdir()
    (leftover / "crashed.parquet").write_bytes(b"half a file")
    # all are younger than a day
    assert maintenance.expire(table, datetime.now(UTC), timedelta()).files == 0
    for path in tmp_path.rglob("*.parquet"):
        os.utime(path, (time.time() - 10 * 86_400,) * 2)
    done = maintenance.expire(table, datetime.now(UTC), timedelta())
    assert done.snapshots + len(table.iceberg.metadata.snapshots) >= 1
    assert len(list(tmp_path.rglob("*.parquet"))) == 1
    assert lake.rows("bank").equals(before)
    send_ordered(lake.server, "bank", [("k0", "last")])
    lake.drain(lake.asked("bank"))
    assert len(lake.rows("bank")) == 201


@pytest.fixture
def lake(node_process: NodeProcess, tmp_path: Path) -> Iterator[Lake]:
    node_process.start()
    uri, warehouse = f"sqlite:///{tmp_path}/catalog.db", f"file://{tmp_path}/warehouse"
    found = Lake(load_catalog("lake", uri=uri, warehouse=warehouse), node_process.address)
    yield found
    found.close()


@pytest.fixture
def history(node_process: NodeProcess, tmp_path: Path) -> Iterator[HistoryReader]:
    node_process.start()
    uri, warehouse = f"sqlite:///{tmp_path}/catalog.db", f"file://{tmp_path}/warehouse"
    lake = Lake(open_catalog("lake", uri, warehouse), node_process.address)
    yield HistoryReader(lake, tmp_path)
    lake.close()


PROMISES = (
    each_round_adds_what_came_since_and_no_round_adds_nothing,
    of_two_writers_one_commits_and_the_other_begins_again,
    what_a_writer_wrote_that_died_before_its_commit_is_in_the_table_once,
    a_table_begins_where_the_user_says_and_keeps_that,
    a_table_of_another_subject_is_refused,
    compaction_changes_no_row_and_sorts_by_logical_partition_and_key,
    a_writer_continues_behind_a_compaction,
)
"""What holds with each catalog."""
