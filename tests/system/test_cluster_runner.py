"""scripts/cluster: the compose file's services as local processes. etcd really runs here, in both
networks; nothing else is needed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import needs

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts"))

from cluster_runner import COMPOSE_FILE, Cluster, ClusterError  # noqa: E402
from cluster_runner.compose import resolve, seconds, services, waves, with_dependencies  # noqa: E402
from cluster_runner.health import Check  # noqa: E402
from cluster_runner.launch import Launcher  # noqa: E402
from cluster_runner.netns import NAMESPACES, NetworkNamespaces  # noqa: E402
from cluster_runner.network import Loopback  # noqa: E402
from cluster_runner.processes import Process, kill, spawn, state, until  # noqa: E402
from cluster_runner.state import StateFolder  # noqa: E402
from cluster_runner.translate import Translator  # noqa: E402

ETCD = ("etcd0", "etcd1", "etcd2")
QUICK = {"QMQ_ETCD_HEARTBEAT_MS": "50", "QMQ_ETCD_ELECTION_MS": "500"}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path / "cluster", environment=QUICK) as found:
        yield found


def launcher(folder: Path, file: Path = COMPOSE_FILE) -> Launcher:
    known = services(resolve(file, {}))
    return Launcher(known, Loopback(folder, list(known), slot=5), StateFolder(folder))


def own_file(folder: Path, text: str) -> Path:
    (folder / "compose.yml").write_text(text)
    return folder / "compose.yml"


def answers(cluster: Cluster, name: str) -> bool:
    """Whether an etcd member answers a linearizable read."""
    return not Check([], {}, cluster.address(name), 2379, 0.5).failure()


def state_of(cluster: Cluster, name: str) -> str:
    return next(each.state for each in cluster.status() if each.service == name)


# --- from the file to a command -------------------------------------------------------------------


def test_a_name_is_a_host_only_where_a_host_can_stand() -> None:
    words = Translator(
        {"g1": "127.77.0.9", "g1-a": "127.77.0.1"}, "127.77.0.1", {"/data": Path("/tmp/v")}
    )
    assert (
        words.text("g1-a=http://g1-a:2380,http://g1:1")
        == "g1-a=http://127.77.0.1:2380,http://127.77.0.9:1"
    )
    assert words.text("g1-a,g1") == "g1-a,g1"
    assert words.text("x-g1-a:1 g1-a.org:1") == "x-g1-a:1 g1-a.org:1"
    assert words.text("http://0.0.0.0:1,localhost:2") == "http://127.77.0.1:1,127.77.0.1:2"
    assert (
        words.text("--data=/data/log:/data2:/other/data") == "--data=/tmp/v/log:/data2:/other/data"
    )
    assert words.argv(["python", "--host", "g1-a", "--advertise=g1-a", "--replica", "g1-a"])[
        1:
    ] == ["--host", "127.77.0.1", "--advertise=127.77.0.1", "--replica", "g1-a"]
    assert words.argv(["python", "scripts/demo.py"]) == [
        sys.executable,
        str(ROOT / "scripts" / "demo.py"),
    ]


def test_every_word_comes_from_the_file(tmp_path: Path) -> None:
    text = (
        COMPOSE_FILE.read_text()
        .replace(":2379", ":2479")
        .replace("20880", "21880")
        .replace("20890", "21890")
    )
    changed = launcher(tmp_path, own_file(tmp_path, text))
    assert (
        changed.environment("etcd0")["ETCD_LISTEN_CLIENT_URLS"]
        == f"http://{changed.network.addresses['etcd0']}:2479"
    )
    assert changed.check("etcd0").port == 2479
    assert changed.environment("meta0")["QMQ_PORT"] == "21880"
    assert changed.check("g2-c").argv[-2] == f"{changed.network.addresses['g2-c']}:21890"
    meta0, meta1 = (changed.network.addresses[name] for name in ("meta0", "meta1"))
    assert changed.argv("client")[-1] == f"{meta0}:21880,{meta1}:21880"


def test_a_broker_finds_its_own_address_and_its_volume(tmp_path: Path) -> None:
    found = launcher(tmp_path)
    environment, address = found.environment("g1-b"), found.network.addresses["g1-b"]
    assert environment["QMQ_HOST"] == environment["QMQ_ADVERTISE"] == address
    assert (environment["QMQ_REPLICA"], environment["QMQ_REPLICAS"]) == ("g1-b", "g1-a,g1-b,g1-c")
    assert environment["QMQ_DATA"] == str(tmp_path / "volumes" / "g1-b")
    assert found.argv("g1-b") == [str(Path(sys.executable).with_name("qmq")), "broker"]
    assert found.check("g1-b").argv[-2:] == [f"{address}:20890", "/livez"]


def test_a_delay_server_is_started_and_checked_as_a_broker_is(tmp_path: Path) -> None:
    found = launcher(tmp_path)
    assert found.argv("d1-b") == [str(Path(sys.executable).with_name("qmq")), "delay"]
    assert found.environment("d1-b")["QMQ_REPLICAS"] == "d1-a,d1-b,d1-c"
    assert found.check("d1-b").argv[-2:] == [f"{found.network.addresses['d1-b']}:20890", "/livez"]


def test_nothing_of_the_shell_leaks_into_a_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ETCD_NAME", "QMQ_SERVER", "HTTP_PROXY", "https_proxy"):
        monkeypatch.setenv(name, "stray")
    assert "stray" not in launcher(tmp_path).environment("etcd1").values()


def test_services_start_in_the_steps_that_dependencies_draw() -> None:
    known = services(resolve(COMPOSE_FILE, {}))
    first, second, third = waves(known, known)
    assert (sorted(first), sorted(third)) == (
        sorted([*ETCD, "s3", "spark-master"]),
        ["client", "spark-job"],
    )
    assert with_dependencies(known, ["meta0"]) == {"meta0", *ETCD}
    assert waves(known, ["g1-a", "meta0"]) == [["g1-a", "meta0"]]
    assert set(second) == set(known) - {*first, *third}


def test_a_worker_of_spark_finds_its_master_and_its_folder(tmp_path: Path) -> None:
    found = launcher(tmp_path)
    master, worker = (
        found.network.addresses["spark-master"],
        found.network.addresses["spark-worker"],
    )
    assert found.argv("spark-master")[:6] == [
        sys.executable,
        "-m",
        "pyspark_qmq.standalone",
        "master",
        "--host",
        master,
    ]
    words = found.argv("spark-worker")
    assert words[:6] == [sys.executable, "-m", "pyspark_qmq.standalone", "worker", "--host", worker]
    assert words[-3:] == [
        "--work-dir",
        str(tmp_path / "volumes" / "spark-worker"),
        f"spark://{master}:7077",
    ]
    assert found.check("spark-worker").argv[-1] == f"{worker}:8081"
    assert found.environment("spark-job")["MASTER"] == f"spark://{master}:7077"


@pytest.mark.parametrize(
    ("text", "value"), [("10s", 10), ("1m30s", 90), ("1h0m0.5s", 3600.5), ("250ms", 0.25)]
)
def test_durations_are_gos(text: str, value: float) -> None:
    assert seconds(text) == value


def test_a_file_that_compose_refuses_is_refused(tmp_path: Path) -> None:
    broken = own_file(
        tmp_path, "services: {a: {image: x, command: [python], depends_on: [nobody]}}"
    )
    with pytest.raises(ClusterError, match="nobody"):
        Cluster(tmp_path / "cluster", file=broken).up()


# --- networks -------------------------------------------------------------------------------------


def test_two_clusters_on_loopback_do_not_meet(tmp_path: Path) -> None:
    addresses = []
    for name in ("one", "two"):
        network = Loopback(tmp_path / name, ETCD)
        network.claim()
        addresses.append(network.addresses)
    assert not set(addresses[0].values()) & set(addresses[1].values())
    again = Loopback(tmp_path / "one", ETCD)
    again.claim()
    assert again.addresses == addresses[0]


@needs.namespaces
def test_two_clusters_in_namespaces_do_not_meet(tmp_path: Path) -> None:
    one, two = (NetworkNamespaces(tmp_path, ETCD) for _ in range(2))
    try:
        one.claim()
        two.claim()
        assert one.slot != two.slot
    finally:
        for each in (one, two):
            if each.slot >= 0:
                each.release()


def test_loopback_cannot_be_partitioned(cluster: Cluster, tmp_path: Path) -> None:
    cluster.folder.path.mkdir()
    with cluster.folder.changing() as remembered:
        remembered.network, remembered.slot, remembered.order = "loopback", 5, list(ETCD)
    with pytest.raises(ClusterError, match="netns"):
        cluster.partition("etcd0", "etcd1")


# --- processes ------------------------------------------------------------------------------------


def test_a_pid_that_was_given_out_again_gets_no_signal() -> None:
    stranger = Process(os.getpid(), started=1)
    assert state(stranger) == "dead"
    kill(stranger)


def test_a_kill_reaches_the_children(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys; print(subprocess.Popen(['sleep', '60']).pid, flush=True); "
        "sys.stdin.read(); import time; time.sleep(60)"
    )
    parent = spawn([sys.executable, "-c", code], dict(os.environ), tmp_path / "log")
    assert until(lambda: (tmp_path / "log").read_text().endswith("\n"), 10)
    child = int((tmp_path / "log").read_text())
    kill(parent)
    stat = Path(f"/proc/{child}/stat")
    assert state(parent) == "dead"
    assert not stat.exists() or ") Z " in stat.read_text()


STUBBORN = """
services:
  stubborn:
    image: none
    command:
      - python
      - -c
      - |
        import pathlib, signal
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        pathlib.Path("/flag/ready").touch()
        while True: signal.pause()
    healthcheck: {test: [CMD, test, -e, /flag/ready]}
    stop_grace_period: 200ms
    volumes: ["flag:/flag"]
  broken:
    image: none
    command: [python, -c, "raise SystemExit('I cannot')"]
    healthcheck: {test: [CMD, "false"]}
