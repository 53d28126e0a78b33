"""A parked key stays parked when its route changes: no newer message of the key is handled before
the replay.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
from support import eventually

import qmq
from qmq.client.consuming.ordered.message import OrderedMessage
from qmq.errors import InvalidArgument
from qmq.operations.letters import unparked
from qmq.proto.v1 import meta_pb2 as pb
from qmq.testing import TestCluster


class World:
    """A subject with one parked key, and a consumer that fails on its first message."""

    def __init__(self, cluster: TestCluster, mq: qmq.Client) -> None:
        self.cluster = cluster
        self.mq = mq
        self.seen: list[bytes] = []
        self.bad = {b"1"}

    async def handle(self, message: OrderedMessage) -> None:
        if message.body in self.bad:
            raise ValueError("it fails")
        self.seen.append(message.body)

    async def parked(self) -> int:
        """Messages of the key that are set aside, wherever they are."""
        return sum(
            [each.messages for each in await self.mq.metadata.parked("s", "g") if each.key == b"k"]
        )

    async def until_parked(self, count: int) -> None:
        async with asyncio.timeout(20):
            while await self.parked() != count:
                await asyncio.sleep(0)

    async def change(self, kind: str) -> None:
        """One change of the route, or several."""
        metadata = self.mq.metadata
        if kind == "merge":
            await metadata.change_route("s", merge=pb.MergeOperation(partitions=[1, 2]))
        elif kind == "move":
            await metadata.change_route(
                "s", move=pb.MoveOperation(partition=1, broker_group=await self.group())
            )
        else:
            await metadata.change_route("s", split=pb.SplitOperation(partition=1, at=[8]))
        if kind == "split, then merge":
            await metadata.change_route("s", merge=pb.MergeOperation(partitions=[2, 3]))

    async def group(self) -> str:
        """The only broker group."""
        return (await self.mq.metadata.describe_route("s")).route.partitions[0].broker_group


@asynccontextmanager
async def world(kind: str, gate: str) -> AsyncIterator[World]:
    """A world with messages 1 and 2 of the key parked."""
    async with TestCluster(delay=False) as cluster, cluster.client() as mq:
        config = qmq.SubjectConfig("s", order=qmq.Order.STRICT, logical_partitions=16)
        await mq.metadata.create_subject(config, partitions=2 if kind == "merge" else 1)
        found = World(cluster, mq)
        consumer = mq.ordered_consumer(
            "s", "g", on_failure="park", attempts_max=1, retry_delays_s=(0.0,), gate=gate
        )
        task = asyncio.create_task(consumer.run(found.handle))
        for body in (b"1", b"2"):
            await mq.send("s", body, key="k")
        await found.until_parked(2)
        yield found
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@pytest.mark.parametrize("gate", ["lanes", "strict"])
@pytest.mark.parametrize("kind", ["split", "merge", "move", "split, then merge"])
async def test_a_parked_key_stays_parked_behind_a_change_of_the_route(kind: str, gate: str) -> None:
    async with world(kind, gate) as it:
        await it.change(kind)
        for body in (b"3", b"4"):
            await it.mq.send("s", body, key="k")
        await it.until_parked(4)
        assert it.seen == []
        it.bad.clear()
        await unparked(it.mq, "s", "g", "k", is_replay=True, dry_run=False)
        await it.mq.send("s", b"5", key="k")
        await eventually(lambda: it.seen == [b"1", b"2", b"3", b"4", b"5"])
        assert await it.mq.metadata.parked("s", "g") == []


@pytest.mark.parametrize("gate", ["lanes", "strict"])
async def test_a_replay_while_the_route_changes_is_in_order(gate: str) -> None:
    async with world("split", gate) as it:
        it.bad.clear()
        changing = asyncio.create_task(it.change("split"))
        replaying = asyncio.create_task(
            unparked(it.mq, "s", "g", "k", is_replay=True, dry_run=False)
        )
        for body in (b"3", b"4"):
            await it.mq.send("s", body, key="k")
        await asyncio.gather(changing, replaying)
        # The key may have been handed on behind the last look of the replay: it is parked still,
        # and replayed once more.
        async with asyncio.timeout(20):
            while len(it.seen) < 4:
                if await it.mq.metadata.parked("s", "g"):
                    with suppress(qmq.errors.InvalidArgument):
                        await unparked(it.mq, "s", "g", "k", is_replay=True, dry_run=False)
                await asyncio.sleep(0)
        assert it.seen == [b"1", b"2", b"3", b"4"]


async def test_a_key_that_is_dropped_flows_again_from_the_next_message_on() -> None:
    async with world("split", "lanes") as it:
        await it.change("split")
        await it.mq.send("s", b"3", key="k")
        await it.until_parked(3)
        await unparked(it.mq, "s", "g", "k", is_replay=False, dry_run=False)
        await it.mq.send("s", b"4", key="k")
        await eventually(lambda: it.seen == [b"4"])


@pytest.mark.parametrize("replay", [True, False])
async def test_newer_messages_of_a_key_are_not_given_back_before_older_ones(replay: bool) -> None:
    async with world("split", "lanes") as it:
        await it.change("split")
        await it.mq.send("s", b"3", key="k")
        await it.until_parked(3)
        old, new = sorted(
            each.partition
            for each in await it.mq.metadata.parked("s", "g")
            if each.key == b"k" and each.messages
        )
        with pytest.raises(InvalidArgument, match=f"parked in partition {old}, which comes first"):
            await it.mq.metadata.unpark("s", "g", new, b"k", replay=replay)
        assert await it.parked() == 3


@pytest.mark.parametrize("target", ["latest", "time"])
async def test_a_move_of_a_group_forgets_the_parked_keys_of_all_versions(target: str) -> None:
    """Older messages of a key that stayed parked would come behind newer ones, by a later
    replay.
    """
    async with world("split", "lanes") as w:
        await w.change("split")
        await w.mq.send("s", b"3", key="k")
        await w.until_parked(3)
        if target == "time":
            (third,) = [
                each async for each in w.mq.browse("s", last=1, key="k") if each.body == b"3"
            ]
            await w.mq.metadata.reset_group("s", "g", time_ms=third.append_time_ms + 1)
        else:
            await w.mq.metadata.reset_group("s", "g", to="latest")
        assert await w.parked() == 0
        w.bad.clear()
        await w.mq.send("s", b"4", key="k")
        await eventually(lambda: b"4" in w.seen)
        with suppress(InvalidArgument, qmq.QmqError):
            await unparked(w.mq, "s", "g", "k", is_replay=True, dry_run=False)
        assert w.seen == sorted(w.seen)
