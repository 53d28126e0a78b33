"""What this machine permits: the rights that tests need, and the reason where one is missing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from cluster_runner.netns import unavailable

from campaign.values import LOOPS, NAMESPACES


def _no_loops() -> str:
    if os.geteuid() != 0:
        return "file systems on loop devices: needs root"
    if not Path("/dev/loop-control").exists():
        return "file systems on loop devices: /dev/loop-control is missing"
    missing = [tool for tool in ("mount", "umount", "mkfs.ext4") if not shutil.which(tool)]
    return f"file systems on loop devices: needs {', '.join(missing)}" if missing else ""


def _no_namespaces() -> str:
    reason = unavailable()
    return f"network namespaces: {reason}" if reason else ""


REASONS: Final = {NAMESPACES: _no_namespaces, LOOPS: _no_loops}


def missing(needs: Iterable[str]) -> str:
    """Why a test with these needs cannot run here; empty if it can."""
    return "; ".join(reason for need in sorted(needs) if (reason := REASONS[need]()))
