"""The environment of a node: clock, disk, network and timing. The default is the machine's own; tests pass others (qmq/testing).

Two clocks, since two kinds of deadlines must not be confused when a test moves the time: what applications see (due times, retention,
leases of consumers and in the coordination store) goes by `clock`, and how replicas judge whether another one lives goes by `steady`,
which is never moved.
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
    """None means the system's clock; on a delay server, a clock that does not follow every jump (qmq/delay/timekeeper.py)."""
    steady: Clock = field(default_factory=SystemClock)
    """Its monotonic time is for heartbeats and elections."""
    disk: Disk = field(default_factory=Disk)
    network: Network = NETWORK
    timing: Timing = field(default_factory=Timing)
    """The intervals of heartbeats and elections."""
    fatal: Callable[[BaseException], None] = stop_process
    """Ends a process that must not continue."""
    node_timing: NodeTiming = TIMING
    make_driver: Callable[..., Driver] = Driver
    """Makes the driver of a replica, by the arguments of `Driver`; tests pass one that also takes down what it does."""


MACHINE: Final = Environment()


def environment_with(tls: Tls | None) -> Environment:
    """The machine's environment, with TLS if there are certificates. Raises InvalidArgument for unusable files."""
    if tls is None:
        return Environment(network=ServerNetwork())
    credentials = Credentials(tls)
    return Environment(network=TlsNetwork(credentials, ExpiryWarning(credentials).look))
