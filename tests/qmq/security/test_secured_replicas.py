"""Three replicas and a metaserver that speak TLS only: replication, fail-over, repair and control
calls go through it.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from qmq_replication.links import Mesh, PeerHello, Secret
from support import cli_process, eventually
from support.clusters import ThreeReplicas

import qmq
from qmq.errors import AccessDenied, QmqError
from qmq.node.process import Environment, environment_with
from qmq.node.replica.node import ReplicaNode
from qmq.proto.v1 import control_pb2 as pb
from qmq.proto.v1 import control_pb2_grpc
from qmq.rpc.channel import typed_error
from qmq.rpc.network import NETWORK
from qmq.rpc.server import RpcBounds, RpcListener
from qmq.rpc.server_name import any_server
from qmq.rpc.tls_network import TlsNetwork
from qmq.security.certificates import create_authority, issue
from qmq.security.tls import Credentials, Tls
from qmq.wire.frame import Frame, FrameKind, frame
from qmq.wire.frame_payloads import unpack_error
from qmq.wire.frame_stream import FrameStream

HOST = "127.0.0.1"


def papers(folder: Path, name: str, kind: str, *hosts: str) -> Tls:
    made = issue(folder, name, kind, hosts)
    return Tls(folder / "ca.pem", made.cert, made.key)


class SecuredReplicas(ThreeReplicas):
    """Each server has its certificate."""

    def __init__(self, folder: Path) -> None:
        self.papers = folder / "papers"
        create_authority(self.papers)
        super().__init__(
            folder, environment_with(papers(self.papers, "meta0", "meta", HOST)).network
        )

    def environment_of(self, name: str) -> Environment:
        return environment_with(papers(self.papers, name, "node", HOST))


@asynccontextmanager
async def secured(folder: Path) -> AsyncIterator[tuple[dict[str, ReplicaNode], str, Tls]]:
    """The nodes, the metaserver's address, and the certificate of an application."""
    cluster = SecuredReplicas(folder)
    async with cluster.running() as address:
        yield cluster.nodes, address, papers(cluster.papers, "orders", "app")


async def test_what_a_secured_group_acknowledged_survives_the_loss_of_its_master(
    tmp_path: Path,
) -> None:
    async with (
        secured(tmp_path) as (nodes, address, client),
        qmq.connect(address, tls=client) as mq,
    ):
        await eventually(lambda: any(node.broker.is_serving for node in nodes.values()))
        await mq.send_many("s", [b"%d" % number for number in range(500)])
        master = next(name for name, node in nodes.items() if node.broker.is_serving)
        await nodes.pop(master).stop()
        await mq.send("s", b"500")
        async with mq.consumer("s", "g") as consumer:
            found = list[bytes]()
            while len(found) < 501:
                found += (await consumer.pull(600, timedelta(seconds=20))).bodies
        assert found == [b"%d" % number for number in range(501)]
        cluster = await mq.metadata.cluster()
        assert len(cluster.groups) == 1


async def test_a_replica_without_a_certificate_is_not_heard(tmp_path: Path) -> None:
    async with secured(tmp_path) as (nodes, _, _):
        await eventually(lambda: any(node.broker.is_serving for node in nodes.values()))
        node = nodes["a"]
        heard, ended = [], []
        stream = FrameStream(
            on_frames=heard.extend,
            on_closed=ended.append,
            on_writable=lambda: None,
            on_violation=ended.append,
            frame_bytes_max=1 << 20,
        )
        await NETWORK.connect(node.address, lambda: stream)
        stream.put(b"\x00" * 64)
        stream.flush()
        await eventually(lambda: ended)
        assert not heard


