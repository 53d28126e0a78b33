"""docker-compose.yml and the Dockerfile, as far as they can be judged without an engine: by the
real compose binary and by hadolint.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from qmq.metrics.endpoint import MetricsServer
from qmq.metrics.figures import Readiness
from qmq.rpc.network import NETWORK

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts"))

from cluster_runner.compose import seconds  # noqa: E402

BIN = Path(sys.executable).parent
ETCD = ["etcd0", "etcd1", "etcd2"]
META = ["meta0", "meta1"]
REAL_TIME = ["g1-a", "g1-b", "g1-c", "g2-a", "g2-b", "g2-c"]
DELAY = ["d1-a", "d1-b", "d1-c"]
BROKERS = [*REAL_TIME, *DELAY]
LAKE = ["g3-a", "g3-b", "g3-c"]
"""The broker group with an object store, `s3`."""
SPARK = ["spark-master", "spark-worker"]
LOCKS = ["requirements-demo.lock", "requirements-spark.lock"]
"""Values of LOCK in the Dockerfile: the default, and the one for the services of Spark."""


def compose(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [
        str(BIN / "docker-compose"),
        "-f",
        str(ROOT / "docker-compose.yml"),
        "--profile",
        "*",
        *words,
    ]
    environment = {"PATH": str(BIN), "HOME": str(ROOT), **variables}
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def resolved(**variables: str) -> dict[str, Any]:
    done = compose("config", "--format", "json", **variables)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["services"]


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    return resolved()


def test_compose_accepts_the_file() -> None:
    done = compose("config", "-q")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_compose_file_describes_the_documented_cluster(services: dict[str, Any]) -> None:
    assert {name for name, each in services.items() if not each.get("profiles")} == {
        *ETCD,
        *META,
        *BROKERS,
    }
    assert set(services) == {*ETCD, *META, *BROKERS, "client", "s3", *LAKE, *SPARK, "spark-job"}


def test_the_demo_spark_and_its_jobs_start_only_if_they_are_asked_for(
    services: dict[str, Any],
) -> None:
    profiles = {
        "client": ["demo"],
        "spark-master": ["spark"],
        "spark-worker": ["spark"],
        "spark-job": ["spark-job"],
    }
    profiles |= {name: ["lake"] for name in ("s3", *LAKE)}
    assert {
        name: each["profiles"] for name, each in services.items() if "profiles" in each
    } == profiles


def test_every_server_is_checked_restarted_and_given_time_to_stop(services: dict[str, Any]) -> None:
    for name in (*ETCD, *META, *BROKERS, "s3", *LAKE, *SPARK):
        each = services[name]
        assert each["healthcheck"]["test"][0] == "CMD", name
        assert each["restart"] == "unless-stopped", name
        assert each["stop_grace_period"], name


def test_health_checks_are_cheap_and_use_the_port_that_the_server_serves(
    services: dict[str, Any],
) -> None:
    for name in (*META, *BROKERS, *LAKE):
        shell, *_, address, path = services[name]["healthcheck"]["test"][1:]
        assert shell == "bash", f"{name}: a Python for each check starves the brokers"
        assert address == f"127.0.0.1:{services[name]['environment']['QMQ_METRICS_PORT']}"
        assert path == ("/readyz" if name in META else "/livez")


def test_checks_are_rare_once_healthy_and_patient_with_a_loaded_machine(
    services: dict[str, Any],
) -> None:
    for name in (*ETCD, *META, *BROKERS, "s3", *LAKE, *SPARK):
        check = services[name]["healthcheck"]
        interval, starting, timeout = (
            seconds(check[which]) for which in ("interval", "start_interval", "timeout")
        )
        assert interval >= 5 * starting, name
        assert timeout >= 10, name
        assert check["retries"] * interval >= 60, name
        assert seconds(check["start_period"]) >= 60, name


@pytest.mark.parametrize(
    ("is_ready", "path", "status"),
    [(True, "/readyz", 0), (False, "/readyz", 1), (False, "/livez", 0)],
)
async def test_the_check_passes_if_and_only_if_the_server_says_so(
    services: dict[str, Any], is_ready: bool, path: str, status: int
) -> None:
    endpoint = MetricsServer([], lambda: Readiness(is_ready, "as this test says"))
    await endpoint.start("127.0.0.1", 0, NETWORK.listen)
    try:
        assert await exit_status(services, endpoint.address, path) == status
    finally:
        await endpoint.stop()


async def test_the_check_fails_without_a_listening_server(services: dict[str, Any]) -> None:
    assert await exit_status(services, "127.0.0.1:1", "/livez") == 1


async def exit_status(services: dict[str, Any], address: str, path: str) -> int | None:
    words = services["g1-a"]["healthcheck"]["test"][1:-2]
    argv = [word.replace("$$", "$") for word in words]  # `config` prints a dollar sign as two
    process = await asyncio.create_subprocess_exec(*argv, address, path, stderr=subprocess.DEVNULL)
    return await process.wait()


def test_what_listens_beyond_its_container_says_that_this_is_meant(
    services: dict[str, Any],
) -> None:
    for name in (*META, *BROKERS, *LAKE):
        environment = services[name]["environment"]
        assert (environment["QMQ_HOST"], environment["QMQ_INSECURE"]) == ("0.0.0.0", "1"), name


def test_every_dependency_waits_for_health(services: dict[str, Any]) -> None:
    for name in (*META, *BROKERS, *LAKE):
        assert set(services[name]["depends_on"]) == {*ETCD, *(["s3"] if name in LAKE else [])}, name
    assert set(services["client"]["depends_on"]) == {*META, *REAL_TIME}
    assert set(services["spark-worker"]["depends_on"]) == {"spark-master"}
    assert set(services["spark-job"]["depends_on"]) == {*META, "spark-worker"}
    conditions = {
        each["condition"]
        for service in services.values()
        for each in service.get("depends_on", {}).values()
    }
    assert conditions == {"service_healthy"}


def test_etcd_members_agree_on_the_list_of_members(services: dict[str, Any]) -> None:
    members = {}
    for name in ETCD:
        environment = services[name]["environment"]
        assert environment["ETCD_NAME"] == name
        assert environment["ETCD_ADVERTISE_CLIENT_URLS"] == f"http://{name}:2379"
        members[name] = environment["ETCD_INITIAL_ADVERTISE_PEER_URLS"]
    whole = ",".join(f"{name}={url}" for name, url in members.items())
    assert {services[name]["environment"]["ETCD_INITIAL_CLUSTER"] for name in ETCD} == {whole}
    for name in (*META, *BROKERS, *LAKE):
        assert services[name]["environment"]["QMQ_ETCD"] == "etcd0:2379,etcd1:2379,etcd2:2379"


def test_a_broker_is_the_replica_it_is_named_after(services: dict[str, Any]) -> None:
    for name in BROKERS:
        environment = services[name]["environment"]
        assert environment["QMQ_REPLICA"] == environment["QMQ_ADVERTISE"] == name
        assert environment["QMQ_GROUP"] == name.split("-")[0]
        assert environment["QMQ_REPLICAS"].split(",") == [
            each for each in BROKERS if each.startswith(environment["QMQ_GROUP"])
        ]


def test_a_delay_server_is_a_broker_with_another_command(services: dict[str, Any]) -> None:
    assert {tuple(services[name]["command"]) for name in DELAY} == {("qmq", "delay")}
    assert {tuple(services[name]["command"]) for name in REAL_TIME} == {("qmq", "broker")}
    assert len({services[name]["environment"]["QMQ_BUCKET"] for name in DELAY}) == 1


def test_each_member_keeps_its_data_in_a_volume_of_its_own(services: dict[str, Any]) -> None:
    for name in (*ETCD, *BROKERS):
        (volume,) = services[name]["volumes"]
        assert (volume["type"], volume["source"]) == ("volume", name)
        environment = services[name]["environment"]
        assert volume["target"] == environment.get("ETCD_DATA_DIR", environment.get("QMQ_DATA"))


def test_workers_and_jobs_find_the_master_under_the_name_and_port_that_it_listens_on(
    services: dict[str, Any],
) -> None:
    for name in SPARK:
        command = services[name]["command"]
        assert command[command.index("--host") + 1] == name, "other containers know it by its name"
        assert (
            services[name]["healthcheck"]["test"][-1]
            == f"{name}:{command[command.index('--webui-port') + 1]}"
        )
    master = services["spark-master"]["command"]
    url = f"spark://spark-master:{master[master.index('--port') + 1]}"
    assert services["spark-worker"]["command"][-1] == url
    assert services["spark-job"]["environment"]["MASTER"] == url


def test_a_job_and_the_tasks_that_write_for_it_see_the_same_folder(
    services: dict[str, Any],
) -> None:
    job, worker = (
        {each["source"]: each["target"] for each in services[name]["volumes"]}
        for name in ("spark-job", "spark-worker")
    )
    assert job == {"archive": "/archive"}
    assert worker == {"archive": "/archive", "spark-worker": "/work"}
    assert "/work" in services["spark-worker"]["command"]


def test_a_workers_size_is_chosen_from_outside(services: dict[str, Any]) -> None:
    for found, size in (
        (services, ("2", "2g")),
        (resolved(QMQ_SPARK_CORES="8", QMQ_SPARK_MEMORY="16g"), ("8", "16g")),
    ):
        command = found["spark-worker"]["command"]
        assert (
            command[command.index("--cores") + 1],
            command[command.index("--memory") + 1],
        ) == size


def test_only_what_clients_need_is_published_and_only_on_this_machine(
    services: dict[str, Any],
) -> None:
    ports = {name: each.get("ports", []) for name, each in services.items()}
    assert {name for name, found in ports.items() if found} == {*META, *BROKERS, *LAKE}
    published = [port for found in ports.values() for port in found]
    assert {port["host_ip"] for port in published} == {"127.0.0.1"}
    assert len({port["published"] for port in published}) == len(published)
    for name in (*BROKERS, *LAKE):  # clients outside connect to the port that the broker advertises
        (port,) = ports[name]
        assert (
            str(port["target"])
            == port["published"]
            == services[name]["environment"]["QMQ_DATA_PORT"]
        )


def test_the_flush_is_chosen_from_outside(services: dict[str, Any]) -> None:
    assert {services[name]["environment"]["QMQ_FLUSH"] for name in BROKERS} == {"async"}
    strict = resolved(QMQ_FLUSH="sync")
    assert {strict[name]["environment"]["QMQ_FLUSH"] for name in BROKERS} == {"sync"}


def test_the_services_of_qmq_are_one_image_without_rights(services: dict[str, Any]) -> None:
    for name in (*META, *BROKERS, *LAKE, "client"):
        each = services[name]
        assert (each["image"], each["cap_drop"]) == ("qmq:latest", ["ALL"]), name
        assert each["command"][0] in ("qmq", "python"), name


@pytest.mark.parametrize(
    "more", [(), ("docker-compose.secure.yml",), ("docker-compose.monitoring.yml",)], ids=" ".join
)
def test_one_service_builds_each_image_and_the_others_use_it(more: tuple[str, ...]) -> None:
    """Otherwise a second `up --build` finds another image of the same name, and recreates every
    server.
    """
    done = compose(
        *[word for name in more for word in ("-f", str(ROOT / name))], "config", "--format", "json"
    )
    assert done.returncode == 0, done.stderr
    builders: dict[str, list[str]] = {}
    for name, each in json.loads(done.stdout)["services"].items():
        if each["image"].startswith("qmq"):
            assert each["pull_policy"] == ("build" if "build" in each else "never"), name
            builders.setdefault(each["image"], []).extend([name] if "build" in each else [])
    assert builders == {"qmq:latest": ["meta0"], "qmq-spark:latest": ["spark-master"]}


def test_spark_has_an_image_of_the_same_file_with_its_own_lock_and_no_rights(
    services: dict[str, Any],
) -> None:
    for name in (*SPARK, "spark-job"):
        each = services[name]
        assert (each["image"], each["cap_drop"]) == ("qmq-spark:latest", ["ALL"]), name
    assert (
        services["spark-master"]["build"]["dockerfile"] == services["meta0"]["build"]["dockerfile"]
    )
    assert services["spark-master"]["build"]["args"]["LOCK"] == "requirements-spark.lock"
    assert [*services["spark-job"]["entrypoint"], *services["spark-job"]["command"]] == [
        "qmq",
        "spark",
        "--help",
    ]


def test_the_images_are_labelled_with_what_they_are_made_of() -> None:
    told = {"QMQ_VERSION": "1.2.3", "QMQ_REVISION": "abc", "QMQ_SOURCE": "https://example.org/qmq"}
    for each in (resolved(**told)[name] for name in ("meta0", "spark-master")):
        assert {
            f"QMQ_{name}": value for name, value in each["build"]["args"].items() if name != "LOCK"
        } == told
    image = (ROOT / "Dockerfile").read_text().rpartition("FROM ")[2]
    for label, argument in (("version", "VERSION"), ("revision", "REVISION"), ("source", "SOURCE")):
        assert f"ARG {argument}=" in image
        assert f'org.opencontainers.image.{label}="${{{argument}}}"' in image


def test_hadolint_finds_nothing() -> None:
    done = subprocess.run(
        [str(BIN / "hadolint"), str(ROOT / "Dockerfile")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_the_image_is_pinned_and_does_not_run_as_root() -> None:
    text = (ROOT / "Dockerfile").read_text()
    installs = re.findall(r"pip install ([^\\\n]*)", text)
    assert installs
    assert all("--require-hashes" in each or "--no-index" in each for each in installs)
    assert re.findall(r"^USER (.*)$", text, re.MULTILINE) == ["10001:10001"]


def test_what_the_image_copies_exists_and_is_let_in() -> None:
    let_in = {
        line[1:]
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    copied = set()
    for line in re.findall(
        r"^COPY (?!--from)(.*)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE
    ):
        copied |= {each for lock in LOCKS for each in line.replace("${LOCK}", lock).split()[:-1]}
    assert copied == let_in
    assert all((ROOT / name).exists() for name in copied)
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"][
        "targets"
    ]["wheel"]
    assert {package.split("/")[0] for package in wheel["packages"]} <= copied
