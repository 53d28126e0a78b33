"""docker-compose.secure.yml, merged into docker-compose.yml by the real compose binary, and what
scripts/cluster makes of both.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts"))

from cluster_runner import COMPOSE_FILE  # noqa: E402
from cluster_runner.compose import SECURE_FILE, resolve, services, waves  # noqa: E402
from cluster_runner.launch import Launcher  # noqa: E402
from cluster_runner.network import Loopback  # noqa: E402
from cluster_runner.state import StateFolder  # noqa: E402

ETCD = ["etcd0", "etcd1", "etcd2"]
META = ["meta0", "meta1"]
BROKERS = [f"{group}-{name}" for group in ("g1", "g2", "d1") for name in "abc"]
SERVERS = [*META, *BROKERS]
CERTS = {
    "QMQ_TLS_CA": "/certs/ca.pem",
    "QMQ_TLS_CERT": "/certs/cert.pem",
    "QMQ_TLS_KEY": "/certs/key.pem",
}
TO_ETCD = {f"QMQ_ETCD_{name.upper()}": f"/certs/etcd-{name}.pem" for name in ("ca", "cert", "key")}


@pytest.fixture(scope="module")
def model() -> dict[str, Any]:
    return resolve(COMPOSE_FILE, {}, SECURE_FILE)


@pytest.fixture(scope="module")
def merged(model: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = model["services"]
    return found


def launcher(folder: Path, model: dict[str, Any]) -> Launcher:
    known = services(model)
    return Launcher(known, Loopback(folder, list(known), slot=5), StateFolder(folder))


def certificates(service: dict[str, Any]) -> dict[str, Any]:
    (found,) = [each for each in service["volumes"] if each["target"] == "/certs"]
    return found


def test_the_secure_file_adds_two_services_and_removes_none(merged: dict[str, Any]) -> None:
    plain = resolve(COMPOSE_FILE, {})["services"]
    assert set(merged) - set(plain) == {"certs", "etcd-users"}
    assert set(plain) < set(merged)
    for name, each in plain.items():
        assert all(merged[name][key] == each[key] for key in ("command", "image") if key in each), (
            name
        )
        assert set(each.get("depends_on", {})) <= set(merged[name].get("depends_on", {})), name


def test_it_keeps_its_data_apart_from_that_of_a_cluster_without_tls(model: dict[str, Any]) -> None:
    assert model["name"] != resolve(COMPOSE_FILE, {})["name"]
    assert {each["name"] for each in model["volumes"].values()} == {
        f"qmq-secure_{name}" for name in model["volumes"]
    }


def test_servers_and_clients_have_certificates_and_no_server_is_insecure(
    merged: dict[str, Any],
) -> None:
    for name in (*SERVERS, "client", "spark-worker", "spark-job"):
        assert merged[name]["environment"].items() >= CERTS.items(), name
    for name in SERVERS:
        environment = merged[name]["environment"]
        assert environment.items() >= TO_ETCD.items(), name
        assert (environment["QMQ_INSECURE"], environment["QMQ_ADMINS"]) == ("0", "op:admin"), name
        assert "QMQ_TLS_CLIENTS" not in environment, "by default clients must show a certificate"


def test_a_service_sees_its_own_certificate_and_no_other_one(merged: dict[str, Any]) -> None:
    owners = {
        **{name: name for name in (*ETCD, *SERVERS)},
        "client": "admin",
        "spark-worker": "demo",
        "spark-job": "demo",
    }
    owners["etcd-users"] = "etcd-root"
    for name, owner in owners.items():
        mount = certificates(merged[name])
        assert (mount["source"], mount["read_only"], mount["volume"]["subpath"]) == (
            "certs",
            True,
            f"members/{owner}",
        ), name
    seeing = {
        name
        for name, each in merged.items()
        if any(mount["source"] == "certs" for mount in each.get("volumes", ()))
    }
    assert seeing == {*owners, "certs"}


def test_every_server_gets_a_certificate_for_the_name_it_is_reached_by(
    merged: dict[str, Any],
) -> None:
    words = merged["certs"]["entrypoint"]
    pairs = [
        (words[at], words[at + 1].split("="))
        for at, word in enumerate(words)
        if word in ("--etcd", "--meta", "--node")
    ]
    assert {(kind, name) for kind, (name, _) in pairs} == {
        *(("--etcd", name) for name in ETCD),
        *(("--meta", name) for name in META),
        *(("--node", name) for name in BROKERS),
    }
    for _, (name, hosts) in pairs:  # with a port, so that scripts/cluster puts an address there
        assert hosts.split(",")[0].rpartition(":")[0] == name


def test_etcd_speaks_tls_alone_and_asks_everybody_for_a_certificate(merged: dict[str, Any]) -> None:
    for name in ETCD:
        environment = merged[name]["environment"]
        urls = [value for key, value in environment.items() if key.endswith(("_URLS", "_CLUSTER"))]
        assert [url for url in urls if "http://" in url] == ["http://localhost:2381"], (
            "metrics, of its own machine only"
        )
        assert (
            environment["ETCD_CLIENT_CERT_AUTH"]
            == environment["ETCD_PEER_CLIENT_CERT_AUTH"]
            == "true"
        )
        assert (
            environment["ETCD_TRUSTED_CA_FILE"]
            == environment["ETCD_PEER_TRUSTED_CA_FILE"]
            == "/certs/ca.pem"
        )
        assert environment["ETCD_ADVERTISE_CLIENT_URLS"] == f"https://{name}:2379"
        check = merged[name]["healthcheck"]["test"]
        assert {"--cacert=/certs/ca.pem", "--cert=/certs/cert.pem", "--key=/certs/key.pem"} <= set(
            check
        )


def test_no_server_starts_before_etcd_has_its_users(
    model: dict[str, Any], merged: dict[str, Any]
) -> None:
    for name in SERVERS:
        needed = {other: each["condition"] for other, each in merged[name]["depends_on"].items()}
        assert needed == {
            **dict.fromkeys(ETCD, "service_healthy"),
            "etcd-users": "service_completed_successfully",
        }, name
    known = services(model)
    assert {name for name, each in known.items() if each.ends} == {"etcd-users"}
    steps = waves(known, [*ETCD, "etcd-users", *SERVERS])
    assert [sorted(step) for step in steps] == [sorted(ETCD), ["etcd-users"], sorted(SERVERS)]


def test_a_job_that_ends_has_no_rights_and_is_not_restarted(merged: dict[str, Any]) -> None:
    for name in ("certs", "etcd-users"):
        each = merged[name]
        assert (each["image"], each["cap_drop"], each["healthcheck"]) == (
            "qmq:latest",
            ["ALL"],
            {"disable": True},
        )
        assert "restart" not in each, name
    assert merged["certs"]["profiles"] == ["certs"], "`up` leaves it alone"
    assert "/certs" in (ROOT / "Dockerfile").read_text(), (
        "its volume takes over owner and mode of that folder"
    )


def test_without_docker_certificates_are_for_addresses_and_lie_in_the_volume(
    tmp_path: Path, model: dict[str, Any]
) -> None:
    found = launcher(tmp_path, model)
    g1_a, etcd0 = found.network.addresses["g1-a"], found.network.addresses["etcd0"]
    words = found.argv("certs")
    assert f"g1-a={g1_a}:20891" in words
    assert f"etcd0={etcd0}:2379,localhost,127.0.0.1" in words
    assert words[words.index("--folder") + 1] == str(tmp_path / "volumes" / "certs")
    members = tmp_path / "volumes" / "certs" / "members"
    assert found.environment("g1-a")["QMQ_ETCD_CERT"] == str(members / "g1-a" / "etcd-cert.pem")
    assert found.environment("etcd0")["ETCD_LISTEN_METRICS_URLS"] == f"http://{etcd0}:2381"
    assert f"--key={members / 'etcd0' / 'key.pem'}" in found.check("etcd0").argv
    own, _ = found.run([], "certs")
    assert own[own.index("--folder") + 1] == str(tmp_path / "volumes" / "certs"), (
        "not a folder of this machine's root"
    )
    _, environment = found.run(["qmq", "whoami"], "client")
    assert environment["QMQ_TLS_CERT"] == str(members / "admin" / "cert.pem")


def test_where_etcdctl_is_missing_a_member_is_asked_over_http(
    tmp_path: Path, model: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "etcd").touch()
    monkeypatch.setenv("QMQ_ETCD_BIN", str(tmp_path / "etcd"))
    monkeypatch.setenv("PATH", "")
    check = launcher(tmp_path, model).check("etcd0")
    assert (check.argv, check.port) == ([], 2381)