async def test_a_replicated_group_continues_while_rules_are_enforced(tmp_path: Path) -> None:
    async with secured(tmp_path) as (nodes, address, orders):
        admin = papers(tmp_path / "papers", "admin", "op")
        async with (
            qmq.connect(address, tls=admin) as operator,
            qmq.connect(address, tls=orders) as mq,
        ):
            await operator.access.put_rule("op:admin", [], "cluster")
            await operator.access.put_rule(
                "app:orders", ["produce", "create", "consume"], "subject", "orders*"
            )
            await operator.access.put_rule("app:orders", ["consume"], "group", "*")
            await operator.access.set_mode("enforce")
            await eventually(lambda: all(node.access.is_enforced for node in nodes.values()))
            await eventually(lambda: any(node.broker.is_serving for node in nodes.values()))
            await mq.send("orders", b"before")
            with pytest.raises(AccessDenied, match="app:orders may not"):
                await mq.send("payments", b"1")
            master = next(node for node in nodes.values() if node.broker.is_serving)
            await master.status.transfer("")
            await mq.send("orders", b"behind")
            consumer = mq.consumer("orders", group="g")
            assert [(await anext(consumer)).body for _ in range(2)] == [b"before", b"behind"]
            assert (await mq.access.whoami()).how == "certificate"
            with pytest.raises(AccessDenied):
                await mq.metadata.transfer("g")


async def test_a_pods_pre_stop_hands_over_with_the_replicas_own_certificate(tmp_path: Path) -> None:
    async with secured(tmp_path) as (nodes, address, orders):
        folder = tmp_path / "papers"
        async with qmq.connect(address, tls=papers(folder, "admin", "op")) as operator:
            await operator.access.put_rule("op:admin", [], "cluster")
            await operator.access.set_mode("enforce")
        await eventually(lambda: all(node.access.is_enforced for node in nodes.values()))
        await eventually(lambda: any(node.broker.is_serving for node in nodes.values()))
        former = next(name for name, node in nodes.items() if node.broker.is_serving)
        control = nodes[former].view.present("g")[former].control_address
        refused = await asyncio.to_thread(hand_over, former, control, orders)
        assert (
            refused.returncode,
            b"app:orders may not" in refused.stderr,
            b"Traceback" in refused.stderr,
        ) == (2, True, False)
        done = await asyncio.to_thread(
            hand_over, former, control, papers(folder, former, "node", HOST)
        )
        assert done.returncode == 0, done.stderr
        (said,) = json.loads(done.stdout)
        assert said["master"] not in ("", former)
        await eventually(lambda: nodes[said["master"]].broker.is_serving)


def hand_over(replica: str, control: str, shown: Tls) -> subprocess.CompletedProcess[bytes]:
    """The chart's pods get their certificates by environment variables."""
    return cli_process.hand_over(
        replica,
        control,
        QMQ_TLS_CA=str(shown.ca),
        QMQ_TLS_CERT=str(shown.cert),
        QMQ_TLS_KEY=str(shown.key),
    )


async def test_a_clients_certificate_is_not_a_replicas_while_rules_are_enforced(
    tmp_path: Path,
) -> None:
    async with secured(tmp_path) as (nodes, address, orders):
        admin = papers(tmp_path / "papers", "admin", "op")
        async with qmq.connect(address, tls=admin) as operator:
            await operator.access.put_rule("op:admin", [], "cluster")
            await operator.access.set_mode("enforce")
        await eventually(lambda: all(node.access.is_enforced for node in nodes.values()))
        answer = await hello_to_a(nodes["a"], "b", orders)
        assert answer.kind == FrameKind.ERROR
        assert isinstance(unpack_error(answer.payload), AccessDenied)


@pytest.mark.parametrize("mode", ["off", "enforce"])
async def test_a_client_s_certificate_makes_no_call_that_is_for_servers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: str
) -> None:
    async with secured(tmp_path) as (nodes, address, orders):
        folder = tmp_path / "papers"
        admin, member, other = (
            papers(folder, "admin", "op"),
            papers(folder, "meta9", "meta", HOST),
            of_another_authority(folder),
        )
        async with qmq.connect(address, tls=admin) as operator:
            await operator.access.put_rule("op:admin", [], "cluster")
            await operator.access.set_mode(mode)
        node = nodes["a"]
        await eventually(
            lambda: (
                node.access.is_enforced == (mode == "enforce")
                and bool(node.view.access.server_token)
            )
        )
        token = node.view.access.server_token
        for shown, with_token in ((orders, ""), (admin, ""), (orders, token), (other, "")):
            with pytest.raises(AccessDenied, match=r"Seal is for servers.*qmq cert server"):
                await seal(node, shown, with_token)
        assert "app:orders shows no server's certificate" in caplog.text, "the audit log has it"
        for shown, with_token in ((member, ""), (other, token)):
            with pytest.raises(QmqError) as refused:
                await seal(node, shown, with_token)
            assert not isinstance(refused.value, AccessDenied), (
                "it was asked, and knows no such change"
            )


