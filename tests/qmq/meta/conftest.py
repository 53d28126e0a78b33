"""Fixtures: etcd servers, and both kinds of store. What needs etcd is skipped only where no etcd binary can be found."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import needs
import pytest
from qmq_coordination.coordination_store import CoordinationStore
from qmq_coordination.embedded import EmbeddedStore
from qmq_coordination.etcd.etcd_process import EtcdProcess
from qmq_coordination.etcd.etcd_store import EtcdStore


def _running(folder: Path) -> Iterator[EtcdProcess]:
    needs.need_etcd()
    server = EtcdProcess(folder)
    try:
        server.start()
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session")
def shared_etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdProcess]:
    """An etcd for tests that do not disturb it: each uses a namespace of its own."""
    yield from _running(tmp_path_factory.mktemp("etcd"))


@pytest.fixture
def own_etcd(tmp_path: Path) -> Iterator[EtcdProcess]:
    """An etcd for a test that disturbs it."""
    yield from _running(tmp_path / "etcd")


@pytest.fixture(params=["embedded", "etcd"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[CoordinationStore]:
    """An empty store of each kind."""
    found: CoordinationStore
    if request.param == "embedded":
        found = EmbeddedStore()
    else:
        server: EtcdProcess = request.getfixturevalue("shared_etcd")
        found = EtcdStore([server.endpoint], namespace=f"/{secrets.token_hex(8)}")
    yield found
    await found.close()
