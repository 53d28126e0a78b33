"""A delay group's files, read in columns: the same as its own schedule reads them message by
message.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark_qmq import datasets
from pyspark_qmq.datasets import schedules
from pyspark_qmq.datasets.schedules import ScheduledState, states
from pyspark_qmq.datasets.tables import SCHEDULES
from support import eventually, node_config, running

import qmq
from qmq.delay.batches import DueMessage, Places, SchedulePlace
from qmq.delay.schedule import Schedule
from qmq.errors import CorruptBatch, InvalidArgument, LogDamaged, MessagesExpired
from qmq.log import checkpoint
from qmq.log.actions import Cancel, PlanAction, PlanDone, Postpone, Recur
from qmq.log.disk import Disk
from qmq.wire.batch import encode, sent_sizes
from qmq.wire.batch_columns import BatchFlag, Columns, Compression

START = 1_700_000_000_000
SECOND = 1_000
COLUMNS = tuple(SCHEDULES)


class Store:
    """A delay group's folder, written by its own schedule."""

    def __init__(self, folder: Path, bucket_ms: int = SECOND) -> None:
        self.folder = folder
        self.schedule = Schedule(folder / "schedule", Disk(), bucket_ms, buffer_bytes_max=600)
        self.schedule.load(None)
        self.index = 0
        self.number = 0

    def send(
        self, due_times_ms: list[int], *, subject: str = "orders", flags: int = 0, **columns: Any
    ) -> None:
        compression = columns.pop("compression", Compression.NONE)
        self.number += 1
        self.index += 1
        found = Columns(
            [b"%d" % place for place in range(len(due_times_ms))],
            due_times_ms=due_times_ms,
            **columns,
        )
        envelope, region = encode(
            subject.encode(),
            found,
            producer_id=7 << 40,
            batch_sequence=self.number,
            create_time_ms=START - 500,
            flags=flags,
            compression=compression,
        )
        self.schedule.take(self.index, START - 100 + self.index, region, sent_sizes(envelope)[1])

    def act(self, *actions: Any) -> None:
        self.index += 1
        for each in actions:
            self.schedule.act(self.index, START - 100 + self.index, each)

    def plan(self, number: int, bucket: int, *ordinals: int) -> None:
        self.act(
            PlanAction(
                number,
                "orders",
                0,
                "g",
                9,
                number,
                ((bucket, np.array(ordinals, "<u4").tobytes()),),
            )
        )

    def save(self) -> None:
        """Write a checkpoint as the delay server does."""
        taken = self.schedule.begin_checkpoint(self.index)
        taken.run()
        self.schedule.end_checkpoint(taken)
        found = checkpoint.Checkpoint(
            checkpoint.VERSION, self.index, 1, START, 0, 0, 0, 0, [], [], taken.state
        )
        checkpoint.save(Disk(), self.folder / "checkpoint", self.index, checkpoint.encode(found))

    def rows(self, group: str = "d") -> list[dict[str, Any]]:
        state = schedules.read_state(self.folder)
        return rows_of(schedules.stretches(self.folder, group, state))

    def expected(self) -> list[dict[str, Any]]:
        """The expected rows, from the schedule itself, message by message."""
        every = [
            SchedulePlace(bucket.bucket, each)
            for bucket in self.schedule.buckets()
            for each in range(bucket.messages)
        ]
        return [self._row(message) for message in self.schedule.read(Places.of(every))]

    def _row(self, message: DueMessage) -> dict[str, Any]:
        return {
            "subject": message.subject,
            "message_id": message.message_id.hex(),
            "delay_group": "d",
            "due_time": at(message.due_ms),
            "append_time": at(message.append_ms),
            "create_time": at(message.create_time_ms),
            "state": self.schedule.state_of(message.place),
            "bucket": at(message.place.bucket * SECOND),
            "ordinal": message.place.ordinal,
            "is_recurring": bool(message.flags & BatchFlag.RECURRING),
            "is_directed": bool(message.flags & BatchFlag.DIRECTED),
        }


def at(time_ms: int) -> datetime:
    return datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=time_ms)


def address(folder: Path) -> Any:
    from qmq.columns.files.log import FileAddress

    return FileAddress((str(folder),))


def rows_of(tasks: Any) -> list[dict[str, Any]]:
    return [
        row
        for task in tasks
        for batch in datasets.read("schedules", task, COLUMNS)
        for row in batch.to_pylist()
    ]


