"""Fixtures: a folder in memory, on machines that have one."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from replica_support import memory


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    """These tests open stores by the thousand; each opening syncs."""
    where = memory()
    if where is None:
        yield tmp_path
        return
    found = Path(tempfile.mkdtemp(dir=where, prefix="qmq-"))
    yield found
    shutil.rmtree(found, ignore_errors=True)
