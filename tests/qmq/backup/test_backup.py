"""A backup of a live cluster is restored into another one, and every message is audited."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest
from live_cluster import (
    GROUP,
    LATER,
    ORDERED,
    PLAIN,
    History,
    LiveCluster,
    objects_in,
    require_order,
    rest,
    running,
)
from support import eventually

import qmq
from qmq.backup.manifest import BackedUpSchedule, manifest_name
from qmq.backup.restore import ReplicaTarget, Restore
from qmq.backup.verify import BackupVerifier
from qmq.errors import BackupDamaged, BackupNotFound, BackupVersion, NotEmpty
from qmq.model import Order, SubjectConfig

HOUR = timedelta(hours=1)


async def send_until(history: History, mq: qmq.Client, is_over: asyncio.Event) -> None:
    while not is_over.is_set():
        await history.send(mq, 1)
        await history.send_later(mq, 1, HOUR)


async def test_a_restored_cluster_has_all_that_was_acknowledged(
    cluster: LiveCluster, empty_cluster: LiveCluster, history: History, tmp_path: Path
) -> None:
    objects = objects_in(tmp_path / "backups")
    async with cluster.client() as mq:
        await history.create_subjects(mq)
        await history.send(mq, 30)
        await history.send_later(mq, 40, HOUR)
        await history.consume(mq, 10)
        is_over = asyncio.Event()
        sending = asyncio.ensure_future(send_until(history, mq, is_over))
        await history.split(mq)
        before = history.frozen()
        splitting = asyncio.ensure_future(history.split(mq))
        manifest = await cluster.back_up(objects)
        await splitting
        is_over.set()
        await sending
        version = (await mq.metadata.describe_route(ORDERED)).route.version
    BackupVerifier(objects).verify(manifest)
    await cluster.stop()

    await empty_cluster.restore(objects, manifest)
    async with running(empty_cluster) as restored, restored.client() as mq:
        route = (await mq.metadata.describe_route(ORDERED)).route
        assert 2 <= route.version <= version
        plain = [body for _, body in await rest(mq, PLAIN, GROUP)]
        assert set(before.plain) - before.done <= set(plain) <= set(history.plain) - before.done, (
            "a group continues from its progress"
        )
        assert {body for _, body in await rest(mq, PLAIN, "new")} >= set(before.plain)
        require_order(await rest(mq, ORDERED, GROUP), history.ordered, before.ordered)

        waiting = {str(each.id)[:32]: each async for each in mq.delayed.list(LATER)}
        assert waiting.keys() >= {each[:32] for each in before.delayed.values()}
        for each in waiting.values():
            await mq.delayed.move(each.id, timedelta(0))
        assert {body for _, body in await rest(mq, LATER, GROUP)} >= set(before.delayed), (
            "delayed messages come"
        )

        later = History(history.plain, history.ordered, numbers=history.numbers)
        await later.send(mq, 2)
        await later.split(mq)
        await later.send(mq, 2)
        assert len(await rest(mq, ORDERED, GROUP)) == 4 * len(later.ordered), (
            "the route takes messages and changes"
        )


async def test_a_schedule_whose_state_is_no_messagepack_is_told_as_damage(
    cluster: LiveCluster, tmp_path: Path
) -> None:
    objects = objects_in(tmp_path / "backups")
    manifest = await cluster.back_up(objects)
    schedule = BackedUpSchedule(1, objects.put_bytes(b"\xa1\xff"), ())
    group = msgspec.structs.replace(manifest.groups[0], schedule=schedule)
    with pytest.raises(BackupDamaged, match="the schedule's state cannot be read"):
        BackupVerifier(objects).verify(msgspec.structs.replace(manifest, groups=(group,)))


@pytest.mark.sampled
async def test_a_backup_refers_to_what_an_earlier_one_has(
    cluster: LiveCluster, empty_cluster: LiveCluster, history: History, tmp_path: Path
) -> None:
    async with cluster.client() as mq:
        await history.create_subjects(mq)
        await history.send(mq, 60)
        first = await cluster.back_up(objects_in(tmp_path / "backups"))
        await history.send(mq, 1)
        second = await cluster.back_up(objects_in(tmp_path / "backups"))
    assert any(each.is_sealed for group in first.groups for each in group.message)
    assert 0 < second.copied_bytes < second.size / 2 < first.copied_bytes
    objects = objects_in(tmp_path / "backups")
    assert objects.ids() == [first.id, second.id]
    BackupVerifier(objects).verify(objects.manifest())
    await cluster.stop()
    await empty_cluster.restore(objects, second)
    async with running(empty_cluster) as restored, restored.client() as mq:
        assert sorted(body for _, body in await rest(mq, PLAIN, GROUP)) == sorted(history.plain)
        third = await restored.back_up(objects)
    for group in third.groups:
        assert group.lineage != next(
            each.lineage for each in second.groups if each.name == group.name
        ), "its log goes its own way"


@pytest.mark.sampled
async def test_replicas_join_a_restored_group(
    cluster: LiveCluster, empty_cluster: LiveCluster, history: History, tmp_path: Path
) -> None:
    objects = objects_in(tmp_path / "backups")
    async with cluster.client() as mq:
        await history.create_subjects(mq)
        await history.send(mq, 10)
        manifest = await cluster.back_up(objects)
    await cluster.stop()
    await empty_cluster.restore(objects, manifest)
    async with running(empty_cluster) as restored, restored.client() as mq:
        await restored.start_replica("b1", "north-4")
        await mq.metadata.add_replica("b1", "north-4")
        await eventually(
            lambda: "north-4" in restored.nodes["north-1"].driver.core.state.membership.voters
        )
        await mq.metadata.transfer("b1", "north-4")
        assert {body for _, body in await rest(mq, PLAIN, GROUP)} == set(history.plain)


async def test_a_flipped_bit_or_a_missing_chunk_is_found(
    cluster: LiveCluster, history: History, tmp_path: Path
) -> None:
    folder = tmp_path / "backups"
    objects = objects_in(folder)
    async with cluster.client() as mq:
        await history.create_subjects(mq)
        await history.send(mq, 10)
        manifest = await cluster.back_up(objects)
    for chunk in (folder / "chunks").rglob("*"):
        if not chunk.is_file():
            continue
        data = chunk.read_bytes()
        for damaged in (data[:-1] + bytes([data[-1] ^ 1]), data[: len(data) // 2], None):
            chunk.unlink() if damaged is None else chunk.write_bytes(damaged)
            with pytest.raises(BackupDamaged, match=chunk.name):
                BackupVerifier(objects).verify(manifest)
        chunk.write_bytes(data)
    BackupVerifier(objects).verify(manifest)
    (path,) = (folder / "backups").rglob("manifest")
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(BackupDamaged):
        objects.manifest()
    again = await cluster.back_up(objects)
    assert objects.ids() == [manifest.id, again.id]
    BackupVerifier(objects).verify(objects.manifest())
    objects.store.delete(manifest_name(again.id))
    path.unlink()
    with pytest.raises(BackupNotFound):
        objects.manifest()


async def test_a_backup_of_a_newer_release_is_refused(cluster: LiveCluster, tmp_path: Path) -> None:
    import msgspec

    objects = objects_in(tmp_path / "backups")
    made = await cluster.back_up(objects)
    newer = msgspec.structs.replace(made, version=2, id=f"{made.id}-newer")
    objects.put_manifest(newer)
    with pytest.raises(BackupVersion, match="has version 2"):
        objects.manifest(newer.id)


async def test_a_restore_goes_only_where_nothing_is(
    cluster: LiveCluster, empty_cluster: LiveCluster, history: History, tmp_path: Path
) -> None:
    objects = objects_in(tmp_path / "backups")
    async with cluster.client() as mq:
        await mq.metadata.create_subject(SubjectConfig(PLAIN, order=Order.NONE))
    manifest = await cluster.back_up(objects)
    with pytest.raises(NotEmpty, match="has a cluster already"):
        await cluster.restore(objects, manifest)
    taken = empty_cluster.data("north-1")
    taken.mkdir(parents=True)
    (taken / "file").touch()
    with pytest.raises(NotEmpty, match="north-1 is not empty"):
        await empty_cluster.restore(objects, manifest)
    assert (await empty_cluster.store.list("/qmq/")).items == ()
    (taken / "file").unlink()
    await empty_cluster.restore(objects, manifest)
    identity = (taken / "replica.json").read_bytes()
    await empty_cluster.restore(objects, manifest)
    assert (taken / "replica.json").read_bytes() == identity, "again: nothing is written"
    with pytest.raises(NotEmpty, match="restored already"):
        await Restore(empty_cluster.store, objects, manifest).run(
            [ReplicaTarget("b1", "other", tmp_path / "other")]
        )
    await empty_cluster.store.close()