def test_rows_say_what_the_schedule_says_whatever_batches_look_like(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.send([START, START + 10, START + 999])
    store.send([START + 5, START + 1_500, START + 7, START + 9_000])
    store.send(
        [START + 20], subject="départs", flags=BatchFlag.DIRECTED, headers=[{"qmq-group": b"ops"}]
    )
    store.send(
        [START + 30, START + 31],
        create_deltas=[5, 9],
        message_ids=[b"a" * 16, b"b" * 16],
        keys=[b"k", b""],
    )
    store.send(
        [START + 40, START + 41, START + 42],
        create_deltas=[1, 2, 3],
        tags=[("x",), (), ("y", "z")],
        compression=Compression.ZSTD,
    )
    store.save()
    found = store.rows()
    assert found == store.expected()
    assert len(found) == 13


def test_runs_of_a_recurring_message_have_ids_of_their_own(tmp_path: Path) -> None:
    store, bucket = Store(tmp_path), START // SECOND
    store.send(
        [START], flags=BatchFlag.RECURRING, headers=[{"qmq-cron": b"* * * * *", "qmq-zone": b"UTC"}]
    )
    store.act(Recur(bucket, 0, START + 3_000), Cancel(bucket, 0))
    store.save()
    seed, run = store.rows()
    assert [seed, run] == store.expected()
    assert (seed["is_recurring"], run["is_recurring"], seed["message_id"] == run["message_id"]) == (
        True,
        True,
        False,
    )


@pytest.mark.parametrize("seed", range(12))
def test_random_schedules_are_read_as_the_schedule_reads_them(tmp_path: Path, seed: int) -> None:
    random, store, plans = Random(seed), Store(tmp_path), 0
    for _ in range(60):
        every = [
            (info.bucket, each)
            for info in store.schedule.buckets()
            for each in range(info.messages)
        ]
        pending = [
            each for each in every if store.schedule.state_of(SchedulePlace(*each)) == "pending"
        ]
        kind = random.choice(["send", "send", "plan", "done", "cancel", "move", "save"])
        if kind == "send":
            due_times_ms = [START + random.randint(0, 5_000) for _ in range(random.randint(1, 9))]
            deltas = (
                [random.randint(0, 99) for _ in due_times_ms] if random.random() < 0.5 else None
            )
            ids = [random.randbytes(16) for _ in due_times_ms] if random.random() < 0.5 else None
            store.send(
                due_times_ms,
                subject=random.choice(["a", "orders.paid", "x" * 40]),
                create_deltas=deltas,
                message_ids=ids,
            )
        elif kind == "plan" and pending:
            plans += 1
            store.plan(plans, *random.choice(pending))
        elif kind == "done" and store.schedule.plans:
            store.act(PlanDone((random.choice(list(store.schedule.plans)),)))
        elif kind == "cancel" and pending:
            store.act(Cancel(*random.choice(pending)))
        elif kind == "move" and pending:
            store.act(Postpone(*random.choice(pending), START + random.randint(0, 9_000)))
        elif kind == "save":
            store.save()
    store.save()
    assert store.rows() == store.expected(), f"seed {seed}"


def test_what_came_behind_the_checkpoint_does_not_count(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.send([START, START + 1])
    store.save()
    before, state = store.rows(), schedules.read_state(tmp_path)
    store.send([START + 2] * 2_000)
    store.plan(1, START // SECOND, 0)
    store.act(PlanDone((1,)))
    assert store.rows() == before
    store.save()
    assert len(store.rows()) == 2_002
    assert rows_of(schedules.stretches(tmp_path, "d", state)) == before


def test_a_large_bucket_is_read_by_several_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedules, "TASK_MESSAGES_MAX", 100)
    monkeypatch.setattr(schedules, "ROWS_MAX", 30)
    store = Store(tmp_path)
    store.send([START + each for each in range(150)])
    store.send([START] * 75)
    store.save()
    tasks = schedules.stretches(tmp_path, "d", schedules.read_state(tmp_path))
    assert [(each.first, each.end) for each in tasks] == [(0, 100), (100, 200), (200, 225)]
    assert rows_of(tasks) == store.expected()


def test_batches_are_exactly_what_spark_wants_and_only_the_asked_columns(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.send([START])
    store.save()
    (task,) = schedules.stretches(tmp_path, "d", schedules.read_state(tmp_path))
    (whole,) = datasets.read("schedules", task, COLUMNS)
    assert whole.schema == to_arrow_schema(datasets.schema_of("schedules"), timezone="UTC")
    (some,) = datasets.read("schedules", task, ["due_time", "subject"])
    assert some.schema.names == ["due_time", "subject"]
    assert isinstance(some, pa.RecordBatch)
    with pytest.raises(InvalidArgument, match="no column 'due'"):
        datasets.read("schedules", task, ["due"])


# --- damage ---------------------------------------------------------------------------------------


def hurt(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("suffix", "place"),
    [
        (".log", 3),
        (".log", 20),
        (".log", 70),
        (".log", -1),
        (".idx", 8),
        (".idx", 12),
        (".done", 17),
    ],
)
def test_damage_is_reported_and_never_read(tmp_path: Path, suffix: str, place: int) -> None:
    store = Store(tmp_path)
    store.send([START, START + 1])
    store.plan(1, START // SECOND, 0)
    store.act(PlanDone((1,)))
    store.save()
    (path,) = (tmp_path / "schedule").glob(f"*{suffix}")
    hurt(path, place)
    with pytest.raises(LogDamaged, match=path.stem):
        store.rows()


@pytest.mark.parametrize("suffix", [".log", ".idx", ".done"])
def test_a_file_that_is_too_short_is_damage(tmp_path: Path, suffix: str) -> None:
    store = Store(tmp_path)
    store.send([START, START + 1])
    store.act(Cancel(START // SECOND, 0))
    store.save()
    (path,) = (tmp_path / "schedule").glob(f"*{suffix}")
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(LogDamaged, match="ends at byte"):
        store.rows()


def test_a_bucket_that_was_deleted_meanwhile_has_expired(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.send([START])
    store.save()
    for path in (tmp_path / "schedule").iterdir():
        path.unlink()
    with pytest.raises(MessagesExpired, match="read again"):
        store.rows()


def test_a_record_about_no_message_is_damage() -> None:
    store_done = states(2, b"", (np.array([1], "<u4").tobytes(),))
    assert store_done.tolist() == [ScheduledState.PENDING, ScheduledState.PLANNED]
    with pytest.raises(CorruptBatch, match="message 2 of 2"):
        states(2, b"", (np.array([2], "<u4").tobytes(),))


def test_a_schedule_of_another_version_is_refused() -> None:
    with pytest.raises(LogDamaged, match="version 2"):
        schedules.of_checkpoint([2, 1000, 1, 0, 1, b"\x90", b"", b""])
    with pytest.raises(LogDamaged, match="cannot be read"):
        schedules.of_checkpoint([1, 1000])


# --- folders --------------------------------------------------------------------------------------


def test_a_schedule_from_another_replica_is_used_until_there_is_a_checkpoint(
    tmp_path: Path,
) -> None:
    store = Store(tmp_path)
    store.send([START])
    taken = store.schedule.begin_checkpoint(5)
    taken.run()
    Schedule.adopt(tmp_path / "schedule", msgspec.msgpack.encode(taken.state))
    assert schedules.read_state(tmp_path).index == 5
    assert len(store.rows()) == 1
    store.send([START])
    store.save()
    assert len(store.rows()) == 2


def test_a_folder_without_a_checkpoint_has_no_rows(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.send([START])
    assert store.rows() == []


def test_of_two_replicas_the_one_with_the_newer_checkpoint_is_read(tmp_path: Path) -> None:
    stores = [Store(tmp_path / name) for name in "ab"]
    for store in stores:
        store.send([START])
        store.save()
    stores[1].send([START])
    stores[1].save()
    (found,) = schedules.furthest(("d", each.folder) for each in stores).values()
    assert found[0] == tmp_path / "b"


async def test_a_delay_group_of_a_node_is_found_in_its_data_folder(tmp_path: Path) -> None:
    async with running(node_config(tmp_path, delay=True)) as node, qmq.connect(node.address) as mq:
        soon = await mq.send("s", b"soon", delay=timedelta(milliseconds=1))
        late = await mq.send("s", b"late", delay=timedelta(days=9))
        gone = await mq.send("s", b"gone", delay=timedelta(days=9))
        assert soon.delayed_id and late.delayed_id and gone.delayed_id  # noqa: PT018
        await mq.delayed.cancel(gone.delayed_id)
        await eventually(
            lambda: (queue := node.store.queue("s", 0)) is not None and queue.next_sequence == 1
        )
    found = rows_of(datasets.partitions("schedules", address(tmp_path)))
    assert {each["message_id"]: each["state"] for each in found} == {
        soon.delayed_id[:32]: "delivered",
        late.delayed_id[:32]: "pending",
        gone.delayed_id[:32]: "cancelled",
    }
    assert {each["delay_group"] for each in found} == {"delay"}


async def test_a_folder_without_a_delay_group_is_refused(tmp_path: Path) -> None:
    async with running(node_config(tmp_path)):
        pass
    with pytest.raises(InvalidArgument, match="not the folder of a delay group"):
        datasets.partitions("schedules", address(tmp_path))
