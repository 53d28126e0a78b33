"""A server listens on other addresses than loopback, or sends etcd's password in plain text, only
with an explicit option.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import pytest
from support import node_config, running
from typer.testing import CliRunner

from qmq.cli.app import app
from qmq.errors import InvalidArgument
from qmq.metrics.figures import one
from qmq.node.metrics.serving import INSECURE, ExposureSource
from qmq.node.process import EtcdOptions, require_guarded
from qmq.process.address import is_local
from qmq.security.tls import Tls

REPLICA = ["--group", "g", "--replica", "a"]
ROLES = (
    ["dev"],
    ["meta", "--etcd", "h:1"],
    ["broker", "--etcd", "h:1", *REPLICA],
    ["delay", "--etcd", "h:1", *REPLICA],
)
PASSWORD = {"QMQ_ETCD_USER": "u", "QMQ_ETCD_PASSWORD": "p"}


def refusal(words: list[str], folder: Path, variables: Mapping[str, str] | None = None) -> str:
    plain = {
        "QMQ_DATA": str(folder / "data"),
        "QMQ_INSECURE": None,
        "QMQ_ETCD": None,
        "COLUMNS": "1000",
    }
    done = CliRunner().invoke(app, words, env={**plain, **(variables or {})})
    assert done.exit_code == 2, done.output
    assert list(folder.iterdir()) == [], "it began although it refused"
    return done.output


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role[0])
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "broker-7"])
def test_no_role_listens_beyond_its_machine_unasked(
    role: list[str], host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = refusal([*role, "--host", host], tmp_path)
    assert host in said
    assert all(
        way in said
        for way in ("--host 127.0.0.1", "--insecure", "QMQ_INSECURE=1", "docs/SECURITY.md")
    )


@pytest.mark.parametrize(
    "role", [role for role in ROLES if role[0] != "meta"], ids=lambda role: role[0]
)
@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_no_role_tells_clients_to_connect_to_a_wildcard_address(
    role: list[str], host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = refusal([*role, "--host", host, "--insecure"], tmp_path)
    assert f"clients cannot connect to {host}" in said
    assert "--advertise HOST (QMQ_ADVERTISE)" in said


@pytest.mark.parametrize("role", ["gateway", "console"])
@pytest.mark.parametrize("host", ["0.0.0.0", "10.1.2.3"])
def test_neither_gateway_nor_console_listens_beyond_its_machine_unasked(
    role: str, host: str, tmp_path: Path
) -> None:
    said = refusal([role, "--host", host], tmp_path)
    assert host in said
    assert "--insecure" in said


@pytest.mark.parametrize("role", [*ROLES, ["gateway"]], ids=lambda role: role[0])
def test_no_role_shows_its_metrics_beyond_its_machine_unasked(
    role: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = refusal([*role, "--metrics-port", "0"], tmp_path, {"QMQ_METRICS_HOST": "10.1.2.3"})
    assert "10.1.2.3 may read the metrics" in said
    assert all(way in said for way in ("Certificates", "--tls-cert", "--insecure"))


def test_certificates_of_clients_close_the_metrics_port_too() -> None:
    require_guarded("127.0.0.1", False, tls=Tls("ca", "cert", "key"), metrics_host="10.1.2.3")
    with pytest.raises(InvalidArgument, match="metrics"):
        require_guarded(
            "127.0.0.1",
            False,
            tls=Tls("ca", "cert", "key", requires_clients=False),
            metrics_host="10.1.2.3",
        )


@pytest.mark.parametrize("role", ROLES[1:], ids=lambda role: role[0])
def test_no_role_gives_etcds_password_away_unasked(role: list[str], tmp_path: Path) -> None:
    said = refusal(role, tmp_path, PASSWORD)
    assert "etcd's password would go to h:1 in clear text" in said
    assert "https://" in said


def test_what_stays_on_this_machine_or_has_tls_or_no_password_is_not_refused() -> None:
    for host in ("127.0.0.1", "127.77.3.9", "localhost", "::1", "[::1]", "unix:/run/qmq/a"):
        assert is_local(host)
        require_guarded(host, False)
    for endpoint in (
        "https://etcd-0:2379",
        "http://127.0.0.1:2379",
        "localhost:2379",
        "[::1]:2379",
    ):
        require_guarded("127.0.0.1", False, EtcdOptions((endpoint,), "u", "p"))
    require_guarded("127.0.0.1", False, EtcdOptions(("etcd-0:2379",)))


def test_one_plain_endpoint_among_many_is_enough_to_refuse() -> None:
    with pytest.raises(InvalidArgument, match=r"would go to etcd-1:2379 in clear"):
        require_guarded(
            "127.0.0.1", False, EtcdOptions(("https://etcd-0:2379", "http://etcd-1:2379"), "u", "p")
        )


def test_who_insists_is_warned_and_the_gauge_shows_it(caplog: pytest.LogCaptureFixture) -> None:
    etcd = EtcdOptions(("etcd-0:2379",), "u", "p")
    with caplog.at_level(logging.WARNING, "qmq.node"):
        require_guarded("0.0.0.0", True, etcd)
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "insecure",
        "insecure",
    ]
    assert list(ExposureSource("0.0.0.0").read()) == [one(INSECURE, 1)]
    assert list(ExposureSource("127.0.0.1", etcd).read()) == [one(INSECURE, 1)]


async def test_a_secured_node_reports_insecure_as_zero(tmp_path: Path) -> None:
    async with running(node_config(tmp_path)) as node:
        assert [
            reading
            for source in node.sources()
            for reading in source.read()
            if reading and reading.figure is INSECURE
        ] == [one(INSECURE, 0)]
