"""A metaserver that listens: the service and its parts, on a store and a view that the caller opens
and closes.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Final

import grpc
from qmq_coordination.coordination_store import CoordinationStore
from qmq_coordination.view import ClusterView

from qmq import limits
from qmq.meta.access import AccessService, follow_access, server_network
from qmq.meta.calls import TIMING, Brokers, Delays, MetaTiming, PartitionMasters
from qmq.meta.catalog import GROUPS_PER_SUBJECT, ClusterCatalog, SchemaService
from qmq.meta.deletion import Deletion
from qmq.meta.delivery import DeliveryService
from qmq.meta.description import AskMembers, ClusterDescription, no_members
from qmq.meta.ordered.controller import Controller
from qmq.meta.ordered.resharding import Evacuation, Resharding
from qmq.meta.ordered.service import CHANGE_WAIT_S, OrderedService
from qmq.meta.service import MetaParts, MetaService
from qmq.meta.watchers import WATCHERS_MAX, Watchers
from qmq.metrics.figures import Durations
from qmq.process.address import is_private
from qmq.process.description import DescribeProcess
from qmq.process.event_loop import Clock, SystemClock
from qmq.proto.v1 import access_pb2_grpc, meta_pb2_grpc
from qmq.proto.v1 import control_pb2 as control
from qmq.rpc.guard import RpcGuard
from qmq.rpc.network import NETWORK, Network, RpcPort, only_uid
from qmq.rpc.server import NameCheck, RpcBounds, RpcListener, rpc_server
from qmq.rpc.server_name import ServerName
from qmq.security.access import AccessConfig, AccessControl
from qmq.text import joined

STOP_GRACE_S: Final = 1.0
BOUNDS: Final = RpcBounds(connections_max=WATCHERS_MAX, calls_max=WATCHERS_MAX + 10_000)
"""The largest number of streams for one connection:
each client has one connection, and watches on it.
"""


@dataclass(frozen=True, slots=True)
class MetaConfig:
    """A metaserver's address (port 0 takes a free one) and its options."""

    host: str = "127.0.0.1"
    port: int = 20880
    auto_create: bool = True
    groups_per_subject: int = GROUPS_PER_SUBJECT
    evacuates: bool = True
    """Whether the metaserver moves partitions of ordered subjects away from broker groups that have
    lost their master for good (qmq/meta/ordered/resharding.py).
    """
    access: AccessConfig = field(default_factory=AccessConfig)
    _: KW_ONLY  # what follows is no option: only tests set it
    change_wait_s: float = CHANGE_WAIT_S
    """The time that the answer to a route change waits for the next route."""
    consumers_max: int = limits.GROUP_CONSUMERS_MAX
    """The largest number of consumers in a group of an ordered subject."""
    timing: MetaTiming = TIMING
    bounds: RpcBounds = BOUNDS


