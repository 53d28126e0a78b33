"""`scripts/release`, in a clone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[2]
VERSION: Final = re.findall(
    r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE
)[0]


def git(clone: Path, *words: str) -> str:
    return subprocess.run(
        ["git", *words], cwd=clone, capture_output=True, text=True, check=True
    ).stdout.strip()


def release(clone: Path, version: str = VERSION) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHON": sys.executable}
    environment.pop("QMQ_PURE", None)
    return subprocess.run(
        ["scripts/release", version],
        cwd=clone,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    subprocess.run(
        ["git", "clone", "-q", "--no-tags", str(ROOT), str(tmp_path / "qmq")], check=True
    )
    git(tmp_path / "qmq", "config", "user.name", "tests")
    git(tmp_path / "qmq", "config", "user.email", "tests@example.com")
    return tmp_path / "qmq"


@pytest.mark.long
def test_a_release_joins_the_news_tags_and_builds(clone: Path) -> None:
    news = clone / "docs/changes/+something.fixed.txt"
    news.write_text("Something works that did not.\n")
    git(clone, "add", ".")
    git(clone, "commit", "-q", "-m", "Mend something")

    done = release(clone)
    assert done.returncode == 0, done.stderr
    assert git(clone, "status", "--porcelain") == ""
    assert git(clone, "rev-parse", f"v{VERSION}^{{commit}}") == git(clone, "rev-parse", "HEAD")
    assert not news.exists()
    assert re.search(
        rf"## {VERSION} \(\d.*?### Fixed\n.*?- Something works that did not\.",
        (clone / "CHANGELOG.md").read_text(),
        re.DOTALL,
    )
    kinds = {
        re.sub(rf"^qmq-{VERSION}|_\d+_\d+_\w+(?=\.whl)", "", each.name)
        for each in (clone / "dist").iterdir()
    }
    assert kinds >= {".tar.gz", "-py3-none-any.whl"}
    assert kinds <= {".tar.gz", "-py3-none-any.whl", "-cp311-abi3-manylinux.whl"}

    assert release(clone).returncode == 0, "the same files again, for another platform"
    assert git(clone, "log", "-1", "--format=%s") == f"Release {VERSION}"


@pytest.mark.parametrize(
    ("version", "said"), [("9.9.9", "has another version"), (VERSION, "commit or remove")]
)
def test_a_release_is_refused_that_would_be_of_something_else(
    clone: Path, version: str, said: str
) -> None:
    (clone / "left.txt").write_text("")
    done = release(clone, version)
    assert done.returncode == 1
    assert said in done.stderr
    assert git(clone, "tag") == ""
