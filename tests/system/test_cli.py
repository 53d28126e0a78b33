"""The command line, as a user types it, against a node process."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support import NodeProcess, cli_process

ROOT = Path(__file__).resolve().parents[2]


def qmq(
    node: NodeProcess | None, command: str, *more: str, data: bytes = b""
) -> subprocess.CompletedProcess[bytes]:
    """Run a command, given as text, and more words that may hold spaces."""
    server = node.address if node else "127.0.0.1:1"
    environment = {**os.environ, "QMQ_SERVER": server, "COLUMNS": "200"}
    return cli_process.run((*command.split(), *more), environment, data)


def rows(node: NodeProcess | None, command: str, *more: str, data: bytes = b"") -> list[dict]:
    """What a command that succeeds says as JSON."""
    done = qmq(node, command, *more, "--json", data=data)
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)


@pytest.mark.smoke
def test_a_user_can_send_look_consume_and_move(node_process: NodeProcess, tmp_path: Path) -> None:
    node_process.start()
    lines = b"".join(b"line %d\n" % number for number in range(100))
    assert rows(node_process, "produce orders --tag t", data=lines) == [
        {"subject": "orders", "broker_group": "broker-0", "messages": 100}
    ]
    (tmp_path / "more").write_text(
        '{"body": {"n": 1}, "key": "k", "tags": ["a"], "headers": {"h": "v"}}\n{"body": "text"}\n'
    )
    assert (
        rows(node_process, "produce orders --file", str(tmp_path / "more"), "--format", "json")[0][
            "messages"
        ]
        == 2
    )
    row = rows(node_process, "subject list")[0]
    assert (row["subject"], row["messages"], row["next"]) == ("orders", 102, 102)
    got = qmq(node_process, "consume orders --group g --count 100")
    assert got.stdout == lines
    told = qmq(node_process, "consume orders -g g -n 2 --json").stdout.splitlines()
    last = [json.loads(line) for line in told]
    assert [(each["body"], each["key"], each["tags"], each["headers"]) for each in last] == [
        ('{"n": 1}', "k", ["a"], {"h": "v"}),
        ("text", None, [], {}),
    ]
    found = rows(node_process, "message find orders", last[0]["id"])[0]
    assert found["sequence"] == 100
    lag = rows(node_process, "group lag orders g")[0]
    assert (lag["waiting"], lag["unacked"], lag["done_before"]) == (0, 0, 102)
    assert rows(node_process, "group reset orders g --to 99") == [
        {"partition": 0, "broker_group": "broker-0", "from": 102, "to": 99}
    ]
    again = qmq(node_process, "consume orders -g g --timeout 3")
    assert len(again.stdout.splitlines()) == 3
    assert rows(node_process, "group reset orders g --to 2020-01-01T00:00:00Z")[0]["to"] == 0
    assert rows(node_process, "group list")[0]["lag"] == 102
    rows(node_process, "subject create small --body-bytes-max 10 --retention-hours 1")
    described = rows(node_process, "subject describe small")[0]
    assert (described["body_bytes_max"], described["retention_ms"]) == (10, 3_600_000)
    assert node_process.stop() == 0
    segment = next((node_process.data / "broker" / "message").glob("*.log"))
    dumped = rows(None, "log dump", str(segment))
    assert sum(line["count"] for line in dumped) == 102
    assert {line["checksums"] for line in dumped} == {"ok"}
    assert b"line 7" in qmq(None, "log dump", str(segment), "--columns").stdout
    data = bytearray(segment.read_bytes())
    data[200] ^= 1
    (tmp_path / segment.name).write_bytes(data)
    damaged = qmq(None, "log dump", str(tmp_path / segment.name))
    assert damaged.returncode == 1
    assert b"envelope is wrong" in damaged.stdout


def test_a_user_can_look_at_a_node_as_a_cluster_and_administer_it(
    node_process: NodeProcess,
) -> None:
    node_process.options = ("--metrics-port", "0")
    node_process.start()
    rows(node_process, "subject create orders")
    status = rows(node_process, "cluster status")
    group, delay = status["groups"]
    assert (delay["group"], delay["is_delay"], group["is_delay"]) == ("delay", True, False)
    (replica,) = group["replicas"]
    assert (group["group"], group["health"], group["master"]) == (
        "broker-0",
        "read-write",
        "broker-0",
    )
    assert (
        replica["role"],
        replica["is_serving"],
        replica["lag_entries"],
        replica["lag_bytes"],
    ) == ("master", True, 0, 0)
    assert b"master" in qmq(node_process, "cluster status").stdout
    assert rows(node_process, "health meta", node_process.metrics_address)[0]["health"] == "serving"
    wrong = qmq(node_process, "health broker", replica["control_address"])
    assert (wrong.returncode, b"does not speak HTTP" in wrong.stderr.replace(b"\n", b" ")) == (
        3,
        True,
    )
    drained = {"group": "broker-0", "from": "read-write", "to": "read-only"}
    assert rows(node_process, "broker drain broker-0 --dry-run") == [drained]
    assert rows(node_process, "broker drain broker-0") == [drained]
    assert rows(node_process, "cluster status")["groups"][0]["health"] == "read-only"
    assert rows(node_process, "broker resume broker-0")[0]["from"] == "read-only"
    placed = [{"subject": "orders", "from": "broker-0", "to": "broker-0"}]
    for words in (("--dry-run",), ()):
        assert rows(node_process, "subject place orders --groups broker-0", *words) == placed
    assert rows(node_process, "subject describe orders")[0]["lives_on"] == "broker-0"
    added = rows(node_process, "replica add broker-0 other --dry-run")
    assert added == [
        {"group": "broker-0", "version": "", "voters": "broker-0", "learners": "other"}
    ]
    for command, says in (
        ("transfer broker-0", b"no other replica to transfer the mastership to"),
        ("replica add broker-0 other", b"cannot have replicas"),
        ("replica remove broker-0 other --dry-run", b"is not a replica of this group"),
        ("broker drain g9", b"there is no broker group 'g9'"),
        ("subject place orders --groups g9", b"there is no broker group 'g9'"),
    ):
        done = qmq(node_process, command)
        assert (done.returncode, says in b" ".join(done.stderr.split())) == (2, True), done.stderr


def test_a_watched_status_shows_changes_and_ends_by_ctrl_c(node_process: NodeProcess) -> None:
    node_process.start()
    words = f"cluster status --watch --json --interval 0.1 --server {node_process.address}"
    # Who runs the tests may ignore SIGINT.
    command = ["env", "--default-signal=INT", sys.executable, "-m", "qmq.cli", *words.split()]
    watching = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert watching.stdout is not None
    assert json.loads(watching.stdout.readline())["groups"][0]["health"] == "read-write"
    rows(node_process, "broker drain broker-0")
    while json.loads(watching.stdout.readline())["groups"][0]["health"] != "read-only":
        pass
    node_process.kill()
    while not (found := json.loads(watching.stdout.readline()))["error"]:
        pass
    assert found["groups"][0]["health"] == "read-only"
    watching.send_signal(signal.SIGINT)
    watching.communicate(timeout=30)
    assert watching.returncode == 130


@pytest.mark.parametrize(
    ("command", "status", "says"),
    [
        ("subject list", 3, "is `qmq dev` running"),
        ("consume a/b -g g", 2, "may hold only letters"),
        ("group reset s g --to yesterday", 2, "earliest, latest, a time or a sequence"),
        ("group reset s g --to 2026-01-01T00:00:00", 2, "needs a time zone"),
        ("log dump nowhere", 2, "is not a file"),
        ("produce s --format xml", 2, "'lines' or 'json'"),
        ("consume s", 2, "--group"),
    ],
)
def test_a_mistake_is_answered_with_what_to_do(command: str, status: int, says: str) -> None:
    done = qmq(None, command)
    assert done.returncode == status
    assert says in done.stderr.decode().replace("\n", " ")


def test_a_folder_or_a_port_in_use_is_reported(node_process: NodeProcess, tmp_path: Path) -> None:
    node_process.start()
    done = qmq(None, "dev --data", str(node_process.data), "--port", "0")
    assert done.returncode == 1
    assert "stop it first" in done.stderr.decode().replace("\n", " ")
    port = node_process.address.split(":")[1]
    done = qmq(
        None,
        "dev --data",
        str(tmp_path / "other"),
        "--port",
        port,
        "--data-port",
        "0",
        "--control-port",
        "0",
    )
    assert done.returncode == 1
    assert "another `qmq dev`" in done.stderr.decode().replace("\n", " ")


@pytest.mark.smoke
def test_the_demo_loses_nothing_and_complains_about_nothing() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "demo.py"), "--json", "--rows", "20000"],
        capture_output=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stderr.decode()) == (0, "")
    figures = json.loads(done.stdout)
    assert (figures["sent"], figures["received"], figures["lost"], figures["corrupted"]) == (
        20_000,
        20_000,
        0,
        0,
    )


def test_the_client_runs_in_a_folder_of_look_alikes(
    node_process: NodeProcess, tmp_path: Path
) -> None:
    for name in ("spark", "ordering", "coordination", "replication", "log", "wire", "broker"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('the wrong package')")
    script = (
        "import qmq.blocking, sys\nwith qmq.blocking.connect(sys.argv[1]) as mq: "
        "print(mq.send('s', b'x').sequence)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, node_process.start()],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.strip() == "0", done.stderr
    shutil.rmtree(tmp_path / "spark")


def test_importing_qmq_stays_light() -> None:
    script = (
        "import sys, qmq; print([m for m in ('numpy', 'msgspec', 'typer', 'rich', 'grpc', "
        "'uvloop', 'sqlite3') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.strip() == "[]", done.stderr
