"""The secured cluster of docker-compose.secure.yml as processes: real certificates, and etcd with
TLS and users.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from qmq_coordination.etcd.channel import EtcdTls
from qmq_coordination.etcd.store import EtcdStore
from support import needs
from system.group import ETCD, REPLICAS, Group, running_group

import qmq
from qmq.errors import AccessDenied, CoordinationError, CoordinationUnavailable, NotConnected
from qmq.security.tls import CA_VARIABLE, CERT_VARIABLE, KEY_VARIABLE

pytestmark = [pytest.mark.xdist_group("faults"), needs.etcd]


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    """Group g1 with TLS."""
    with running_group(tmp_path_factory.mktemp("secured"), "loopback", secure=True) as found:
        yield found


def etcds(group: Group, name: str) -> Path:
    """A file that g1-a uses to connect to etcd: its certificate, its key, or the authority."""
    return group.papers("g1-a").ca.with_name(f"etcd-{name}.pem")


def store_of(group: Group, cert: Path | None, key: Path | None) -> EtcdStore:
    """etcd, asked with a certificate."""
    endpoints = [f"{group.cluster.address(name)}:2379" for name in ETCD]
    return EtcdStore(endpoints, tls=EtcdTls(etcds(group, "ca"), cert, key), total_s=1.0)


async def test_a_client_with_a_certificate_sends_and_receives(group: Group) -> None:
    async with qmq.connect(group.server, tls=group.papers("demo")) as mq:
        assert (await mq.access.whoami()).principal == "app:demo"
        await mq.send("secured.plain", b"1")
        async with mq.consumer("secured.plain", "g") as consumer:
            assert (await consumer.pull(1, timedelta(seconds=30))).bodies == [b"1"]


async def test_a_client_without_a_certificate_of_the_authority_gets_nowhere(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (CA_VARIABLE, CERT_VARIABLE, KEY_VARIABLE):
        monkeypatch.delenv(name, raising=False)

    async def try_with(tls: qmq.Tls | None) -> None:
        async with qmq.connect(group.server, tls=tls) as mq:
            with pytest.raises(NotConnected):
                await mq.metadata.list_subjects()

    ca = group.papers("demo").ca
    await asyncio.gather(
        *map(try_with, (None, qmq.Tls(ca), qmq.Tls(ca, etcds(group, "cert"), etcds(group, "key"))))
    )


async def test_etcd_refuses_clients_that_are_not_servers_of_the_cluster(group: Group) -> None:
    demo = group.papers("demo")
    for each in (store_of(group, None, None), store_of(group, demo.cert, demo.key)):
        with pytest.raises(CoordinationUnavailable):
            await each.list("/qmq/")
        await each.close()
    server = store_of(group, etcds(group, "cert"), etcds(group, "key"))
    assert (await server.list("/qmq/groups/")).items
    with pytest.raises(CoordinationError, match="permission denied"):
        await server.put("/other", b"1")
    await server.close()


async def is_taken(mq: qmq.Client) -> bool:
    """Whether a message may be sent."""
    try:
        await mq.send("secured.rules", b"0")
    except AccessDenied:
        return False
    return True


async def until_taken(mq: qmq.Client, wanted: bool) -> None:
    """A change of the rules reaches every server within a second."""
    async with asyncio.timeout(30):
        while await is_taken(mq) is not wanted:
            await asyncio.sleep(0.02)


async def test_while_rules_are_enforced_nothing_goes_without_one_and_a_denial_wins(
    group: Group,
) -> None:
    async with (
        qmq.connect(group.server, tls=group.papers("admin")) as admin,
        qmq.connect(group.server, tls=group.papers("demo")) as mq,
    ):
        assert await is_taken(mq)
        await admin.access.set_mode("enforce")
        try:
            await until_taken(mq, False)
            await admin.access.put_rule("app:demo", ["produce", "create"], "subject", "secured.*")
            await until_taken(mq, True)
            await admin.access.put_rule("app:demo", ["produce"], "subject", "*", is_deny=True)
            await until_taken(mq, False)
            with pytest.raises(AccessDenied):
                await mq.access.set_mode("off")
        finally:
            await admin.access.set_mode("off")
        await until_taken(mq, True)


async def test_a_killed_master_is_replaced_and_nothing_acknowledged_is_lost(group: Group) -> None:
    async with qmq.connect(group.server, tls=group.papers("demo")) as mq:
        await mq.send_many("secured.kill", [b"%d" % number for number in range(100)])
        master = await group.master()
        await asyncio.to_thread(group.cluster.kill, master)
        other = await group.master(other_than=master)
        assert other in REPLICAS
        await mq.send("secured.kill", b"100")
        async with mq.consumer("secured.kill", "g") as consumer:
            found = list[bytes]()
            while len(found) < 101:
                found += (await consumer.pull(200, timedelta(seconds=30))).bodies
        assert found == [b"%d" % number for number in range(101)]
        await asyncio.to_thread(group.cluster.start, master)
        await group.settled_peer(master)
