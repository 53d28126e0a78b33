"""Assembles a running broker, and has the parts that answer from the process's view of the
coordination store. Each part gets what it needs from its constructor.

                            single node (`qmq dev`)         replica (`qmq broker`, `qmq delay`)
    turns, state            Broker                          Broker
    work while it serves    -, or DelayWork                 the same (qmq/delay/broker.py)
    commits                 Alone                           Driver, with the Coordinator of its
                                                            mastership
    fencing by lease        -                               WriteLease
    flushes, checkpoints    Maintenance                     Maintenance
    repairs damage          -                               BackgroundRepair
    knows operators' rules  ViewRules                       ViewRules
    knows routes            ViewRouting, if not delayed     ViewRouting, if not delayed
    data port               DataServer                      DataServer
    control port            SingleGroupStatus               ReplicaStatus
    assembled by            StandaloneBroker                ReplicaBroker
                                                            (qmq/node/replica/broker.py)

A broker and its parts need each other: the broker reports written entries to the committer, and the
committer reports committed entries to the broker. So a broker gets a function that makes its parts
(`Broker.__init__`): the method `_make_parts` of both classes.

`ViewRouting` and `ViewRules` answer a broker about ordered subjects and consumer groups. The view
may be a moment behind. A partition then is "not known" or "not open" a moment longer, and the
caller tries again. The view never contains changes that the store did not have. Routes only move
forward. A frontier goes back when a group is reset or a parked key is replayed, and the broker then
reads the store first (`group_revision`). Replicas need not agree on settings and pauses. While the
store cannot be reached, the last known settings and pauses apply.

`ViewLocator` locates subjects for a client inside a server. A delay group also delivers without a
running metaserver, so its client calls none, and applies the metaserver's rules here
(qmq/meta/catalog.py). The locator never creates a subject: a message whose subject is deleted
waits.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Final

from qmq_coordination.ordered_records import change_key, group_record_key
from qmq_coordination.view import ClusterView, ViewChange
from qmq_ordering.routes import Change, LpRange, PhysicalPartition

from qmq.broker.admin import SingleGroupStatus
from qmq.broker.broker import Alone, Broker, MakeParts
from qmq.broker.connection.server import DataServer
from qmq.broker.control import ControlService, ProcessParts, serve_control
from qmq.broker.maintenance import TICK_S, Maintenance, stop_process
from qmq.broker.parts import BrokerParts, GroupRules, KindParts
from qmq.broker.produce_checks import Routing
from qmq.client.connection.pool import ConnectionPool
from qmq.client.metadata.cache import MetadataCache, Ordering, Placement, Pushed, routes_of
from qmq.errors import CallerError, NotConnected, Overloaded, QmqError, Unavailable
from qmq.meta.catalog import ClusterCatalog
from qmq.meta.watchers import Watchers
from qmq.model import GroupSettings, Order, SubjectConfig
from qmq.rpc.network import NETWORK, Network, RpcPort
from qmq.rpc.server_name import ServerName
from qmq.text import joined

if TYPE_CHECKING:
    import grpc
    from qmq_coordination.coordination_store import CoordinationStore


class ViewRouting(Routing):
    """See `qmq.broker.produce_checks.Routing`. `group` is the broker's own group."""

    def __init__(self, view: ClusterView, group: str) -> None:
        self._view = view
        self._group = group

    def partition(self, subject: str, number: int) -> PhysicalPartition | None:
        """The partition; None if no version of the route has it on this broker group."""
        state = self._view.ordered(subject)
        if state is None:
            return None
        for version in sorted(state.routes, reverse=True):
            found = state.routes[version].partition(number)
            if found is not None:
                return found if found.group == self._group else None
        return None

    def is_open(self, subject: str, group: str, number: int, lps: LpRange, version: int) -> bool:
        """True if the group reads `version` in the range,
        and that version has the partition there.
        """
        state = self._view.ordered(subject)
        record = state.groups.get(group) if state is not None else None
        if (
            state is None
            or record is None
            or not record.is_ready
            or not record.frontier.is_open(lps, version)
        ):
            return False
        route = state.routes.get(version)
        part = route.partition(number) if route is not None else None
        return part is not None and part.range.contains(lps)

    async def closes(self, subject: str, number: int, change_id: str, to_version: int) -> bool:
        """True if the store has the change, and the change closes the partition.
        Raises CoordinationError.
        """
        state = self._view.ordered(subject)
        change = None if state is None else state.changes.get(to_version)
        if change is None or change.id != change_id:
            item = await self._view.fetch(change_key(subject, to_version))
            change = None if item is None else Change.decode(item.value)
        return change is not None and change.id == change_id and number in change.sources

    async def group_revision(self, subject: str, group: str) -> int:
        """Read the current revision of the group's record from the store; 0 without a record.
        `is_open` uses no older record from now on. Raises CoordinationError.
        """
        item = await self._view.fetch(group_record_key(subject, group))
        return 0 if item is None else item.mod_revision


