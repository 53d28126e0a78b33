"""`qmq cert` and the servers' TLS options, as an operator uses them."""

from __future__ import annotations

import json
import logging
import os
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID
from support import NodeProcess, cli_process

import qmq
from qmq.errors import InvalidArgument, InvalidName
from qmq.metrics.figures import Figure
from qmq.node.metrics.serving import EXPIRES, INSECURE, ExposureSource
from qmq.node.process import require_guarded
from qmq.security.certificates import create_authority, issue
from qmq.security.tls import AGAIN, WARNING, Credentials, ExpiryWarning, Tls

NOW = datetime.now(UTC)


def command(*words: str, data: bytes = b"", **environment: str) -> tuple[int, str, str]:
    """Status, output, errors of `qmq WORDS`."""
    done = cli_process.run(words, {**os.environ, "COLUMNS": "200", **environment}, data)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def tls_of(folder: Path, name: str) -> Tls:
    return Tls(folder / "ca.pem", folder / f"{name}.pem", folder / f"{name}.key")


def shown(source: ExposureSource, figure: Figure) -> float:
    (value,) = [
        row[1] for each in source.read() if each and each.figure is figure for row in each.rows
    ]
    assert isinstance(value, int | float)
    return value


@pytest.mark.sampled
def test_a_node_and_its_clients_are_secured_by_three_commands(
    tmp_path: Path, node_process: NodeProcess
) -> None:
    folder = tmp_path / "certs"
    for words in (["ca"], ["server", "dev", "--host", "127.0.0.1"], ["client", "orders"]):
        status, _, said = command("cert", *words, "--folder", str(folder))
        assert status == 0, said
    files = [
        f"--tls-{name}={folder / file}"
        for name, file in (("ca", "ca.pem"), ("cert", "dev.pem"), ("key", "dev.key"))
    ]
    node_process.options = (*node_process.options, *files)
    address = node_process.start()
    papers = {
        "QMQ_TLS_CA": f"{folder}/ca.pem",
        "QMQ_TLS_CERT": f"{folder}/orders.pem",
        "QMQ_TLS_KEY": f"{folder}/orders.key",
    }
    status, _, said = command("produce", "s", "--server", address, data=b"hello\n", **papers)
    assert status == 0, said
    _, listed, _ = command("subject", "list", "--json", "--server", address, **papers)
    assert [each["subject"] for each in json.loads(listed)] == ["s"]
    status, _, said = command("subject", "list", "--server", address)
    assert status != 0
    assert "QMQ_TLS_CA" in said


def test_a_certificate_names_its_holder_and_hosts(tmp_path: Path) -> None:
    create_authority(tmp_path, now=NOW)
    made = issue(
        tmp_path, "broker0", "node", ["127.0.0.1", "[::1]", "broker0.example"], now=NOW, days=30
    )
    cert = x509.load_pem_x509_certificate(made.cert.read_bytes())
    names = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.UniformResourceIdentifier) == [
        "spiffe://qmq/node/broker0"
    ]
    assert names.get_values_for_type(x509.DNSName) == ["broker0.example"]
    assert [str(each) for each in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1", "::1"]
    assert abs(made.ends_at - NOW - timedelta(days=30)) < timedelta(seconds=1)
    client = x509.load_pem_x509_certificate(issue(tmp_path, "orders", "app").cert.read_bytes())
    assert (
        ExtendedKeyUsageOID.SERVER_AUTH
        not in client.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    )


def test_keys_are_their_owners_only(tmp_path: Path) -> None:
    create_authority(tmp_path / "certs")
    issue(tmp_path / "certs", "orders", "app")
    assert stat.S_IMODE((tmp_path / "certs").stat().st_mode) == 0o700
    assert {stat.S_IMODE(each.stat().st_mode) for each in (tmp_path / "certs").glob("*.key")} == {
        0o600
    }


def test_an_authority_is_not_replaced_by_accident(tmp_path: Path) -> None:
    create_authority(tmp_path)
    with pytest.raises(InvalidArgument, match="has an authority already"):
        create_authority(tmp_path)


@pytest.mark.parametrize(
    ("name", "kind", "error"),
    [("ca", "app", InvalidArgument), ("x", "king", InvalidArgument), ("../x", "app", InvalidName)],
)
def test_what_cannot_be_certified_is_refused(
    tmp_path: Path, name: str, kind: str, error: type[qmq.QmqError]
) -> None:
    create_authority(tmp_path)
    with pytest.raises(error):
        issue(tmp_path, name, kind)
    with pytest.raises(InvalidArgument, match="qmq cert ca"):
        issue(tmp_path / "nowhere", "x", "app")


def test_a_server_with_required_certificates_may_listen_anywhere(tmp_path: Path) -> None:
    create_authority(tmp_path)
    issue(tmp_path, "broker0", "node", ["10.0.0.1"])
    files = tls_of(tmp_path, "broker0")
    require_guarded("10.0.0.1", False, tls=files)
    assert shown(ExposureSource("10.0.0.1", None, Credentials(files)), INSECURE) == 0
    optional = Tls(files.ca, files.cert, files.key, requires_clients=False)
    with pytest.raises(InvalidArgument, match="no access control"):
        require_guarded("10.0.0.1", False, tls=optional)


def test_the_end_of_a_certificate_is_a_metric_and_logged_once_a_day(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    create_authority(tmp_path)
    issue(tmp_path, "broker0", "node", ["10.0.0.1"], now=NOW, days=30)
    credentials = Credentials(tls_of(tmp_path, "broker0"))
    assert (
        29 * 86_400 < shown(ExposureSource("127.0.0.1", None, credentials), EXPIRES) <= 30 * 86_400
    )
    now = NOW
    warning = ExpiryWarning(credentials, lambda: now)
    warning.look()
    assert not caplog.records
    now = NOW + timedelta(days=30) - WARNING + timedelta(minutes=1)
    with caplog.at_level(logging.WARNING, "qmq.security"):
        warning.look()
        warning.look()
        now += AGAIN
        warning.look()
    assert len(caplog.records) == 2
    assert "broker0.pem ends at" in caplog.records[0].getMessage()
