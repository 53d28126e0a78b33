"""Replicas that are removed and added while the network is cut, and a new one that starts late.

Changes are asked of a metaserver, as `qmq cluster replicas add` and `remove` do. Their outcome may
be unknown after a lost answer, so they are asked again until the group's master says that it has
the replica as a voter, or has it no more.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

from system.group import CONTROL_PORT, master_at, statuses_at

import qmq
from campaign.cluster import START_S, World
from campaign.faults.partition import LASTS_S, NEEDS, parted
from campaign.values import Fault, Striking, Struck
from qmq.client.metadata.service import MetadataClient
from qmq.errors import QmqError
from qmq.rpc.network import NETWORK

LOOK_S: Final = 0.2
SILENT_S: Final = 3.0
"""After that time a master knows that a replica is silent."""
NEW: Final = "d"
"""The letter of the replica that is added: g1-d."""
NEW_PORT: Final = "20990"


def _controls(world: World, group: str) -> dict[str, str]:
    """Control ports of the group's replicas, and of the one that may have been added."""
    names = [*world.members(group), f"{group}-{NEW}"]
    known = world.cluster.services
    return {
        name: f"{world.cluster.address(name)}:{CONTROL_PORT}" for name in names if name in known
    }


async def _master(world: World, group: str) -> str:
    """Also the added replica may be it, which `World.master` does not know."""
    return await master_at(_controls(world, group), NETWORK, within_s=START_S)


async def _members(world: World, group: str) -> tuple[set[str], set[str]]:
    """(voters, learners), as the master has them."""
    while True:
        master = await _master(world, group)
        found = await statuses_at(_controls(world, group), NETWORK)
        if master in found:
            return set(found[master].voters), set(found[master].learners)


async def _until(
    world: World,
    group: str,
    ask: Callable[[MetadataClient], Awaitable[Any]],
    is_done: Callable[[set[str], set[str]], bool],
) -> None:
    """Ask until it is done: an answer may be lost, or a change may be under way."""
    async with asyncio.timeout(START_S), qmq.connect(world.server) as client:
        while not is_done(*await _members(world, group)):
            with suppress(QmqError):
                await ask(client.metadata)
            await asyncio.sleep(LOOK_S)


async def _add(world: World, group: str, name: str) -> None:
    await _until(
        world,
        group,
        lambda metadata: metadata.add_replica(group, name),
        lambda voters, _: name in voters,
    )


async def _remove(world: World, group: str, name: str) -> None:
    await _until(
        world,
        group,
        lambda metadata: metadata.remove_replica(group, name),
        lambda voters, learners: name not in voters | learners,
    )


async def _roles(world: World) -> tuple[str, str, str, str]:
    """(group, master, one of its followers, the other one)."""
    group = world.a_group()
    master, others = await world.others(group)
    one, other = world.random.sample(others, 2)
    return group, master, one, other


@asynccontextmanager
async def _remove_the_lone_one(world: World) -> Striking:
    """It learns only afterwards that it was removed, and then joins again with its log."""
    group, master, lone, other = await _roles(world)
    try:
        async with parted(world, [lone], [master, other], CONTROL_PORT) as struck:
            await _remove(world, group, lone)
            yield Struck(
                targets=(lone,),
                effect=f"{lone} is removed; {struck.effect}" if struck.effect else "",
            )
    finally:
        await _add(world, group, lone)


@asynccontextmanager
async def _add_during_a_cut(world: World) -> Striking:
    """Two voters are left, which must both have every message. Then they are cut off from each
    other, and the replica that is to be added hears only one of them.
    """
    group, master, out, other = await _roles(world)
    await _remove(world, group, out)
    adding: asyncio.Task[None] | None = None
    try:
        async with parted(world, [other], [master, out], CONTROL_PORT) as struck:
            adding = asyncio.create_task(_add(world, group, out))
            effect = f"{out} is to be added; {struck.effect}"
            yield Struck(targets=(out, other), effect=effect if struck.effect else "")
    finally:
        if adding is not None:
            adding.cancel()
            await asyncio.gather(adding, return_exceptions=True)
        await _add(world, group, out)


@asynccontextmanager
async def _refuse_to_remove(world: World) -> Striking:
    """With one follower away, the other one must not be removed: no majority of what stays would
    answer.
    """
    group, master, lone, other = await _roles(world)
    try:
        async with parted(world, [lone], [master, other], CONTROL_PORT) as struck:
            refused = ""
            await asyncio.sleep(SILENT_S)
            async with qmq.connect(world.server) as client:
                try:
                    await client.metadata.remove_replica(group, other)
                except QmqError as failure:
                    refused = f"{other} stays: {failure.code}"
            yield Struck(
                targets=(lone, other),
                effect=f"{refused}; {struck.effect}" if refused and struck.effect else "",
            )
    finally:
        await _add(world, group, other)


@asynccontextmanager
async def _a_new_one(world: World) -> Striking:
    """A fourth replica, on another machine, begins empty at first and with an old log later.
    It becomes a voter under load, the master dies, and in the end the new one leaves.
    """
    group, master, *_ = await _roles(world)
    name = _known(world, group)
    await world.start(name)
    try:
        await _add(world, group, name)
        await world.do(world.cluster.kill, master)
        try:
            yield Struck(targets=(name, master), effect=f"{name} votes; dead: {master}")
        finally:
            await world.start(master)
    finally:
        await _leave(world, group, name)
        await world.do(world.cluster.kill, name)


async def _leave(world: World, group: str, name: str) -> None:
    """Remove a replica, which may be master: that is refused until another one is."""

    async def ask(metadata: MetadataClient) -> None:
        if await _master(world, group) == name:
            await metadata.transfer(group)
        await metadata.remove_replica(group, name)

    await _until(world, group, ask, lambda voters, learners: name not in voters | learners)


def _known(world: World, group: str) -> str:
    """The name of the new replica, which the cluster's file has from now on."""
    name, like = f"{group}-{NEW}", world.members(group)[0]
    folder = world.cluster.folder
    model = folder.load_model()
    assert model is not None, "the cluster is up"
    if name not in model["services"]:
        body = copy.deepcopy(model["services"][like])
        body["environment"] |= {
            "QMQ_REPLICA": name,
            "QMQ_ADVERTISE": name,
            "QMQ_DATA_PORT": NEW_PORT,
        }
        for volume in body.get("volumes", ()):
            volume["source"] = name
        model["services"][name] = body
        folder.save_model(model)
        with folder.changing() as state:
            if name not in state.order:
                state.order.append(name)
    return name


FAULTS = (
    Fault(
        name="remove-cut-off",
        what="a follower that is cut off is removed from its group, and joins again afterwards",
        strike=_remove_the_lone_one,
        needs=NEEDS,
        lasts_s=LASTS_S,
    ),
    Fault(
        name="add-during-cut",
        what="a replica is added to a group of two, which do not hear each other",
        strike=_add_during_a_cut,
        needs=NEEDS,
        lasts_s=LASTS_S,
    ),
    Fault(
        name="remove-last-majority",
        what="a follower is to be removed while the other one is cut off",
        strike=_refuse_to_remove,
        needs=NEEDS,
        lasts_s=(2.0, 5.0),
    ),
    Fault(
        name="late-replica",
        what="a fourth replica starts late, joins, and the master dies",
        strike=_a_new_one,
        lasts_s=(2.0, 5.0),
    ),
)
