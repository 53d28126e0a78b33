"""A replica whose disk is lost begins again: from an object store and with the tail from the master, or with everything from the master.

`scripts/bench --only lake` runs both, one after the other, with 2 GiB of 1 KB messages.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import grpc

from bench.cold import SIZE, fill
from bench.group import ReplicaSet
from bench.processes import together
from bench.replicas import cpu_s
from bench.tiering import folder_store
from qmq.limits import MIB
from qmq.proto.v1 import control_pb2 as pb
from qmq.proto.v1 import control_pb2_grpc
from qmq.rpc.network import NETWORK
from qmq.rpc.server_name import any_server

SEGMENT_MIB: Final = 64
WAIT_S: Final = 1200

Figures = dict[str, float]


def from_store(mib: int) -> Figures:
    """With a local retention: the new replica reads the store."""
    return begun_again(mib, "--local-retention-mib", str(2 * SEGMENT_MIB))


def from_master(mib: int) -> Figures:
    """Without one: the master sends everything."""
    return begun_again(mib)


def begun_again(mib: int, *words: str) -> Figures:
    """Fill, wait until the store has every sealed segment, and replace the disk of a slave."""
    with folder_store() as url:
        group = ReplicaSet(3, "--object-store", url, "--segment-mib", str(SEGMENT_MIB), "--retention-hours", "87600", *words)
        try:
            together((fill, group.address, mib * MIB // SIZE // 1000 * 1000))
            return asyncio.run(_replaced(group, Path(url.removeprefix("file://"))))
        finally:
            group.stop()


async def _replaced(group: ReplicaSet, objects: Path) -> Figures:
    master = await _master(group)
    lost = next(name for name in group.names if name != master)
    end = (await _status(group, master)).message_position
    await _until(lambda: _stored(objects) > end - 2 * SEGMENT_MIB * MIB, "the store gets the segments")
    group.kill(lost)
    shutil.rmtree(group.folder / lost)
    begin, cpu = time.monotonic(), sum(cpu_s(group.processes[master].pid))
    group.start(lost)
    while not ((found := await _status(group, lost)).is_whole and found.message_position >= end):
        await asyncio.sleep(0.05)
        if time.monotonic() > begin + WAIT_S:
            raise SystemExit("the replica does not catch up")
    folder = group.folder / lost / "broker" / "message"
    return {
        "until it has everything, s": time.monotonic() - begin,
        "messages, MB": end / 1e6,
        "on its disk, MB": sum(each.stat().st_size for each in folder.glob("*.log")) / 1e6,
        "the master's CPU time, s": sum(cpu_s(group.processes[master].pid)) - cpu,
    }


def _stored(objects: Path) -> int:
    """Where the newest stored segment begins."""
    return max((int(each.parent.name) for each in objects.glob("g/message/*/manifest")), default=0)


async def _status(group: ReplicaSet, name: str) -> pb.ReplicaStatus:
    """Waits until the replica answers."""
    async with asyncio.timeout(WAIT_S), NETWORK.channel(group.control[name], any_server) as channel:
        while True:
            try:
                found: pb.ReplicaStatus = await control_pb2_grpc.BrokerControlStub(channel).DescribeReplica(pb.DescribeReplicaRequest())
            except grpc.RpcError:
                await asyncio.sleep(0.05)
            else:
                return found


async def _master(group: ReplicaSet) -> str:
    async with asyncio.timeout(WAIT_S):
        while True:
            for name in group.names:
                if (await _status(group, name)).is_serving:
                    return name
            await asyncio.sleep(0.05)


async def _until(condition: Callable[[], bool], what: str) -> None:
    try:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise SystemExit(f"{what}: not within {WAIT_S} s") from None