class MetaServer:
    """A metaserver. Call `start`, then `stop`.
    It has no state, so a killed metaserver loses nothing.
    """

    def __init__(
        self,
        store: CoordinationStore,
        view: ClusterView,
        config: MetaConfig,
        *,
        clock: Clock | None = None,
        network: Network = NETWORK,
        access: AccessControl | None = None,
        process: DescribeProcess = control.ProcessStatus,
        members: AskMembers = no_members,
    ) -> None:
        """`access` is the process's access control, if it exists already. `process` describes the
        process, `members` asks the members of the coordination store.
        """
        self._config = config
        self._view = view
        self._network = network
        clock = clock or SystemClock()
        self._access = access or follow_access(view, config.access, clock=clock)
        self._brokers = Brokers(view, server_network(network, view))
        self._watchers = Watchers(view)
        self.calls = CallCounts()
        cluster = ClusterCatalog(
            store,
            view,
            auto_create=config.auto_create,
            groups_per_subject=config.groups_per_subject,
        )
        masters = PartitionMasters(self._brokers)
        self._controller = Controller(store, view, masters, clock, timing=config.timing)
        self._resharding = Resharding(
            store, view, masters, self._controller, clock, timing=config.timing
        )
        self._evacuation = Evacuation(view, self._controller, clock)
        ordered = OrderedService(
            cluster,
            view,
            self._brokers,
            self._controller,
            masters,
            self._resharding,
            change_wait_s=config.change_wait_s,
            consumers_max=config.consumers_max,
        )
        delivery = DeliveryService(store, view, cluster, self._brokers, clock)
        self._deletion = Deletion(store, view, cluster, self._brokers, timing=config.timing)
        delays = Delays(view, self._brokers)
        description = ClusterDescription(view, self._brokers, clock, process, members)
        schemas = SchemaService(store, cluster, clock)
        self._service = MetaService(
            MetaParts(
                cluster,
                view,
                self._brokers,
                self._watchers,
                ordered,
                delays,
                delivery,
                self._deletion,
                description,
                schemas,
            )
        )
        self._guard = RpcGuard(
            self._access,
            lambda name: view.subject(name) is not None,
            delays.subject_of,
            lambda: only_uid(config.host, self.port),
        )
        is_encrypted = network.credentials is not None

        def open_links() -> list[str]:
            addresses = [
                each.control_address
                for group in view.groups()
                for each in view.present(group.name).values()
            ]
            return [each for each in addresses if not is_private(each, is_encrypted=is_encrypted)]

        self._administration = AccessService(store, self._access, clock, open_links)
        self.rpc_port: RpcPort | None = None
        """The open port for calls, while the metaserver runs."""
        self.port = config.port

    @property
    def address(self) -> str:
        return joined(self._config.host, self.port)

    @property
    def watchers(self) -> int:
        """The clients that watch this metaserver for changes."""
        return self._watchers.count

    @property
    def is_leader(self) -> bool:
        """True if this metaserver is the leader."""
        return self._controller.leader.is_leader

    async def start(self) -> None:
        """Serve clients. Raises OSError if the port is taken."""
        bounds = self._config.bounds.fitting(self._network.rpc_descriptors(self._config.host))
        door = RpcListener(bounds, self._guard.refused, self._guard.peers)
        server = rpc_server(
            door, (self.calls, NameCheck(lambda: ServerName(self._view.cluster)), self._guard)
        )
        meta_pb2_grpc.add_MetaServicer_to_server(self._service, server)
        access_pb2_grpc.add_AccessServicer_to_server(self._administration, server)
        self.rpc_port = await self._network.serve(
            server, self._config.host, self._config.port, door
        )
        self.port = self.rpc_port.port
        self._controller.start()
        self._controller.spawn(self._resharding.run())
        self._controller.spawn(self._deletion.run(lambda: self.is_leader))
        if self._config.evacuates:
            self._controller.spawn(self._evacuation.run())

    async def stop(self) -> None:
        """Give running calls a moment to finish, then end. Watches end immediately."""
        self._watchers.close()
        await self._controller.stop()
        if self.rpc_port is not None:
            await self.rpc_port.stop(STOP_GRACE_S)
        await self._brokers.close()


_WAITING: Final = ("SyncMember", "ChangeRoute")
"""Long polls, whose durations are not measured."""


class CallCounts(grpc.aio.ServerInterceptor):
    def __init__(self) -> None:
        self.requests: dict[str, int] = {}
        """The number of requests by method. Streams count when they begin."""
        self.failures: dict[tuple[str, str], int] = {}
        """The number of failed requests by method and gRPC code."""
        self.durations = Durations()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None  # an unknown method: a caller can send any name
        method = str(handler_call_details.method).rpartition("/")[2]
        self.requests[method] = self.requests.get(method, 0) + 1
        if handler.response_streaming:
            return handler
        return grpc.stream_unary_rpc_method_handler(
            self._counted(method, handler.stream_unary),
            handler.request_deserializer,
            handler.response_serializer,
        )

    def _counted(
        self, method: str, serve: Callable[[Any, Any], Awaitable[Any]]
    ) -> Callable[[Any, Any], Awaitable[Any]]:
        async def counted(request: Any, context: Any) -> Any:
            begin = time.perf_counter()
            try:
                return await serve(request, context)
            except Exception:
                labels = (method, getattr(context.code(), "name", "UNKNOWN"))
                self.failures[labels] = self.failures.get(labels, 0) + 1
                raise
            finally:
                if method not in _WAITING:
                    self.durations.note(time.perf_counter() - begin)

        return counted
