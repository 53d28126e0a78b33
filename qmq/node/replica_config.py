"""The configuration of one replica of a broker group or delay group."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from qmq.broker.broker_config import BrokerConfig
from qmq.log.log_config import LogConfig
from qmq.node.etcd_options import EtcdOptions
from qmq.security.access_config import AccessConfig


@dataclass(frozen=True, slots=True)
class ReplicaConfig:
    """One replica. `replicas` are used to create the group. Port 0 takes a free one."""

    group: str
    replica: str
    replicas: tuple[str, ...]
    data: Path
    etcd: EtcdOptions
    host: str = "127.0.0.1"
    data_port: int = 20881
    control_port: int = 20882
    advertise: str = ""
    log: LogConfig = field(default_factory=LogConfig)
    broker: BrokerConfig = field(default_factory=BrokerConfig)
    metrics_port: int | None = None
    """The port of /metrics; None: no metrics are served."""
    metrics_host: str = ""
    """The address on which /metrics listens; empty means loopback only."""
    access: AccessConfig = field(default_factory=AccessConfig)
