"""Fetching a schedule from another replica: over gRPC, from real folders; the store that needs it
is this test's.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest
from support import SmallDisk, eventually

from qmq.delay.files import ReplicaScheduleFiles
from qmq.delay.service import DelayIdentity, DelayService, describe_schedule
from qmq.errors import NotMaster
from qmq.limits import MIB
from qmq.log import checkpoint as checkpoints
from qmq.log.checkpoint import Checkpoint
from qmq.log.disk import Disk
from qmq.node import delay
from qmq.node.delay import ScheduleTransfer
from qmq.node.process import NodeTiming
from qmq.proto.v1 import delay_pb2 as pb
from qmq.rpc.channel import MESSAGE_BYTES_MAX
from qmq.rpc.server_name import ServerName

HOUR = "20261121T130000Z"
LOG, IDX = f"{HOUR}.log", f"{HOUR}.idx"


QUICK = NodeTiming(schedule_retry_s=0.01, schedule_give_s=0.01)


class Form:
    """A schedule whose state is its files and their lengths; those without bytes only make it
    long.
    """

    @staticmethod
    def files(state: Any) -> list[tuple[str, int]]:
        return [(name, size) for name, size in state if size]

    @staticmethod
    def adopt(folder: Path, state: bytes, disk: Disk | None = None) -> None:
        (disk or Disk()).replace(folder / "state", state)


class Donor:
    """Another replica's folder and control port."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.has_schedule = True
        self.reads: list[str] = []
        self.before_read: Callable[[str], None] = lambda _: None
        self.before_describe: Callable[[], None] = lambda: None
        (folder / "schedule").mkdir(parents=True)

    async def start(self) -> None:
        files = ReplicaScheduleFiles(self.folder, lambda: self.has_schedule)
        plain, describe = files.read, files.describe

        def read(file: str, offset: int, bytes_max: int) -> bytes:
            self.reads.append(file)
            self.before_read(file)
            return plain(file, offset, bytes_max)

        def described_now() -> tuple[bytes, int]:
            self.before_describe()
            return describe()

        files.read, files.describe = read, described_now  # type: ignore[method-assign]
        self.server = grpc.aio.server()
        DelayService(DelayIdentity("d", self.folder.name, 3_600_000), lambda: None, files).add_to(
            self.server
        )
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        await self.server.start()

    def write(self, name: str, data: bytes) -> None:
        (self.folder / "schedule" / name).write_bytes(data)

    def checkpoint(self, index: int, files: list[tuple[str, int]] | None) -> None:
        found = Checkpoint(checkpoints.VERSION, index, 1, 0, 0, 0, 0, 0, [], projection=files)
        checkpoints.save(Disk(), self.folder / "checkpoint", index, checkpoints.encode(found))


class Replica:
    """A replica without a schedule."""

    def __init__(self, folder: Path, disk: Disk) -> None:
        self.folder = folder
        self.others: dict[ServerName, str] = {}
        self.whole_from: int | None = 1
        self.committed = 1_000
        self.is_master = False
        self.adopted: list[dict[str, bytes]] = []
        self.handed_to: list[str] = []
        self.unwilling: set[str] = set()
        self.failures: list[BaseException] = []
        folder.mkdir()
        self.transfer = ScheduleTransfer(
            self, folder, disk, Form, self.failures.append, timing=QUICK
        )

    @property
    def has_all(self) -> bool:
        return bool(self.adopted)

    @property
    def complete_from(self) -> int | None:
        return self.needs_from()

    def donors(self) -> Mapping[ServerName, str]:
        return self.others

    def needs_from(self) -> int | None:
        return self.whole_from

    def reopen_now(self) -> None:
        self.adopted.append(
            {path.name: path.read_bytes() for path in (self.folder / "schedule").iterdir()}
        )

    async def hand_over(self, to: str) -> None:
        if to in self.unwilling:
            raise NotMaster("not now")
        self.handed_to.append(to)
        self.is_master = False


@asynccontextmanager
async def running(
    tmp_path: Path, *names: str, disk: Disk | None = None
) -> AsyncIterator[tuple[Replica, list[Donor]]]:
    donors = [Donor(tmp_path / name) for name in names or ("b",)]
    replica = Replica(tmp_path / "a", disk or Disk())
    for donor in donors:
        await donor.start()
        replica.others[ServerName(replica=donor.folder.name)] = donor.address
    try:
        yield replica, donors
    finally:
        await replica.transfer.stop()
        for donor in donors:
            await donor.server.stop(0)
    assert replica.failures == []


def described(files: list[tuple[str, int]]) -> bytes:
    return msgspec.msgpack.encode(files)


