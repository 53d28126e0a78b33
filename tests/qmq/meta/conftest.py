"""Fixture: a store of each kind, embedded and etcd."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator

import pytest
from qmq_coordination.coordination_store import CoordinationStore
from qmq_coordination.embedded import EmbeddedStore
from qmq_coordination.etcd.store import EtcdStore
from support.etcd_process import EtcdProcess


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
