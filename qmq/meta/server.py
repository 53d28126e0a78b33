"""A metaserver that listens: the service and all it needs, on a store and a view that somebody else opened and closes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import grpc
from qmq_coordination.store import CoordinationStore
from qmq_coordination.view import ClusterView

from qmq.broker.control import bind
from qmq.meta.brokers import Brokers
from qmq.meta.cluster import Cluster
from qmq.meta.placement import GROUPS_PER_SUBJECT
from qmq.meta.service import MetaService
from qmq.meta.watchers import Watchers
from qmq.proto.v1 import meta_pb2_grpc
from qmq.rpc import SERVER_OPTIONS

STOP_GRACE_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class MetaConfig:
    """Where a metaserver listens (port 0 takes a free one), and what it may do."""

    host: str = "127.0.0.1"
    port: int = 20880
    auto_create: bool = True
    groups_per_subject: int = GROUPS_PER_SUBJECT


class MetaServer:
    """`start`, then `stop`. Nothing is lost if it is killed instead: it keeps nothing."""

    def __init__(self, store: CoordinationStore, view: ClusterView, config: MetaConfig) -> None:
        self._config = config
        self._brokers = Brokers(view)
        self._watchers = Watchers(view)
        cluster = Cluster(store, view, auto_create=config.auto_create, groups_per_subject=config.groups_per_subject)
        self._service = MetaService(cluster, view, self._brokers, self._watchers)
        self._server: grpc.aio.Server | None = None
        self.port = config.port

    @property
    def address(self) -> str:
        """For clients."""
        return f"{self._config.host}:{self.port}"

    async def start(self) -> None:
        """Serve. Raises OSError if the port is taken."""
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        meta_pb2_grpc.add_MetaServicer_to_server(self._service, self._server)
        self.port = bind(self._server, self._config.host, self._config.port)
        await self._server.start()

    async def stop(self) -> None:
        """Answer what is under way for a moment, then end; watches end at once."""
        self._watchers.close()
        if self._server is not None:
            await self._server.stop(STOP_GRACE_S)
        await self._brokers.close()
