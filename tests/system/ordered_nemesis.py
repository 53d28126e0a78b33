"""Two disturbers of an ordered workload: one changes the route, one breaks processes and networks. `ordered_plan` says what happens when.

Rules of the nemesis:
* It repairs each fault before the next one. The history has the outage from before the fault until the group has a serving master.
* It leaves a frozen or cut off broker group alone for longer than its master's lease, while the group's partitions are moved away. It
  waits until writers continue before it wakes the group. The group must have had a good share of the route, and so of the load, when it
  fell silent; if a change took that share away at the same moment, nothing was out of service, and the nemesis chooses a group again.

A change may conflict with one of the other disturber, or find a metaserver dead. It is then tried again, from the route of that moment.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from random import Random
from typing import Any, Protocol

from history import Recorder
from history.ordered import Outage

from qmq.client.metadata.service import MetadataClient
from qmq.errors import QmqError
from qmq.proto.v1 import meta_pb2 as pb
from system.ordered_consumer import ConsumerProcess
from system.ordered_plan import Step, evacuation, held_by, is_share, operation, worth_harming

CHANGE_S = 120.0
"""A change waits for a lost group's lease, an election, and perhaps for the other one's changes."""
RETRY_S = 0.3
LEASE_S = 5.0
"""A master's lease in the coordination store (docs/OPERATIONS.md)."""
FREEZE_S = LEASE_S + 3.0
STOPPED_S = (0.5, 6.0)


class Changer:
    """Changes the route of one subject."""

    def __init__(self, metadata: MetadataClient, subject: str, groups: Sequence[str], coin: Random) -> None:
        self.done: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        """Tries that ended with an error, by code: conflicts with the other one's changes, metaservers that died."""
        self._metadata, self._subject, self._groups, self._coin = metadata, subject, groups, coin
        self._latest = 1

    async def change(self, kind: str) -> None:
        """One step of the plan. A drain is a move of everything that a broker group has."""
        if kind == "drain":
            await self.evacuate(self._coin.choice(list(self._groups)))
        else:
            await self._until_done(kind, lambda route: operation(self._coin, kind, route, self._groups))
        self.done[kind] += 1

    async def route(self, version: int = 0) -> pb.OrderedRoute:
        """A version of the route; 0: the latest, and never an older one than was seen before. Raises TimeoutError."""
        async with asyncio.timeout(CHANGE_S):
            while True:
                try:
                    route = (await self._metadata.describe_route(self._subject, version)).route
                except QmqError:
                    await asyncio.sleep(RETRY_S)
                    continue
                if version or route.version >= self._latest:
                    self._latest = max(self._latest, route.version)
                    return route
                await asyncio.sleep(RETRY_S)  # from a metaserver that lags

    async def still_held(self, group: str, since: int) -> frozenset[int]:
        """The partitions that a group has held in every version of the route since then; none if they are too few for a useful fault."""
        latest = await self.route()
        routes = [latest, *[await self.route(version) for version in range(since, latest.version)]]
        held = frozenset.intersection(*[held_by(route, group) for route in routes])
        return held if is_share(held, latest, self._groups) else frozenset()

    async def evacuate(self, group: str) -> None:
        """Move partitions away from a broker group until it has none in the latest route."""

        def next_move(route: pb.OrderedRoute) -> dict[str, object] | None:
            moves = evacuation(route, group, self._groups, self._coin)
            return {"move": moves[0]} if moves else None

        while await self._until_done("drain", next_move):
            pass

    async def _until_done(self, reason: str, choose: Callable[[pb.OrderedRoute], dict[str, Any] | None]) -> bool:
        """One change; False if there was nothing to change. Raises TimeoutError."""
        async with asyncio.timeout(CHANGE_S):
            while True:
                try:
                    route = (await self._metadata.describe_route(self._subject)).route
                    wanted = choose(route)
                    if wanted is None:
                        return False
                    await self._metadata.change_route(self._subject, **wanted, from_version=route.version, reason=reason)
                    self._latest = max(self._latest, route.version + 1)
                    return True
                except QmqError as failure:
                    self.refused[f"E{failure.code}"] += 1
                    await asyncio.sleep(RETRY_S)


