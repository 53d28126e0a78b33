"""What the campaign knows of Spark: its rules, what is in work, which files of a table count."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from history.events import History, Operation
from support import eventually_sync
from system.spark_parts import is_alive, kill_tree

from campaign import table
from campaign.checkers.fifo import FifoReceive, FifoSend
from campaign.checkers.spark import KeyedPlace, QueryEnded, all_placed
from campaign.faults.spark import committed, in_work
from campaign.spark_driver import CHECKPOINTS
from campaign.spark_kills import found_again, kills_of, unmet
from campaign.spark_tables import parquet_rows
from campaign.values import Evidence
from campaign.verdict import Result


def found(events: Sequence[Operation]) -> dict[str, int]:
    """What the checkers of spark-ordered find; events are a nanosecond apart."""
    work = table.workloads()["spark-ordered"]
    history = [replace(each, t_ns=at) for at, each in enumerate(events, 1)]
    evidence = Evidence(history=History(history), is_drained=True)  # type: ignore[arg-type]
    names = {name: len(list(table.checkers()[name].find(evidence))) for name in work.checkers}
    return {name: count for name, count in names.items() if count}


def sent(serial: int) -> list[Operation]:
    begun = FifoSend(process="k", type="invoke", key="a", serial=serial)
    return [begun, replace(begun, type="ok")]


def placed(serial: int, sequence: int, queue: str = "t/1@g1", *, source: bool = False) -> Operation:
    name = {"producer": "k", "key": "a", "serial": serial}
    return KeyedPlace(
        process="r", type="ok", **name, queue=queue, sequence=sequence, is_source=source
    )


def came(serial: int) -> Operation:
    return FifoReceive(process="r", type="ok", producer="k", key="a", serial=serial, attempt=1)


SENT = [*sent(1), *sent(2), came(1), came(2)]


def test_each_rule_of_ordered_copies_is_checked() -> None:
    assert found([*SENT, placed(1, 5), placed(2, 6), placed(1, 5)]) == {}
    assert found([*SENT, placed(1, 5), placed(1, 7)]) == {"keyed_once": 1}
    assert found([*SENT, placed(1, 6), placed(2, 5)]) == {"keyed_in_order": 1}
    assert found([*SENT, placed(1, 6), placed(2, 5, "t/2@g1")]) == {}, "received in order"
    ended = QueryEnded(process="d", type="info", errors=("NotConnected",))
    assert found([*SENT, ended]) == {}
    refused = replace(ended, errors=("InvalidArgument", "NotConnected"))
    assert found([*SENT, refused]) == {"stream_goes_on": 1}


def test_a_second_copy_in_the_source_may_have_one_in_the_target() -> None:
    twice = [placed(1, 0, "s/1@g1", source=True), placed(1, 0, "s/2@g1", source=True)]
    assert found([*SENT, *twice, placed(1, 5), placed(1, 7)]) == {}
    assert found([*SENT, *twice, placed(1, 5), placed(1, 7), placed(1, 8)]) == {"keyed_once": 1}


def test_ordered_copies_are_all_there_when_both_subjects_were_seen() -> None:
    target = placed(1, 5)
    assert not all_placed([*sent(1), target])
    assert all_placed([*sent(1), target, placed(1, 0, "s/1@g1", source=True)])


def test_a_query_is_in_work_between_its_offsets_and_its_commit(tmp_path: Path) -> None:
    for query, offsets, commits in (("copy", 3, 3), ("keyed", 12, 11), ("files", 0, 0)):
        for what, count in (("offsets", offsets), ("commits", commits)):
            folder = tmp_path / "spark" / CHECKPOINTS / query / what
            folder.mkdir(parents=True)
            for number in range(count):
                (folder / str(number)).touch()
                (folder / f".{number}.crc").touch()
    (tmp_path / "spark" / CHECKPOINTS / "table").mkdir()
    assert in_work(tmp_path) == ["keyed"]
    assert committed(tmp_path) == 14


def test_a_run_of_kills_needs_a_repeated_micro_batch_that_found_rows(tmp_path: Path) -> None:
    effects = [
        "kill-driver: dead: a driver of driver0, in work: copy, keyed",
        "kill-driver: dead: a driver of driver0",
        "kill-broker: dead: g1-a",
    ]
    result = Result(test="t", verdict="pass", seed=1, seconds=1.0, effects=effects)
    kinds, hit = kills_of(effects)
    assert (kinds, hit) == ({"kill-driver": 2, "kill-broker": 1}, {"kill-driver": 1})
    log = tmp_path / "driver0.17-python.log"
    log.write_text("qmq: epoch 4: 20 rows in 2 batches, 0 were stored already\n")
    assert unmet(result, found_again(tmp_path)) == ["no repeated micro-batch found rows"]
    log.write_text("qmq: epoch 4: 20 rows in 1 batches, 10 were stored already\n")
    assert found_again(tmp_path) == (1, 1, 10)
    assert unmet(result, found_again(tmp_path)) == []
    calm = replace(result, effects=effects[1:])
    assert unmet(calm, (1, 1, 10)) == ["no driver died in a micro-batch"]


def test_only_files_that_the_sink_committed_are_of_the_table(tmp_path: Path) -> None:
    log = tmp_path / "_spark_metadata"
    log.mkdir()
    for number, values in enumerate((["1", "2"], ["3"], ["1", "2"])):
        pq.write_table(pa.table({"value": values}), tmp_path / f"part-{number}.parquet")
    for batch, number in (("0", 0), ("9.compact", 0), ("10", 1)):
        line = json.dumps({"path": f"file://{tmp_path}/part-{number}.parquet", "action": "add"})
        with (log / batch).open("a") as file:
            file.write(f"v1\n{line}\n")
    rows = dict(parquet_rows(tmp_path, ()))
    assert rows == {str(tmp_path / "part-0.parquet"): [1, 2], str(tmp_path / "part-1.parquet"): [3]}
    assert list(parquet_rows(tmp_path, set(rows))) == []


def test_a_driver_is_killed_with_all_that_it_started() -> None:
    words = ["sh", "-c", "sleep 1000 & echo $!; wait"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        assert is_alive(child)
        assert kill_tree(process.pid) == 2
        process.wait()
    eventually_sync(lambda: not is_alive(child))
