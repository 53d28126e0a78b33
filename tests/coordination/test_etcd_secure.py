"""TLS with client certificates, users with passwords, and an etcd from a container."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from qmq_coordination.etcd.channel import EtcdTls
from qmq_coordination.etcd.store import EtcdStore
from support import eventually, needs
from support.etcd_process import EtcdProcess, ServerTls
from support.stores import Follower, proxied, put_surely

from qmq.errors import (
    CoordinationError,
    CoordinationTlsFailed,
    CoordinationUnavailable,
    InvalidArgument,
)
from qmq.security.certificates import create_authority, issue
from qmq.security.tls import LOOK_S

pytestmark = pytest.mark.sampled

DAY = datetime.timedelta(days=1)


class Authority:
    """Signs certificates for a test."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.ca = folder / f"{name}.pem"
        self.ca.write_bytes(
            self._sign(self._name, self._key.public_key(), is_ca=True).public_bytes(
                serialization.Encoding.PEM
            )
        )

    def _sign(
        self, name: x509.Name, public: ec.EllipticCurvePublicKey, *, is_ca: bool
    ) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        builder = x509.CertificateBuilder(
            self._name, name, public, x509.random_serial_number(), now - DAY, now + DAY
        )
        builder = builder.add_extension(
            x509.BasicConstraints(ca=is_ca, path_length=None), critical=True
        )
        names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        return builder.add_extension(x509.SubjectAlternativeName(names), critical=False).sign(
            self._key, hashes.SHA256()
        )

    def issue(self, name: str) -> tuple[Path, Path]:
        """A certificate and its key, as files."""
        key = ec.generate_private_key(ec.SECP256R1())
        # etcd would take a client certificate's common name for a user; an empty one leaves the
        # user to the token.
        certificate = self._sign(x509.Name([]), key.public_key(), is_ca=False)
        cert_path, key_path = self._folder / f"{name}.crt", self._folder / f"{name}.key"
        cert_path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        encoding = (
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        key_path.write_bytes(key.private_bytes(*encoding))
        return cert_path, key_path


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "ca")


@pytest.fixture
def tls_server(tmp_path: Path, authority: Authority) -> Iterator[EtcdProcess]:
    """A member that wants client certificates."""
    needs.need_etcd()
    cert, key = authority.issue("server")
    server = EtcdProcess(tmp_path / "etcd", tls=ServerTls(authority.ca, cert, key))
    try:
        server.start()
        yield server
    finally:
        server.stop()


@pytest.fixture
def auth_server(own_etcd: EtcdProcess) -> EtcdProcess:
    """A member that wants users."""
    own_etcd.enable_auth("root-secret", {"broker": "secret"}, "/qmq/")
    return own_etcd


async def test_with_a_certificate_of_the_right_authority_everything_works(
    tls_server: EtcdProcess, authority: Authority
) -> None:
    cert, key = authority.issue("client")
    store = EtcdStore([tls_server.endpoint], tls=EtcdTls(authority.ca, cert, key))
    start = await store.put("k", b"v")
    lease = await store.grant(60)
    assert await store.keep_alive(lease) == 60
    follower = Follower(store, "k", start)
    await follower.reaches(await store.put("k", b"w"))
    await follower.stop()
    await store.close()


async def test_without_a_certificate_or_with_a_wrong_one_there_is_no_connection(
    tls_server: EtcdProcess, authority: Authority, tmp_path: Path
) -> None:
    stranger = Authority(tmp_path, "stranger")
    cert, key = stranger.issue("stranger")
    address = tls_server.endpoint.removeprefix("https://")
    stores = [
        EtcdStore([tls_server.endpoint], tls=EtcdTls(authority.ca), total_s=0.5),
        EtcdStore([tls_server.endpoint], tls=EtcdTls(authority.ca, cert, key), total_s=0.5),
        EtcdStore([tls_server.endpoint], tls=EtcdTls(stranger.ca), total_s=0.5),
        EtcdStore([address], total_s=0.5),
    ]
    for store in stores:
        with pytest.raises(CoordinationUnavailable):
            await store.get("k")
        await store.close()


async def test_an_untrusted_certificate_is_reported_with_the_option_to_check(
    tls_server: EtcdProcess, authority: Authority, tmp_path: Path
) -> None:
    stranger = Authority(tmp_path, "stranger")
    cert, key = stranger.issue("stranger")
    for store, said in (
        (
            EtcdStore([tls_server.endpoint], tls=EtcdTls(authority.ca), total_s=1),
            "wants a client certificate, and there is none: set --etcd-cert",
        ),
        (
            EtcdStore([tls_server.endpoint], tls=EtcdTls(authority.ca, cert, key), total_s=1),
            "refuses our certificate: --etcd-cert",
        ),
        (
            EtcdStore([tls_server.endpoint], tls=EtcdTls(stranger.ca), total_s=1),
            "not trusted .unable to get local issuer certificate.: --etcd-ca",
        ),
        (EtcdStore([tls_server.endpoint], total_s=1), "--etcd-ca .QMQ_ETCD_CA. must name its CA"),
    ):
        for call in (store.get("k"), store.put("k", b"v")):
            with pytest.raises(CoordinationTlsFailed, match=said):
                await call
        await store.close()


