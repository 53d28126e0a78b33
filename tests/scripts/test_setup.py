"""scripts/setup keeps a virtual environment for development, and installs the lock file that fits
it.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SETUP = Path(__file__).parents[2] / "scripts" / "setup"
LOCKS = ("requirements.lock", "requirements-demo.lock", "requirements-build.lock")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project whose pip only writes down what it was asked for."""
    for folder in ("scripts", ".venv/bin"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy(SETUP, tmp_path / "scripts" / "setup")
    for name in (*LOCKS, "pyproject.toml"):
        (tmp_path / name).write_text(name)
    for name in ("python", "pip"):
        tool = tmp_path / ".venv" / "bin" / name
        tool.write_text('#!/bin/sh\necho "$@" >> asked\n')
        tool.chmod(0o755)
    return tmp_path


def installed(project: Path, *lock: str) -> list[str]:
    """The lock files that scripts/setup installs."""
    (project / "asked").write_text("")
    subprocess.run([project / "scripts" / "setup", *lock], check=True, capture_output=True)
    return [
        line.split()[-1]
        for line in (project / "asked").read_text().splitlines()
        if "-r" in line.split()
    ]


def test_the_lock_file_that_is_asked_for_is_installed_once(project: Path) -> None:
    assert installed(project, "requirements-demo.lock") == [
        "requirements-build.lock",
        "requirements-demo.lock",
    ]
    assert installed(project, "requirements-demo.lock") == []


def test_the_demo_leaves_an_environment_for_development_alone(project: Path) -> None:
    assert installed(project) == ["requirements-build.lock", "requirements.lock"]
    assert installed(project, "requirements-demo.lock") == []


def test_the_demo_renews_an_outdated_environment_for_development_as_such(project: Path) -> None:
    """The versions of the demo do not all fit development: pip complained about them on standard
    error.
    """
    installed(project)
    (project / "pyproject.toml").write_text("changed")
    assert installed(project, "requirements-demo.lock") == [
        "requirements-build.lock",
        "requirements.lock",
    ]
    assert installed(project) == []
