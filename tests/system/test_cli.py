"""The command line, as a user types it, against a node process."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support import NodeProcess

ROOT = Path(__file__).resolve().parents[2]


def qmq(node: NodeProcess | None, *words: str, data: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    environment = {**os.environ, "QMQ_SERVER": node.address if node else "127.0.0.1:1", "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, "-m", "qmq.cli", *words], input=data, capture_output=True, env=environment, timeout=60, check=False
    )


def table(done: subprocess.CompletedProcess[bytes]) -> list[dict]:
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)


def test_a_user_can_send_look_consume_and_move(node_process: NodeProcess, tmp_path: Path) -> None:
    node_process.start()
    lines = b"".join(b"line %d\n" % number for number in range(100))
    assert table(qmq(node_process, "produce", "orders", "--json", "--tag", "t", data=lines)) == [{"subject": "orders", "messages": 100}]
    (tmp_path / "more").write_text('{"body": {"n": 1}, "key": "k", "tags": ["a"], "headers": {"h": "v"}}\n{"body": "text"}\n')
    assert table(qmq(node_process, "produce", "orders", "--file", str(tmp_path / "more"), "--format", "json", "--json"))[0]["messages"] == 2
    row = table(qmq(node_process, "subject", "list", "--json"))[0]
    assert (row["subject"], row["messages"], row["next"]) == ("orders", 102, 102)
    got = qmq(node_process, "consume", "orders", "--group", "g", "--count", "100")
    assert got.stdout == lines
    last = [json.loads(line) for line in qmq(node_process, "consume", "orders", "-g", "g", "-n", "2", "--json").stdout.splitlines()]
    assert [(each["body"], each["key"], each["tags"], each["headers"]) for each in last] == [
        ('{"n": 1}', "k", ["a"], {"h": "v"}), ("text", None, [], {}),
    ]  # fmt: skip
    found = table(qmq(node_process, "message", "find", "orders", last[0]["id"], "--json"))[0]
    assert found["sequence"] == 100
    lag = table(qmq(node_process, "group", "lag", "orders", "g", "--json"))[0]
    assert (lag["waiting"], lag["unacked"], lag["done_before"]) == (0, 0, 102)
    assert table(qmq(node_process, "group", "reset", "orders", "g", "--to", "99", "--json")) == [{"partition": 0, "from": 102, "to": 99}]
    again = qmq(node_process, "consume", "orders", "-g", "g", "--idle", "0.3")
    assert len(again.stdout.splitlines()) == 3
    assert table(qmq(node_process, "group", "reset", "orders", "g", "--to", "2020-01-01T00:00:00Z", "--json"))[0]["to"] == 0
    assert table(qmq(node_process, "group", "list", "--json"))[0]["lag"] == 102
    table(qmq(node_process, "subject", "create", "small", "--body-bytes-max", "10", "--retention-hours", "1", "--json"))
    described = table(qmq(node_process, "subject", "describe", "small", "--json"))[0]
    assert (described["body_bytes_max"], described["retention_ms"]) == (10, 3_600_000)
    assert node_process.stop() == 0
    segment = next((node_process.data / "broker" / "message").glob("*.log"))
    dumped = table(qmq(None, "log", "dump", str(segment), "--json"))
    assert sum(line["count"] for line in dumped) == 102
    assert {line["checksums"] for line in dumped} == {"ok"}
    assert b"line 7" in qmq(None, "log", "dump", str(segment), "--columns").stdout
    data = bytearray(segment.read_bytes())
    data[200] ^= 1
    (tmp_path / segment.name).write_bytes(data)
    damaged = qmq(None, "log", "dump", str(tmp_path / segment.name))
    assert damaged.returncode == 1
    assert b"does not hold" in damaged.stdout


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        (("subject", "list"), 3, "is `qmq dev` running"),
        (("consume", "a/b", "-g", "g"), 2, "may hold only letters"),
        (("group", "reset", "s", "g", "--to", "yesterday"), 2, "earliest, latest, a time or a sequence"),
        (("group", "reset", "s", "g", "--to", "2026-01-01T00:00:00"), 2, "needs a time zone"),
        (("log", "dump", "nowhere"), 2, "is no file"),
        (("produce", "s", "--format", "xml"), 2, "'lines' or 'json'"),
        (("consume", "s"), 2, "--group"),
    ],
)
def test_a_mistake_is_answered_with_what_to_do(words: tuple[str, ...], status: int, says: str) -> None:
    done = qmq(None, *words)
    assert done.returncode == status
    assert says in done.stderr.decode().replace("\n", " ")


def test_a_folder_or_a_port_in_use_is_said(node_process: NodeProcess, tmp_path: Path) -> None:
    node_process.start()
    done = qmq(None, "dev", "--data", str(node_process.data), "--port", "0")
    assert done.returncode == 1
    assert "stop it first" in done.stderr.decode().replace("\n", " ")
    port = node_process.address.split(":")[1]
    done = qmq(None, "dev", "--data", str(tmp_path / "other"), "--port", port, "--data-port", "0", "--control-port", "0")
    assert done.returncode == 1
    assert "another `qmq dev`" in done.stderr.decode().replace("\n", " ")


def test_the_demo_loses_nothing() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "demo.py"), "--json", "--rows", "20000"], capture_output=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    figures = json.loads(done.stdout)
    assert (figures["sent"], figures["received"], figures["lost"], figures["corrupted"]) == (20_000, 20_000, 0, 0)


def test_the_client_runs_in_a_folder_of_look_alikes(node_process: NodeProcess, tmp_path: Path) -> None:
    for name in ("spark", "ordering", "coordination", "replication", "log", "wire", "broker"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('the wrong package')")
    script = "import qmq.blocking, sys\nwith qmq.blocking.connect(sys.argv[1]) as mq: print(mq.send('s', b'x').sequence)"
    done = subprocess.run(
        [sys.executable, "-c", script, node_process.start()], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.strip() == "0", done.stderr
    shutil.rmtree(tmp_path / "spark")


def test_importing_qmq_stays_light() -> None:
    script = "import sys, qmq; print([m for m in ('numpy', 'msgspec', 'typer', 'rich', 'grpc', 'uvloop', 'sqlite3') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip() == "[]", done.stderr
