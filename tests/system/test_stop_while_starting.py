"""A role that still waits for the coordination store ends at a signal, without a word of
complaint.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

NOWHERE = "127.0.0.1:1"


@pytest.mark.parametrize("role", ["broker", "meta"])
def test_a_signal_ends_a_role_that_waits_for_the_coordination_store(
    tmp_path: Path, role: str
) -> None:
    own = [
        "--group",
        "g",
        "--replica",
        "a",
        "--replicas",
        "a",
        "--data",
        str(tmp_path / "a"),
        "--data-port",
        "0",
        "--control-port",
        "0",
    ]
    options = own if role == "broker" else ["--port", "0"]
    command = [sys.executable, "-m", "qmq.cli", role, "--etcd", NOWHERE, *options]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "coordination store" in line:
                break
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 0, errors
    assert "Traceback" not in errors