volumes: {flag: }
"""


def test_who_does_not_stop_in_time_is_killed(tmp_path: Path) -> None:
    said: list[str] = []
    stubborn = Cluster(
        tmp_path / "cluster", file=own_file(tmp_path, STUBBORN), progress=said.append
    )
    stubborn.up(["stubborn"])
    assert state_of(stubborn, "stubborn") == "running"
    stubborn.down()
    assert said[-1] == "stubborn: killed, it did not stop in time"
    assert (tmp_path / "cluster" / "volumes" / "flag" / "ready").exists()
    stubborn.down(volumes=True)
    assert not (tmp_path / "cluster").exists()


def test_who_does_not_start_is_quoted(tmp_path: Path) -> None:
    with (
        Cluster(tmp_path / "cluster", file=own_file(tmp_path, STUBBORN)) as broken,
        pytest.raises(ClusterError, match="I cannot"),
    ):
        broken.up(["broken"])


ENDING = """
services:
  first: {image: none, command: [python, -c, "import sys; print('I ran'); sys.exit(${STATUS})"]}
  second:
    image: none
    command: [python, -c, "import time; time.sleep(60)"]
    depends_on: {first: {condition: service_completed_successfully}}
"""


def test_what_depends_on_a_service_that_ends_starts_after_its_success_only(tmp_path: Path) -> None:
    file = own_file(tmp_path, ENDING)
    with Cluster(tmp_path / "good", file=file, environment={"STATUS": "0"}) as good:
        good.up()
        assert good.log("first").read_text().endswith("I ran\n")
        assert state_of(good, "second") == "running"
    with Cluster(tmp_path / "bad", file=file, environment={"STATUS": "7"}) as bad:
        with pytest.raises(ClusterError, match=r"first failed with status 7(.|\n)*I ran"):
            bad.up()
        assert state_of(bad, "second") == "absent"


# --- etcd, really ---------------------------------------------------------------------------------


@needs.etcd
def test_etcd_lives_through_faults_on_loopback(cluster: Cluster) -> None:
    cluster.up(ETCD)
    pids = {
        each.service: each.pid for each in cluster.status(health=True) if each.health == "healthy"
    }
    assert set(pids) == set(ETCD)
    cluster.kill("etcd0")
    assert state_of(cluster, "etcd0") == "dead"
    assert until(lambda: answers(cluster, "etcd1"), 20)
    with pytest.raises(ClusterError, match="does not run"):
        cluster.kill("etcd0")
    cluster.start("etcd0")
    assert until(lambda: answers(cluster, "etcd0"), 20)
    cluster.pause("etcd1")
    assert state_of(cluster, "etcd1") == "paused"
    assert not answers(cluster, "etcd1")
    assert until(lambda: answers(cluster, "etcd0"), 20)
    cluster.resume("etcd1")
    assert until(lambda: answers(cluster, "etcd1"), 20)
    remembered = cluster.folder.load().processes
    cluster.down(force=True)
    assert {state(each) for each in remembered.values()} == {"dead"}
    assert {each.state for each in cluster.status()} == {"absent"}


@needs.etcd
def test_what_etcd_stored_is_there_after_down_and_up(cluster: Cluster) -> None:
    def ask(path: str, question: dict[str, str]) -> dict[str, object]:
        """etcd's JSON gateway; keys and values are base64."""
        url = f"http://{cluster.address('etcd2')}:2379/v3/kv/{path}"
        with urllib.request.urlopen(
            urllib.request.Request(url, json.dumps(question).encode()), timeout=10
        ) as answer:
            return json.load(answer)

    cluster.up(ETCD)
    ask("put", {"key": "a2V5", "value": "dmFsdWU="})
    cluster.down(force=True)
    cluster.up(ETCD)
    assert ask("range", {"key": "a2V5"})["kvs"][0]["value"] == "dmFsdWU="


