"""`pip install` of the wheel alone, into an environment that has nothing else: a client, then a
server, on each Python that is here.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest
from support import NodeProcess, forms
from support.wheels import build_wheel

import qmq

pytestmark = pytest.mark.long
ROOT: Final = Path(__file__).resolve().parents[2]
PROGRAM: Final = ROOT / "tests" / "system" / "release_program.py"
SAID: Final = [
    f"{qmq.__version__} says wheel to {qmq.__version__}",
    "wheel later",
    "wheel now",
    "wheel ordered",
]
LIGHT: Final = {
    "google-crc32c",
    "grpcio",
    "pip",
    "protobuf",
    "qmq",
    "setuptools",
    "tenacity",
    "typing_extensions",
    "typing-extensions",
}
"""The packages after the installation of a client, with pip and setuptools, which were there
before.
"""


def _runs(python: str) -> bool:
    """A shim of pyenv is there for versions that are not chosen, too."""
    return subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode == 0


def _pythons() -> list[str]:
    found = [
        path
        for minor in range(11, 15)
        if (path := shutil.which(f"python3.{minor}")) and _runs(path)
    ] or [sys.executable]
    return found if forms.FORM == "all" else sorted({found[0], found[-1]})


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(ROOT, tmp_path_factory.mktemp("wheel"))


def say(server: str, python: Path) -> list[str]:
    """Run the program of both releases; what it printed."""
    done = subprocess.run(
        [str(python), "-I", str(PROGRAM), server, "wheel"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    first, *rest = done.stdout.splitlines()
    return [first, *sorted(rest)]


@pytest.mark.parametrize("python", _pythons())
def test_the_wheel_alone_is_a_client_and_with_extras_a_server(
    python: str, wheel: Path, tmp_path: Path
) -> None:
    subprocess.run([python, "-m", "venv", str(tmp_path / "venv")], check=True)
    programs = tmp_path / "venv" / "bin"
    pip = [str(programs / "python"), "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "-q", "install", str(wheel)], check=True)
    listed = subprocess.run(
        [*pip, "list", "--format", "json"], capture_output=True, text=True, check=True
    )
    assert {each["name"] for each in json.loads(listed.stdout)} <= LIGHT

    node = NodeProcess(tmp_path / "node")
    try:
        assert say(node.start(), programs / "python") == SAID
    finally:
        node.kill()

    subprocess.run([*pip, "-q", "install", f"{wheel}[server,cli]"], check=True)
    served = NodeProcess(tmp_path / "served", python=programs / "python")
    try:
        assert say(served.start(), programs / "python") == SAID
        assert served.stop() == 0, served.errors
    finally:
        served.kill()
    assert os.listdir(tmp_path / "served")
