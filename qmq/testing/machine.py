"""A machine of the cluster: a server with its own environment, so that it can be killed.

To kill a machine, its network, disk and access to the coordination store are shut first, all at the
same moment. The machine's remaining objects have no effect after that, and are cleaned up. The
files stay as they were at that moment.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from qmq_coordination.broker_groups import DelaySettings
from qmq_coordination.embedded import EmbeddedStore
from qmq_coordination.view import ClusterView
from qmq_replication.driver import Driver
from qmq_replication.ready import Timing

from qmq.broker.config import BrokerConfig
from qmq.delay.config import DelayConfig
from qmq.log.disk import Disk
from qmq.log.log_config import LogConfig
from qmq.meta.server import MetaConfig, MetaServer
from qmq.node.broker import broker_node
from qmq.node.delay import DelayReplicaConfig, delay_log, delay_node
from qmq.node.process import Environment, EtcdOptions, process_status
from qmq.node.replica.context import ReplicaConfig
from qmq.node.replica.node import ReplicaNode
from qmq.process.address import UNIX
from qmq.process.event_loop import Clock, SystemClock
from qmq.testing.parties import Parties, PartyStore


class MortalDisk(Disk):
    """The real disk until `die`. After that every change fails;
    open files can be read and closed.
    """

    def __init__(self) -> None:
        self._is_dead = False

    def die(self) -> None:
        """Fail all changes from now on, as after the process was killed."""
        self._is_dead = True

    def _require_alive(self) -> None:
        if self._is_dead:
            raise OSError(errno.EIO, "the process was killed (a fault that the test asked for)")

    def open_append(self, path: Path) -> int:
        self._require_alive()
        return super().open_append(path)

    def write(self, fd: int, buffers: Sequence[bytes | memoryview], at: int) -> None:
        self._require_alive()
        super().write(fd, buffers, at)

    def truncate(self, fd: int, size: int) -> None:
        self._require_alive()
        super().truncate(fd, size)

    def sync(self, fd: int) -> None:
        self._require_alive()
        super().sync(fd)

    def sync_folder(self, folder: Path) -> None:
        self._require_alive()
        super().sync_folder(folder)

    def delete(self, path: Path) -> None:
        self._require_alive()
        super().delete(path)

    def replace(self, path: Path, data: bytes) -> None:
        self._require_alive()
        super().replace(path, data)

    def rewrite(self, path: Path, data: bytes) -> None:
        self._require_alive()
        super().rewrite(path, data)


DATA_PORT: Final = 1
CONTROL_PORT: Final = 2
TIMING: Final = Timing(
    heartbeat_ms=50,
    suspect_ms=300,
    lost_ms=60,
    poll_ms=60,
    fence_ms=1_000,
    quorum_ms=1_000,
    late_ms=90,
)
"""Elections take tenths of a second, since everything is in one process. A pause of this process
ends no mastership.
"""
DELAY: Final = DelayConfig(tick_ms=1, pause_ms=20)
"""Messages are due to the millisecond, because a clock that stops never reaches the next tick."""
_NOWHERE: Final = EtcdOptions(("127.0.0.1:1",))


@dataclass(frozen=True, slots=True)
class Site:
    """The shared parts of a cluster's machines. Sockets lie in `folder`, data in `folder`/data."""

    folder: Path
    store: EmbeddedStore
    parties: Parties
    clock: Clock
    log: LogConfig
    make_disk: Callable[[str], MortalDisk]
    """Makes the disk of a machine, by its name, at each start."""
    make_driver: Callable[..., Driver]
    """Makes the driver of a replica at each start."""

    def host(self, name: str) -> str:
        """The host on which a machine listens."""
        return f"{UNIX}{self.folder}/{name}"

    def data(self, name: str) -> Path:
        """The folder of a machine's files."""
        return self.folder / "data" / name


