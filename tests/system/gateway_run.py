"""A run with faults through gateways: RocketMQ's Java client works while gateways and brokers are
killed and routes change.

Java sender ──▶ gateway 1, gateway 2 (processes, killed and restarted) ──▶ brokers (TestCluster: real files, killed and restarted)
Java receiver ─┘                                                              route: splits, merges, moves
"""  # noqa: E501

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from random import Random
from typing import Any, Final

from support.etcd_process import free_ports
from system.gateway_processes import Gateway, Load
from system.ordered_workload import operation

import qmq
from qmq.errors import QmqError
from qmq.testing import TestCluster

TOPIC: Final = "faults"
LOGICAL_PARTITIONS: Final = 64
BROKER_GROUPS: Final = 2
KINDS: Final = ("split", "merge", "move")
RETRY_S: Final = 0.2
DOWN_S: Final = 1.0
"""So long a killed process stays away."""


@dataclass(frozen=True, slots=True)
class GatewayRun:
    """The plan of a run. With `groups` (message groups) the topic is ordered, otherwise unordered.
    Only an ordered topic has `changes`.
    """

    count: int = 5_000
    bytes: int = 100
    at_once: int = 16
    groups: int = 0
    changes: int = 0
    gateway_kills: int = 0
    failovers: int = 0
    gateways: int = 2
    replicas: int = 3
    idle_s: int = 90
    """The receiver gives up when nothing has come for so long; ten times as long before its first
    message.
    """
    seed: int = 1


@dataclass(frozen=True, slots=True)
class GatewayOutcome:
    """The outcome of a run. `resent`: sends without an answer at the client. `under_load`: faults
    during sending.
    """

    sent: int
    resent: int
    received: int
    lost: int
    received_again: int
    out_of_order: int
    changes: int
    gateway_kills: int
    failovers: int
    under_load: int
    seconds: float

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in asdict(self).items())


class Faults:
    """Makes the run's faults in the cluster."""

    def __init__(
        self,
        cluster: TestCluster,
        mq: qmq.Client,
        gateways: list[Gateway],
        coin: Random,
        say: Callable[[str], None],
    ) -> None:
        self._cluster, self._mq, self._gateways, self._coin, self._say = (
            cluster,
            mq,
            gateways,
            coin,
            say,
        )
        self._brokers = sorted(name for name in cluster.groups if name != "delay")

    async def do(self, kind: str, struck: Callable[[], None]) -> None:
        """One fault; calls `struck` when the harm is done, and returns when what was killed is
        there again.
        """
        self._say(kind)
        await {"change": self._change, "gateway": self._kill_gateway, "failover": self._fail_over}[
            kind
        ](struck)

    async def _change(self, struck: Callable[[], None]) -> None:
        kind = self._coin.choice(KINDS)
        while True:
            try:
                route = (await self._mq.metadata.describe_route(TOPIC)).route
                wanted: Any = operation(self._coin, kind, route, self._brokers)
                await self._mq.metadata.change_route(TOPIC, **wanted, from_version=route.version)
            except QmqError:
                await asyncio.sleep(RETRY_S)
            else:
                struck()
                return

    async def _kill_gateway(self, struck: Callable[[], None]) -> None:
        at = self._coin.randrange(len(self._gateways))
        await asyncio.to_thread(self._gateways[at].kill)
        struck()
        await asyncio.sleep(DOWN_S)
        self._gateways[at] = await asyncio.to_thread(
            Gateway, self._cluster.address, self._gateways[at].port
        )

    async def _fail_over(self, struck: Callable[[], None]) -> None:
        group = self._coin.choice(self._brokers)
        await self._cluster.until_master(group)
        master = self._cluster.master(group)
        await self._cluster.kill(master)
        struck()
        await self._cluster.until_master(group, other_than=master)
        await asyncio.sleep(DOWN_S)
        await self._cluster.restart(master)


async def run(wanted: GatewayRun, say: Callable[[str], None] = lambda _: None) -> GatewayOutcome:
    """Do it, and count."""
    coin, begun_s = Random(wanted.seed), time.monotonic()
    kinds = (
        ["change"] * wanted.changes
        + ["gateway"] * wanted.gateway_kills
        + ["failover"] * wanted.failovers
    )
    coin.shuffle(kinds)
    async with TestCluster(brokers=wanted.replicas, groups=BROKER_GROUPS) as cluster:
        mq = cluster.client()
        if wanted.groups:
            config = qmq.SubjectConfig(
                TOPIC, order=qmq.Order.STRICT, logical_partitions=LOGICAL_PARTITIONS
            )
            await mq.metadata.create_subject(config)
        else:
            await mq.metadata.create_subject(qmq.SubjectConfig(TOPIC))
        gateways = [
            await asyncio.to_thread(Gateway, cluster.address, free_ports(1)[0])
            for _ in range(wanted.gateways)
        ]
        loads: list[Load] = []
        try:
            addresses = ";".join(each.address for each in gateways)
            receiver = Load(addresses, "receive", TOPIC, "G", wanted.count, 8, 16, wanted.idle_s)
            loads.append(receiver)
            sender = Load(
                addresses,
                "send",
                TOPIC,
                wanted.count,
                wanted.bytes,
                wanted.at_once,
                wanted.groups,
                len(kinds) + 1,
            )
            loads.append(sender)
            under_load = await _harm(Faults(cluster, mq, gateways, coin, say), kinds, sender)
            sent, received = await asyncio.gather(
                *[asyncio.to_thread(each.result) for each in (sender, receiver)]
            )
        finally:
            for each in loads:
                each.end()
            for gateway in gateways:
                await asyncio.to_thread(gateway.kill)
    return GatewayOutcome(
        sent=sent["sent"],
        resent=sent["again"],
        received=received["received"],
        lost=wanted.count - received["received"],
        received_again=received["again"],
        out_of_order=received["out_of_order"],
        changes=wanted.changes,
        gateway_kills=wanted.gateway_kills,
        failovers=wanted.failovers,
        under_load=under_load,
        seconds=round(time.monotonic() - begun_s, 1),
    )


async def _harm(faults: Faults, kinds: list[str], sender: Load) -> int:
    """Make each fault at the start of a share of the messages. Returns the number of faults before
    the share was stored.
    """
    under_load = 0

    def struck() -> None:
        nonlocal under_load
        under_load += not storing.done()

    await asyncio.to_thread(sender.until_stored)
    for kind in kinds:
        sender.go_on()
        storing = asyncio.create_task(asyncio.to_thread(sender.until_stored))
        await faults.do(kind, struck)
        await storing
    return under_load
