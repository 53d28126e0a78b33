"""The parts that one replica's modules share: its configuration, its environment, and its view of the cluster."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from qmq_coordination.view import ClusterView
from qmq_replication.replica_identity import ReplicaIdentity

from qmq.broker.broker_config import BrokerConfig
from qmq.clock import Clock
from qmq.network import host_of
from qmq.node.environment import Environment
from qmq.node.metering.coordination_metrics import CountedStore
from qmq.node.replica_config import ReplicaConfig
from qmq.security.cluster_access import server_network
from qmq.server_name import ServerName
from qmq.timekeeper import SteadyClock

if TYPE_CHECKING:
    from qmq_coordination.coordination_store import CoordinationStore


@dataclass(frozen=True, slots=True)
class ReplicaContext:
    config: ReplicaConfig
    coordination: CountedStore
    view: ClusterView
    environment: Environment
    clock: Clock

    @property
    def folder(self) -> Path:
        """The folder of the replica's store."""
        return self.config.data / "broker"

    @property
    def broker_config(self) -> BrokerConfig:
        """The broker's configuration, with the replica's name."""
        return replace(self.config.broker, name=self.config.replica)

    def server_name(self, replica: str) -> ServerName:
        """The name of a replica of this group."""
        return ServerName(self.view.cluster, self.config.group, replica)

    def donors(self) -> dict[ServerName, str]:
        """Control addresses of the other replicas."""
        records = self.view.replicas(self.config.group)
        return {self.server_name(name): each.control_address for name, each in records.items() if name != self.config.replica}

    def witnesses(self) -> Iterator[str]:
        """Control addresses on other machines: of the group's other replicas, then of one server on each further machine."""
        donors = self.donors()
        yield from donors.values()
        hosts = {host_of(each) for each in donors.values()} | {(self.config.advertise or self.config.host).strip("[]")}
        for state in self.view.groups():
            for each in self.view.present(state.name).values():
                if state.name != self.config.group and host_of(each.control_address) not in hosts:
                    hosts.add(host_of(each.control_address))
                    yield each.control_address

    def save(self, identity: ReplicaIdentity) -> None:
        """Write and sync the replica's promises and identity."""
        identity.save(self.environment.disk, self.config.data)


def open_context(config: ReplicaConfig, coordination: CoordinationStore | None, environment: Environment) -> ReplicaContext:
    """Open the context. Without `coordination` the coordination store is the configured etcd cluster."""
    store = CountedStore(coordination or config.etcd.open())
    view = ClusterView(store)
    environment = replace(environment, network=server_network(environment.network, view))
    return ReplicaContext(config, store, view, environment, environment.clock or SteadyClock())
