"""A real cluster that is traced: what its drivers commit, and what its coordination store is told, goes to a tracer in that order. Brokers,
files, sockets, elections and clients are those of production, in one event loop, so nothing lies between a step and its observation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from ordersim.committed import CommittedLogs
from ordersim.tracer import Tracer
from qmq_coordination.coordination_store import Compare, Operation, Put, TxnResult
from qmq_coordination.embedded import EmbeddedStore
from qmq_replication.driver import Driver
from qmq_replication.ready import Ready

from qmq.testing import TestCluster


class TracedStore(EmbeddedStore):
    """A coordination store that shows what it stores."""

    def __init__(self, monotonic_s: Callable[[], float], show: Callable[[str, bytes, Callable[[str], bool]], None]) -> None:
        """`show` gets each key, its new value, and what says whether the store has a key."""
        super().__init__(monotonic_s=monotonic_s)
        self._show = show

    async def txn(self, compares: Sequence[Compare], success: Sequence[Operation], failure: Sequence[Operation] = ()) -> TxnResult:
        result = await super().txn(compares, success, failure)  # it never waits
        for operation in success if result.succeeded else failure:
            if isinstance(operation, Put):
                self._show(operation.key, operation.value, self._has)
        return result

    def _has(self, key: str) -> bool:
        return bool(self._rows.select(key, is_prefix=False, revision=self._revision()))


class TracedDriver(Driver):
    """A driver that shows what its group commits, at the moment at which the first replica knows it."""

    def __init__(self, *args: Any, logs: CommittedLogs, tracer: Tracer, **options: Any) -> None:
        super().__init__(*args, **options)
        self._committed_logs, self._tracer = logs, tracer

    def _handle(self, ready: Ready) -> None:
        super()._handle(ready)
        if ready.commit is not None and not self.is_waiting:
            for entry in self._committed_logs.read(self.identity.group, self.host.store, ready.commit):
                self._tracer.entry(entry)


def traced_cluster(tracer: Tracer, *, brokers: int, groups: int) -> TestCluster:
    """A cluster without a delay group, whose ordered subject `tracer` watches."""
    logs = CommittedLogs()

    def show(key: str, value: bytes, has: Callable[[str], bool]) -> None:
        tracer.put(key, value, at_ms=int(time.time() * 1000), has=has)

    return TestCluster(
        brokers=brokers,
        groups=groups,
        delay=False,
        make_driver=lambda *args, **options: TracedDriver(*args, logs=logs, tracer=tracer, **options),
        make_store=lambda monotonic_s: TracedStore(monotonic_s, show),
    )
