"""TLS through real sockets: a node, its clients, and strangers with the wrong papers."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import ssl
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from access_support import HOST, NOW, FakeClock, Papers, handshakes, secured
from support import cli_process, eventually, node_config, running

import qmq
from qmq.broker.config import BrokerConfig
from qmq.client.connection.connection import connect
from qmq.columns.servers.connection import BlockingConnection
from qmq.errors import InvalidArgument, NotConnected, TlsFailed
from qmq.metrics.figures import Readiness
from qmq.node.dev_node import Node
from qmq.node.metrics import serving
from qmq.rpc.tls_network import TlsNetwork, network_of
from qmq.security.contexts import ClusterContext, ContextFile
from qmq.security.tls import LOOK_S, Credentials, Tls
from qmq.wire.frame import FrameKind
from qmq.wire.frame_payloads import Find

QUESTION = Find("s", 0, "0" * 16, 1, 1).pack()


async def exchange(mq: qmq.Client) -> bytes:
    await mq.send("s", b"hello")
    async with mq.consumer("s", "g") as consumer:
        found = await consumer.pull(1, timedelta(seconds=20))
        await found.ack_sync()
    return found[0].body


async def refused(address: str, tls: Tls | None) -> str:
    """Why a client with these papers gets nowhere."""
    async with qmq.connect(address, tls=tls) as mq:
        with pytest.raises(qmq.QmqError) as failed:
            await mq.metadata.list_subjects()
        return str(failed.value)


async def test_messages_go_through_encrypted_ports_both_ways(
    tmp_path: Path, papers: Papers
) -> None:
    async with (
        secured(tmp_path / "data", papers.server) as node,
        qmq.connect(node.address, tls=papers.client) as mq,
    ):
        assert await exchange(mq) == b"hello"
        receipt = await mq.send("s", b"later", delay=timedelta(milliseconds=100))
        async with mq.consumer("s", "g") as consumer:
            assert (await consumer.pull(1, timedelta(seconds=20))).bodies == [b"later"]
            large = bytes(range(256)) * 4096 * 3
            await mq.send("s", large)
            assert (await consumer.pull(1, timedelta(seconds=20)))[0].body == large
        assert receipt.due_ms


async def test_a_client_with_wrong_papers_gets_nowhere(tmp_path: Path, papers: Papers) -> None:
    strange = Papers(tmp_path / "strange")
    long_ago, later = NOW - timedelta(days=30), NOW + timedelta(days=30)
    expired, early = papers.of("expired", "app", now=long_ago), papers.of("early", "app", now=later)
    wrong = {
        "no certificate": papers.ca_only,
        "no TLS": None,
        "another authority's certificate": replace(strange.client, ca=papers.client.ca),
        "an expired certificate": expired,
        "a certificate of the future": early,
    }
    async with secured(tmp_path / "data", papers.server) as node:
        assert "TLS" in await refused(node.address, None)
        assert "E314" in await refused(node.address, strange.client)
        for what, each in wrong.items():
            assert await data_port_refuses(node.data_address, each), what
        async with qmq.connect(node.address, tls=papers.client) as mq:
            assert await exchange(mq) == b"hello"


async def test_handshakes_that_fail_are_in_the_audit_log_with_address_and_reason(
    tmp_path: Path, papers: Papers, caplog: pytest.LogCaptureFixture
) -> None:
    strange = Papers(tmp_path / "strange")
    wrong = [
        papers.ca_only,
        None,
        replace(strange.client, ca=papers.client.ca),
        papers.of("expired", "app", now=NOW - timedelta(days=30)),
    ]
    async with secured(tmp_path / "data", papers.server) as node:
        for each in (*wrong, papers.ca_only, papers.ca_only):
            assert await data_port_refuses(node.data_address, each)
        await eventually(lambda: len(handshakes(caplog)) == len(wrong))
        async with qmq.connect(node.address, tls=papers.client) as mq:
            assert await exchange(mq) == b"hello"
    records = handshakes(caplog)
    reasons = {str(each["on"]).lower() for each in records}
    assert len(reasons) == len(wrong), "the same refusal is written once"
    for expected in (
        "certificate has expired",
        "did_not_return_a_certificate",
        "local issuer",
        "wrong_version",
    ):
        assert any(expected in each for each in reasons), reasons
    assert {
        (each["principal"], each["result"], str(each["from"]).split(":")[0]) for each in records
    } == {("any:anonymous", "denied", HOST)}


async def test_a_client_with_tls_hears_that_the_server_has_no_tls(
    tmp_path: Path, papers: Papers
) -> None:
    async with running(node_config(tmp_path)) as node:
        assert "does the server speak TLS" in await refused(node.address, papers.client)
        with pytest.raises((TlsFailed, NotConnected)):
            await connect(node.data_address, "app", network_of(papers.client))


async def data_port_refuses(address: str, tls: Tls | None) -> bool:
    """Whether the server closes the connection before its greeting."""
    with pytest.raises((NotConnected, qmq.QmqError)):
        await connect(address, "stranger", network_of(tls))
    return True


@pytest.mark.parametrize("wrong", ["authority", "name", "expired", "early"])
async def test_a_client_trusts_no_server_with_wrong_papers(
    tmp_path: Path, papers: Papers, wrong: str
) -> None:
    servers = {
        "authority": Papers(tmp_path / "strange").server,
        "name": papers.of("elsewhere", "node", "broker9.example"),
        "expired": papers.of("expired", "node", HOST, now=NOW - timedelta(days=30)),
        "early": papers.of("early", "node", HOST, now=NOW + timedelta(days=30)),
    }
    network = TlsNetwork(Credentials(replace(servers[wrong], requires_clients=False)))
    listener = await network.listen(HOST, 0, asyncio.Protocol)
    try:
        with pytest.raises(TlsFailed, match=r"certificate"):
            await connect(f"{HOST}:{listener.port}", "app", TlsNetwork(Credentials(papers.client)))
    finally:
        listener.close()


async def test_strangers_whose_handshake_fails_leave_nothing_behind(
    tmp_path: Path, papers: Papers
) -> None:
    async with secured(tmp_path / "data", papers.server, hello_timeout_ms=200) as node:
        host, _, port = node.data_address.rpartition(":")
        for _ in range(20):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(bytes(64))
            await reader.read()
            writer.close()
        server = node.running.data
        await eventually(lambda: not server.connections)


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
@pytest.mark.parametrize(
    ("allows", "versions"), [(False, {"TLSv1.3"}), (True, {"TLSv1.2", "TLSv1.3"})]
)
async def test_old_versions_of_tls_are_refused(
    papers: Papers, allows: bool, versions: set[str]
) -> None:
    network = TlsNetwork(
        Credentials(replace(papers.server, requires_clients=False, allows_tls12=allows))
    )
    listener = await network.listen(HOST, 0, asyncio.Protocol)
    spoken = set[str]()
    for version in (ssl.TLSVersion.TLSv1_1, ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
        context = ssl.create_default_context(cafile=str(papers.client.ca))
        context.set_ciphers("ALL:@SECLEVEL=0")
        context.minimum_version = context.maximum_version = version
        try:
            _, writer = await asyncio.open_connection(HOST, listener.port, ssl=context)
        except (ssl.SSLError, OSError):
            continue
        spoken.add(writer.get_extra_info("ssl_object").version())
        writer.close()
        await writer.wait_closed()
    listener.close()
    assert spoken == versions


async def test_renewed_certificates_are_used_and_no_connection_is_dropped(
    tmp_path: Path, papers: Papers
) -> None:
    clock = FakeClock()
    async with (
        secured(tmp_path / "data", papers.server, clock) as node,
        qmq.connect(node.address, tls=papers.client) as mq,
    ):
        assert await exchange(mq) == b"hello"
        before = await serial_at(node.data_address, papers)
        papers.of("broker0", "node", HOST, "localhost", days=9)
        assert await serial_at(node.data_address, papers) == before, "it is not time to look yet"
        clock.now_s += LOOK_S
        assert await serial_at(node.data_address, papers) != before
        assert await control_serial(node.address, papers) == await serial_at(
            node.data_address, papers
        )
        assert mq.connections == 1
        assert await exchange(mq) == b"hello"
        assert mq.connections == 1


async def ask_over_tls(port: int, path: str, context: ssl.SSLContext | None) -> bytes:
    reader, writer = await asyncio.open_connection(HOST, port, ssl=context)
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nConnection: close\r\n\r\n".encode())
        return await reader.read()
    finally:
        writer.close()


async def test_remote_readers_of_metrics_need_a_certificate(tmp_path: Path, papers: Papers) -> None:
    # counts as another machine's address
    config = replace(node_config(tmp_path / "data"), metrics_port=0, metrics_host="127.1")
    node = Node(config, network=TlsNetwork(Credentials(papers.server)))
    await node.start()
    try:
        assert node.metrics is not None
        port = node.metrics.port

        known, stranger = (
            Credentials(papers.client).client_context(),
            Credentials(papers.ca_only).client_context(),
        )
        assert b"qmq_" in await ask_over_tls(port, "/metrics", known)
        refusal = await ask_over_tls(port, "/metrics", stranger)
        assert b"403 Forbidden" in refusal
        assert b"qmq_" not in refusal
        for path in ("/livez", "/readyz"):  # a probe has no certificate
            assert b"200 OK" in await ask_over_tls(port, path, stranger)
        with suppress(OSError):
            assert await ask_over_tls(port, "/livez", None) == b""
    finally:
        await node.stop()


async def test_health_is_asked_over_tls_where_the_metrics_port_has_tls(
    tmp_path: Path, papers: Papers
) -> None:
    server = papers.of("broker1", "node", HOST)
    config = replace(node_config(tmp_path / "data"), metrics_port=0, metrics_host="0.0.0.0")
    node = Node(config, network=TlsNetwork(Credentials(server)))
    await node.start()

    async def health(*words: str, **environment: str) -> tuple[int, str]:
        """Exit status and output of `qmq health`."""
        assert node.metrics is not None
        asked = ("health", "meta", f"{HOST}:{node.metrics.port}", *words)
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith("QMQ_TLS")
        }
        done = await asyncio.to_thread(
            cli_process.run, asked, {**inherited, "XDG_CONFIG_HOME": str(tmp_path), **environment}
        )
        return done.returncode, (done.stdout + done.stderr).decode()

    try:
        assert (await health("--tls-ca", str(server.ca)))[0] == 0
        assert (await health(QMQ_TLS_CA=str(server.ca)))[0] == 0
        context = ContextFile(tmp_path / "qmq" / "contexts.json")
        context.add(ClusterContext("prod", tls_ca=str(server.ca)))
        status, said = await health("--json")
        assert (status, json.loads(said)[0]["health"]) == (0, "serving")
        context.remove("prod")
        status, said = await health()
        assert (status, "--tls-ca" in said) == (3, True)
        stranger = Papers(tmp_path / "stranger")
        status, said = await health("--tls-ca", str(stranger.ca_only.ca))
        assert (status, "E314" in said) == (3, True)
        status, said = await health("--tls-cert", str(server.cert))
        assert (status, "need --tls-ca" in said) == (2, True)
    finally:
        await node.stop()
    async with running(replace(node_config(tmp_path / "plain"), metrics_port=0)) as plain:
        node = plain
        assert (await health("--tls-ca", str(server.ca)))[0] == 0, (
            "on this machine metrics have no TLS"
        )


async def test_metrics_are_for_all_where_clients_need_no_certificate(papers: Papers) -> None:
    network = TlsNetwork(Credentials(replace(papers.server, requires_clients=False)))
    metrics = await serving.serve("127.1", 0, [], lambda: Readiness(True, "ok"), network)
    assert metrics is not None
    try:
        assert b"200 OK" in await ask_over_tls(
            metrics.port, "/metrics", Credentials(papers.ca_only).client_context()
        )
    finally:
        await metrics.stop()


async def test_a_listener_outlives_its_own_failures(
    papers: Papers, caplog: pytest.LogCaptureFixture
) -> None:
    failures = [RuntimeError("the factory fails")]

    def accept() -> asyncio.Protocol:
        if failures:
            raise failures.pop()
        return asyncio.Protocol()

    def look() -> None:
        raise RuntimeError("looking fails")

    listener = await TlsNetwork(Credentials(papers.server), look).listen(HOST, 0, accept)
    for _ in range(2):
        with suppress(OSError):
            _, writer = await asyncio.open_connection(
                HOST, listener.port, ssl=Credentials(papers.client).client_context()
            )
    writer.close()
    listener.close()
    assert not failures
    assert all(each in caplog.text for each in ("the factory fails", "looking fails"))


async def test_connections_beyond_the_rate_of_handshakes_wait_and_are_all_served(
    tmp_path: Path, papers: Papers
) -> None:
    broker = BrokerConfig(handshakes_per_s=5)
    node = Node(
        node_config(tmp_path / "data", broker=broker),
        network=TlsNetwork(Credentials(papers.server)),
    )
    await node.start()
    data = node.running.data
    begun = [
        asyncio.ensure_future(connect(node.data_address, str(number), network_of(papers.client)))
        for number in range(12)
    ]
    await eventually(lambda: data.is_paused)
    standing = [await each for each in begun]
    assert data.connections == 12
    for each in standing:
        each.close()
        await each.wait_closed()
    await node.stop()


async def serial_at(address: str, papers: Papers) -> str:
    """The serial number of the certificate that a server shows."""
    host, _, port = address.rpartition(":")
    _, writer = await asyncio.open_connection(
        host, int(port), ssl=Credentials(papers.client).client_context(), server_hostname=host
    )
    found = writer.get_extra_info("ssl_object").getpeercert()["serialNumber"]
    writer.close()
    await writer.wait_closed()
    return str(found)


async def control_serial(address: str, papers: Papers) -> str:
    context = Credentials(papers.client).client_context()
    context.set_alpn_protocols(["h2"])
    host, _, port = address.rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port), ssl=context, server_hostname=host)
    found = writer.get_extra_info("ssl_object").getpeercert()["serialNumber"]
    writer.close()
    return str(found)


def test_certificates_are_named_by_path_or_by_text(papers: Papers) -> None:
    files = papers.client
    named = Credentials(replace(files, ca=str(files.ca), cert=str(files.cert), key=str(files.key)))
    assert named.pem == Credentials(files).pem
    with pytest.raises(InvalidArgument, match="nowhere"):
        Credentials(qmq.Tls("nowhere"))


def test_files_that_do_not_match_each_other_change_nothing(
    papers: Papers, caplog: pytest.LogCaptureFixture
) -> None:
    clock = FakeClock()
    credentials = Credentials(papers.server, clock)
    first = credentials.pem
    assert papers.server.key is not None
    key = papers.server.key.read_bytes()
    papers.server.key.write_bytes(Path(str(papers.client.key)).read_bytes())
    for _ in range(3):
        clock.now_s += LOOK_S
        assert credentials.pem == first
    assert caplog.text.count("new certificates cannot be used") == 1
    papers.server.key.write_bytes(key + b"\n")
    clock.now_s += LOOK_S
    assert credentials.version == first.version + 1


@pytest.mark.parametrize(
    ("files", "what"),
    [
        ({"ca": "nowhere.pem"}, "cannot be read"),
        ({"ca": "garbage"}, "do not belong together"),
        ({"key": "garbage"}, "do not belong together"),
    ],
)
def test_files_that_cannot_be_used_are_named(
    tmp_path: Path, papers: Papers, files: dict[str, str], what: str
) -> None:
    (tmp_path / "garbage").write_bytes(b"\xff\x00garbage")
    with pytest.raises(InvalidArgument, match=what):
        Credentials(
            replace(papers.server, **{name: tmp_path / path for name, path in files.items()})
        )


def test_a_certificate_without_its_key_is_refused(papers: Papers) -> None:
    with pytest.raises(InvalidArgument, match="go together"):
        Tls(papers.client.ca, papers.client.cert)
    with pytest.raises(InvalidArgument, match="QMQ_TLS_CA"):
        Tls.from_environment({"QMQ_TLS_CERT": "a", "QMQ_TLS_KEY": "b"})
    assert Tls.from_environment({}) is None


@pytest.mark.parametrize("open_files", [0, 1100])
async def test_a_blocking_connection_sends_while_it_waits_for_an_answer(
    tmp_path: Path, papers: Papers, monkeypatch: pytest.MonkeyPatch, open_files: int
) -> None:
    """As the Spark sink does: one thread receives, another one sends."""
    for name, path in (
        ("CA", papers.client.ca),
        ("CERT", papers.client.cert),
        ("KEY", papers.client.key),
    ):
        monkeypatch.setenv(f"QMQ_TLS_{name}", str(path))
    async with secured(tmp_path / "data", papers.server) as node:
        async with qmq.connect(node.address) as mq:
            await mq.send("s", b"x")
        with _files_open(open_files):
            assert await asyncio.to_thread(_ask_from_two_threads, node.data_address) == list(
                range(500)
            )


@contextmanager
def _files_open(count: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as held:
        held.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, count + 1000), hard))
        for _ in range(count):
            held.enter_context(Path(os.devnull).open())
        yield


def _ask_from_two_threads(address: str) -> list[int]:
    count, heard = 500, list[int]()
    with BlockingConnection.connect(address) as connection:
        first = connection.send(FrameKind.FIND, QUESTION)

        def receive() -> None:
            for _ in range(count):
                heard.append(connection.receive().request_id - first)

        receiver = threading.Thread(target=receive)
        receiver.start()
        for _ in range(count - 1):
            connection.send(FrameKind.FIND, QUESTION)
        receiver.join(60)
    return heard
