"""Every process collects the same tests: xdist's workers stop the run where one has a test that
another one has not.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_two_processes_collect_the_same_tests() -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--collect-only",
        "-o",
        "addopts=-q",
        "-p",
        "no:cacheprovider",
        "--ignore=tests/tidy",
    ]
    started = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "QMQ_TEST_FORM": "all", "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2")
    ]
    outputs = [each.communicate()[0] for each in started]
    assert [each.returncode for each in started] == [0, 0], outputs[0][-2000:]
    first, second = ({line for line in each.splitlines() if "::" in line} for each in outputs)
    assert len(first) > 5_000
    assert first ^ second == set()
