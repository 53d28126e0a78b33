"""Builds the wheel of a source tree, as a release does.

The previous release's packages, built from its commit: a node of this version must work beside them
(docs/UPGRADES.md).
"""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Final

import pytest


def build_wheel(sources: Path, folder: Path) -> Path:
    """Build a tree's wheel into a folder; returns its file."""
    before = set(folder.glob("*.whl"))
    command = [
        sys.executable,
        "-m",
        "hatchling",
        "build",
        "--target",
        "wheel",
        "--directory",
        str(folder),
    ]
    subprocess.run(command, cwd=sources, capture_output=True, timeout=100, check=True)
    (wheel,) = set(folder.glob("*.whl")) - before
    return wheel


ROOT: Final = Path(__file__).resolve().parents[2]
VERSION: Final = "0.2.0"
COMMIT: Final = "2f4663222340145393d96889a529d4e165217411"
"""The commit of the release: a clone need not have its tag."""


def has_history() -> bool:
    """Whether this checkout knows the release's commit; a shallow clone and an unpacked archive do
    not.
    """
    found = subprocess.run(
        ["git", "cat-file", "-e", f"{COMMIT}^{{commit}}"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    return found.returncode == 0


def unpack(folder: Path) -> Path:
    """Build the release's wheel and unpack it. Returns the folder for PYTHONPATH. Skips the test
    without the project's history.
    """
    if not has_history():
        pytest.skip(
            f"no history: qmq {VERSION} is built from commit {COMMIT}, which git fetch "
            "--unshallow brings"
        )
    archive = subprocess.run(
        ["git", "archive", COMMIT], cwd=ROOT, capture_output=True, check=True
    ).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as sources:
        sources.extractall(folder / "sources", filter="data")
    packages = folder / "packages"
    with zipfile.ZipFile(build_wheel(folder / "sources", folder)) as wheel:
        wheel.extractall(packages)
    return packages