class ViewRules(GroupRules):
    """See `qmq.broker.parts.GroupRules`. `own` are the broker's defaults; `changed` is called after
    changes. Every pull needs the settings of a group and the pauses, so they are cached.
    """

    def __init__(self, view: ClusterView, own: GroupSettings, changed: Callable[[], None]) -> None:
        self._view = view
        self._own = own
        self._changed = changed
        self._found: dict[tuple[str, str], GroupSettings] = {}
        self._has_pauses = bool(view.delivery.pauses)
        view.on_change(self._on_view_change)

    def _on_view_change(self, change: ViewChange) -> None:
        if change.delivery:
            self._found.clear()
            self._has_pauses = bool(self._view.delivery.pauses)
            self._changed()

    def settings(self, subject: str, group: str) -> GroupSettings:
        """The settings, each from its most specific source: the group on this subject, the group on
        all subjects, the broker.
        """
        found = self._found.get((subject, group))
        if found is None:
            found = self._found[subject, group] = self._view.delivery.settings(
                subject, group, self._own
            )
        return found

    def is_paused(self, subject: str, group: str, consumer: str, client: str) -> bool:
        """True if the group, the consumer or the client is paused."""
        return self._has_pauses and self._view.delivery.is_paused(subject, group, consumer, client)


STOP_GRACE_S: Final = 1.0

MakeBroker = Callable[[MakeParts], Broker]
AddServices = Callable[["grpc.aio.Server"], None]
"""Adds services to the control port."""


class StandaloneBroker:
    """The broker of a node without replicas, which is always master. Without a `view` it has no
    group rules.
    """

    def __init__(
        self,
        make_broker: MakeBroker,
        view: ClusterView | None = None,
        routing: Routing | None = None,
        *,
        parts: ProcessParts | None = None,
        kind: KindParts | None = None,
        fatal: Callable[[BaseException], None] = stop_process,
        tick_s: float = TICK_S,
    ) -> None:
        self._parts = parts or ProcessParts()
        self._view = view
        self._routing = routing or Routing()
        self._kind = kind or KindParts()
        self._fatal = fatal
        self._tick_s = tick_s
        self.broker = make_broker(self._make_parts)
        self.data = DataServer(self.broker, self._parts.network, own=self._own_name)
        self.status = SingleGroupStatus(self.broker)
        self._control: RpcPort | None = None

    def _make_parts(self, broker: Broker) -> BrokerParts:
        self.maintenance = Maintenance(
            broker,
            self._fatal,
            retention_before=self._parts.retention_before,
            tick_s=self._tick_s,
        )
        rules = GroupRules()
        if self._view is not None:
            rules = ViewRules(self._view, broker.config.retries, broker.serve_waiting)
        return BrokerParts(
            Alone(broker),
            self._fatal,
            self.maintenance.after_turn,
            routing=self._routing,
            access=self._parts.access,
            kind=self._kind,
            rules=rules,
        )

    def _own_name(self) -> ServerName:
        name = self.broker.config.name
        return ServerName("" if self._view is None else self._view.cluster, name, name)

    async def listen(
        self,
        host: str,
        data_port: int,
        control_port: int,
        also: AddServices | None = None,
        *,
        advertise: str = "",
    ) -> tuple[str, str]:
        """Serve both ports, and return their addresses, with `advertise` as the host. Raises
        OSError if a port is taken.
        """
        await self.data.start(host, data_port)
        self.maintenance.start()
        self._control = await serve_control(
            ControlService(self.broker, self.status, self.broker.config.name, self._parts),
            host,
            control_port,
            also=also,
            own=self._own_name,
        )
        return joined(advertise or host, self.data.port), joined(
            advertise or host, self._control.port
        )

    async def stop(self) -> None:
        """Answer the requests under way. The caller closes the store."""
        if self._control is not None:
            await self._control.stop(STOP_GRACE_S)
        await self.data.stop()
        await self.maintenance.stop()


class ViewLocator:
    """Implements `qmq.client.metadata.cache.Locate` and `Watch`.
    Use it only while the view runs.
    """

    def __init__(
        self, store: CoordinationStore, view: ClusterView, network: Network = NETWORK
    ) -> None:
        self._view = view
        self._network = network
        self._cluster = ClusterCatalog(store, view, auto_create=False)
        self._watchers = Watchers(view)

    async def locate(self, subject: str) -> Placement:
        """Locate a subject. Raises UnknownSubject;
        Unavailable if the answer is not known at the moment.
        """
        try:
            config, found = await self._cluster.locate(subject, create=False)
            ordering = await self._ordering(config)
        except (CallerError, Unavailable):
            raise
        except QmqError as cause:
            raise NotConnected(
                f"the broker groups of {subject!r} are not known at the moment: {cause}"
            ) from cause
        return Placement(routes_of(found, self._view.cluster), ordering)

    async def _ordering(self, config: SubjectConfig) -> Ordering | None:
        if config.order is Order.NONE:
            return None
        state = await self._cluster.ordered(config)
        assert state.route is not None
        return Ordering(config.order, state.route, frozenset(state.fenced))

    async def watch(self) -> AsyncIterator[Pushed]:
        """The changes of locations, until `close`."""
        while True:
            try:
                async for changed in self._watchers.watch():
                    yield Pushed(changed.subjects, changed.broker_groups)
                return
            except Overloaded:  # too many changes at a time to keep their names
                yield Pushed(is_gap=True)

    def links(self, client: str) -> ConnectionPool:
        """Make connections to brokers that this locator finds. The caller closes them."""
        return ConnectionPool(MetadataCache(self.locate, self.watch), client, network=self._network)

    def close(self) -> None:
        self._watchers.close()
