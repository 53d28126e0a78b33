"""The compiled part of the client: how it gets into wheels, and that consumption keeps its promises
without it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Final

import pytest
from support.wheels import build_wheel

ROOT: Final = Path(__file__).resolve().parents[2]
MODULE: Final = "qmq/client/_ready.abi3.so"
PROMISES: Final = (
    "test_pausing.py",
    "test_flow_control.py",
    "test_interceptors.py",
    "test_calls_a_message.py",
    "test_blocking.py",
)
"""Tests of consumption in tests/qmq/client, which run in this checkout's form otherwise."""


def held(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as file:
        return {each for each in file.namelist() if each.startswith("qmq/client/")}


@pytest.mark.long
def test_a_wheel_has_the_compiled_part_for_every_later_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("QMQ_PURE", raising=False)
    wheel = build_wheel(ROOT, tmp_path)
    assert re.fullmatch(r"qmq-.*-cp311-abi3-\w+\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as file:
        binary = file.read(MODULE)
    assert max([int(each) for each in re.findall(rb"GLIBC_2\.(\d+)", binary)], default=0) <= 17, (
        "manylinux_2_17 would be wrong"
    )
    assert str(ROOT).encode() not in binary
    assert "qmq/client/_ready.c" not in held(wheel)

    monkeypatch.setenv("QMQ_WHEEL_PLATFORM", "manylinux_2_17_x86_64")
    assert build_wheel(ROOT, tmp_path).name.endswith("-cp311-abi3-manylinux_2_17_x86_64.whl")


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "value"), [("QMQ_PURE", "1"), ("CC", "/nowhere/cc"), ("CC", "false")]
)
def test_without_a_compiler_the_wheel_is_pure(
    name: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    wheel = build_wheel(ROOT, tmp_path)
    assert wheel.name.endswith("-py3-none-any.whl")
    assert "qmq/client/consuming/iterator.py" in held(wheel)
    assert MODULE not in held(wheel)


def test_this_checkout_uses_the_form_that_it_is_told_to() -> None:
    program = (
        "import qmq.client.consuming as ready; print(ready.IS_COMPILED, "
        "ready.ReadyMessages.__module__)"
    )

    def said(pure: str) -> str:
        environment = os.environ | {"QMQ_PURE": pure}
        return subprocess.run(
            [sys.executable, "-c", program],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        ).stdout

    assert said("1").split() == ["False", "qmq.client.consuming.iterator"]
    if (ROOT / MODULE).exists():
        assert said("").split() == ["True", "qmq.client._ready"]


@pytest.mark.longest
def test_consumption_keeps_its_promises_in_python(tmp_path: Path) -> None:
    files = [str(ROOT / "tests" / "qmq" / "client" / each) for each in PROMISES]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        f"--basetemp={tmp_path / 'tests'}",
        *files,
    ]
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")
    } | {"QMQ_PURE": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-5000:]