def test_a_certificate_that_would_not_be_shown_is_refused(authority: Authority) -> None:
    cert, key = authority.issue("client")
    with pytest.raises(InvalidArgument, match="needs `ca`"):
        EtcdStore(["https://localhost:2379"], tls=EtcdTls(None, cert, key))


async def test_a_member_whose_certificate_is_for_another_name_is_not_trusted(
    tmp_path: Path,
) -> None:
    needs.need_etcd()
    create_authority(tmp_path)
    member, own = (
        issue(tmp_path, "etcd", "node", ["elsewhere.example"]),
        issue(tmp_path, "broker", "node"),
    )
    server = EtcdProcess(
        tmp_path / "data", tls=ServerTls(tmp_path / "ca.pem", member.cert, member.key)
    )
    server.start()
    store = EtcdStore(
        [server.endpoint], tls=EtcdTls(tmp_path / "ca.pem", own.cert, own.key), total_s=1
    )
    try:
        with pytest.raises(CoordinationTlsFailed, match="not for the address that is asked"):
            await store.get("k")
    finally:
        await store.close()
        server.stop()


async def test_a_user_may_do_what_its_role_may(auth_server: EtcdProcess) -> None:
    store = EtcdStore([auth_server.endpoint], user="broker", password="secret", namespace="/qmq/")
    start = await store.put("k", b"v")
    follower = Follower(store, "k", start)
    await follower.reaches(await store.put("k", b"w"))
    lease = await store.grant(60)
    await store.put("l", b"", lease)
    assert await store.keep_alive(lease) == 60
    await follower.stop()
    await store.close()


async def test_a_wrong_password_is_named_as_such(auth_server: EtcdProcess) -> None:
    store = EtcdStore([auth_server.endpoint], user="broker", password="wrong", namespace="/qmq/")
    with pytest.raises(CoordinationError, match="user or the password") as found:
        await store.get("k")
    assert type(found.value) is CoordinationError
    with pytest.raises(CoordinationError, match="user or the password"):
        await Follower(store, "k", 1).result()
    await store.close()


async def test_a_missing_user_name_is_named_in_the_error(auth_server: EtcdProcess) -> None:
    store = EtcdStore([auth_server.endpoint], namespace="/qmq/")
    with pytest.raises(CoordinationError, match="set them"):
        await store.put("k", b"")
    with pytest.raises(CoordinationError):
        await Follower(store, "k", 1).result()
    await store.close()


async def test_what_the_role_does_not_allow_is_denied(auth_server: EtcdProcess) -> None:
    store = EtcdStore(
        [auth_server.endpoint], user="broker", password="secret", namespace="/others/"
    )
    with pytest.raises(CoordinationError, match="denies"):
        await store.put("k", b"")
    with pytest.raises(CoordinationError, match="denies"):
        await Follower(store, "", 1).result()
    await store.close()


async def test_a_needless_user_name_does_no_harm(own_etcd: EtcdProcess) -> None:
    store = EtcdStore([own_etcd.endpoint], user="broker", password="secret", namespace="/qmq/")
    await store.put("k", b"1")
    own_etcd.enable_auth("root-secret", {"broker": "secret"}, "/qmq/")
    await store.put("k", b"2")
    await store.close()


async def test_tokens_that_a_restart_made_invalid_are_renewed_and_a_watch_continues(
    auth_server: EtcdProcess,
) -> None:
    store = EtcdStore([auth_server.endpoint], user="broker", password="secret", namespace="/qmq/")
    start = await store.put("k", b"0")
    follower = Follower(store, "k", start)
    await follower.reaches(start)
    for turn in range(3):
        auth_server.kill()
        auth_server.spawn()
        await asyncio.to_thread(auth_server.wait_healthy)
        await asyncio.gather(
            *[put_surely(store, f"other/{turn}/{number}", b"") for number in range(10)]
        )
        end = await put_surely(store, "k", b"%d" % turn)
        await follower.reaches(end)
    assert [changes.events[0].now.value for changes in follower.found if changes.events[0].now] == [
        b"0",
        b"0",
        b"1",
        b"2",
    ]
    await follower.stop()
    await store.close()


