"""The delay group of `qmq dev`, in the same process as its broker.

It is one replica, which is its master. It finds the real-time broker as in a cluster, through the
coordination store and a connection to its data port. So there is one delivery path.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from qmq_coordination.broker_groups import DelaySettings
from qmq_coordination.coordination_store import CoordinationStore
from qmq_coordination.view import ClusterView

from qmq.broker.broker import Broker, MakeParts
from qmq.broker.config import BrokerConfig
from qmq.broker.control import ProcessParts
from qmq.broker.maintenance import stop_process
from qmq.delay.broker import DelayWork
from qmq.delay.config import DelayConfig
from qmq.delay.files import SCHEDULE, ReplicaScheduleFiles
from qmq.delay.schedule import Schedule
from qmq.delay.service import DelayIdentity, DelayService
from qmq.errors import LogDamaged
from qmq.log.disk import Disk
from qmq.log.log_config import LogConfig
from qmq.log.recovery import Progress, open_store
from qmq.node.broker_assembly import ViewLocator
from qmq.node.metrics.broker import DelaySource
from qmq.node.single_replica import SingleReplica
from qmq.process.event_loop import Clock

if TYPE_CHECKING:
    from qmq.client.connection.pool import ConnectionPool
    from qmq.metrics.figures import FigureSource


@dataclass(frozen=True, slots=True)
class DelayPartConfig:
    """The delay group's folder and settings."""

    folder: Path
    log: LogConfig
    broker: BrokerConfig
    settings: DelaySettings
    delay: DelayConfig


class DelayPart:
    """The delay group. The constructor opens the store, and raises the errors of `open_store`."""

    def __init__(
        self,
        config: DelayPartConfig,
        clock: Clock,
        coordination: CoordinationStore,
        view: ClusterView,
        *,
        progress: Progress,
        parts: ProcessParts,
    ) -> None:
        folder, broker, settings = config.folder, config.broker, config.settings
        self.clock = clock
        disk = Disk()
        schedule = Schedule(folder / SCHEDULE, disk, settings.bucket_ms)
        store = open_store(
            folder, config.log, clock, disk=disk, progress=progress, projection=schedule
        )
        if not schedule.is_whole:
            store.close()
            raise LogDamaged(
                f"{folder}: the checkpoints are missing, and the log no longer reaches back "
                "to the beginning: restore a copy"
            )
        self._locator = ViewLocator(coordination, view, parts.network)

        self.work = DelayWork(broker.name, settings, config.delay, clock, self._links, stop_process)
        kind = self.work.parts(parts.access)

        def make_broker(make_parts: MakeParts) -> Broker:
            loop = asyncio.get_running_loop()
            return Broker(
                store,
                view.subject,
                clock,
                broker,
                loop,
                make_parts=make_parts,
                is_serving=False,
            )

        self._part = SingleReplica(make_broker, coordination, view, parts=parts, kind=kind)
        self.broker = self._part.broker
        files = ReplicaScheduleFiles(folder, lambda: True)
        identity = DelayIdentity(broker.name, broker.name, settings.bucket_ms)
        self._service = DelayService(
            identity, lambda: self.work.admin if self.broker.is_serving else None, files
        )

    def _links(self) -> ConnectionPool:
        return self._locator.links("qmq-delay/dev")

    async def start(
        self, host: str, data_port: int, control_port: int, *, advertise: str = ""
    ) -> None:
        """Serve clients. Raises OSError if a port is taken."""
        self.broker.serve(self.broker.store)
        await self._part.start(
            host, data_port, control_port, also=self._service.add_to, advertise=advertise
        )

    @property
    def data_port(self) -> int:
        return self._part.data_port

    def sources(self) -> list[FigureSource]:
        """The sources of its metrics."""
        return [*self._part.sources(), DelaySource(self.broker, self.work, self.broker.config.name)]

    async def retire(self) -> None:
        """Stop delivering and accepting messages."""
        await self._part.retire()
        await self.work.stop()
        self._locator.close()

    async def stop(self) -> None:
        """Finish the requests under way, and end."""
        await self._part.stop()

    def close(self) -> None:
        self._part.close()
