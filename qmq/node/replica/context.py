"""The parts that the modules of one replica share: its configuration, of a broker group or a delay group; its environment; its view of the
cluster; and what opens its store, at the start, with repair of damage from the other replicas, and again while the replica runs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from qmq_coordination.view import ClusterView
from qmq_replication.identity import ReplicaIdentity

from qmq.broker.config import BrokerConfig
from qmq.broker.timekeeper import SteadyClock
from qmq.errors import DiskFull, LogDamaged
from qmq.log import follower
from qmq.log.log_config import LogConfig
from qmq.log.reading import StoredBytes
from qmq.log.recent_writes import ACTIONS, MESSAGES, Place
from qmq.log.recovery import open_store
from qmq.log.segment_index import SegmentIndex
from qmq.log.store import PendingEntry, Store
from qmq.log.taken_segments import CannotTake, take_segments
from qmq.meta.access import server_network
from qmq.node.metrics.replica import CountedStore
from qmq.node.process import Environment, EtcdOptions
from qmq.node.replica import repair
from qmq.process.address import host_of
from qmq.process.event_loop import Clock
from qmq.rpc.server_name import ServerName
from qmq.security.access import AccessConfig
from qmq.tiering.stored_reads import StoredBeginnings

if TYPE_CHECKING:
    from qmq_coordination.coordination_store import CoordinationStore

    from qmq.log.projection import Projection


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


log = logging.getLogger("qmq.node")

MEND_TRIES: Final = 1_000


class ProjectionFolder(Protocol):
    """The folder of the data that a replica derives from its log."""

    def projection(self) -> Projection | None:
        """Make the store's projection, if it has one. Each opening gets a new one."""
        ...

    def discard(self) -> None:
        """Delete everything derived from the log, because the log starts over."""
        ...


class StoreOpener:
    def __init__(
        self,
        context: ReplicaContext,
        projections: ProjectionFolder,
        stored: StoredBytes | None = None,
        beginnings: StoredBeginnings | None = None,
    ) -> None:
        """`stored` reads the segments that are in the object store only. A log that starts over begins with `beginnings`."""
        self._context = context
        self._stored = stored
        self._beginnings = beginnings
        self._projections = projections

    @property
    def _folder(self) -> Path:
        return self._context.folder

    async def open(self, *, is_resetting: bool) -> Store:
        """Open the store. Repair a damaged store from the others first. `is_resetting`: the log starts over. Raises LogDamaged."""
        if is_resetting:
            self._projections.discard()
            follower.start_over(self._folder, (0, 0))
        for _ in range(MEND_TRIES):
            try:
                return self.open_at()
            except LogDamaged as damage:
                if damage.position < 0 or not await self._mend(damage):
                    raise
        raise LogDamaged(
            f"{self._folder} has more than {MEND_TRIES} damaged entries: move the folder away and start again; "
            "the replica copies the data from the others"
        )

    async def _mend(self, damage: LogDamaged) -> bool:
        context = self._context
        where = context.donors(), self._folder, context.config.log.segment_bytes, damage
        return await repair.repair_folder(*where, context.environment.network, context.environment.disk)

    @property
    def begins_in_store(self) -> bool:
        """True if a log that starts over begins with the segments in the object store."""
        return self._beginnings is not None

    def stop(self) -> None:
        """Stop reading the object store, because the process ends."""
        if self._beginnings is not None:
            self._beginnings.stop()

    async def reopen(self, until: int | None, place: Place | None) -> Store:
        """As `open_at`, in a thread. A log that starts over begins with the segments that the object store has from that place on. Raises
        LogDamaged.
        """
        store = await self._begun_in_store(place) if place is not None else None
        return await asyncio.to_thread(self.open_at, until, place) if store is None else store

    async def _begun_in_store(self, place: Place) -> Store | None:
        """Open a store that begins with the segments in the object store. None if there are none, or the object store cannot be read now:
        all entries then come from the master.
        """
        if self._beginnings is None:
            return None
        try:
            segments = await asyncio.to_thread(self._beginnings.find, place[MESSAGES])
            if not segments:
                return None
            end = segments[-1].end
            opening = await repair.ask_entry(self._context.donors(), end, self._context.environment.network)
            if opening is None:
                raise CannotTake(f"no other replica says how the log continues at {end}")
            store = await asyncio.to_thread(self._open_with, self._beginnings, segments, (end, place[ACTIONS]), opening)
        except (CannotTake, DiskFull) as failure:
            log.warning("the log does not begin with the object store's segments, the master sends everything: %s", failure)
            return None
        log.info("the log begins with the object store's segments from %d to %d, the master sends what follows", place[MESSAGES], end)
        return store

    def _open_with(self, beginnings: StoredBeginnings, segments: list[SegmentIndex], place: Place, opening: PendingEntry) -> Store:
        """Begin with these segments, which end at `place`. Raises CannotTake, DiskFull."""
        store = self.open_at(None, place)
        try:
            take_segments(store, segments, beginnings.entries, opening)
        except BaseException:
            store.close()
            raise
        return store

    def open_at(self, until: int | None = None, place: Place | None = None) -> Store:
        """Open the store, with everything after index `until` cut, or with a log that starts over at a place. Raises LogDamaged."""
        if place is not None:
            follower.start_over(self._folder, place)
        return open_store(
            self._folder,
            self._context.config.log,
            self._context.clock,
            disk=self._context.environment.disk,
            is_replicated=True,
            until=until,
            projection=self._projections.projection(),
            stored=self._stored,
        )
