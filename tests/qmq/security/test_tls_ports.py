"""Certificates that are not right, at every port that speaks TLS and in every client: a list of all
of them, and one test for each side.
"""

from __future__ import annotations

import ast
import asyncio
import os
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from access_support import HOST, WRONG_SERVERS, Papers, node_with, wrong_clients, wrong_server
from qmq_coordination.etcd.channel import EtcdTls
from qmq_coordination.etcd.store import EtcdStore
from support import cli_process, needs, node_config
from support.etcd_process import EtcdProcess, ServerTls

import qmq
from qmq.client.connection.connection import connect
from qmq.columns.servers.connection import BlockingConnection
from qmq.columns.servers.metaservers import Metadata
from qmq.console.app import ConsoleServer
from qmq.console.config import ConsoleConfig
from qmq.errors import CoordinationTlsFailed, NotConnected, TlsFailed
from qmq.gateway.config import GatewayConfig
from qmq.gateway.server import GatewayServer, tls_of
from qmq.integrations.http.site import HttpConfig, HttpServer
from qmq.node.dev_node import Node
from qmq.proto.v1 import control_pb2, control_pb2_grpc
from qmq.rpc.channel import typed_error
from qmq.rpc.server_name import any_server
from qmq.rpc.tls_network import TlsNetwork, network_of
from qmq.security.tls import Credentials, Tls
from qmq.wire.frame import FrameKind, frame
from qmq.wire.frame_payloads import PROTOCOL_VERSION, Hello

ROOT = Path(__file__).parents[3]

# --- the list -------------------------------------------------------------------------------------

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
GET = b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n"
METRICS = b"GET /metrics HTTP/1.1\r\nconnection: close\r\n\r\n"
HELLO = frame(FrameKind.HELLO, 1, Hello(PROTOCOL_VERSION, "app", "", "").pack())

PORTS: dict[str, tuple[str, bytes, str]] = {
    "data": ("qmq", HELLO, "required"),
    "delay data": ("qmq", HELLO, "required"),
    "metaserver": ("h2", PREFACE, "required"),
    "broker control": ("h2", PREFACE, "required"),
    "delay control": ("h2", PREFACE, "required"),
    "metrics": ("", METRICS, "required"),
    "RocketMQ gateway": ("h2", PREFACE, "optional"),
    "HTTP gateway": ("http/1.1", GET, "not read"),
    "console": ("http/1.1", GET, "not read"),
}
"""The ports that speak TLS: the protocol that they speak, the first bytes of a peer, and what a
certificate of the client is there. Replicas speak with each other at data ports.
"""

SERVING = {
    ("qmq/broker/connection/server.py", "listen"): "data, delay data",
    ("qmq/broker/control.py", "serve"): "broker control, delay control",
    ("qmq/meta/server.py", "serve"): "metaserver",
    ("qmq/gateway/server.py", "serve"): "RocketMQ gateway",
    ("qmq/node/metrics/serving.py", "listen"): "metrics",
    ("qmq/integrations/http/site.py", "WebServer"): "HTTP gateway",
    ("qmq/console/app.py", "WebServer"): "console",
}
"""Where the product serves TLS, and at which of the ports. Who adds a place adds its port to
`PORTS`.
"""
INSIDE = {
    "qmq/rpc/network.py",
    "qmq/rpc/relay.py",
    "qmq/security/tls.py",
    "qmq/rpc/tls_listener.py",
    "qmq/rpc/tls_network.py",
    "qmq/rpc/web_server.py",
}
"""The implementation: what it offers is in `SERVING` where it is used."""
CONNECTING = {
    ("qmq/client/connection/connection.py", "connect"): "client: data",
    ("replication/qmq_replication/links.py", "connect"): "replica",
    ("qmq/cli/doctor.py", "client_context"): "command: health",
    ("qmq/columns/servers/connection.py", "client_context"): "Spark: data",
    (
        "qmq/rpc/channel.py",
        "channel_credentials",
    ): "client: metaserver, Spark: metaserver, client: control",
    ("coordination/qmq_coordination/etcd/channel.py", "channel_credentials"): "server: etcd",
}
"""Where the product connects with certificates."""


