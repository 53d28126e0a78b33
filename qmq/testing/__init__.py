"""Support for tests of applications: a whole cluster in the test's process, a clock that the test
moves, and faults on request. See docs/TESTING.md.

    async with TestCluster(brokers=3, clock=virtual()) as cluster:
        mq = cluster.client()
        await mq.send("reminder", b"...", delay=timedelta(days=700))
        await cluster.clock.advance(days=700)

With pytest the fixture `qmq_cluster` is a `TestCluster`; `@pytest.mark.qmq_cluster(brokers=3)`
passes its arguments. Because pytest loads the fixture's module at every run, the servers are
imported at the first use only.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from qmq.testing.cluster import TestCluster
    from qmq.testing.virtual_clock import VirtualClock, virtual

__all__ = ["TestCluster", "VirtualClock", "virtual"]

_MODULES: Final = {
    "TestCluster": "cluster",
    "VirtualClock": "virtual_clock",
    "virtual": "virtual_clock",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
