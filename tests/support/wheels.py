"""Builds the wheel of a source tree, as a release does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def build_wheel(sources: Path, folder: Path) -> Path:
    """Build a tree's wheel into a folder; returns its file."""
    before = set(folder.glob("*.whl"))
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(command, cwd=sources, capture_output=True, timeout=100, check=True)
    (wheel,) = set(folder.glob("*.whl")) - before
    return wheel
