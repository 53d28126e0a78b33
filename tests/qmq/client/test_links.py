"""The client's connections while it is closed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fake_cluster import FakeGroup, FakeMeta, serving

from qmq.client.connection.pool import ConnectionPool
from qmq.client.metadata.cache import Master
from qmq.errors import ClientClosed


class Addresses:
    """A locator that knows all masters."""

    def __init__(self, groups: list[FakeGroup]) -> None:
        self.masters = {group.name: Master(group.replicas[0].address, 1) for group in groups}
        self.is_asked = asyncio.Event()
        self.may_answer = asyncio.Event()

    async def master(self, _subject: str, group: str) -> Master:
        self.is_asked.set()
        await self.may_answer.wait()
        return self.masters[group]

    async def close(self) -> None:
        self.may_answer.set()

    def doubt(self, *_: object) -> None: ...


async def test_a_connection_that_is_made_while_the_client_closes_is_closed_too() -> None:
    groups = [FakeGroup("g0"), FakeGroup("g1")]
    async with serving(groups, [FakeMeta(groups)]):
        locator: Any = Addresses(groups)
        links = ConnectionPool(locator, "c")
        locator.may_answer.set()
        await links.reach("s", "g0")
        others = asyncio.all_tasks()
        reaching = asyncio.create_task(links.reach("s", "g1"))
        while not (
            found := [
                each
                for each in asyncio.all_tasks() - others - {reaching}
                if "connect" in repr(each.get_coro())
            ]
        ):
            await asyncio.sleep(0)
        while not found[0].done():
            await asyncio.sleep(0)
        await links.close()
        _, connection = await reaching
        assert not connection.is_open
        assert links.connections == 0


async def test_no_connection_begins_after_the_client_is_closed() -> None:
    groups = [FakeGroup("g0"), FakeGroup("g1")]
    async with serving(groups, [FakeMeta(groups)]):
        locator: Any = Addresses(groups)
        links = ConnectionPool(locator, "c")
        reaching = asyncio.create_task(links.reach("s", "g0"))
        await locator.is_asked.wait()
        await links.close()
        with pytest.raises(ClientClosed):
            await reaching
        assert not groups[0].replicas[0].is_connected_to.is_set()
