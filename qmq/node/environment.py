"""The environment of a node: clock, disk, network and timing. The default is the machine's own; tests pass others (qmq/testing).

There are two clocks, because a test that moves the time must not cause elections. Times that applications see (due times, retention, leases
of consumers and in the coordination store) use `clock`. Heartbeats and elections of replicas use `steady`, which no test moves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from qmq_replication.driver import Driver
from qmq_replication.ready import Timing

from qmq.broker.maintenance import stop_process
from qmq.clock import Clock, SystemClock
from qmq.log.disk import Disk
from qmq.network import NETWORK, Network
from qmq.node.node_timing import TIMING, NodeTiming
from qmq.security.expiry import ExpiryWarning
from qmq.security.tls import Credentials, Tls
from qmq.security.tls_network import ServerNetwork, TlsNetwork


@dataclass(frozen=True, slots=True)
class Environment:
    clock: Clock | None = None
    """Is trusted. None means a clock that does not follow every jump of the machine's (qmq/broker/replica_time.py)."""
    steady: Clock = field(default_factory=SystemClock)
    """The clock whose monotonic time is for heartbeats and elections."""
    disk: Disk = field(default_factory=Disk)
    network: Network = NETWORK
    timing: Timing = field(default_factory=Timing)
    """The intervals of heartbeats and elections."""
    fatal: Callable[[BaseException], None] = stop_process
    """Ends a process that must not continue."""
    node_timing: NodeTiming = TIMING
    make_driver: Callable[..., Driver] = Driver
    """Makes the driver of a replica, with the arguments of `Driver`. Tests pass a driver that also records its actions."""


MACHINE: Final = Environment()


def environment_with(tls: Tls | None) -> Environment:
    """Make the machine's environment, with TLS if there are certificates. Raises InvalidArgument for unusable files."""
    if tls is None:
        return Environment(network=ServerNetwork())
    credentials = Credentials(tls)
    return Environment(network=TlsNetwork(credentials, ExpiryWarning(credentials).look))
