"""A cluster of real processes for one test, and what faults may do with it.

Servers are the services of docker-compose.yml in the numbers that workload and fault ask for
(`system.group.shaped`); the processes of clients are services of the same cluster, so that they
have namespaces of their own and can be killed, stopped and cut off like servers. scripts/cluster
runs all of them.

    etcd0..  meta0..  g1-a g1-b g1-c  g2-a..  d1-a..        servers
    producer0  producer1  consumer0 ..                      clients, by their roles

Where network namespaces are missing, everything is on loopback addresses.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any, Final

from cluster_runner import Cluster
from cluster_runner.compose import COMPOSE_FILE, ROOT, resolve
from system.group import CONTROL_PORT, META_PORT, Shape, master_at, settled_at, shaped

from campaign.broken_disk import BrokenDisk, build
from campaign.disks import LoopDisk
from campaign.machine import missing
from campaign.values import LOOPS, NAMESPACES, PRELOAD, Bug, CampaignTest
from qmq.rpc.network import NETWORK

ETCD_TIMES: Final = {"QMQ_ETCD_HEARTBEAT_MS": "50", "QMQ_ETCD_ELECTION_MS": "500"}
CLIENT_PORT: Final = 2379
PEER_PORT: Final = 2380
PATHS: Final = ":".join(str(ROOT / each) for each in ("tests", "scripts", "examples"))
PLANTED: Final = ROOT / "tests" / "campaign" / "planted"
START_S: Final = 240.0
PROBE_S: Final = "1"


class World:
    """The cluster as faults see it. `random` is the nemesis's only source of chance."""

    def __init__(
        self, cluster: Cluster, test: CampaignTest, shape: Shape, folder: Path, random: Random
    ) -> None:
        self.cluster, self.test, self.folder, self.random = cluster, test, folder, random
        self.etcds, self.metas, self.delays = shape.etcd_names, shape.meta_names, shape.delay_names
        self.groups = shape.replica_names
        self.clients = [
            f"{role.name}{number}" for role in test.workload.roles for number in range(role.count)
        ]
        self.disks: dict[str, LoopDisk] = {}
        """Of each replica, if the test has them."""
        self.broken: dict[str, BrokenDisk] = {}
        """What the disk of each replica does, if the fault changes that."""

    def data(self, name: str) -> Path:
        """A replica's data folder."""
        return self.cluster.folder.volume(name)

    async def others(self, group: str) -> tuple[str, list[str]]:
        """The serving master, and the other replicas."""
        master = await self.master(group)
        return master, [name for name in self.members(group) if name != master]

    @property
    def server(self) -> str:
        """The address of the metaservers for a client on this machine."""
        return self.cluster.translate(",".join(f"{name}:{META_PORT}" for name in self.metas))

    @property
    def brokers(self) -> list[str]:
        """The replicas of all broker groups."""
        return [name for names in self.groups.values() for name in names]

    def of_kind(self, kind: str) -> list[str]:
        """All services of a kind: brokers, delays, etcds, metas or clients."""
        found: list[str] = getattr(self, kind)
        return found

    def a_group(self) -> str:
        """One of the broker groups."""
        return self.random.choice(list(self.groups))

    def members(self, group: str) -> list[str]:
        """The replicas of a broker group, or of the delay group d1."""
        return self.delays if group == "d1" else self.groups[group]

    def _controls(self, group: str) -> dict[str, str]:
        return {
            name: f"{self.cluster.address(name)}:{CONTROL_PORT}" for name in self.members(group)
        }

    async def master(self, group: str) -> str:
        """The serving master, waited for."""
        return await master_at(self._controls(group), NETWORK, within_s=START_S)

    async def settled(self, *, within_s: float = START_S) -> None:
        """Wait until every group has a master that all its replicas follow."""
        for group in [*self.groups, *(["d1"] if self.delays else [])]:
            await settled_at(self._controls(group), NETWORK, within_s=within_s)

    async def do(self, act: Callable[..., Any], *names: str, **options: Any) -> Any:
        """A verb of the cluster, without holding up the loop."""
        return await asyncio.to_thread(act, *names, **options)

    async def start(self, *names: str) -> None:
        """Start services again, and wait until they are healthy."""
        await self.do(self.cluster.start, *names, within_s=START_S)

    def state(self, name: str) -> str:
        """running, paused, dead or absent."""
        return next(each.state for each in self.cluster.status() if each.service == name)

    async def cut(self, sources: Sequence[str], targets: Sequence[str], *, one_way: bool) -> None:
        """Drop what each source sends to each target, and back unless `one_way`."""
        for source in sources:
            for target in targets:
                await self.do(self.cluster.partition, source, target, one_way=one_way)

    async def reaches(self, source: str, target: str, port: int) -> bool:
        """Whether a connection can be made from one service's place to another's port."""
        words = f"exec 3<>/dev/tcp/{self.cluster.address(target)}/{port}"
        prefix = await self.do(self.cluster.prefix, source)
        process = await asyncio.create_subprocess_exec(
            *prefix, "timeout", PROBE_S, "bash", "-c", words, stderr=asyncio.subprocess.DEVNULL
        )
        return await process.wait() == 0


