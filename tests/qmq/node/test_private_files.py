"""Only the server's user can read the server's files, with any umask."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from qmq_coordination.embedded import EmbeddedStore
from support import eventually, node_config, running

import qmq
from qmq.log.follower import start_over
from qmq.log.log_config import LogConfig
from qmq.node.broker import broker_node
from qmq.node.process import EtcdOptions
from qmq.node.replica.context import ReplicaConfig


@pytest.fixture(params=[0o000, 0o022, 0o077])
def _umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


def open_to_others(folder: Path) -> dict[str, str]:
    """The files and folders that other users may read, write or list; sockets are left out."""
    modes = {
        str(path.relative_to(folder)): path.stat().st_mode for path in [folder, *folder.rglob("*")]
    }
    wanted = {True: 0o700, False: 0o600}
    return {
        name: stat.filemode(mode)
        for name, mode in modes.items()
        if stat.S_IMODE(mode) != wanted[stat.S_ISDIR(mode)]
    }


@pytest.mark.usefixtures("_umask")
async def test_what_a_node_stores_is_for_its_own_user_only(tmp_path: Path) -> None:
    config = node_config(tmp_path / "new" / "node", LogConfig(segment_bytes=1 << 16), delay=True)
    for _ in range(2):  # the second time there is a checkpoint, and a schedule that was saved
        async with running(config) as node, qmq.connect(node.address) as mq:
            await mq.send_many("s", [bytes(1_000)] * 200)
            await mq.send("s", b"later", delay=timedelta(days=1))
            async with mq.consumer("s", "g") as consumer:
                await (await consumer.pull(10)).ack_sync()
    found = {path.name for path in config.data.rglob("*")}
    assert {"coordination.db", "coordination.lock", "lock", "schedule"} <= found
    assert open_to_others(tmp_path / "new") == {}


@pytest.mark.usefixtures("_umask")
async def test_what_a_replica_stores_is_for_its_own_user_only(tmp_path: Path) -> None:
    data = tmp_path / "data"
    config = ReplicaConfig(
        "g",
        "a",
        ("a",),
        data,
        EtcdOptions(("127.0.0.1:1",)),
        host=f"unix:{tmp_path}/q",
        data_port=0,
        control_port=0,
    )
    node = broker_node(config, EmbeddedStore())
    await node.start()
    await eventually(lambda: node.broker.is_serving)
    await node.stop()
    start_over(data / "broker", (0, 0))
    assert "replica.json" in {path.name for path in data.rglob("*")}
    assert open_to_others(data) == {}


async def test_a_folder_that_was_given_keeps_its_rights(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir(mode=0o750)
    data.chmod(0o750)
    async with running(node_config(data)):
        pass
    assert set(open_to_others(data)) == {"."}
