"""The sources of a role's metrics, and the HTTP server. prometheus_client is imported only if a port is served."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from qmq.broker.broker import Broker
from qmq.broker.data_server import DataServer
from qmq.broker.replica_time import ReplicaTime
from qmq.metrics.figures import Figure, FigureSource
from qmq.metrics.readiness import Readiness
from qmq.network import NETWORK, UNIX, Network, is_local
from qmq.node.metering.broker_metrics import BrokerSource
from qmq.node.metering.delay_metrics import DelaySource
from qmq.node.metering.groups_metrics import GroupsSource
from qmq.node.metering.log_metrics import LogSource
from qmq.node.metering.replica_metrics import ReplicaSource
from qmq.node.metering.tiering_metrics import TieringSource
from qmq.proto.v1 import control_pb2 as pb

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
    return [ReplicaSource(group, describe, roles, refused), LogSource(broker, group, time), BrokerSource(broker, group, server)]


def metrics_host(host: str, given: str) -> str:
    """The address for the metrics of a role that listens on `host`: the operator's choice, otherwise loopback."""
    return given or (host if is_local(host) and not host.startswith(UNIX) else LOOPBACK)


async def serve(
    host: str, port: int | None, sources: Sequence[FigureSource], readiness: Callable[[], Readiness], network: Network
) -> MetricsServer | None:
    """Listen. Returns None without a port. A port that other machines reach uses the TLS of `network`. If TLS requires certificates of
    clients, a client without one gets the health only. Raises OSError if the port is taken.
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
        await endpoint.start(host, port, network.with_optional_certificates().listen, needs_certificate=needs_certificate)
    return endpoint


def figures_by_role() -> dict[str, Sequence[Figure]]:
    """All metrics of each role, for the test of docs/METRICS.md."""
    from qmq.client.metrics import ClientSource
    from qmq.gateway.gateway_metrics import GatewaySource
    from qmq.metrics.exposition import LEFT_OUT
    from qmq.node.metering.access_metrics import AccessSource
    from qmq.node.metering.coordination_metrics import CoordinationSource
    from qmq.node.metering.exposure_metrics import ExposureSource
    from qmq.node.metering.lake_metrics import LakeMetrics
    from qmq.node.metering.meta_metrics import MetaSource
    from qmq.node.metering.mirror_metrics import MirrorMetrics

    all_servers = (*CoordinationSource.figures, *ExposureSource.figures, *AccessSource.figures, LEFT_OUT)
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
