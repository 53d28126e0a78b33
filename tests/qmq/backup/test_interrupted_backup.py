"""A backup or a restore that dies at any step leaves no half of one, and the next attempt
continues.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest
from live_cluster import DELAY, GROUP, LATER, PLAIN, History, LiveCluster, objects_in, rest, running
from support.etcd_process import EtcdProcess

import qmq
from qmq.backup.objects import BackupObjects
from qmq.backup.restore import ReplicaTarget, Restore
from qmq.backup.verify import BackupVerifier
from qmq.errors import BackupNotFound, NotEmpty
from qmq.limits import KIB, MIB
from qmq.log.disk import Disk
from qmq.tiering.object_store import Objects, StoreAway, open_objects
from qmq.tiering.stored_segment import CHUNK_BYTES
from qmq.wire.batch import parse_envelope


class DyingObjects:
    """An object store that is away from a call on."""

    def __init__(self, inner: Objects, calls: int) -> None:
        self.inner, self.left = inner, calls

    def _call(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise StoreAway("it died")

    def create(self, name: str, data: bytes) -> bool:
        self._call()
        return self.inner.create(name, data)

    def get(self, name: str) -> bytes | None:
        self._call()
        return self.inner.get(name)

    def delete(self, name: str) -> None:
        self._call()
        self.inner.delete(name)

    def names(self, prefix: str) -> list[str]:
        return self.inner.names(prefix)


async def test_a_backup_that_dies_at_any_call_does_not_exist_and_is_continued(
    cluster: LiveCluster, history: History, tmp_path: Path
) -> None:
    url = f"file://{tmp_path / 'backups'}"
    async with cluster.client() as mq:
        await history.create_subjects(mq)
        await history.send(mq, 10)
    for calls in range(1_000):
        dying = DyingObjects(open_objects(url), calls)
        objects = BackupObjects(dying, chunk_bytes=16 * KIB)
        try:
            made = await cluster.back_up(objects)
        except StoreAway:
            if dying.inner.names("backups"):  # only the reading back of the manifest failed
                BackupVerifier(objects_in(tmp_path / "backups")).verify(
                    objects_in(tmp_path / "backups").manifest()
                )
                return
            with pytest.raises(BackupNotFound):
                objects_in(tmp_path / "backups").manifest()
            continue
        assert calls > 10
        BackupVerifier(objects).verify(made)
        return
    pytest.fail("it never succeeds")


class DyingDisk(Disk):
    """A disk that fails from a call on, as for a process that is killed."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self._left = calls

    def sync(self, fd: int) -> None:
        self._left -= 1
        if self._left < 0:
            raise InterruptedError("killed")
        super().sync(fd)


@pytest.mark.sampled
async def test_a_restore_that_dies_at_any_flush_is_continued(
    cluster: LiveCluster, empty_cluster: LiveCluster, history: History, tmp_path: Path
) -> None:
    objects = objects_in(tmp_path / "backups")
    async with cluster.client() as mq:
        await history.create_subjects(mq)
        await history.send(mq, 30)
        manifest = await cluster.back_up(objects)
    await cluster.stop()
    targets = [
        ReplicaTarget(group, names[0], empty_cluster.data(names[0]))
        for group, names in empty_cluster.groups.items()
    ]
    deaths = 0
    while True:
        try:
            assert (
                await Restore(empty_cluster.store, objects, manifest, DyingDisk(deaths)).run(
                    targets
                )
                == []
            )
            break
        except InterruptedError:
            deaths += 1
    assert deaths >= 4, "each group dies at least once"
    async with running(empty_cluster) as restored, restored.client() as mq:
        assert sorted(body for _, body in await rest(mq, PLAIN, GROUP)) == sorted(history.plain)


@pytest.mark.sampled
async def test_a_server_started_before_its_restore_creates_no_new_log(
    cluster: LiveCluster, empty_cluster: LiveCluster, history: History, tmp_path: Path
) -> None:
    objects = objects_in(tmp_path / "backups")
    async with cluster.client() as mq:
        await history.create_subjects(mq)
        await history.send(mq, 3)
        manifest = await cluster.back_up(objects)
    await cluster.stop()
    assert await Restore(empty_cluster.store, objects, manifest).run([]) == ["b1", "b2", "d"]
    await empty_cluster.start_replica("b1", "north-1")
    node = empty_cluster.nodes.pop("north-1")
    assert node.driver.core.state.membership.voters == ("restore-under-way",)
    await node.stop()
    with pytest.raises(NotEmpty, match="north-1 is not empty"):
        await empty_cluster.restore(objects, manifest)
    await empty_cluster.store.close()