# --- partitions -----------------------------------------------------------------------------------

RECEIVE = """
import socket, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
    s.bind(("0.0.0.0", 9)); s.settimeout(0.3); print("ready", flush=True); sys.stdin.read()
    try: print(s.recv(9).decode())
    except TimeoutError: print("nothing")
"""
SEND = """
import socket, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s: s.sendto(b"packet", (sys.argv[1], 9))
"""
CONNECT = """
import socket, sys
try: socket.create_connection((sys.argv[1], 2379), 0.5).close(); print("connected")
except OSError as failure: print(type(failure).__name__)
"""


def arrives(cluster: Cluster, source: str, target: str) -> bool:
    """Whether a packet from one service's place reaches another's."""
    command = [*cluster.prefix(target), sys.executable, "-c", RECEIVE]
    receiver = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with receiver:
        assert receiver.stdout is not None
        assert receiver.stdout.readline() == "ready\n"
        subprocess.run(
            [*cluster.prefix(source), sys.executable, "-c", SEND, cluster.address(target)],
            check=True,
        )
        # its patience begins when its input ends, after the packet was sent
        return receiver.communicate()[0] == "packet\n"


def connect(cluster: Cluster, source: str, target: str) -> str:
    command = [*cluster.prefix(source), sys.executable, "-c", CONNECT, cluster.address(target)]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


