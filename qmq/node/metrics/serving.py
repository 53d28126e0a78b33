"""Serves a role's metrics over HTTP: those of its parts, and of security: whether unauthenticated
clients can reach the server, when its certificate expires, and the mode and refusals of access
control. prometheus_client is imported only if a port is served.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from qmq.broker.broker import Broker
from qmq.broker.connection.server import DataServer
from qmq.broker.replica_time import ReplicaTime
from qmq.metrics.figures import COUNTER, GAUGE, Figure, FigureSource, Readiness, Reading, one
from qmq.node.metrics.broker import (
    BrokerSource,
    DelaySource,
    GroupsSource,
    LogSource,
    TieringSource,
)
from qmq.node.metrics.replica import ReplicaSource
from qmq.node.process import EtcdOptions, weaknesses
from qmq.process.address import UNIX, is_local
from qmq.proto.v1 import control_pb2 as pb
from qmq.rpc.network import NETWORK, Network
from qmq.security.access import AccessControl
from qmq.security.access_rules import AccessMode
from qmq.security.tls import Credentials, left_s, now

if TYPE_CHECKING:
    from qmq.metrics.endpoint import MetricsServer

LOOPBACK: Final = "127.0.0.1"


def sources_of(
    broker: Broker,
    group: str,
    server: DataServer,
    describe: Callable[[], pb.ReplicaStatus],
    roles: Mapping[str, int],
    refused: Callable[[], Mapping[str, int]] = dict,
    time: ReplicaTime | None = None,
) -> list[FigureSource]:
    """The sources that a broker and a delay server have in common."""
    return [
        ReplicaSource(group, describe, roles, refused),
        LogSource(broker, group, time),
        BrokerSource(broker, group, server),
    ]


def metrics_host(host: str, given: str) -> str:
    """The address for the metrics of a role that listens on `host`: the operator's choice,
    otherwise loopback.
    """
    return given or (host if is_local(host) and not host.startswith(UNIX) else LOOPBACK)


async def serve(
    host: str,
    port: int | None,
    sources: Sequence[FigureSource],
    readiness: Callable[[], Readiness],
    network: Network,
) -> MetricsServer | None:
    """Listen. Returns None without a port. A port that other machines reach uses the TLS of
    `network`. If TLS requires certificates of clients, a client without one gets the health only.
    Raises OSError if the port is taken.
    """
    if port is None:
        return None
    from qmq.metrics.endpoint import MetricsServer

    endpoint = MetricsServer(sources, readiness)
    if is_local(host):
        await endpoint.start(host, port, NETWORK.listen)
    else:
        credentials = network.credentials
        needs_certificate = credentials is not None and credentials.files.requires_clients
        await endpoint.start(
            host,
            port,
            network.with_optional_certificates().listen,
            needs_certificate=needs_certificate,
        )
    return endpoint


def figures_by_role() -> dict[str, Sequence[Figure]]:
    """All metrics of each role, for docs/reference/metrics.md."""
    from qmq.client.metrics import ClientSource
    from qmq.gateway.server import GatewaySource
    from qmq.metrics.endpoint import LEFT_OUT
    from qmq.node.metrics.copies import LakeMetrics, MirrorMetrics
    from qmq.node.metrics.meta import MetaSource
    from qmq.node.metrics.replica import CoordinationSource

    all_servers = (
        *CoordinationSource.figures,
        *ExposureSource.figures,
        *AccessSource.figures,
        LEFT_OUT,
    )
    both = (*ReplicaSource.figures, *LogSource.figures, *BrokerSource.figures, *all_servers)
    return {
        "client": (*ClientSource.figures, LEFT_OUT),
        "broker": (*both, *TieringSource.figures, *GroupsSource.figures),
        "meta": (*MetaSource.figures, *all_servers),
        "delay": (*both, *DelaySource.figures),
        "gateway": (*GatewaySource.figures, LEFT_OUT),
        "mirror": (*MirrorMetrics.figures, LEFT_OUT),
        "lake": (*LakeMetrics.figures, LEFT_OUT),
    }


INSECURE: Final = Figure(
    "qmq_insecure",
    GAUGE,
    (),
    "1 if strangers may reach this process or etcd's password, which only --insecure allows.",
)

EXPIRES: Final = Figure(
    "qmq_certificate_expires_seconds",
    GAUGE,
    (),
    "Seconds until the process's TLS certificate expires; negative after that.",
)


class ExposureSource:
    figures: Final = (INSECURE, EXPIRES)

    def __init__(
        self, host: str, etcd: EtcdOptions | None = None, credentials: Credentials | None = None
    ) -> None:
        self._credentials = credentials
        self._is_insecure = bool(
            weaknesses(host, etcd, None if credentials is None else credentials.files)
        )

    def read(self) -> Iterator[Reading | None]:
        yield one(INSECURE, int(self._is_insecure))
        left = None if self._credentials is None else left_s(self._credentials, now())
        if left is not None:
            yield one(EXPIRES, left)


MODE: Final = Figure(
    "qmq_access_mode", GAUGE, (), "Mode of access control: 0 off, 1 watch, 2 enforce."
)
REFUSALS: Final = Figure(
    "qmq_access_refusals_total",
    COUNTER,
    (),
    "Requests and logins that were refused, or would be in mode watch.",
)
_NUMBERS: Final = {AccessMode.OFF: 0, AccessMode.WATCH: 1, AccessMode.ENFORCE: 2}


class AccessSource:
    figures: Final = (MODE, REFUSALS)

    def __init__(self, access: AccessControl) -> None:
        self._access = access

    def read(self) -> Iterator[Reading | None]:
        yield one(MODE, _NUMBERS[self._access.mode])
        yield one(REFUSALS, self._access.audit.refusals)