def of_another_authority(folder: Path) -> Tls:
    """A certificate as an authority makes it that knows nothing of principals: a DNS name, and
    every purpose.
    """
    made, signer = (
        issue(folder, "machine-9", "node", [HOST]),
        serialization.load_pem_private_key((folder / "ca.key").read_bytes(), None),
    )
    known = x509.load_pem_x509_certificate(made.cert.read_bytes())
    builder = x509.CertificateBuilder(
        known.issuer, known.subject, known.public_key(), known.serial_number
    )
    builder = builder.not_valid_before(known.not_valid_before_utc).not_valid_after(
        known.not_valid_after_utc
    )
    builder = builder.add_extension(
        x509.SubjectAlternativeName([x509.DNSName("machine-9.example")]), critical=False
    )
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    made.cert.write_bytes(
        builder.sign(signer, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    )
    return Tls(folder / "ca.pem", made.cert, made.key)


async def seal(node: ReplicaNode, shown: Tls, token: str) -> None:
    """Call the control port of a replica with this certificate and this token. Raises the typed
    error.
    """
    address = node.view.present("g")["a"].control_address
    request = pb.SealRequest(subject="s", partition=1, change_id="evil", to_version=9)
    async with TlsNetwork(Credentials(shown)).channel(
        address, any_server, lambda: token
    ) as channel:
        try:
            await control_pb2_grpc.BrokerControlStub(channel).Seal(request, timeout=10)
        except grpc.RpcError as cause:
            raise typed_error(cause, address) from cause


@pytest.mark.parametrize(
    ("name", "kind", "is_server"),
    [("orders", "app", False), ("admin", "op", False), ("meta0", "meta", True)],
)
async def test_a_client_s_certificate_is_taken_for_no_server_s(
    tmp_path: Path, name: str, kind: str, is_server: bool
) -> None:
    create_authority(tmp_path)
    network, shown = (
        environment_with(papers(tmp_path, "g1-a", "node", HOST)).network,
        environment_with(papers(tmp_path, name, kind, HOST)),
    )
    port = await shown.network.serve(grpc.aio.server(), HOST, 0, RpcListener(RpcBounds(9, 9)))
    listener = await shown.network.listen(HOST, 0, quiet)
    async with network.channel(f"{HOST}:{port.port}", any_server) as channel:
        with pytest.raises(grpc.RpcError) as failed:
            await control_pb2_grpc.BrokerControlStub(channel).DescribeReplica(
                pb.DescribeReplicaRequest(), timeout=10
            )
    assert (failed.value.code() is grpc.StatusCode.UNIMPLEMENTED) is is_server, (
        "the right host, and for servers the right purpose"
    )
    with (
        nullcontext() if is_server else pytest.raises(ssl.SSLCertVerificationError, match="purpose")
    ):
        await network.connect(f"{HOST}:{listener.port}", quiet)
    listener.close()
    await port.stop(None)


def quiet() -> FrameStream:
    return FrameStream(
        on_frames=lambda _: None,
        on_closed=lambda _: None,
        on_writable=lambda: None,
        on_violation=lambda _: None,
        frame_bytes_max=1 << 20,
    )


async def hello_to_a(node: ReplicaNode, name: str, shown: Tls) -> Frame:
    """The answer of replica `a` to a hello in this replica's name with this certificate."""
    heard: list[Frame] = []
    stream = FrameStream(
        on_frames=heard.extend,
        on_closed=lambda _: None,
        on_writable=lambda: None,
        on_violation=lambda _: None,
        frame_bytes_max=1 << 20,
    )
    await TlsNetwork(Credentials(shown)).connect(node.address, lambda: stream)
    stream.put(frame(FrameKind.REPLICA_HELLO, 1, PeerHello("g", name, "a", "nonce").pack()))
    stream.flush()
    await eventually(lambda: bool(heard))
    stream.close()
    return heard[0]


async def test_a_replica_speaks_in_the_name_of_its_certificate_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with secured(tmp_path) as (nodes, _, orders):
        folder = tmp_path / "papers"
        await eventually(lambda: any(node.broker.is_serving for node in nodes.values()))
        before = nodes["a"].driver.arrivals.refused
        for shown in (
            papers(folder, "c", "node", HOST),
            papers(folder, "b", "app"),
            papers(folder, "c2", "node", "B", "b.example"),
            orders,
        ):
            answer = await hello_to_a(nodes["a"], "b", shown)
            assert answer.kind == FrameKind.ERROR
            assert "qmq cert server b" in unpack_error(answer.payload).message
        assert nodes["a"].driver.arrivals.refused == before + 4
        assert "not for 'b'" in caplog.text, "the audit log has it"
        for shown in (
            papers(folder, "b", "node", HOST),
            papers(folder, "machine-2", "node", "b", "c"),
        ):
            assert (await hello_to_a(nodes["a"], "b", shown)).kind == FrameKind.REPLICA_HELLO


async def test_a_replica_says_nothing_to_a_server_whose_certificate_is_another_one_s(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    create_authority(tmp_path)
    networks = {
        name: environment_with(papers(tmp_path, name, "node", HOST)).network
        for name in ("a", "b", "c")
    }
    heard: list[Frame] = []

    def accept() -> FrameStream:
        ignored = {
            "on_closed": lambda _: None,
            "on_writable": lambda: None,
            "on_violation": lambda _: None,
        }
        return FrameStream(on_frames=heard.extend, frame_bytes_max=1 << 20, **ignored)

    impostor = await networks["c"].listen(HOST, 0, accept)
    right = await networks["b"].listen(HOST, 0, accept)
    secret = Secret(b"s" * 32)
    mesh = Mesh(PeerHello("g", "a"), secret, lambda _: None, networks["a"])
    try:
        mesh.update({"b": f"{HOST}:{impostor.port}"})
        await eventually(lambda: "its certificate is not for 'b'" in caplog.text)
        assert not heard
        mesh.update({"b": f"{HOST}:{right.port}"})
        await eventually(lambda: bool(heard))
    finally:
        await mesh.close()
        impostor.close()
        right.close()


@pytest.mark.parametrize(
    ("days", "said"),
    [(-30, "certificate has expired"), (30, "certificate is not yet valid")],
    ids=["expired", "not yet valid"],
)
async def test_a_replica_logs_once_that_a_peer_s_certificate_is_not_valid_now(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, days: int, said: str
) -> None:
    create_authority(tmp_path)
    now = datetime.now(UTC) + timedelta(days=days)
    made = issue(tmp_path, "b", "node", [HOST], now=now, days=7)
    there = environment_with(Tls(tmp_path / "ca.pem", made.cert, made.key)).network
    here = environment_with(papers(tmp_path, "a", "node", HOST)).network
    dialled = list[FrameStream]()

    def accept() -> FrameStream:
        dialled.append(quiet())
        return dialled[-1]

    listener = await there.listen(HOST, 0, accept)
    mesh = Mesh(PeerHello("g", "a"), Secret(b"s" * 32), lambda _: None, here)
    try:
        mesh.update({"b": f"{HOST}:{listener.port}"})
        await eventually(lambda: len(dialled) >= 3)
    finally:
        await mesh.close()
        listener.close()
    lines = [each.getMessage() for each in caplog.records if each.name == "qmq.replication"]
    assert len([each for each in lines if said in each]) == 1
    assert "replace it (`qmq cert server`), or correct this machine's clock" in lines[0]
