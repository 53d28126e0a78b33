"""Servers of a running cluster get each other's addresses, and for a while the names still lead to
the former ones, as with DNS that lags.

Each process has an /etc/hosts of the test. The metaserver and a client run on all the time.

    1. all replicas are killed, and start again at each other's addresses; their names lead to the
       former addresses
    2. no server takes another one's calls: the metaserver reports no replica's state as another
       one's, and nothing is stored astray
    3. the names lead to the new addresses: everything works again, without a restart of anybody
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import IO

import pytest
from support import needs
from support.etcd_process import EtcdProcess

from qmq.client.metadata.service import MetadataClient
from qmq.errors import QmqError
from qmq.proto.v1 import meta_pb2
from qmq.rpc.tls_network import network_of
from qmq.security.certificates import create_authority, issue
from qmq.security.tls import Tls

pytestmark = [
    pytest.mark.xdist_group("faults"),
    needs.etcd,
    needs.mounts,
    pytest.mark.skipif(
        shutil.which("unshare") is None, reason="no unshare: apt-get install util-linux"
    ),
]

GROUPS = {"g1": ("g1-a", "g1-b", "g1-c"), "g2": ("g2-a",), "d1": ("d1-a",)}
REPLICAS = tuple(replica for replicas in GROUPS.values() for replica in replicas)
META = "meta0"
DATA_PORT, CONTROL_PORT, META_PORT = 20881, 20882, 20880
WITHIN_S = 180.0
LOOKS = 5
CLIENT = Path(__file__).with_name("permuted_client.py")
WITH_OWN_HOSTS = ("unshare", "--mount", "sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"')


class Town:
    """The processes, and what the names of their machines lead to."""

    def __init__(self, folder: Path, etcd: str, *, is_secure: bool) -> None:
        self.folder, self._etcd = folder, etcd
        number = int.from_bytes(hashlib.sha256(str(folder).encode()).digest()[:1], "big")
        self._address = [f"127.79.{number}.{at}" for at in range(1, len(REPLICAS) + 2)]
        self.places = dict(zip((META, *REPLICAS), self._address, strict=True))
        self.hosts = folder / "hosts"
        self.tell_names(self.places)
        self.papers: dict[str, Tls] = {}
        if is_secure:
            create_authority(folder / "papers")
            # Every certificate is for every host: TLS alone cannot tell these servers apart.
            hosts = (*REPLICAS, META, *self._address)
            for name in (META, *REPLICAS):
                made = issue(folder / "papers", name, "meta" if name == META else "node", hosts)
                self.papers[name] = Tls(folder / "papers" / "ca.pem", made.cert, made.key)
            made = issue(folder / "papers", "app", "app", ())
            self.papers["app"] = Tls(folder / "papers" / "ca.pem", made.cert, made.key)
        self._running: dict[str, subprocess.Popen[str]] = {}

    def tell_names(self, places: Mapping[str, str]) -> None:
        """Let the names lead to these addresses, for processes that run, too: the file stays the
        same one.
        """
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in places.items())]
        with self.hosts.open("r+" if self.hosts.exists() else "w") as file:
            file.write("\n".join(lines) + "\n")
            file.truncate()

    def permute(self) -> None:
        """Every replica gets the address of the next one. The names do not know it yet."""
        addresses = [self.places[name] for name in REPLICAS]
        self.places |= dict(zip(REPLICAS, [*addresses[1:], addresses[0]], strict=True))

    def start(self, name: str) -> None:
        group = next((group for group, replicas in GROUPS.items() if name in replicas), "")
        role = "meta" if name == META else "delay" if group == "d1" else "broker"
        variables = {
            "QMQ_ETCD": self._etcd,
            "QMQ_HOST": self.places[name],
            "QMQ_PORT": str(META_PORT),
        }
        if group:
            variables |= {
                "QMQ_GROUP": group,
                "QMQ_REPLICA": name,
                "QMQ_REPLICAS": ",".join(GROUPS[group]),
                "QMQ_ADVERTISE": name,
                "QMQ_DATA": str(self.folder / name),
                "QMQ_DATA_PORT": str(DATA_PORT),
                "QMQ_CONTROL_PORT": str(CONTROL_PORT),
            }
        self._running[name] = self._spawn(name, [sys.executable, "-m", "qmq.cli", role], variables)

    def client(self) -> subprocess.Popen[str]:
        found = self._spawn(
            "app", [sys.executable, str(CLIENT), f"{META}:{META_PORT}"], {}, subprocess.PIPE
        )
        self._running["app"] = found
        return found

    def _spawn(
        self, name: str, command: list[str], variables: Mapping[str, str], pipe: int | None = None
    ) -> subprocess.Popen[str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith("QMQ_")}
        tls = self.papers.get(name)
        shown = (
            {}
            if tls is None
            else {
                "QMQ_TLS_CA": str(tls.ca),
                "QMQ_TLS_CERT": str(tls.cert),
                "QMQ_TLS_KEY": str(tls.key),
            }
        )
        with (self.folder / f"{name}.log").open("a") as log:
            output: int | IO[str] = log if pipe is None else pipe
            return subprocess.Popen(
                [*WITH_OWN_HOSTS, str(self.hosts), *command],
                env={**kept, **variables, **shown},
                stdin=pipe,
                stdout=output,
                stderr=log,
                text=True,
            )

    def kill(self, *names: str) -> None:
        for name in names:
            self._running[name].kill()
        for name in names:
            ended = self._running.pop(name)
            ended.wait()
            for pipe in (ended.stdin, ended.stdout):
                if pipe is not None and not pipe.closed:
                    pipe.close()

    async def listening(self, *names: str) -> None:
        """Wait until these servers listen at their addresses."""
        async with asyncio.timeout(WITHIN_S):
            for name in names:
                while not _answers(self.places[name], META_PORT if name == META else CONTROL_PORT):
                    assert self._running[name].poll() is None, (
                        self.folder / f"{name}.log"
                    ).read_text()[-4000:]
                    await asyncio.sleep(0.1)

    def metadata(self) -> MetadataClient:
        return MetadataClient(
            [f"{self.places[META]}:{META_PORT}"], network_of(self.papers.get("app"), environment={})
        )

    def end(self) -> None:
        self.kill(*self._running)


def _answers(address: str, port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((address, port)) == 0


@contextlib.asynccontextmanager
async def running(folder: Path, etcd: str, *, is_secure: bool) -> AsyncIterator[Town]:
    town = Town(folder, etcd, is_secure=is_secure)
    try:
        for name in (META, *REPLICAS):
            town.start(name)
        await town.listening(META, *REPLICAS)
        yield town
    finally:
        town.end()


def described(found: meta_pb2.DescribeClusterResponse) -> dict[str, str]:
    """Each replica that answered, and who it says that it is."""
    return {
        each.replica: each.status.replica
        for group in found.groups
        for each in group.replicas
        if each.HasField("status")
    }


def is_healthy(found: meta_pb2.DescribeClusterResponse) -> bool:
    """Whether all replicas answer, and each group has one master, which serves."""
    masters = {
        group.broker_group: [
            each.replica
            for each in group.replicas
            if each.status.is_serving and each.status.role == "master"
        ]
        for group in found.groups
    }
    return (
        set(described(found)) == set(REPLICAS)
        and all(len(each) == 1 for each in masters.values())
        and len(masters) == len(GROUPS)
    )


async def until_healthy(metadata: MetadataClient) -> None:
    seen: object = None
    try:
        async with asyncio.timeout(WITHIN_S):
            while True:
                with contextlib.suppress(QmqError):
                    seen = await metadata.cluster()
                    assert isinstance(seen, meta_pb2.DescribeClusterResponse)
                    require_own_answers(seen)
                    if is_healthy(seen):
                        return
                await asyncio.sleep(0.2)
    except TimeoutError:
        raise AssertionError(f"the cluster does not become healthy: {seen}") from None


def require_own_answers(found: meta_pb2.DescribeClusterResponse) -> None:
    others = {name: says for name, says in described(found).items() if name != says}
    assert not others, f"the metaserver takes a replica for another one: {others}"


@pytest.mark.parametrize("is_secure", [False, True], ids=["plain", "tls"])
async def test_servers_that_get_each_other_s_addresses_are_not_taken_for_each_other(
    own_etcd: EtcdProcess, tmp_path: Path, is_secure: bool
) -> None:
    async with running(tmp_path, f"127.0.0.1:{own_etcd.client_port}", is_secure=is_secure) as town:
        metadata = town.metadata()
        await until_healthy(metadata)
        client = town.client()
        assert client.stdout is not None
        assert await asyncio.to_thread(client.stdout.readline) == "begun\n", (
            town.folder / "app.log"
        ).read_text()[-4000:]

        town.kill(*REPLICAS)
        town.permute()
        for name in REPLICAS:
            town.start(name)
        await town.listening(*REPLICAS)
        for _ in range(LOOKS):
            require_own_answers(await metadata.cluster())

        town.tell_names(town.places)
        await until_healthy(metadata)
        for group, replicas in GROUPS.items():
            master = next(
                each.master
                for each in (await metadata.cluster()).groups
                if each.broker_group == group
            )
            for to in replicas[:2]:
                if len(replicas) > 1 and to != master:
                    await metadata.transfer(group, to)
                    master = to
        await metadata.close()
        printed, _ = await asyncio.to_thread(client.communicate, "end\n")
        assert client.returncode == 0, (town.folder / "app.log").read_text()[-4000:]
        said = json.loads(printed)
        assert said["disordered"] == []
        assert said["acked"] > 0
