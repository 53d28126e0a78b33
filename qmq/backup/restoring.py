"""`qmq backup restore`: a new cluster from a backup.

    the coordination store   one replica's data folder of each group
    ──────────────────────   ─────────────────────────────────────────
    1. `restored`: under way
    2. the backup's keys; for each group its next epoch, a new secret, and a membership of nobody
    3. `restored`: the keys are there
                             4. logs and schedule, each file flushed
                             5. `replica.json`: from now on it is a replica's folder
    6. the group's only member is this replica

No process can found a group before 6, since the group exists from 2 on and nobody is its member. So a server that is started too early
waits, and cannot begin with an empty log. A crash anywhere is mended by the same command: it continues a restore of the same backup.
Groups on other machines are restored there, by the same command with their `--data`.

Every replica holds the same bytes, so one of each group is enough: others join it as after the loss of a machine (`qmq replica add`).
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Final

from qmq_coordination.broker_groups import group_key
from qmq_coordination.coordination_store import CoordinationStore, Put, absent, unchanged
from qmq_replication.coordinator import SECRET, new_secret
from qmq_replication.replica_membership import ReplicaMembership

from qmq.backup.backup_manifest import BackedUpGroup, BackupManifest
from qmq.backup.backup_objects import BackupObjects
from qmq.backup.cluster_items import RESTORED, ROOT, Items, awaits_data, decode_items, delay_settings, group_items
from qmq.backup.replica_folder import ReplicaFolderWriter, ReplicaTarget
from qmq.errors import BackupNotFound, CoordinationUnknown, NotEmpty
from qmq.log.disk import Disk
from qmq.model import check_name

KEYS_PUT: Final = 64
"""In one transaction: etcd takes 128 operations and 1.5 MiB."""
BYTES_PUT: Final = 1 << 19


@dataclass(frozen=True, slots=True)
class RestoreMark:
    """A restore, as the coordination store knows it."""

    backup: str
    token: str
    """Also in the folders that it made, so that one of another cluster is never taken for one of this."""
    has_keys: bool = False

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> RestoreMark:
        return cls(**json.loads(data))


class Restore:
    """Of one backup into one cluster."""

    def __init__(self, store: CoordinationStore, objects: BackupObjects, manifest: BackupManifest, disk: Disk | None = None) -> None:
        self._store = store
        self._objects = objects
        self._manifest = manifest
        self._disk = disk or Disk()

    async def run(self, targets: list[ReplicaTarget]) -> list[str]:
        """Restore the store's keys, if they are not there yet, and these replicas. Returns the groups whose data is still missing.

        Raises CoordinationError, StoreAway, BackupDamaged, InvalidArgument, InvalidName; NotEmpty, BackupNotFound: nothing was changed.
        """
        groups = {target.group: self._group(target) for target in targets}
        known = await self._known()
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

    async def _known(self) -> RestoreMark | None:
        """The restore of this backup that was begun here. Raises NotEmpty."""
        found = await self._store.get(RESTORED)
        known = None if found is None else RestoreMark.decode(found.value)
        if known is not None and known.backup == self._manifest.id:
            return known
        if (await self._store.list(ROOT, limit=1)).items:
            raise NotEmpty("the coordination store has a cluster already: restore into a new etcd, or into another namespace")
        return None

    async def _restore_keys(self, known: RestoreMark | None) -> tuple[RestoreMark, Items]:
        items = decode_items(await asyncio.to_thread(self._objects.read_bytes, self._manifest.items))
        mark = known or await self._begun()
        if not mark.has_keys:
            wanted = dict(items)
            for group in self._manifest.groups:
                wanted |= group_items(group, self._manifest.id, new_secret())
            await self._put_all(wanted)
            await self._put([Put(RESTORED, replace(mark, has_keys=True).encode())])
        return mark, items

    async def _begun(self) -> RestoreMark:
        mark = RestoreMark(self._manifest.id, secrets.token_hex(8))
        done = await self._store.txn([absent(RESTORED)], [Put(RESTORED, mark.encode())])
        if not done.succeeded:
            raise NotEmpty("another restore into this coordination store has begun at this moment")
        return mark

    async def _put_all(self, items: Mapping[str, bytes]) -> None:
        puts: list[Put] = []
        size = 0
        for key, value in sorted(items.items()):
            if puts and (len(puts) == KEYS_PUT or size + len(key) + len(value) > BYTES_PUT):
                await self._put(puts)
                puts, size = [], 0
            puts.append(Put(key, value))
            size += len(key) + len(value)
        await self._put(puts)

    async def _put(self, puts: list[Put]) -> None:
        """The servers are not running, so a put that arrives late finds what it would write."""
        try:
            await self._store.txn([], puts)
        except CoordinationUnknown:
            await self._store.txn([], puts)

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