class ReplicaMachine:
    """A machine with a replica of a broker group, or, with `settings`, of a delay group."""

    def __init__(
        self,
        site: Site,
        group: str,
        name: str,
        replicas: tuple[str, ...],
        *,
        settings: DelaySettings | None = None,
        failed: Callable[[str, BaseException], None],
    ) -> None:
        self.name = name
        self.group = group
        self.node: ReplicaNode | None = None
        self.site = site
        self._replicas = replicas
        self._settings = settings
        self._failed = failed
        self._shut: Callable[[], None] | None = None

    @property
    def is_running(self) -> bool:
        """True if the machine was started and has not been killed since."""
        return self._shut is not None

    def shut(self) -> None:
        """Cut the machine off: from now on it has no effect outside."""
        if self._shut is not None:
            self._shut()

    @property
    def is_serving(self) -> bool:
        """True if the replica is its group's master, as far as it knows."""
        return self.is_running and self.node is not None and self.node.broker.is_serving

    @property
    def epoch(self) -> int:
        """The highest epoch that the replica promised."""
        return self.node.driver.core.state.promised if self.node is not None else 0

    async def start(self) -> None:
        """Start the machine on its files."""
        disk, network = self.site.make_disk(self.name), self.site.parties.network(self.name)

        def shut() -> None:
            self._shut = None
            disk.die()
            network.shut()

        def fatal(cause: BaseException) -> None:
            if self._shut is shut:
                shut()
                self._failed(self.name, cause)

        environment = Environment(
            self.site.clock,
            SystemClock(),
            disk,
            network,
            TIMING,
            fatal,
            make_driver=self.site.make_driver,
        )
        node = self._make(environment, PartyStore(self.site.store, network))
        self._shut = shut
        try:
            await node.start()
        except BaseException:
            shut()
            raise
        self.node = node

    def _make(self, environment: Environment, store: PartyStore) -> ReplicaNode:
        site, name = self.site, self.name
        place = (
            self.group,
            name,
            self._replicas,
            site.data(name),
            _NOWHERE,
            site.host(name),
            DATA_PORT,
            CONTROL_PORT,
        )
        broker = BrokerConfig(name)
        if self._settings is None:
            return broker_node(
                ReplicaConfig(*place, log=site.log, broker=broker), store, environment=environment
            )
        config = DelayReplicaConfig(
            *place, log=delay_log(), broker=broker, settings=self._settings, delay=DELAY
        )
        return delay_node(config, store, environment=environment)

    async def kill(self) -> None:
        """Shut the machine, and clean up."""
        node, self.node = self.node, None
        self.shut()
        if node is not None:
            await node.stop(abruptly=True)


class Metaserver:
    """A machine with a metaserver, which has no data."""

    def __init__(self, site: Site, name: str) -> None:
        self.name = name
        self.view: ClusterView | None = None
        self.site = site
        self._server: MetaServer | None = None
        self._shut: Callable[[], None] | None = None

    @property
    def is_running(self) -> bool:
        """True if the machine was started and has not been killed since."""
        return self._shut is not None

    def shut(self) -> None:
        """Cut the machine off: from now on it has no effect outside."""
        shut, self._shut = self._shut, None
        if shut is not None:
            shut()

    @property
    def address(self) -> str:
        return f"{self.site.host(self.name)}:{DATA_PORT}"

    async def start(self) -> None:
        network = self.site.parties.network(self.name)
        store = PartyStore(self.site.store, network)
        self.view, self._shut = ClusterView(store), network.shut
        await self.view.start()
        config = MetaConfig(self.site.host(self.name), DATA_PORT)
        self._server = MetaServer(
            store,
            self.view,
            config,
            clock=self.site.clock,
            network=network,
            process=process_status(config.host),
        )
        await self._server.start()

    async def kill(self) -> None:
        """Shut the machine, and clean up."""
        self.shut()
        if self._server is not None:
            await self._server.stop()
            self._server = None
        if self.view is not None:
            await self.view.stop()
            self.view = None


Machine = ReplicaMachine | Metaserver
