"""Fixtures: etcd servers. They are skipped only where no etcd binary can be found."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import needs
import pytest
from qmq_coordination.etcd.etcd_process import EtcdCluster, EtcdProcess


@pytest.fixture(scope="session")
def etcd_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdProcess]:
    """An etcd member for tests that do not disturb it: each uses a namespace of its own."""
    needs.need_etcd()
    server = EtcdProcess(tmp_path_factory.mktemp("etcd"))
    try:
        server.start()
        yield server
    finally:
        server.stop()


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[EtcdProcess]:
    """An etcd member for a test that disturbs it."""
    needs.need_etcd()
    server = EtcdProcess(tmp_path / "etcd")
    try:
        server.start()
        yield server
    finally:
        server.stop()


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
