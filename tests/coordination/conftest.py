"""Fixture: an etcd cluster. Its tests are skipped only on machines without an etcd binary."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support import needs
from support.etcd_process import EtcdCluster


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[EtcdCluster]:
    """Three members."""
    needs.need_etcd()
    found = EtcdCluster(tmp_path / "etcd", 3)
    try:
        found.start()
        yield found
    finally:
        found.stop()
