"""Opens the store of a replica: at the start, repairing damage from the other replicas, and again while the replica runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from qmq.errors import LogDamaged
from qmq.log import follower
from qmq.log.cold_read import StoredBytes
from qmq.log.recent_writes import Place
from qmq.log.recovery import open_store
from qmq.log.store import Store
from qmq.node import replica_repair
from qmq.node.replica_context import ReplicaContext

if TYPE_CHECKING:
    from qmq.log.projection import Projection

MEND_TRIES: Final = 1_000


class ProjectionFolder(Protocol):
    """Where a replica keeps what is derived from its log."""

    def projection(self) -> Projection | None:
        """The store's projection, if it has one; a new one for each opening."""
        ...

    def discard(self) -> None:
        """Delete everything derived from the log, because the log starts over."""
        ...


class StoreOpener:
    def __init__(self, context: ReplicaContext, projections: ProjectionFolder, stored: StoredBytes | None = None) -> None:
        """`stored` reads the segments that are only in the object store."""
        self._context = context
        self._stored = stored
        self._projections = projections

    @property
    def _folder(self) -> Path:
        return self._context.folder

    async def open(self, *, is_resetting: bool) -> Store:
        """Open the store; if it is damaged, repair it from the others first. `is_resetting`: the log starts over. Raises LogDamaged."""
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
        return await replica_repair.repair_folder(*where, context.environment.network, context.environment.disk)

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
