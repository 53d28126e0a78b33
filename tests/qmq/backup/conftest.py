"""Fixture: a running cluster, and a place for its backups."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from live_cluster import History, LiveCluster, running
from support.etcd_process import EtcdProcess


@pytest.fixture
async def cluster(shared_etcd: EtcdProcess, tmp_path: Path) -> AsyncIterator[LiveCluster]:
    async with running(
        LiveCluster(shared_etcd.endpoint, f"/{secrets.token_hex(8)}", tmp_path / "first")
    ) as found:
        yield found


@pytest.fixture
async def second(shared_etcd: EtcdProcess, tmp_path: Path) -> AsyncIterator[LiveCluster]:
    """Another running cluster, whose broker groups have other names and numbers."""
    groups = {"w1": ("w1-a",)}
    async with running(
        LiveCluster(shared_etcd.endpoint, f"/{secrets.token_hex(8)}", tmp_path / "west", groups)
    ) as found:
        yield found


@pytest.fixture
def history() -> History:
    return History()


@pytest.fixture
def empty_cluster(shared_etcd: EtcdProcess, tmp_path: Path) -> LiveCluster:
    """A cluster that does not run; its replicas have other names and ports."""
    groups = {"b1": ("north-1",), "b2": ("north-2",), "d": ("north-3",)}
    return LiveCluster(
        shared_etcd.endpoint, f"/{secrets.token_hex(8)}", tmp_path / "second", groups
    )
