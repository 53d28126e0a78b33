"""Processes that end in order and start again: on the same machine, at another address, under
another name's former address, or with another port.

SIGTERM lets a broker hand over, flush and write a checkpoint, so a start replays nothing: other
code than after SIGKILL.

An address belongs to a namespace. A service that moves gets a free one, and the address that it had
is the next free one: so a later strike gives it to somebody else. Clients and servers are not told;
they learn it as they do on machines.
"""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Sequence
from contextlib import asynccontextmanager
from typing import Final

from system.group import CONTROL_PORT

from campaign.cluster import World
from campaign.faults.partition import NEEDS
from campaign.faults.victims import master, on, replicas
from campaign.values import Fault, Striking, Struck

SPARE: Final = "spare"
"""The name in the cluster's list of addresses that stands for the free one."""
PORTS: Final = ("21900", "21901")
PORT: Final = "QMQ_DATA_PORT"


@asynccontextmanager
async def ended(world: World, names: Sequence[str]) -> Striking:
    """These services ended by SIGTERM, and are away during the block."""
    await world.do(world.cluster.stop, *names)
    dead = [name for name in names if world.state(name) == "dead"]
    try:
        yield Struck(targets=tuple(names), effect=f"ended: {', '.join(dead)}" if dead else "")
    finally:
        await world.start(*names)


@asynccontextmanager
async def _in_turn(world: World) -> Striking:
    """As one brings a new version to a cluster: each process, when the one before is back."""
    names = [*world.metas, *world.brokers, *world.delays]
    world.random.shuffle(names)
    seen: list[str] = []
    for name in names:
        async with ended(world, [name]) as struck:
            seen.append(struck.effect)
        await world.settled()
    yield Struck(targets=tuple(names), effect="; ".join(seen) if all(seen) else "")


# --- addresses ------------------------------------------------------------------------------------


def _ip(world: World, name: str, *words: str) -> None:
    """Run `ip` in a service's namespace. Raises OSError."""
    command = [*world.cluster.prefix(name), "ip", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


def _exchange(world: World, one: str, other: str) -> None:
    """Exchange two addresses. Either may be the free one, which no namespace has."""
    before = {name: world.cluster.address(name) for name in (one, other) if name != SPARE}
    with world.cluster.folder.changing() as state:
        if SPARE in (one, other) and SPARE not in state.order:
            state.order.append(SPARE)
        at, to = state.order.index(one), state.order.index(other)
        state.order[at], state.order[to] = other, one
    for name, address in before.items():
        _ip(world, name, "addr", "del", f"{address}/24", "dev", "eth0")
    for name in before:
        _ip(world, name, "addr", "add", f"{world.cluster.address(name)}/24", "dev", "eth0")
    # A machine that takes an address says so; else its neighbours ask again only after a while.
    servers = (*world.etcds, *world.metas, *world.brokers, *world.delays, *world.clients)
    for name in servers:
        _ip(world, name, "neigh", "flush", "dev", "eth0")
    network = world.cluster.address(servers[0]).rsplit(".", 1)[0] + ".0/24"
    subprocess.run(["ip", "neigh", "flush", "to", network], capture_output=True, check=False)


async def _moved(world: World, names: Sequence[str], to: str) -> Struck:
    """Kill services, let the first one and `to` exchange addresses, and start them again."""
    before = {name: world.cluster.address(name) for name in names}
    await world.do(world.cluster.kill, *names)
    await asyncio.to_thread(_exchange, world, names[0], to)
    await world.start(*names)
    reached = [await world.reaches(world.clients[0], name, CONTROL_PORT) for name in names]
    effect = ", ".join(
        f"{name} was at {address}, and is at {world.cluster.address(name)}"
        for name, address in before.items()
    )
    return Struck(targets=tuple(names), effect=effect if all(reached) else "")


@asynccontextmanager
async def _move_master(world: World) -> Striking:
    yield await _moved(world, [await world.master(world.a_group())], SPARE)


@asynccontextmanager
async def _move_meta(world: World) -> Striking:
    """Clients know its address from their start: they are started again, too."""
    struck = await _moved(world, [world.random.choice(world.metas)], SPARE)
    alive = [name for name in world.clients if world.state(name) != "dead"]
    await world.do(world.cluster.stop, *alive)
    await world.start(*world.clients)
    yield struck


@asynccontextmanager
async def _swap(world: World) -> Striking:
    """Two replicas, of one group or of two, each with the address that the other one had."""
    one, other = world.random.sample(world.brokers, 2)
    yield await _moved(world, [one, other], other)


@asynccontextmanager
async def _port(world: World) -> Striking:
    """The master starts again with another port for its clients."""
    name = await world.master(world.a_group())
    await world.do(world.cluster.kill, name)
    model = world.cluster.folder.load_model()
    assert model is not None, "the cluster is up"
    environment = model["services"][name]["environment"]
    before = environment[PORT]
    environment[PORT] = PORTS[before == PORTS[0]]
    world.cluster.folder.save_model(model)
    await world.start(name)
    is_there = await world.reaches(world.clients[0], name, int(environment[PORT]))
    effect = f"{name} listens at {environment[PORT]}, and did at {before}"
    yield Struck(targets=(name,), effect=effect if is_there else "")


FAULTS = (
    Fault(
        name="restart-master",
        what="a master ends in order, and is away for a while",
        strike=on(master, ended),
    ),
    Fault(
        name="restart-all",
        what="all brokers and delay servers end in order, and start again",
        strike=on(replicas, ended),
        lasts_s=(0.5, 2.0),
    ),
    Fault(
        name="restart-in-turn",
        what="each server ends in order and starts again, one after another",
        strike=_in_turn,
        lasts_s=(0.5, 2.0),
    ),
    Fault(
        name="move-master",
        what="a master starts again at another address",
        strike=_move_master,
        needs=NEEDS,
        lasts_s=(2.0, 4.0),
    ),
    Fault(
        name="move-meta",
        what="a metaserver starts again at another address",
        strike=_move_meta,
        hits=frozenset({"metas"}),
        needs=NEEDS,
        lasts_s=(2.0, 4.0),
    ),
    Fault(
        name="swap-addresses",
        what="two replicas start again, each at the address of the other one",
        strike=_swap,
        needs=NEEDS,
        lasts_s=(2.0, 4.0),
    ),
    Fault(
        name="move-port",
        what="a master starts again with another port",
        strike=_port,
        lasts_s=(2.0, 4.0),
    ),
)
