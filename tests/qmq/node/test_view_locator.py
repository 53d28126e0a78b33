"""A delay server finds brokers in its own view of the store, with the same result as a metaserver's
answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from operator import itemgetter
from typing import NamedTuple

import pytest
from qmq_coordination.broker_groups import DelaySettings, EpochClaim, MasterRecord, group_key
from qmq_coordination.coordination_store import CoordinationStore
from qmq_coordination.embedded import EmbeddedStore
from qmq_coordination.ordered_records import change_key, latest_key, route_key
from qmq_coordination.subjects import SubjectCatalog
from qmq_coordination.view import ClusterView
from qmq_ordering.changes import first_route, next_route, split
from support import eventually
from support.stores import FaultyStore

from qmq.client.metadata.cache import MetadataCache, Pushed, SubjectRoute
from qmq.client.metadata.service import MetadataClient
from qmq.errors import NotConnected, UnknownSubject
from qmq.meta.server import MetaConfig, MetaServer
from qmq.model import Fencing, Order, SubjectConfig, SubjectFlush
from qmq.node.broker_assembly import ViewLocator
from qmq.rpc.server_name import ServerName


class World(NamedTuple):
    store: FaultyStore
    view: ClusterView
    locator: ViewLocator

    async def put_master(self, group: str, epoch: int = 1) -> None:
        claim = EpochClaim(epoch, f"{group}-a", "test")
        await self.store.put(
            group_key(group, "members"),
            b'{"version": 1, "voters": ["%s-a"], "learners": []}' % group.encode(),
        )
        await self.store.put(group_key(group, "epoch"), claim.encode())
        await self.store.put(
            group_key(group, "master"),
            MasterRecord(f"{group}-a", epoch, "test", f"{group}-{epoch}:1", "c:1").encode(),
        )

    async def create(self, config: SubjectConfig) -> None:
        route = (
            first_route(config.logical_partitions, 2, config.groups)
            if config.order is not Order.NONE
            else None
        )
        also = (
            []
            if route is None
            else [(route_key(config.name, 1), route.encode()), (latest_key(config.name), b"1")]
        )
        await SubjectCatalog(self.store).create(config, is_placed=True)
        for key, value in also:
            await self.store.put(key, value)


@asynccontextmanager
async def running() -> AsyncIterator[World]:
    store = FaultyStore(EmbeddedStore())
    view = ClusterView(store)
    await view.start()
    world = World(store, view, ViewLocator(store, view))
    for group in ("g1", "g2"):
        await world.put_master(group)
    await eventually(lambda: all(view.group(group).master is not None for group in ("g1", "g2")))
    try:
        yield world
    finally:
        world.locator.close()
        await view.stop()
        await store.close()


async def test_it_answers_what_a_metaserver_answers() -> None:
    async with running() as world:
        await world.create(SubjectConfig("plain", groups=("g1", "g2")))
        await world.create(SubjectConfig("drained", groups=("g2",)))
        ordered = SubjectConfig(
            "ordered",
            groups=("g1", "g2"),
            order=Order.STRICT,
            logical_partitions=100,
            fencing=Fencing.LEASE,
        )
        await world.create(ordered)
        await world.store.put(group_key("g2", "mode"), b"read-only")
        await eventually(lambda: world.view.group("g2").mode.value == "read-only")
        meta = MetaServer(world.store, world.view, MetaConfig("127.0.0.1", 0))
        await meta.start()
        client = MetadataClient([meta.address])
        for subject in ("plain", "drained", "ordered"):
            mine, theirs = await world.locator.locate(subject), await client.routes(subject)
            assert sorted(mine.routes, key=itemgetter(0)) == sorted(
                theirs.routes, key=itemgetter(0)
            )
            assert (mine.ordering is None) == (theirs.ordering is None)
            if mine.ordering is not None and theirs.ordering is not None:
                assert mine.ordering.route.partitions == theirs.ordering.route.partitions
                assert mine.ordering[::2] == theirs.ordering[::2]
        assert (await world.locator.locate("drained")).routes == [
            SubjectRoute("g2", "g2-1:1", 1, False, ServerName("", "g2", "g2-a"))
        ]
        await client.close()
        await meta.stop()


async def test_a_delay_group_is_never_where_a_subject_lives() -> None:
    async with running() as world:
        await world.put_master("d1")
        await world.store.put(group_key("d1", "delay"), DelaySettings(3_600_000, 1).encode())
        await eventually(lambda: world.view.group("d1").delay is not None)
        await world.create(SubjectConfig("s"))
        assert {each.group for each in (await world.locator.locate("s")).routes} == {"g1", "g2"}


async def test_a_subject_that_was_created_a_moment_ago_is_found_before_the_watch_brings_it() -> (
    None
):
    async with running() as world:
        await world.view.stop()
        await world.create(SubjectConfig("new", groups=("g1",)))
        assert (await world.locator.locate("new")).routes == [
            SubjectRoute("g1", "g1-1:1", 1, True, ServerName("", "g1", "g1-a"))
        ]


async def test_without_the_store_known_subjects_are_answered_and_no_other_is_denied() -> None:
    async with running() as world:
        await world.create(SubjectConfig("s", groups=("g1",)))
        await world.locator.locate("s")
        with pytest.raises(UnknownSubject):
            await world.locator.locate("nobody")
        assert await SubjectCatalog(world.store).get("nobody") is None, "nor is it created"
        world.store.cut("get")
        assert (await world.locator.locate("s")).routes == [
            SubjectRoute("g1", "g1-1:1", 1, True, ServerName("", "g1", "g1-a"))
        ]
        with pytest.raises(NotConnected):
            await world.locator.locate("other")


async def test_a_group_without_a_master_is_not_connected() -> None:
    async with running() as world:
        await world.create(SubjectConfig("s", groups=("g1",)))
        await world.store.delete(group_key("g1", "master"))
        await eventually(lambda: world.view.group("g1").master is None)
        with pytest.raises(NotConnected):
            await world.locator.locate("s")


async def test_a_new_master_and_a_new_route_reach_a_client_without_its_asking() -> None:
    async with running() as world:
        config = SubjectConfig(
            "o",
            groups=("g1", "g2"),
            order=Order.STRICT,
            logical_partitions=100,
            fencing=Fencing.LEASE,
        )
        await world.create(config)
        client = MetadataCache(world.locator.locate, world.locator.watch)
        first = await client.ordering("o")
        assert first is not None
        assert (await client.master("o", "g1"))[:2] == ("g1-1:1", 1)
        await world.put_master("g1", epoch=2)
        await eventually(lambda: (client.book.master("g1") or ())[:2] == ("g1-2:1", 2))
        change = split(first.route, 1, [20], change_id="c", groups=("g1", "g2"))
        await world.store.put(change_key("o", 2), change.encode())
        await world.store.put(route_key("o", 2), next_route(first.route, change).encode())
        await world.store.put(latest_key("o"), b"2")
        await eventually(
            lambda: (found := client.book.ordering("o")) is not None and found.route.version == 2
        )
        await client.close()


async def test_when_more_changes_at_once_than_are_remembered_all_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("qmq.meta.watchers.NAMES_MAX", 3)
    async with running() as world:
        pushes = world.locator.watch()
        assert await anext(pushes) == Pushed([], [])
        for number in range(5):
            await SubjectCatalog(world.store).create(
                SubjectConfig(f"s{number}", groups=("g1",)), is_placed=True
            )
        await eventually(lambda: len(world.view.subjects()) == 5)
        for number in range(5):
            await _flush_sync(world.store, f"s{number}")
        await eventually(
            lambda: all(each.flush is SubjectFlush.SYNC for each in world.view.subjects())
        )
        assert (await anext(pushes)).is_gap
        assert await anext(pushes) == Pushed([], [])
        await SubjectCatalog(world.store).create(
            SubjectConfig("last", groups=("g1",)), is_placed=True
        )
        await _flush_sync(world.store, "last")
        assert "last" in (await anext(pushes)).subjects


async def _flush_sync(store: CoordinationStore, subject: str) -> None:
    await SubjectCatalog(store).update(
        subject, lambda config: replace(config, flush=SubjectFlush.SYNC)
    )


async def test_every_watch_ends_with_it() -> None:
    async with running() as world:
        locator = ViewLocator(world.store, world.view)
        pushes = locator.watch()
        await anext(pushes)
        rest = asyncio.ensure_future(_rest(pushes))
        locator.close()
        assert await rest == []


async def _rest(pushes: AsyncIterator[Pushed]) -> list[Pushed]:
    return [each async for each in pushes if each.subjects or each.groups]
