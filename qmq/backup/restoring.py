"""`qmq backup restore`: a new cluster from a backup.

    the coordination store   one replica's data folder of each group
    ──────────────────────   ─────────────────────────────────────────
    1. `restored`: under way
    2. the backup's keys; for each group its next epoch, a new secret, and an empty membership
    3. `restored`: the keys are there
                             4. logs and schedule, each file flushed
                             5. `replica.json`: from now on it is a replica's folder
    6. the group's only member is this replica

No process can found a group before 6, since the group exists from 2 on and has no members. So a server that is started too early
waits, and cannot begin with an empty log. A crash anywhere is mended by the same command: it continues a restore of the same backup.
Groups on other machines are restored there, by the same command with their `--data`.

Every replica holds the same bytes, so one of each group is enough: others join it as after the loss of a machine (`qmq replica add`).
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from qmq_coordination.broker_groups import group_key
from qmq_coordination.coordination_store import CoordinationStore, Put, unchanged
from qmq_replication.coordinator import SECRET, new_secret
from qmq_replication.replica_membership import ReplicaMembership

from qmq.backup.backup_manifest import BackedUpGroup, BackupManifest
from qmq.backup.backup_objects import BackupObjects
from qmq.backup.cluster_items import RESTORED, Items, awaits_data, decode_items, delay_settings, group_items
from qmq.backup.new_cluster import RestoreMark, begin, known_mark, put_items
from qmq.backup.replica_folder import ReplicaFolderWriter, ReplicaTarget
from qmq.errors import BackupNotFound, CoordinationUnknown, NotEmpty
from qmq.log.disk import Disk
from qmq.model import check_name


class Restore:
    """A restore of one backup into one cluster."""

    def __init__(self, store: CoordinationStore, objects: BackupObjects, manifest: BackupManifest, disk: Disk | None = None) -> None:
        self._store = store
        self._objects = objects
        self._manifest = manifest
        self._disk = disk or Disk()

    async def run(self, targets: list[ReplicaTarget]) -> list[str]:
        """Restore the store's keys, if they are not there yet, and these replicas. Returns the groups whose data is still missing.

        Raises CoordinationError, StoreAway, BackupDamaged, InvalidArgument, InvalidName; NotEmpty, BackupNotFound; after these two, nothing
        was changed.
        """
        groups = {target.group: self._group(target) for target in targets}
        known = await known_mark(self._store, self._manifest.id)
        for target in targets:
            target.require_empty("" if known is None else known.token)
        mark, items = await self._restore_keys(known)
        for target in targets:
            await self._restore_replica(groups[target.group], target, items, mark)
        return [each.name for each in self._manifest.groups if await self._awaits_data(each.name)]

    def _group(self, target: ReplicaTarget) -> BackedUpGroup:
        check_name("replica", target.replica)
        found = self._manifest.group(target.group)
        if found is None:
            known = ", ".join(each.name for each in self._manifest.groups)
            raise BackupNotFound(f"backup {self._manifest.id} has no group {target.group!r}: it has {known}")
        return found

    # --- the coordination store ----------------------------------------------------------------------------------------

    async def _restore_keys(self, known: RestoreMark | None) -> tuple[RestoreMark, Items]:
        items = decode_items(await asyncio.to_thread(self._objects.read_bytes, self._manifest.items))
        mark = known or await begin(self._store, self._manifest.id)
        if not mark.has_keys:
            wanted = dict(items)
            for group in self._manifest.groups:
                wanted |= group_items(group, self._manifest.id, new_secret())
            await put_items(self._store, wanted)
            await put_items(self._store, {RESTORED: replace(mark, has_keys=True).encode()})
        return mark, items

    async def _awaits_data(self, group: str) -> bool:
        members = await self._store.get(group_key(group, "members"))
        return members is not None and awaits_data(members.value)

    # --- a replica's folder --------------------------------------------------------------------------------------------

    async def _restore_replica(self, group: BackedUpGroup, target: ReplicaTarget, items: Items, mark: RestoreMark) -> None:
        if not await self._awaits_data(group.name):
            if target.made_by() == mark.token:
                return  # an earlier attempt did it
            raise NotEmpty(f"the data of {group.name} is restored already: start its replica, and let others join by `qmq replica add`")
        secret = await self._secret(group.name)
        writer = ReplicaFolderWriter(self._objects, self._disk, target)
        await asyncio.to_thread(writer.write, group, delay_settings(items, group.name), secret, mark.token)
        await self._admit(group.name, target.membership)

    async def _secret(self, group: str) -> str:
        found = await self._store.get(group_key(group, SECRET))
        return "" if found is None else found.value.decode()

    async def _admit(self, group: str, membership: ReplicaMembership) -> None:
        key = group_key(group, "members")
        found = await self._store.get(key)
        if found is None or not awaits_data(found.value):
            raise NotEmpty(f"the data of {group} was restored into another folder meanwhile: delete this one")
        try:
            done = await self._store.txn([unchanged(found)], [Put(key, membership.encode())])
        except CoordinationUnknown:
            now = await self._store.get(key)
            if now is not None and now.value == membership.encode():
                return
            raise
        if not done.succeeded:
            raise NotEmpty(f"the data of {group} was restored into another folder meanwhile: delete this one")
