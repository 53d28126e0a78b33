"""`qmq backup create`, in these steps:

    1. write a mark, so that no prune deletes chunks that the backup needs (qmq/backup/running_marks.py)
    2. read the newest backup's manifest: the new backup refers to its sealed segments instead of copying them
    3. each delay group's newest checkpoint, before the moment, so that the logs go further than it
    4. the moment (qmq/backup/moment.py)
    5. the coordination store's keys, each group's logs and schedule
    6. write the manifest; then check that the mark still exists

A crash anywhere before 6 leaves chunks that the next backup finds, and no backup. Nothing is ever overwritten.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

import grpc
from qmq_coordination.broker_groups import GROUPS, BrokerGroupState, group_states
from qmq_coordination.coordination_store import CoordinationStore

import qmq
from qmq.backup.backup_manifest import VERSION, BackedUpGroup, BackedUpSchedule, BackupManifest, manifest_name, new_id
from qmq.backup.backup_objects import BackupObjects
from qmq.backup.cluster_items import encode_items, kept
from qmq.backup.log_reading import GroupLogReader, ScheduleReader
from qmq.backup.moment import HeldGroup, find_moment, master_name
from qmq.backup.running_marks import Mark, RunningMarks, Work
from qmq.errors import BackupDamaged, BackupNotFound, Unavailable
from qmq.network import Network
from qmq.proto.v1 import control_pb2_grpc, delay_pb2, delay_pb2_grpc
from qmq.server_name import always

log = logging.getLogger("qmq.backup")

TRIES: Final = 3
PRUNE_POLL_S: Final = 1.0

Progress = Callable[[int, int], None]
"""Called with the bytes done and the bytes in all."""


def _untold(_done: int, _total: int) -> None:
    return


class BackupCreator:
    def __init__(
        self,
        store: CoordinationStore,
        network: Network,
        objects: BackupObjects,
        *,
        now_ms: Callable[[], int],
        progress: Progress = _untold,
    ) -> None:
        self._store = store
        self._network = network
        self._objects = objects
        self._marks = RunningMarks(objects.store)
        self._now_ms = now_ms
        self._progress = progress
        self._done = self._total = 0

    async def create(self) -> BackupManifest:
        """Raises CoordinationError, Unavailable, LogDamaged, StoreAway, BackupDamaged, BackupVersion."""
        for tries_left in reversed(range(TRIES)):
            try:
                return await self._marked()
            except Unavailable as failure:
                if not tries_left:
                    raise
                log.warning("the backup begins again: %s", failure)
        raise AssertionError("the last try returns or raises")

    async def _marked(self) -> BackupManifest:
        mark = await asyncio.to_thread(self._marks.put, Work.CREATE, self._now_ms())
        try:
            await self._until_nobody_prunes(mark)
            manifest = await self._create()
            if not await asyncio.to_thread(self._marks.is_there, mark):
                await asyncio.to_thread(self._objects.store.delete, manifest_name(manifest.id))
                raise Unavailable("the backup took over a day, and backups were pruned meanwhile: it may lack objects, create it again")
            return manifest
        finally:
            await asyncio.to_thread(self._marks.end, mark)

    async def _until_nobody_prunes(self, own: Mark) -> None:
        while any(each.work is Work.PRUNE and each.counts(self._now_ms()) for each in await asyncio.to_thread(self._marks.others, own)):
            log.info("backups are pruned here: waiting until that has ended")
            await asyncio.sleep(PRUNE_POLL_S)

    async def _create(self) -> BackupManifest:
        previous = await asyncio.to_thread(self._previous)
        schedules = await self._describe_schedules()
        moment = await find_moment(self._store, self._network)
        time_ms = self._now_ms()
        self._done, self._total = 0, sum(_log_bytes(each) for each in moment.groups)
        items = await asyncio.to_thread(self._objects.put_bytes, encode_items(kept(moment.listing.items)))
        groups = [await self._back_up(each, schedules.get(each.state.name), previous) for each in moment.groups]
        manifest = BackupManifest(
            VERSION,
            new_id(time_ms),
            time_ms,
            moment.listing.revision,
            qmq.__version__,
            items,
            tuple(groups),
            self._objects.copied_bytes,
        )
        await asyncio.to_thread(self._objects.put_manifest, manifest)
        return manifest

    def _previous(self) -> BackupManifest | None:
        try:
            return self._objects.manifest()
        except BackupNotFound:
            return None
        except BackupDamaged as failure:
            log.warning("this backup copies all data, because the previous backup cannot be read: %s", failure)
            return None

    async def _describe_schedules(self) -> dict[str, delay_pb2.ScheduleDescription]:
        found: dict[str, delay_pb2.ScheduleDescription] = {}
        for name, state in group_states(await self._store.list(GROUPS)).items():
            if state.delay is None or state.master is None:
                continue
            address = state.master.control_address
            async with self._channel(state, address) as channel:
                described = await ScheduleReader(address, delay_pb2_grpc.DelayControlStub(channel), self._objects, self._told).describe()
            if described is not None:
                found[name] = described
        return found

    async def _back_up(
        self, held: HeldGroup, described: delay_pb2.ScheduleDescription | None, previous: BackupManifest | None
    ) -> BackedUpGroup:
        state, address = held.state, held.control_address
        lineage = state.lineage
        before = None if previous is None else previous.group(state.name)
        known = ((), ()) if before is None or before.lineage != lineage else before.logs
        schedule: BackedUpSchedule | None = None
        if state.delay is not None and described is None and held.logs.message.bases[0]:
            raise Unavailable(f"{state.name} has written no checkpoint of its schedule yet: try again in a minute")
        async with self._channel(state, address) as channel:
            if described is not None:
                reader = ScheduleReader(address, delay_pb2_grpc.DelayControlStub(channel), self._objects, self._told)
                schedule = await reader.read(described)
            logs = GroupLogReader(address, control_pb2_grpc.BrokerControlStub(channel), self._objects, self._told)
            message = await logs.segments(0, held.logs.message, known[0])
            action = await logs.segments(1, held.logs.action, known[1])
        return BackedUpGroup(state.name, lineage, held.logs.index, held.logs.epoch, message, action, schedule)

    def _told(self, size: int) -> None:
        self._done += size
        self._progress(self._done, max(self._total, self._done))

    @asynccontextmanager
    async def _channel(self, state: BrokerGroupState, address: str) -> AsyncIterator[grpc.aio.Channel]:
        channel: Any = self._network.channel(address, always(master_name(state)))
        try:
            yield channel
        finally:
            await channel.close()


def _log_bytes(held: HeldGroup) -> int:
    return sum(each.end - each.bases[0] for each in (held.logs.message, held.logs.action))