async def test_files_are_what_they_were_at_the_checkpoint_although_they_grow_meanwhile(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as (replica, (donor,)):
        big = bytes(range(256)) * (3 * MIB // 256) + b"end"
        donor.write(LOG, big)
        donor.write(IDX, b"0123456789")
        donor.checkpoint(7, [(LOG, len(big)), (IDX, 10)])

        def grow(file: str) -> None:
            with (donor.folder / "schedule" / file).open("ab") as content:
                content.write(b"more")

        donor.before_read = grow
        replica.transfer.start()
        await eventually(lambda: replica.has_all)
        assert replica.adopted == [
            {LOG: big, IDX: b"0123456789", "state": described([(LOG, len(big)), (IDX, 10)])}
        ]
        assert donor.reads.count(LOG) > 3
        assert not (replica.folder / delay.ASIDE).exists()


async def test_a_state_longer_than_an_answer_comes_in_pieces_of_one_checkpoint(
    tmp_path: Path,
) -> None:
    def state(index: int) -> list[tuple[str, int]]:
        return [(LOG, 3), *[(f"{index} {'x' * MIB}", 0)] * (MESSAGE_BYTES_MAX // MIB + 1)]

    async with running(tmp_path) as (replica, (donor,)):
        donor.write(LOG, b"old")
        donor.checkpoint(7, state(7))
        asked = []
        donor.before_describe = lambda: asked.append(7)
        replica.transfer.start()
        await eventually(lambda: replica.has_all)
        assert replica.adopted == [{LOG: b"old", "state": described(state(7))}]
        assert len(asked) == 1, "the donor reads the state once"


async def test_pieces_of_two_checkpoints_are_not_joined() -> None:
    """Two replicas ask at the same time, and a checkpoint is written between their first pieces."""
    states = {7: b"older" * 10, 8: b"newer!" * 10}
    indexes = iter([7, 8, 8, *[8] * 20])

    class Donor:
        async def DescribeSchedule(
            self, request: pb.DescribeScheduleRequest, timeout: float
        ) -> pb.ScheduleDescription:
            index = next(indexes)
            state = states[index]
            return pb.ScheduleDescription(
                state=state[request.offset : request.offset + 9],
                index=index,
                state_bytes=len(state),
            )

    assert (await describe_schedule(Donor(), timeout_s=1.0)).state == states[8]


async def test_a_file_that_vanishes_restarts_the_copy_with_the_next_checkpoint(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as (replica, (donor,)):
        donor.write(LOG, b"old")
        donor.write(IDX, b"new")
        donor.checkpoint(7, [(IDX, 3), (LOG, 3)])

        def close_bucket(file: str) -> None:
            if file == LOG:
                (donor.folder / "schedule" / LOG).unlink(missing_ok=True)
                donor.checkpoint(9, [(IDX, 3)])

        donor.before_read = close_bucket
        replica.transfer.start()
        await eventually(lambda: replica.has_all)
        assert replica.adopted == [{IDX: b"new", "state": described([(IDX, 3)])}]


async def test_a_file_shorter_than_its_checkpoint_says_is_not_taken(tmp_path: Path) -> None:
    async with running(tmp_path) as (replica, (donor,)):
        donor.write(LOG, b"cut")
        donor.checkpoint(7, [(LOG, 100)])
        replica.transfer.start()
        await eventually(lambda: donor.reads.count(LOG) > 3)
        assert not replica.has_all
        donor.write(LOG, b"x" * 100)
        await eventually(lambda: replica.has_all)


async def test_another_replica_is_asked_if_one_has_no_checkpoint_schedule_or_answer(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, "b", "c", "d", "e") as (
        replica,
        (no_checkpoint, no_schedule, gone, whole),
    ):
        no_schedule.has_schedule = False
        no_schedule.checkpoint(7, [])
        gone.checkpoint(7, [])
        await gone.server.stop(0)
        whole.write(LOG, b"mine")
        whole.checkpoint(7, [(LOG, 4)])
        replica.transfer.start()
        await eventually(lambda: replica.has_all)
        assert replica.adopted[0][LOG] == b"mine"
        assert no_checkpoint.reads == no_schedule.reads == []


async def test_a_master_without_a_schedule_waits_for_a_replica_that_has_one(tmp_path: Path) -> None:
    async with running(tmp_path) as (replica, (donor,)):
        donor.has_schedule = False
        asked: list[int] = []

        def donors() -> Mapping[ServerName, str]:
            asked.append(1)
            return replica.others if len(asked) > 2 else {}

        replica.donors = donors  # type: ignore[method-assign]
        replica.transfer.start()
        await eventually(lambda: len(asked) > 5)
        assert not replica.has_all
        donor.checkpoint(7, [])
        donor.has_schedule = True
        await eventually(lambda: replica.has_all)


@pytest.mark.parametrize("whole_from", [9, None])
async def test_a_checkpoint_from_before_our_own_log_begins_is_not_taken(
    tmp_path: Path, whole_from: int | None
) -> None:
    async with running(tmp_path) as (replica, (donor,)):
        replica.whole_from = whole_from
        donor.write(LOG, b"1")
        donor.checkpoint(7, [(LOG, 1)])
        asked: list[int] = []

        def needs_from() -> int | None:
            asked.append(1)
            return replica.whole_from

        replica.needs_from = needs_from  # type: ignore[method-assign]
        replica.transfer.start()
        await eventually(lambda: len(asked) > 3)
        assert donor.reads == []
        replica.whole_from = 9
        donor.checkpoint(8, [(LOG, 1)])
        await eventually(lambda: replica.has_all)


async def test_nothing_is_taken_over_before_our_own_log_is_committed_up_to_it(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as (replica, (donor,)):
        replica.committed = 6
        donor.write(LOG, b"1")
        donor.checkpoint(7, [(LOG, 1)])
        replica.transfer.start()
        await eventually(lambda: (replica.folder / delay.ASIDE / LOG).exists())
        assert not (replica.folder / "schedule").exists()
        assert not replica.has_all
        replica.committed = 7
        await eventually(lambda: replica.has_all)


async def test_what_a_crash_left_of_an_earlier_try_does_not_matter(tmp_path: Path) -> None:
    async with running(tmp_path) as (replica, (donor,)):
        for folder in (delay.ASIDE, "schedule"):
            (replica.folder / folder).mkdir()
            (replica.folder / folder / LOG).write_bytes(b"half of something else")
            (replica.folder / folder / "20260101T000000Z.done").write_bytes(b"?")
        donor.write(LOG, b"whole")
        donor.checkpoint(7, [(LOG, 5)])
        replica.transfer.start()
        await eventually(lambda: replica.has_all)
        assert replica.adopted == [{LOG: b"whole", "state": described([(LOG, 5)])}]


async def test_the_transfer_starts_over_when_the_log_starts_over_again(tmp_path: Path) -> None:
    async with running(tmp_path) as (replica, (donor,)):
        replica.committed = 0
        donor.write(LOG, b"1")
        donor.checkpoint(7, [(LOG, 1)])
        replica.transfer.start()
        await eventually(lambda: (replica.folder / delay.ASIDE / LOG).exists())
        donor.write(LOG, b"12")
        donor.checkpoint(20, [(LOG, 2)])
        replica.whole_from = 15
        replica.transfer.stop_fetch()
        shutil.rmtree(replica.folder / delay.ASIDE)
        replica.transfer.fetch()
        replica.committed = 30
        await eventually(lambda: replica.has_all)
        assert replica.adopted == [{LOG: b"12", "state": described([(LOG, 2)])}]


async def test_a_full_disk_is_waited_out(tmp_path: Path) -> None:
    disk = SmallDisk(3)
    async with running(tmp_path, disk=disk) as (replica, (donor,)):
        donor.write(LOG, b"12345")
        donor.checkpoint(7, [(LOG, 5)])
        replica.transfer.start()
        await eventually(lambda: donor.reads.count(LOG) > 2)
        assert not replica.has_all
        disk.left = 1 << 20
        await eventually(lambda: replica.has_all)
        assert replica.adopted[0][LOG] == b"12345"


async def test_who_has_its_schedule_fetches_nothing_and_keeps_the_mastership(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as (replica, (donor,)):
        donor.checkpoint(7, [])
        replica.adopted.append({})
        replica.is_master = True
        replica.transfer.start()
        replica.transfer.role_changed()
        await replica.transfer.stop()
        assert (donor.reads, replica.handed_to, replica.is_master) == ([], [], True)


async def test_a_master_without_a_schedule_hands_over_to_a_replica_that_has_one(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, "b", "c", "d") as (replica, (lacks_it_too, unwilling, whole)):
        replica.committed = 0
        lacks_it_too.has_schedule = False
        unwilling.checkpoint(7, [])
        whole.checkpoint(7, [])
        replica.unwilling.add("c")
        replica.transfer.start()
        replica.is_master = True
        replica.transfer.role_changed()
        await eventually(lambda: replica.handed_to == ["d"])


async def test_what_cannot_be_cured_stops_the_process(tmp_path: Path) -> None:
    class Broken(Disk):
        def sync(self, fd: int) -> None:
            raise OSError("input/output error (in this test)")

    async with running(tmp_path, disk=Broken()) as (replica, (donor,)):
        donor.write(LOG, b"1")
        donor.checkpoint(7, [(LOG, 1)])
        replica.transfer.start()
        await eventually(lambda: len(replica.failures) == 1)
        assert isinstance(replica.failures.pop(), OSError)
        await asyncio.sleep(0)
        assert not replica.has_all