class Victims(Protocol):
    """The cluster, as far as the nemesis needs it: see `ordered_cluster.OrderedCluster`."""

    replicas: dict[str, list[str]]
    metas: list[str]
    cluster: Any

    async def master(self, group: str, *, other_than: str = "", within_s: float = 240.0) -> str:
        """The serving master, waited for."""
        ...

    async def settled(self, group: str, *, within_s: float = 240.0) -> str:
        """The master, when all replicas are in step."""
        ...

    async def do(self, act: Callable[..., None], *names: str, **options: Any) -> None:
        """A verb of the cluster."""
        ...

    async def start(self, name: str) -> None:
        """Start a service again; it answers when this returns."""
        ...


class Progress(Protocol):
    """Waits for the writers."""

    async def __call__(self, count: int, within_s: float, lps: Collection[int] = ()) -> None:
        """Wait for this many more acknowledged messages, of these logical partitions or of any. Raises TimeoutError."""
        ...


class Nemesis:
    """Breaks, and mends."""

    def __init__(
        self,
        victims: Victims,
        consumers: Sequence[ConsumerProcess],
        recorder: Recorder,
        changer: Changer,
        coin: Random,
        *,
        note: Callable[[str], None],
        progress: Progress,
        consumer_lease_s: float,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.done: Counter[str] = Counter()
        self._victims, self._consumers, self._recorder, self._changer, self._coin = victims, consumers, recorder, changer, coin
        self._note, self._progress, self._sleep = note, progress, sleep
        self._consumer_lease_s = consumer_lease_s
        self._outages = 0

    async def strike(self, kind: str) -> None:
        """One fault, from its beginning to its end."""
        act: Callable[[], Awaitable[None]] = getattr(self, f"_{kind.replace('-', '_')}")
        await act()
        self.done[kind] += 1

    async def _group(self) -> str:
        """Choose a broker group that has partitions."""
        route = await self._changer.route()
        return self._coin.choice(sorted({part.broker_group for part in route.partitions}))

    # --- brokers -----------------------------------------------------------------------------------------------------------

    async def _kill_master(self) -> None:
        await self._with_master(self._killed)

    async def _stop_master(self) -> None:
        await self._with_master(self._stopped)

    async def _with_master(self, harm: Callable[[str, str], Awaitable[None]]) -> None:
        group = await self._group()
        await harm(group, await self._victims.settled(group))

    async def _killed(self, group: str, master: str) -> None:
        victims = self._victims
        async with self._outage(group, "a kill of the master", master):
            await victims.do(victims.cluster.kill, master)
            if len(victims.replicas[group]) == 1:
                await victims.start(master)
            await victims.master(group)
        if len(victims.replicas[group]) > 1:
            await victims.start(master)

    async def _stopped(self, group: str, master: str) -> None:
        victims = self._victims
        alone = len(victims.replicas[group]) == 1
        async with self._outage(group, "a stop of the master", master):
            await victims.do(victims.cluster.pause, master)
            if alone:
                await self._sleep(FREEZE_S)
                await victims.do(victims.cluster.resume, master)
            await victims.master(group, other_than="" if alone else master)
        if not alone:
            await self._sleep(self._coin.uniform(*STOPPED_S))
            await victims.do(victims.cluster.resume, master)

    async def _kill_slave(self) -> None:
        victims, group = self._victims, await self._group()
        master = await victims.settled(group)
        slaves = [name for name in victims.replicas[group] if name != master]
        if not slaves:
            return await self._killed(group, master)
        slave = self._coin.choice(slaves)
        self._note(f"kill {slave}, a slave")
        await victims.do(victims.cluster.kill, slave)
        await self._progress(200, 240.0)
        await victims.start(slave)

    # --- whole broker groups -----------------------------------------------------------------------------------------------

    async def _freeze_group(self) -> None:
        victims = self._victims

        async def freeze(group: str) -> None:
            await victims.do(victims.cluster.pause, *victims.replicas[group])

        async def thaw(group: str) -> None:
            await victims.do(victims.cluster.resume, *victims.replicas[group])

        await self._take_away("a frozen group", freeze, thaw)

    async def _cut_group(self) -> None:
        victims = self._victims
        services = [name for name in victims.cluster.services if name.startswith("etcd")] + victims.metas

        async def cut(group: str) -> None:
            for replica in victims.replicas[group]:
                for service in services:
                    await victims.do(victims.cluster.partition, replica, service)

        async def heal(_: str) -> None:
            await victims.do(victims.cluster.heal)

        await self._take_away("a cut off group", cut, heal)

    async def _take_away(self, kind: str, harm: Callable[[str], Awaitable[None]], mend: Callable[[str], Awaitable[None]]) -> None:
        """Repeat until a group had its share from before the outage until it was unreachable: changes continue meanwhile."""
        victims, held = self._victims, frozenset[int]()
        while not held:
            group, version = await self._worthy()
            async with self._outage(group, kind, *victims.replicas[group]):
                try:
                    await harm(group)
                    held = await self._changer.still_held(group, version)
                    if held:
                        await self._leave(group, held)
                finally:
                    await mend(group)
                await victims.settled(group)

    async def _worthy(self) -> tuple[str, int]:
        """A settled group that is worth harming, and in which version of the route."""
        names = list(self._victims.replicas)
        while True:
            group = self._coin.choice(worth_harming(await self._changer.route(), names))
            await self._victims.settled(group)
            route = await self._changer.route()
            if group in worth_harming(route, names):
                return group, route.version

    async def _leave(self, group: str, held: Collection[int]) -> None:
        """Move everything away, and check that writers continue on other groups and that the group's lease has ended."""
        since_s = time.monotonic()
        if len(self._victims.replicas) > 1:
            await self._changer.evacuate(group)
            await self._progress(200, 240.0, held)
        await self._sleep(max(FREEZE_S - (time.monotonic() - since_s), 0.0))

    def _outage(self, group: str, kind: str, *names: str) -> _Outage:
        self._outages += 1
        self._note(f"{kind}: {group}, {' '.join(names)}")
        return _Outage(self._recorder, Outage(process="nemesis", type="invoke", broker_group=group, kind=kind, op=self._outages))

    # --- metaservers and consumers -----------------------------------------------------------------------------------------

    async def _kill_meta(self) -> None:
        victims, meta = self._victims, self._coin.choice(self._victims.metas)
        self._note(f"kill {meta}")
        await victims.do(victims.cluster.kill, meta)
        await self._sleep(self._coin.uniform(*STOPPED_S))
        await victims.start(meta)

    async def _kill_consumer(self) -> None:
        consumer = self._coin.choice(list(self._consumers))
        self._note(f"kill consumer {consumer.name}")
        await asyncio.to_thread(consumer.kill)
        await self._sleep(self._coin.uniform(0.0, 2.0))
        consumer.start()

    async def _stop_consumer(self) -> None:
        consumer = self._coin.choice(list(self._consumers))
        self._note(f"stop consumer {consumer.name}")
        consumer.pause()
        try:
            await self._sleep(self._consumer_lease_s * self._coin.uniform(1.2, 1.8))
        finally:
            consumer.resume()


class _Outage:
    """An outage in the history: its end is written only if the group is well again."""

    def __init__(self, recorder: Recorder, begun: Outage) -> None:
        self._recorder = recorder
        self._begun = begun

    async def __aenter__(self) -> None:
        self._begun = self._recorder.record(self._begun)

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._recorder.record(self._begun.ended("ok"))


async def follow(steps: Sequence[Step], act: Callable[[str], Awaitable[None]], done: Callable[[], None], *, begin_s: float) -> None:
    """Take one step after the other, none before its time."""
    for step in steps:
        await asyncio.sleep(max(begin_s + step.at_s - time.monotonic(), 0.0))
        await act(step.kind)
        done()
