"""Opens the store of a replica: at the start, with repair of damage from the other replicas, and again while the replica runs."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from qmq.errors import DiskFull, LogDamaged
from qmq.log import follower
from qmq.log.cold_read import StoredBytes
from qmq.log.recent_writes import ACTIONS, MESSAGES, Place
from qmq.log.recovery import open_store
from qmq.log.segment_index import SegmentIndex
from qmq.log.store import PendingEntry, Store
from qmq.log.taken_segments import CannotTake, take_segments
from qmq.node import replica_repair
from qmq.node.replica_context import ReplicaContext
from qmq.tiering.stored_beginning import StoredBeginnings

if TYPE_CHECKING:
    from qmq.log.projection import Projection

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
        return await replica_repair.repair_folder(*where, context.environment.network, context.environment.disk)

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
            opening = await replica_repair.ask_entry(self._context.donors(), end, self._context.environment.network)
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