def shape_of(test: CampaignTest) -> Shape:
    """The number of processes of each kind. Pure."""
    work = test.workload
    return Shape(
        etcds=test.fault.etcds,
        metas=work.metas,
        groups=work.broker_groups,
        replicas=test.fault.replicas,
        delays=3 if work.delays and "delays" in test.fault.hits else work.delays,
    )


def model_of(
    model: dict[str, Any],
    test: CampaignTest,
    histories: Path,
    seed: int,
    bug: Bug | None,
    preloads: Mapping[str, Mapping[str, str]],
) -> dict[str, Any]:
    """The compose file with servers and clients; `preloads` has more variables of servers. Pure."""
    found = shaped(model, shape_of(test))
    services: dict[str, Any] = found["services"]
    metas = ",".join(f"{name}:{META_PORT}" for name in shape_of(test).meta_names)
    etcds = ",".join(f"{name}:{CLIENT_PORT}" for name in shape_of(test).etcd_names)
    for name, body in services.items():
        if kind_of(name) in ("brokers", "delays"):
            flush = "sync" if test.durability == "sync" else "async"
            body["environment"] |= {
                "QMQ_FLUSH": flush,
                **test.fault.settings,
                **preloads.get(name, {}),
            }
        if bug is not None and kind_of(name) in bug.into:
            body["command"] = ["python", "-m", "campaign.bugs", bug.name, *body["command"][1:]]
            body["environment"]["PYTHONPATH"] = PATHS
    for name in (each for each in services if kind_of(each) == "brokers"):
        services[name]["environment"] |= {
            variable: value.format(folder=histories.absolute().parent)
            for variable, value in test.workload.settings.items()
        }
    for role in test.workload.roles:
        for number in range(role.count):
            name = f"{role.name}{number}"
            command = [
                *("python", "-m", "campaign.client", "--workload", test.workload.name),
                *("--role", role.name, "--number", str(number), "--server", metas),
                *("--history", str(histories / f"{name}.jsonl"), "--seed", str(seed)),
                *("--durability", test.durability),
            ]
            environment = {"PYTHONPATH": PATHS, "QMQ_ETCD": etcds}
            if bug is not None and kind_of(name) in bug.into:
                environment |= {"PYTHONPATH": f"{PLANTED}:{PATHS}", "CAMPAIGN_BUG": bug.name}
            services[name] = {
                "image": "qmq:latest",
                "command": command,
                "environment": environment,
            }
    return found


def kind_of(service: str) -> str:
    """brokers, delays, etcds, metas, drivers of Spark, or other clients."""
    for start, kind in (("etcd", "etcds"), ("meta", "metas"), ("driver", "drivers")):
        if service.startswith(start):
            return kind
    for start, kind in (("d1-", "delays"), ("g", "brokers")):
        if service.startswith(start) and "-" in service:
            return kind
    return "clients"


@contextmanager
def running(
    test: CampaignTest, folder: Path, histories: Path, seed: int, bug: Bug | None = None
) -> Iterator[World]:
    """The servers of a test, up and healthy, until the end of the block."""
    file = folder / "compose.json"
    network = "loopback" if missing({NAMESPACES}) else "netns"
    shape = shape_of(test)
    cluster = Cluster(folder / "cluster", network=network, environment=ETCD_TIMES, file=file)
    world = World(cluster, test, shape, folder, Random(seed))
    if PRELOAD in test.fault.needs:
        for name in (*world.brokers, *world.delays):
            world.broken[name] = BrokenDisk(folder / "disks" / name, world.data(name))
    preloads = {
        name: disk.environment(build(folder / "disks")) for name, disk in world.broken.items()
    }
    model = resolve(COMPOSE_FILE, ETCD_TIMES)
    file.write_text(json.dumps(model_of(model, test, histories, seed, bug, preloads)))
    try:
        if test.fault.disk_mib:
            reason = missing({LOOPS})
            if reason:
                raise OSError(reason)
            for name in (*world.brokers, *world.delays):
                world.disks[name] = LoopDisk(
                    folder / "images" / name, world.data(name), test.fault.disk_mib
                )
        servers = (*world.etcds, *world.metas, *world.brokers, *world.delays)
        cluster.up(servers, deps=False, within_s=START_S)
        yield world
    finally:
        cluster.down(force=True)
        for disk in world.disks.values():
            disk.remove()