@pytest.mark.sampled
async def test_delayed_messages_come_from_the_schedule_when_the_log_lost_them(
    cluster: LiveCluster, empty_cluster: LiveCluster, history: History, tmp_path: Path
) -> None:
    objects = objects_in(tmp_path / "backups", chunk_bytes=64 * KIB)
    async with cluster.client() as mq:
        await history.create_subjects(mq)
        while len(list((cluster.data("d-a") / "broker" / "checkpoint").glob("*.qmc"))) < 2:
            await history.send_later(mq, 20, timedelta(hours=1))
        manifest = await cluster.back_up(objects)
    await cluster.stop()
    group = manifest.group(DELAY)
    assert group is not None
    assert group.schedule is not None
    assert group.schedule.files
    kept = [
        each
        for each in group.message
        if parse_envelope(objects.read_bytes(each.content)[:64]).index <= group.schedule.index + 1
    ][-1:]  # the log begins as late as retention may let it
    assert kept[0].base > 0
    shorter = msgspec.structs.replace(
        group, message=tuple(each for each in group.message if each.base >= kept[0].base)
    )
    groups = tuple(shorter if each.name == DELAY else each for each in manifest.groups)
    await empty_cluster.restore(objects, msgspec.structs.replace(manifest, groups=groups))
    async with running(empty_cluster) as restored, restored.client() as mq:
        waiting = {str(each.id)[:32] async for each in mq.delayed.list(LATER)}
        assert waiting == {each[:32] for each in history.delayed.values()}


def _qmq(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "qmq.cli", *words],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.sampled
async def test_a_killed_create_leaves_no_backup_and_the_commands_continue(
    own_etcd: EtcdProcess, tmp_path: Path
) -> None:
    where, etcd = tmp_path / "backups", ("--etcd", own_etcd.endpoint.removeprefix("http://"))
    first = LiveCluster(own_etcd.endpoint, "", tmp_path / "first", {"b1": ("a",)})
    async with running(first), qmq.connect(first.server) as mq:
        bodies = [os.urandom(MIB // 2) for _ in range(80)]
        for body in bodies:
            await mq.send(PLAIN, body)
        process = await asyncio.to_thread(
            subprocess.Popen,
            [sys.executable, "-m", "qmq.cli", "backup", "create", str(where), *etcd],
            stdout=subprocess.DEVNULL,
        )
        until_s = time.monotonic() + 60
        while (
            sum(each.stat().st_size for each in where.glob("chunks/*/*") if len(each.name) == 64)
            < CHUNK_BYTES
        ):
            assert time.monotonic() < until_s
            await asyncio.sleep(0.001)
        process.kill()
        process.wait()
        listed = await asyncio.to_thread(_qmq, "backup", "list", str(where), "--json")
        assert json.loads(listed.stdout) == []
        failed = await asyncio.to_thread(_qmq, "backup", "verify", str(where))
        assert (failed.returncode, "there is no backup here" in failed.stderr) == (2, True)
        made = await asyncio.to_thread(_qmq, "backup", "create", str(where), *etcd, "--json")
        (row,) = json.loads(made.stdout)
        assert row["copied_bytes"] < row["bytes"], "chunks of the killed one are used"
    verified = await asyncio.to_thread(_qmq, "backup", "verify", str(where))
    assert "is whole" in verified.stdout, verified.stderr
    refused = await asyncio.to_thread(
        _qmq, "backup", "restore", str(where), *etcd, "--into", f"b1/z={tmp_path / 'z'}"
    )
    assert (refused.returncode, "has a cluster already" in refused.stderr) == (2, True)


@pytest.mark.sampled
async def test_the_commands_restore_and_rebuild_a_cluster_that_serves(
    own_etcd: EtcdProcess, tmp_path: Path
) -> None:
    where, etcd = tmp_path / "backups", ("--etcd", own_etcd.endpoint.removeprefix("http://"))

    async def command(*words: str) -> str:
        done = await asyncio.to_thread(_qmq, "backup", *words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    async def bodies(cluster: LiveCluster) -> list[bytes]:
        async with running(cluster), cluster.client() as mq:
            return [message.body async for message in mq.browse(PLAIN)]

    first = LiveCluster(own_etcd.endpoint, "", tmp_path / "first", {"b1": ("a",)})
    async with running(first), first.client() as mq:
        await mq.send(PLAIN, b"1")
        await command("create", str(where), *etcd)
    own_etcd.stop()
    second = EtcdProcess(tmp_path / "second-etcd")
    third = EtcdProcess(tmp_path / "third-etcd")
    try:
        second.start()
        etcd = ("--etcd", second.endpoint.removeprefix("http://"))
        said = await command("restore", str(where), *etcd, "--into", f"b1/z={tmp_path / 'z'}")
        assert "start the brokers" in said
        assert await bodies(LiveCluster(second.endpoint, "", tmp_path, {"b1": ("z",)})) == [b"1"]
        third.start()
        etcd = ("--etcd", third.endpoint.removeprefix("http://"))
        assert "rebuilt 1 groups (b1) and 1 subjects" in await command(
            "rebuild", *etcd, str(tmp_path / "z")
        )
        assert await bodies(LiveCluster(third.endpoint, "", tmp_path, {"b1": ("z",)})) == [b"1"]
    finally:
        second.stop()
        third.stop()
