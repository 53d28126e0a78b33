"""The pytest plugin: a cluster as a fixture, new for each test that requests it. The module is
quick to import, since pytest does so at each run.

    async def test_a_reminder_comes(qmq_cluster): ...

    @pytest.mark.qmq_cluster(brokers=3)
    async def test_orders_survive_a_broker(qmq_cluster): ...

The marker's arguments are those of `TestCluster`; without `clock` it has a virtual one, and
`clock=None` means the machine's. Coroutine tests need a plugin that runs them: pytest-asyncio, in
any of its modes, or anyio's.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from qmq.testing.cluster import TestCluster

MARKER = (
    "qmq_cluster(brokers=1, groups=1, delay=True, clock=virtual(), log=None): how the cluster of "
    "the fixture is made"
)

# In its strict mode pytest-asyncio runs only its own fixtures; anyio's plugin runs those that
# pytest knows.
_fixture: Any = (
    import_module("pytest_asyncio").fixture
    if find_spec("pytest_asyncio") is not None
    else pytest.fixture
)


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line("markers", MARKER)


@_fixture  # type: ignore[untyped-decorator]
async def qmq_cluster(request: pytest.FixtureRequest) -> AsyncIterator[TestCluster]:
    """A running `qmq.testing.TestCluster` with one broker, or with the marker's arguments."""
    from qmq.testing.cluster import TestCluster
    from qmq.testing.virtual_clock import virtual

    marker = request.node.get_closest_marker("qmq_cluster")
    options = dict(marker.kwargs) if marker is not None else {}
    options.setdefault("clock", virtual())
    async with TestCluster(**options) as cluster:
        yield cluster