async def test_a_watch_that_is_opened_with_an_old_token_gets_a_new_one(
    auth_server: EtcdProcess,
) -> None:
    """The watch meets the invalid token first: no call has renewed it."""
    async with proxied(auth_server.client_port) as proxy:
        store = EtcdStore([proxy.endpoint], user="broker", password="secret", namespace="/qmq/")
        other = EtcdStore(
            [auth_server.endpoint], user="broker", password="secret", namespace="/qmq/"
        )
        start = await store.put("k", b"0")
        auth_server.kill()
        auth_server.spawn()
        await asyncio.to_thread(auth_server.wait_healthy)
        follower = Follower(store, "k", start)
        await follower.reaches(await put_surely(other, "k", b"1"))
        await follower.stop()
        for each in (store, other):
            await each.close()


@pytest.mark.docker
@needs.engine
async def test_an_etcd_from_a_container_keeps_the_contract() -> None:
    from testcontainers.core.container import DockerContainer

    command = (
        "etcd --listen-client-urls http://0.0.0.0:2379 --advertise-client-urls "
        "http://127.0.0.1:2379"
    )
    container = (
        DockerContainer("quay.io/coreos/etcd:v3.6.4").with_command(command).with_exposed_ports(2379)
    )
    await asyncio.to_thread(container.start)
    try:
        address = f"{container.get_container_host_ip()}:{container.get_exposed_port(2379)}"
        store = EtcdStore([address], total_s=30)
        start = await put_surely(store, "k", b"1")
        follower = Follower(store, "k", start)
        await follower.reaches(await store.put("k", b"2"))
        lease = await store.grant(60)
        assert await store.keep_alive(lease) == 60
        await follower.stop()
        await store.close()
    finally:
        await asyncio.to_thread(container.stop)


async def test_once_protected_a_certificate_decides_which_keys_its_holder_may_touch(
    tmp_path: Path,
) -> None:
    needs.need_etcd()
    create_authority(tmp_path)
    member = issue(tmp_path, "etcd", "node", ["localhost", "127.0.0.1"])
    server = EtcdProcess(
        tmp_path / "data", tls=ServerTls(tmp_path / "ca.pem", member.cert, member.key)
    )

    def store(name: str) -> EtcdStore:
        paper = issue(tmp_path, name, "app")
        return EtcdStore([server.endpoint], tls=EtcdTls(tmp_path / "ca.pem", paper.cert, paper.key))

    server.start()
    root, broker, stranger = (store(name) for name in ("root", "broker", "stranger"))
    try:
        for _ in range(2):  # the second run finds everything, and access control on
            await root.protect("broker", "etcd", "/qmq/")
        await broker.put("/qmq/subjects/s", b"1")
        lease = await broker.grant(5)
        await broker.put("/qmq/presence/a", b"1", lease)
        assert await broker.keep_alive(lease) > 0
        await broker.revoke(lease)
        assert [each.key for each in (await broker.list("/qmq/")).items] == ["/qmq/subjects/s"]
        for denied in (
            broker.put("/other", b"1"),
            broker.list("/"),
            stranger.get("/qmq/subjects/s"),
            stranger.put("/qmq/x", b"1"),
        ):
            with pytest.raises(CoordinationError, match="permission denied"):
                await denied
        for name in (broker, stranger):
            with pytest.raises(CoordinationError, match=r"permission denied|user name not found"):
                await name.protect("stranger", "etcd", "/")
        await root.put("/other", b"1")
    finally:
        for each in (root, broker, stranger):
            await each.close()
        server.stop()


async def test_renewed_certificates_are_used_without_a_restart(
    tls_server: EtcdProcess, authority: Authority, tmp_path: Path
) -> None:
    cert, key = authority.issue("client")
    looks = count(0.0, LOOK_S)  # it is time for the next look whenever it asks
    async with proxied(tls_server.client_port) as proxy:
        address = f"https://127.0.0.1:{proxy.port}"
        store = EtcdStore(
            [address], tls=EtcdTls(authority.ca, cert, key), monotonic_s=lambda: next(looks)
        )
        start = await store.put("k", b"before")
        follower = Follower(store, "k", start)
        await follower.reaches(start)
        stranger_cert, stranger_key = Authority(tmp_path, "stranger").issue("stranger")
        for new, old in ((stranger_key, key), (stranger_cert, cert)):
            new.replace(old)
        with pytest.raises(CoordinationUnavailable):
            async with asyncio.timeout(20):
                await store.put("k", b"refused")
        authority.issue("client")
        await follower.reaches(await store.put("k", b"behind"))
        # of the connections with older certificates only the watch's is left
        await eventually(lambda: proxy.connections == 2)
        await follower.stop()
        item = await store.get("k")
        assert item is not None
        assert item.value == b"behind"
        await store.close()
