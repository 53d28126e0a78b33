"""For applications' own tests: a whole cluster in the test's process, time that the test moves, faults on request. See docs/TESTING.md.

    async with TestCluster(brokers=3, clock=virtual()) as cluster:
        mq = cluster.client()
        await mq.send("reminder", b"...", delay=timedelta(days=700))
        await cluster.clock.advance(days=700)

With pytest the fixture `qmq_cluster` is one; `@pytest.mark.qmq_cluster(brokers=3)` says how it is to be. Since pytest loads the fixture's
module whenever it runs, nothing of the servers is imported before it is asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from qmq.testing.cluster import TestCluster
    from qmq.testing.virtual_clock import VirtualClock, virtual

__all__ = ["TestCluster", "VirtualClock", "virtual"]

_MODULES: Final = {"TestCluster": "cluster", "VirtualClock": "virtual_clock", "virtual": "virtual_clock"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
