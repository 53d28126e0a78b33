"""etcd is lost for good: its keys are made again from the replicas' folders, and clients
continue.
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from live_cluster import (
    GROUP,
    KEYS,
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
from qmq_ordering.changes import first_route, merge, move, next_route, split
from qmq_ordering.hashing import logical_partition
from qmq_ordering.routes import Change, LpRange, Route
from qmq_replication.identity import new
from qmq_replication.membership import ReplicaMembership
from support.etcd_process import EtcdProcess

from qmq.backup.manifest import decode_items
from qmq.backup.rebuild import (
    CountEvidence,
    FolderEvidence,
    PartitionEvidence,
    deduce,
    look_into,
    put_rebuilt,
    rebuilt_keys,
)
from qmq.errors import FolderInUse, InvalidArgument, NotEmpty
from qmq.model import Order, SubjectConfig
from qmq.proto.v1 import meta_pb2 as pb


def without_etcd(etcd: EtcdProcess, cluster: LiveCluster) -> LiveCluster:
    """The same folders with an empty coordination store."""
    return LiveCluster(
        etcd.endpoint, f"/{secrets.token_hex(8)}", cluster.folder, cluster.groups, cluster.meta_port
    )


def folders_of(cluster: LiveCluster) -> list[Path]:
    return [cluster.data(name) for names in cluster.groups.values() for name in names]


@pytest.mark.parametrize("has_backup", [False, True], ids=["from-logs-alone", "with-a-backup"])
async def test_a_cluster_continues_with_a_new_etcd(
    cluster: LiveCluster,
    history: History,
    shared_etcd: EtcdProcess,
    tmp_path: Path,
    has_backup: bool,
) -> None:
    objects = objects_in(tmp_path / "backups")
    async with cluster.client() as mq:
        await history.create_subjects(mq)
        await history.send(mq, 10)
        await history.consume(mq, 4)
        handled = [await rest(mq, ORDERED, GROUP)]
        if has_backup:
            await cluster.back_up(objects)
        await history.split(mq)
        await history.send(mq, 5)
        await history.split(mq)
        await history.send(mq, 5)
        await history.send_later(mq, 20, timedelta(hours=1))
        with pytest.raises(FolderInUse):
            look_into(cluster.data("b1-a"))
    await cluster.stop()

    again = without_etcd(shared_etcd, cluster)
    items = decode_items(objects.read_bytes(objects.manifest().items)) if has_backup else {}
    rebuilt = rebuilt_keys([look_into(each) for each in folders_of(cluster)], items)
    assert rebuilt.failed == {}
    await put_rebuilt(again.store, rebuilt)
    async with running(again), again.client() as mq:
        found = {each.settings.name: each.settings for each in await mq.metadata.list_subjects()}
        assert (found[ORDERED].order, found[ORDERED].logical_partitions) == (Order.STRICT.value, 64)
        assert (await mq.metadata.describe_route(ORDERED)).route.version == 3
        assert {body for _, body in await rest(mq, PLAIN, GROUP)} == set(
            history.plain
        ) - history.done
        handled.append(await rest(mq, ORDERED, GROUP))
        require_order([each for part in handled for each in part], history.ordered, history.ordered)
        assert {str(each.id)[:32] async for each in mq.delayed.list(LATER)} == {
            each[:32] for each in history.delayed.values()
        }
        await history.split(mq)
        before = len(history.plain)
        await history.send(mq, 3)
        got = await rest(mq, ORDERED, GROUP)
        for key in KEYS:
            assert [body for found_key, body in got if found_key == key] == history.ordered[key][
                before:
            ]
        with pytest.raises(NotEmpty):
            await put_rebuilt(cluster.open_store(), rebuilt)


async def test_clients_that_run_meanwhile_continue_after_a_rebuild(
    cluster: LiveCluster, shared_etcd: EtcdProcess
) -> None:
    async with cluster.client() as mq:
        await mq.metadata.create_subject(SubjectConfig("u"))
        await mq.metadata.create_subject(
            SubjectConfig(ORDERED, order=Order.STRICT, logical_partitions=64), partitions=2
        )
        producer, consumer = mq.ordered_producer(ORDERED), mq.consumer("u", "g", ack="explicit")
        await producer.send(b"1", "k")
        await mq.send("u", b"1")
        await mq.metadata.change_route(
            ORDERED, split=pb.SplitOperation(partition=1, parts=2), from_version=1
        )
        await cluster.stop()
        again = without_etcd(shared_etcd, cluster)
        await put_rebuilt(
            again.store, rebuilt_keys([look_into(each) for each in folders_of(cluster)], {})
        )
        async with running(again):
            assert again.server == cluster.server
            await producer.send(b"2", "k")
            await mq.send("u", b"2")
            assert [body for _, body in await rest(mq, ORDERED, "readers")] == [b"1", b"2"]
            async with asyncio.timeout(60):
                found = [(await anext(consumer)).body for _ in range(2)]
            assert sorted(found) == [b"1", b"2"]
            await consumer.close()


def test_folders_of_different_clusters_are_refused(tmp_path: Path) -> None:
    folders = []
    for name in ("a", "b"):
        identity = replace(
            new(f"g-{name}", name),
            cluster=name,
            membership=ReplicaMembership(1, (name,)).encode().decode(),
        )
        folders.append(FolderEvidence(tmp_path, identity, None))
    with pytest.raises(InvalidArgument, match="different clusters, a, b"):
        rebuilt_keys(folders, {})


def evidence(
    routes: list[Route], changes: list[Change], lps: set[int]
) -> dict[int, PartitionEvidence]:
    """What the logs say if these logical partitions were used in every version."""
    parts = {part.number: part for route in routes for part in route.partitions}
    seals = {
        number: (7, change.id, change.to_version) for change in changes for number in change.sources
    }
    found = {}
    for number, part in parts.items():
        mine = [lp for lp in lps if part.range.first <= lp < part.range.end]
        hull = LpRange(min(mine), max(mine) + 1) if mine else None
        if hull is not None or number in seals:
            found[number] = PartitionEvidence(number, part.group, hull, seals.get(number))
    return found


def changed(route: Route) -> tuple[list[Route], list[Change]]:
    routes, changes = [route], []

    def add(change: Change) -> None:
        changes.append(change)
        routes.append(next_route(routes[-1], change))

    add(split(routes[-1], 1, [10, 20], change_id="a", groups=["x", "y", "x"]))
    add(move(routes[-1], 2, "y", change_id="b"))
    add(merge(routes[-1], [3, 4], change_id="c", group="x"))
    add(split(routes[-1], 6, [40], change_id="d", groups=["x", "y"]))
    return routes, changes


def test_routes_are_deduced_from_what_the_logs_have() -> None:
    routes, changes = changed(first_route(64, 2, ["x", "y"]))
    deduced = deduce(64, evidence(routes, changes, set(range(64))))
    assert list(deduced.routes) == routes
    assert [(each.id, each.kind, each.sources, each.targets) for each in deduced.changes] == [
        (each.id, each.kind, each.sources, each.targets) for each in changes
    ]


def test_with_few_keys_a_deduced_route_keeps_each_key_where_its_messages_are() -> None:
    routes, changes = changed(first_route(64, 2, ["x", "y"]))
    lps = {1, 5, 11, 19, 21, 30, 33, 38, 41, 60}
    deduced = deduce(64, evidence(routes, changes, lps))
    assert len(deduced.routes) == len(routes)
    for found, real in zip(deduced.routes, routes, strict=True):
        for lp in lps:
            assert found.holder(lp).number == real.holder(lp).number
            assert found.holder(lp).group == real.holder(lp).group


def test_what_no_route_explains_is_refused() -> None:
    sealed = (3, "a", 2)
    overlapping = {
        number: PartitionEvidence(number, "x", LpRange(0, 40), sealed if number < 3 else None)
        for number in (1, 2, 3)
    }
    with pytest.raises(InvalidArgument):
        deduce(64, overlapping)


def test_the_number_of_logical_partitions_follows_from_keys() -> None:
    for count in (64, 1_000, 1_024):
        found = CountEvidence()
        for number in range(3_000):
            key = f"key-{number}".encode()
            found.add(logical_partition(key, 1 << 32), logical_partition(key, count))
        assert found.count(usual=7) == count
    with pytest.raises(InvalidArgument, match="too few keys"):
        CountEvidence().count(usual=1 << 20)
