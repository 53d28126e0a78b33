"""The members behind etcd's addresses: those that do not answer, and addresses that come to lead to
another etcd cluster. Real members.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from qmq_coordination.etcd.channel import PUT, RANGE, STATUS
from qmq_coordination.etcd.store import EtcdStore
from support import eventually, needs
from support.etcd_process import EtcdCluster, EtcdProcess
from support.stores import Follower, Proxy, history, proxied, put_surely

from qmq.errors import CoordinationUnavailable, CoordinationUnknown, WrongCoordinationStore
from qmq.proto.etcd import etcd_pb2 as pb

pytestmark = pytest.mark.sampled


@pytest.fixture
def other_etcd(tmp_path: Path) -> Iterator[EtcdProcess]:
    """A member of another etcd cluster."""
    needs.need_etcd()
    server = EtcdProcess(tmp_path / "other")
    try:
        server.start()
        yield server
    finally:
        server.stop()


@dataclass(frozen=True, slots=True)
class Led:
    """A store whose addresses are those of proxies."""

    store: EtcdStore
    proxies: tuple[Proxy, ...]

    async def lead_to(self, port: int, at: int = 0) -> None:
        self.proxies[at].lead_to(port)
        await self.proxies[at].cut()


@pytest.fixture
async def led(own_etcd: EtcdProcess) -> AsyncIterator[Led]:
    """A store with two addresses of one member."""
    async with AsyncExitStack() as stack:
        proxies = tuple(
            [await stack.enter_async_context(proxied(own_etcd.client_port)) for _ in range(2)]
        )
        store = EtcdStore([each.endpoint for each in proxies], total_s=2)
        yield Led(store, proxies)
        await store.close()


async def test_a_change_is_not_made_in_another_etcd_cluster(
    led: Led, other_etcd: EtcdProcess, own_etcd: EtcdProcess
) -> None:
    begin = await led.store.put("w/0", b"here")
    follower = Follower(led.store, "w/", begin)
    await follower.reaches(begin)
    for at in range(2):
        await led.lead_to(other_etcd.client_port, at)
    with pytest.raises(
        WrongCoordinationStore,
        match=r"belongs to the etcd cluster [0-9a-f]+, and this process uses [0-9a-f]+",
    ) as refused:
        while True:
            # the connection that is led away may end with the change under way
            with contextlib.suppress(CoordinationUnknown):
                await led.store.put("w/1", b"there")
    # certainly not made: the caller may repeat it
    assert isinstance(refused.value, CoordinationUnavailable)
    with pytest.raises(WrongCoordinationStore, match="correct etcd's addresses"):
        await led.store.get("w/0")
    elsewhere = EtcdStore([other_etcd.endpoint])
    assert (await elsewhere.list("w/")).items == ()
    await elsewhere.close()
    for at in range(2):
        await led.lead_to(own_etcd.client_port, at)
    end = await put_surely(led.store, "w/1", b"here")
    await follower.reaches(end)
    assert follower.found == await history(led.store, "w/", begin, end)
    await follower.stop()


async def test_one_address_of_another_etcd_cluster_is_not_used(
    led: Led, other_etcd: EtcdProcess
) -> None:
    await led.store.put("k", b"1")
    await led.lead_to(other_etcd.client_port)
    assert await put_surely(led.store, "k", b"2") > 0
    strange, right = await led.store.members()
    assert "belongs to the etcd cluster" in strange.failure
    assert (right.failure, right.version) == ("", "3.5.1")


async def test_the_member_that_does_not_answer_is_named(etcd_cluster: EtcdCluster) -> None:
    store = EtcdStore(etcd_cluster.endpoints)
    try:
        assert [each.failure for each in await store.members()] == ["", "", ""]
        etcd_cluster.members[0].kill()
        etcd_cluster.members[1].pause()
        killed, paused, alone = await store.members()
        assert killed.address == f"127.0.0.1:{etcd_cluster.members[0].client_port}"
        assert killed.failure
        assert paused.failure == "no answer within 1 s"
        assert alone.address == f"127.0.0.1:{etcd_cluster.members[2].client_port}"
    finally:
        etcd_cluster.members[1].resume()
        await store.close()


async def test_members_that_want_a_user_tell_their_version(own_etcd: EtcdProcess) -> None:
    own_etcd.enable_auth("root-secret", {"broker": "secret"}, "/qmq/")
    store = EtcdStore([own_etcd.endpoint], user="broker", password="secret")
    (member,) = await store.members()
    assert (member.version, member.failure) == ("3.5.1", "")
    await store.close()


async def test_a_closed_store_has_no_connection_left(led: Led) -> None:
    await asyncio.gather(led.store.members(), led.store.put("k", b"1"))
    await led.store.close()
    await eventually(lambda: not any(each.connections for each in led.proxies))


@pytest.fixture
async def changing() -> AsyncIterator[str]:
    """An address that leads to another etcd cluster after the first call."""

    class Members(grpc.GenericRpcHandler):  # type: ignore[type-arg]
        def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
            method = {each.path: each for each in (PUT, RANGE, STATUS)}[str(details.method)]

            async def answer(_request: bytes, _context: object) -> bytes:
                header = pb.ResponseHeader(cluster_id=1 if method is STATUS else 2, revision=7)
                return method.response(header=header).SerializeToString()

            return grpc.unary_unary_rpc_method_handler(answer)

    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Members(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"http://127.0.0.1:{port}"
    await server.stop(None)


async def test_an_answer_of_another_etcd_cluster_is_not_taken(changing: str) -> None:
    store = EtcdStore([changing], total_s=0.2)
    with pytest.raises(
        CoordinationUnknown, match="belongs to the etcd cluster 2, and this process uses 1"
    ):
        await store.put("k", b"1")
    with pytest.raises(WrongCoordinationStore, match="correct etcd's addresses"):
        await store.get("k")
    await store.close()