@needs.etcd
@needs.namespaces
def test_a_partition_cuts_and_heals(tmp_path: Path) -> None:
    with Cluster(tmp_path / "cluster", network="netns", environment=QUICK) as cluster:
        cluster.up(ETCD)
        slot, remembered = cluster.folder.load().slot, cluster.folder.load().processes
        assert arrives(cluster, "etcd0", "etcd1")
        cluster.partition("etcd0", "etcd1", one_way=True)
        assert not arrives(cluster, "etcd0", "etcd1")
        assert arrives(cluster, "etcd1", "etcd0")
        cluster.partition("etcd0", "etcd1")
        cluster.partition("etcd0", "etcd2")
        assert not arrives(cluster, "etcd1", "etcd0")
        assert connect(cluster, "etcd0", "etcd1") == "TimeoutError", (
            "a partition is silent, not an error"
        )
        assert connect(cluster, "etcd1", "etcd2") == "connected"
        assert until(lambda: answers(cluster, "etcd1") and answers(cluster, "etcd2"), 20)
        assert until(lambda: not answers(cluster, "etcd0"), 20), "the minority still serves"
        cluster.heal()
        assert arrives(cluster, "etcd0", "etcd1")
        assert until(lambda: answers(cluster, "etcd0"), 20)
        cluster.kill("etcd2")
        cluster.start("etcd2")
        assert until(lambda: answers(cluster, "etcd2"), 20)
    assert {state(each) for each in remembered.values()} == {"dead"}
    assert not list(NAMESPACES.glob(f"qmq{slot}-*"))
    assert not Path(f"/sys/class/net/qmq{slot}host").exists()


