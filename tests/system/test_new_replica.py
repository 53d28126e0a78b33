"""A broker's process on a new disk begins with what is in the object store, and copies from the
master what follows.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Final

import pytest
from system.group import describe

import qmq
from bench.processes import ReplicaSet
from qmq.limits import KIB, MIB
from qmq.log.segments import segment_name
from qmq.proto.v1 import control_pb2 as pb

pytestmark = [pytest.mark.sampled, pytest.mark.xdist_group("faults")]

VARIABLES: Final = {
    "QMQ_SEGMENT_MIB": "1",
    "QMQ_LOCAL_RETENTION_MIB": "2",
    "QMQ_OBJECT_STORE_CACHE_MIB": "128",
}


@pytest.fixture
def replicas(tmp_path: Path) -> Iterator[ReplicaSet]:
    found = ReplicaSet(3, "--object-store", f"file://{tmp_path}/objects", variables=VARIABLES)
    yield found
    found.stop()


async def status(replicas: ReplicaSet, name: str) -> pb.ReplicaStatus:
    async with asyncio.timeout(60):
        while (found := await describe(replicas.control[name])) is None:
            await asyncio.sleep(0.05)
        return found


async def master_of(replicas: ReplicaSet) -> str:
    async with asyncio.timeout(60):
        while True:
            for name in replicas.names:
                if (await status(replicas, name)).is_serving:
                    return name
            await asyncio.sleep(0.05)


async def test_a_killed_replica_whose_disk_is_lost_copies_only_the_tail(
    replicas: ReplicaSet, tmp_path: Path
) -> None:
    random = Random(1)
    sent = [b"%05d" % number + random.randbytes(64 * KIB) for number in range(180)]
    async with qmq.connect(replicas.address) as mq:
        for body in sent:
            await mq.send("s", body)
        before = await master_of(replicas)
        end = (await status(replicas, before)).message_position
        objects = tmp_path / "objects" / "g" / "message"
        async with asyncio.timeout(60):
            while (
                len(stored := sorted(int(each.parent.name) for each in objects.glob("*/manifest")))
                < end // MIB
            ):
                await asyncio.sleep(0.05)
        lost = next(name for name in replicas.names if name != before)
        replicas.kill(lost)
        shutil.rmtree(replicas.folder / lost)
        replicas.start(lost)
        async with asyncio.timeout(60):
            while not (
                (found := await status(replicas, lost)).is_whole and found.message_position == end
            ):
                await asyncio.sleep(0.05)
        folder = replicas.folder / lost / "broker" / "message"
        files = sorted(folder.glob("*.log"))
        assert files[0].name > segment_name(stored[-1]), "no file of what the store has"
        assert sum(each.stat().st_size for each in files) < end - stored[-1]
        assert [int(each.stem) for each in sorted(folder.glob("*.stored"))] == stored
        await mq.metadata.transfer("g", lost)
        assert await master_of(replicas) == lost
        assert [message.body async for message in mq.browse("s")] == sent