OF_NETWORKS = {"listen", "serve", "connect"}
"""Names that other things have, too."""


def calls_of(names: set[str]) -> set[tuple[str, str]]:
    """Where the product calls or passes on methods of these names, of something that is a network
    or certificates.
    """
    found = set[tuple[str, str]]()
    for folder in ("qmq", "coordination", "ordering", "replication", "spark/pyspark_qmq"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            where = str(path.relative_to(ROOT))
            for each in ast.walk(ast.parse(path.read_text())):
                if (
                    isinstance(each, ast.Call)
                    and isinstance(each.func, ast.Name)
                    and each.func.id in names - OF_NETWORKS
                ):
                    found.add((where, each.func.id))
                elif (
                    isinstance(each, ast.Attribute)
                    and each.attr in names
                    and is_of_network(ast.unparse(each.value), each.attr)
                ):
                    found.add((where, each.attr))
    return {each for each in found if each[0] not in INSIDE and "/testing/" not in each[0]}


def is_of_network(owner: str, name: str) -> bool:
    """`NETWORK` is the machine's, without TLS."""
    return name not in OF_NETWORKS or "network" in owner


def test_the_list_has_every_place_that_serves_tls() -> None:
    served = {
        "listen",
        "serve",
        "WebServer",
        "TlsListener",
        "server_context",
        "load_cert_chain",
        "ssl_server_credentials",
        "wrap_bio",
    }
    assert calls_of(served) == set(SERVING)
    assert {name for names in SERVING.values() for name in names.split(", ")} == set(PORTS)


def test_the_list_has_every_place_that_connects_with_certificates() -> None:
    opened = {"connect", "client_context", "channel_credentials"}
    assert calls_of(opened) == set(CONNECTING)
    assert {name for names in CONNECTING.values() for name in names.split(", ")} == {
        *CLIENTS,
        *CLIENTS_ELSEWHERE,
    }


# --- servers refuse clients -----------------------------------------------------------------------


@asynccontextmanager
async def all_ports(folder: Path, papers: Papers) -> AsyncIterator[dict[str, int]]:
    """Every port of `PORTS`, with the server's good certificate."""
    config = replace(node_config(folder, delay=True), metrics_port=0, metrics_host="127.1")
    cert, key = papers.server.cert, papers.server.key
    assert isinstance(cert, Path)
    assert isinstance(key, Path)
    async with AsyncExitStack() as stack:
        node = Node(config, network=TlsNetwork(Credentials(papers.server)))
        await node.start()
        stack.push_async_callback(node.stop)
        mq = await stack.enter_async_context(
            qmq.connect(node.address, tls=papers.client, state_dir=False)
        )
        gateway = GatewayServer(mq, GatewayConfig(port=0), network=tls_of(cert, key))
        console = ConsoleServer(
            ConsoleConfig(node.address, port=0, tls_cert=cert, tls_key=key), lambda _: mq
        )
        http = HttpServer(HttpConfig(HOST, 0, cert, key), lambda _: mq)
        for each in (gateway, console, http):
            await each.start()
            stack.push_async_callback(each.stop)
        groups = {each.is_delay: each.replicas[0] for each in (await mq.metadata.cluster()).groups}
        assert node.metrics is not None
        ports = {
            "data": groups[False].data_address,
            "delay data": groups[True].data_address,
            "metaserver": node.address,
            "broker control": groups[False].control_address,
            "delay control": groups[True].control_address,
        }
        yield {
            **{name: int(address.rpartition(":")[2]) for name, address in ports.items()},
            "metrics": node.metrics.port,
            "RocketMQ gateway": gateway.port,
            "HTTP gateway": http.port,
            "console": console.port,
        }


async def heard(port: int, alpn: str, first: bytes, tls: Tls) -> bytes:
    """What a peer with these papers hears from a port."""
    context = Credentials(tls).client_context()
    context.set_alpn_protocols([alpn] if alpn else ["http/1.1"])
    try:
        async with asyncio.timeout(30):
            reader, writer = await asyncio.open_connection(HOST, port, ssl=context)
            try:
                writer.write(first)
                return await reader.read(1000)
            finally:
                writer.transport.abort()
    except (ssl.SSLError, ConnectionError):
        return b""


async def test_every_port_refuses_wrong_certificates_and_serves_who_needs_none(
    tmp_path: Path,
) -> None:
    papers = Papers(tmp_path / "papers")
    wrong = wrong_clients(tmp_path, papers)
    async with all_ports(tmp_path / "data", papers) as ports:
        assert set(ports) == set(PORTS)
        for name, (alpn, first, asked) in PORTS.items():
            assert await heard(
                ports[name], alpn, first, papers.client if asked == "required" else papers.ca_only
            ), name
            for what, tls in wrong.items():
                answer = await heard(ports[name], alpn, first, tls)
                if name == "metrics" and what == "none":
                    assert b"403 Forbidden" in answer
                else:
                    is_served = asked == "not read" or (asked == "optional" and what == "none")
                    assert bool(answer) is is_served, (name, what, answer)


# --- clients refuse servers, and say why they are refused -----------------------------------------


async def ask_data(address: str, tls: Tls) -> None:
    (await connect(address, "app", network_of(tls))).close()


async def ask_metaserver(address: str, tls: Tls) -> None:
    async with qmq.connect(address, tls=tls, state_dir=False) as mq:
        await mq.metadata.list_subjects()


async def ask_control(address: str, tls: Tls) -> None:
    async with network_of(tls).channel(address, any_server) as channel:
        try:
            await control_pb2_grpc.BrokerControlStub(channel).DescribeReplica(
                control_pb2.DescribeReplicaRequest(), timeout=10
            )
        except Exception as failure:
            raise typed_error(failure, address) from failure


@contextmanager
def in_environment(tls: Tls) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, path in (("CA", tls.ca), ("CERT", tls.cert), ("KEY", tls.key)):
            if path is None:
                patch.delenv(f"QMQ_TLS_{name}", raising=False)
            else:
                patch.setenv(f"QMQ_TLS_{name}", str(path))
        yield


async def ask_data_in_spark(address: str, tls: Tls) -> None:
    with in_environment(tls):
        (await asyncio.to_thread(BlockingConnection.connect, address)).close()


async def ask_metaserver_in_spark(address: str, tls: Tls) -> None:
    with in_environment(tls):
        await asyncio.to_thread(lambda: Metadata(address, retry_ms=0).list_subjects())


async def ask_health(address: str, tls: Tls) -> None:
    words = ["health", "meta", address, "--tls-ca", str(tls.ca)]
    if tls.cert is not None:
        words += ["--tls-cert", str(tls.cert), "--tls-key", str(tls.key)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("QMQ_")}
    done = await asyncio.to_thread(cli_process.run, tuple(words), environment)
    said = done.stderr.decode()
    if done.returncode:
        raise TlsFailed(" ".join(said.split())) if "E314" in said else NotConnected(said)


Ask = Callable[[str, Tls], Awaitable[None]]
CLIENTS: dict[str, tuple[str, Ask]] = {
    "client: data": ("data", ask_data),
    "client: metaserver": ("metaserver", ask_metaserver),
    "client: control": ("broker control", ask_control),
    "command: health": ("metrics", ask_health),
    "Spark: data": ("data", ask_data_in_spark),
    "Spark: metaserver": ("metaserver", ask_metaserver_in_spark),
}
"""What connects with certificates: to which port, and how."""
CLIENTS_ELSEWHERE = {"replica", "server: etcd"}
"""Their tests are in test_secured_replicas.py, and below."""


@pytest.mark.parametrize("what", WRONG_SERVERS)
async def test_every_client_refuses_a_wrong_server_and_says_what_to_do(
    tmp_path: Path, what: str
) -> None:
    papers = Papers(tmp_path / "papers")
    async with node_with(tmp_path / "data", wrong_server(what, tmp_path, papers)) as addresses:
        for name, (port, ask) in CLIENTS.items():
            with pytest.raises(TlsFailed, match=WRONG_SERVERS[what]) as failure:
                await ask(addresses[port], papers.client)
            assert addresses[port] in str(failure.value), name


@pytest.mark.parametrize("what", ["none", "another authority's", "expired", "not yet valid"])
async def test_every_client_that_is_refused_says_what_to_do(tmp_path: Path, what: str) -> None:
    papers = Papers(tmp_path / "papers")
    wrong = wrong_clients(tmp_path, papers)[what]
    async with node_with(tmp_path / "data", papers.server) as addresses:
        for name, (port, ask) in CLIENTS.items():
            if (name, what) == ("command: health", "none"):
                await ask(addresses[port], wrong)
                continue
            with pytest.raises(
                (TlsFailed, NotConnected), match=r"QMQ_TLS_CERT|does it refuse the certificate"
            ) as failure:
                await ask(addresses[port], wrong)
            assert addresses[port] in str(failure.value), name


# --- etcd -----------------------------------------------------------------------------------------


@contextmanager
def etcd_with(folder: Path, tls: Tls) -> Iterator[str]:
    """The address of an etcd that shows this certificate, and asks for one of the same
    authority.
    """
    needs.need_etcd()
    assert isinstance(tls.ca, Path)
    assert isinstance(tls.cert, Path)
    assert isinstance(tls.key, Path)
    server = EtcdProcess(folder, tls=ServerTls(tls.ca, tls.cert, tls.key))
    try:
        server.start()
        yield server.endpoint
    finally:
        server.stop()


async def refusal_of_etcd(address: str, tls: Tls) -> str:
    """The error of a server with these certificates that asks etcd."""
    store = EtcdStore(
        [address], tls=EtcdTls(path_of(tls.ca), path_of(tls.cert), path_of(tls.key)), total_s=1
    )
    try:
        with pytest.raises(CoordinationTlsFailed) as failure:
            await store.get("k")
    finally:
        await store.close()
    return str(failure.value)


def path_of(found: Path | str | None) -> Path | None:
    return None if found is None else Path(found)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("another authority's", "--etcd-ca (QMQ_ETCD_CA) must name its CA"),
        (
            "expired",
            (
                "certificate is not valid now (certificate has expired): replace it, or correct "
                "this machine's clock"
            ),
        ),
        (
            "not yet valid",
            (
                "certificate is not valid now (certificate is not yet valid): replace it, or "
                "correct this machine's clock"
            ),
        ),
        ("another name", "not for the address that is asked"),
    ],
)
async def test_a_server_refuses_an_etcd_with_a_wrong_certificate_and_says_what_to_do(
    tmp_path: Path, what: str, said: str
) -> None:
    papers = Papers(tmp_path / "papers")
    with etcd_with(tmp_path / "etcd", wrong_server(what, tmp_path, papers)) as address:
        assert said in await refusal_of_etcd(address, papers.client)


async def test_a_server_that_etcd_refuses_says_what_to_do(tmp_path: Path) -> None:
    papers = Papers(tmp_path / "papers")
    with etcd_with(tmp_path / "etcd", papers.server) as address:
        for what, tls in wrong_clients(tmp_path, papers).items():
            said = (
                "set --etcd-cert and --etcd-key"
                if what == "none"
                else "must be signed by a CA that etcd trusts, and be valid now"
            )
            assert said in await refusal_of_etcd(address, tls), what
