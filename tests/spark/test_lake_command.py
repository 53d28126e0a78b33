"""`qmq lake` as a user types it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

import pytest
from publishing import send
from support import NodeProcess
from typer.testing import CliRunner, Result

from qmq.cli.app import app

pytestmark = pytest.mark.sampled


class Shell:
    def __init__(self, server: str, folder: Path) -> None:
        self._server = ["--server", server]
        self._catalog = [
            "--catalog-uri",
            f"sqlite:///{folder}/catalog.db",
            "--warehouse",
            f"file://{folder}/warehouse",
        ]

    def lake(self, command: str, *words: str) -> Result:
        server = self._server if command == "follow" else []
        return CliRunner().invoke(app, ["lake", command, *words, *self._catalog, *server])


@pytest.fixture
def shell(node_process: NodeProcess, tmp_path: Path) -> Shell:
    node_process.start()
    return Shell(node_process.address, tmp_path)


def test_a_subject_becomes_a_table_that_can_be_looked_at_compacted_and_expired(
    shell: Shell, node_process: NodeProcess
) -> None:
    send(node_process.address, "orders", ["a", "b", "c"])
    assert (
        shell.lake("follow", "--subject", "orders", "--once").stdout
        == "orders: 3 messages in 1 files\n"
    )
    (day,) = json.loads(shell.lake("show", "--subject", "orders", "--json").stdout)
    assert (day["files"], day["rows"]) == (1, 3)
    (queue,) = json.loads(shell.lake("positions", "--subject", "orders", "--json").stdout)
    assert (queue["partition"], queue["next_sequence"]) == (0, 3)
    # today is not over
    assert json.loads(shell.lake("compact", "--subject", "orders", "--json").stdout) == []
    assert json.loads(shell.lake("expire", "--subject", "orders", "--json").stdout) == [
        {"snapshots": 0, "files": 0}
    ]


def test_follow_shows_its_metrics_and_ends_by_a_signal(
    shell: Shell, node_process: NodeProcess, tmp_path: Path
) -> None:
    send(node_process.address, "orders", ["a", "b", "c"])
    where = [
        "--catalog-uri",
        f"sqlite:///{tmp_path}/catalog.db",
        "--warehouse",
        f"file://{tmp_path}/warehouse",
    ]
    words = [
        "lake",
        "follow",
        "--subject",
        "orders",
        "--metrics-port",
        "0",
        "--server",
        node_process.address,
        *where,
    ]
    command = [sys.executable, "-m", "qmq.cli", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = process.stdout.readline().removeprefix("qmq lake follow: metrics at ").strip()
        assert process.stdout.readline() == "orders: 3 messages in 1 files\n"
        with urlopen(f"http://{address}/metrics", timeout=30) as answer:
            page = answer.read().decode()
        process.send_signal(signal.SIGTERM)
    assert process.returncode == 0
    assert 'qmq_lake_rows_total{subject="orders"} 3' in page
    assert 'qmq_lake_waits_total{reason="catalog"} 0' in page


MISTAKES = {
    "follow": "--subject NAME (repeatable) or --pattern",
    "follow --subject orders --pattern o.*": "or --pattern",
    "show --subject nothing": "has no table qmq.nothing: `qmq lake follow` makes it",
    "follow --subject orders -P nothing": "a property is KEY=VALUE",
    "follow --subject orders --once": "there is no subject",
}


def test_a_mistake_is_answered_with_what_to_do(shell: Shell) -> None:
    for line, says in MISTAKES.items():
        found = shell.lake(*line.split())
        assert found.exit_code == 2, line
        assert says in found.stderr, line


def test_without_a_catalog_it_says_how_to_give_one() -> None:
    found = CliRunner().invoke(app, ["lake", "show", "--subject", "orders"])
    assert found.exit_code == 2
    assert "give --catalog-uri and --warehouse" in found.stderr