@needs.etcd
@needs.namespaces
def test_a_secured_server_in_a_namespace_of_its_own_becomes_healthy(tmp_path: Path) -> None:
    with Cluster(tmp_path / "cluster", network="netns", environment=QUICK, secure=True) as cluster:
        cluster.up((*ETCD, "etcd-users", "meta0"), deps=False)
        assert cluster.health("meta0") == ""
        cluster.kill("meta0")
        assert cluster.health("meta0") != ""


# --- the command line -----------------------------------------------------------------------------


def say(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "cluster.py"), "--dir", str(folder), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@needs.etcd
def test_the_command_line_says_the_same_verbs(tmp_path: Path) -> None:
    folder = tmp_path / "cluster"
    try:
        assert say(folder, "up", "--services", "etcd0", "--no-wait").returncode == 0
        rows = {row["service"]: row for row in json.loads(say(folder, "status", "--json").stdout)}
        assert (rows["etcd0"]["state"], rows["etcd1"]["state"]) == ("running", "absent")
        assert (
            say(folder, "pause", "etcd0").returncode
            == say(folder, "resume", "etcd0").returncode
            == 0
        )
        assert "etcd" in say(folder, "logs", "etcd0").stdout
        shown = say(
            folder,
            "run",
            "--",
            "python",
            "-c",
            "import os, sys; print(sys.argv[1], os.environ['QMQ_SERVER'])",
            "g1-a:7",
        )
        meta0, meta1 = rows["meta0"]["address"], rows["meta1"]["address"]
        assert shown.stdout.split() == [
            f"{rows['g1-a']['address']}:7",
            f"{meta0}:20880,{meta1}:20880",
        ]
        unknown = say(folder, "start", "nobody")
        assert unknown.returncode == 1
        assert "there is no service nobody" in unknown.stderr
    finally:
        assert say(folder, "down", "--force").returncode == 0
    assert "running" not in say(folder, "status").stdout


@needs.etcd
def test_in_the_foreground_services_die_with_the_runner(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path / "cluster")
    command = [
        sys.executable,
        str(ROOT / "scripts" / "cluster.py"),
        "--dir",
        str(folder.path),
        "up",
        "--foreground",
        "--no-wait",
    ]
    runner = subprocess.Popen([*command, "--services", "etcd0"], stderr=subprocess.PIPE, text=True)
    with runner:
        assert runner.stderr is not None
        try:
            assert any("all is up" in line for line in runner.stderr)
            service = folder.load().processes["etcd0"]
            assert state(service) == "running"
            # before it is etcd it is setpriv, which may not have asked yet to die with its parent
            assert until(
                lambda: Path(f"/proc/{service.pid}/comm").read_text().strip() == "etcd", 30
            )
        finally:
            runner.send_signal(signal.SIGKILL)
    assert until(lambda: state(service) == "dead", 10)
