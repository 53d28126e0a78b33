"""`qmq backup restore`: a new cluster from a backup.

    the coordination store   one replica's data folder of each group
    ──────────────────────   ─────────────────────────────────────────
    1. `restored`: under way
    2. the backup's keys; for each group its next epoch, a new secret, and an empty membership
    3. `restored`: the keys are there
                             4. logs and schedule, each file flushed
                             5. `replica.json`: from now on it is a replica's folder
    6. the group's only member is this replica

No process can found a group before 6, since the group exists from 2 on and has no members. So a
server that is started too early waits, and cannot begin with an empty log. A crash anywhere is
mended by the same command: it continues a restore of the same backup. Groups on other machines are
restored there, by the same command with their `--data`.

Every replica holds the same bytes, so one of each group is enough: others join it as after the loss
of a machine (`qmq replica add`). The calls that write a replica's data folder block.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from qmq_coordination.broker_groups import DelaySettings, group_key
from qmq_coordination.coordination_store import CoordinationStore, Put, absent, unchanged
from qmq_replication import identity
from qmq_replication.coordinator import SECRET, new_secret
from qmq_replication.membership import ReplicaMembership
from qmq_replication.ready import DurableState

from qmq.backup.manifest import (
    RESTORED,
    ROOT,
    BackedUpGroup,
    BackupManifest,
    ChunkedBytes,
    Items,
    awaits_data,
    decode_items,
    delay_settings,
    group_items,
)
from qmq.backup.objects import BackupObjects
from qmq.delay.files import SCHEDULE
from qmq.delay.schedule import Schedule
from qmq.errors import BackupNotFound, CoordinationUnknown, InvalidArgument, NotEmpty
from qmq.log.disk import Disk
from qmq.log.segments import segment_name
from qmq.model import check_name
from qmq.node import process
from qmq.process.files import make_private

KEYS_PUT: Final = 64
"""Operations in one transaction. etcd allows 128 operations and 1.5 MiB."""
BYTES_PUT: Final = 1 << 19


@dataclass(frozen=True, slots=True)
class RestoreMark:
    """The record of a restore in the coordination store."""

    backup: str
    token: str
    """The token is also in the folders that the restore made, so that a folder of another cluster
    is never used for this one.
    """
    has_keys: bool = False

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> RestoreMark:
        return cls(**json.loads(data))


async def known_mark(store: CoordinationStore, backup: str) -> RestoreMark | None:
    """The mark of an interrupted restore of this backup.
    Raises NotEmpty if the store has other keys.
    """
    found = await store.get(RESTORED)
    known = None if found is None else RestoreMark.decode(found.value)
    if known is not None and known.backup == backup:
        return known
    if (await store.list(ROOT, limit=1)).items:
        raise NotEmpty(
            "the coordination store has a cluster already: restore into a new etcd, or into "
            "another namespace"
        )
    return None


async def begin(store: CoordinationStore, backup: str) -> RestoreMark:
    """Raises NotEmpty."""
    mark = RestoreMark(backup, secrets.token_hex(8))
    done = await store.txn([absent(RESTORED)], [Put(RESTORED, mark.encode())])
    if not done.succeeded:
        raise NotEmpty("another restore into this coordination store has begun at this moment")
    return mark


async def put_items(store: CoordinationStore, items: Mapping[str, bytes]) -> None:
    """Put keys, in as few transactions as etcd allows. No server runs yet, so a late put only finds
    the value that it would write.
    """
    puts: list[Put] = []
    size = 0
    for key, value in sorted(items.items()):
        if puts and (len(puts) == KEYS_PUT or size + len(key) + len(value) > BYTES_PUT):
            await _put(store, puts)
            puts, size = [], 0
        puts.append(Put(key, value))
        size += len(key) + len(value)
    await _put(store, puts)


async def _put(store: CoordinationStore, puts: list[Put]) -> None:
    try:
        await store.txn([], puts)
    except CoordinationUnknown:
        await store.txn([], puts)


MARK_FILE: Final = "restored.json"
"""The file in a data folder with the token of the restore that made the folder."""


@dataclass(frozen=True, slots=True)
class ReplicaTarget:
    """The target of a group's data: a replica's name and its data folder."""

    group: str
    replica: str
    data: Path

    @property
    def membership(self) -> ReplicaMembership:
        """The group's first membership. Other replicas join later."""
        return ReplicaMembership(1, (self.replica,))

    def made_by(self) -> str:
        """The token of the restore that made the folder; empty without one."""
        try:
            return str(json.loads((self.data / MARK_FILE).read_bytes()))
        except (FileNotFoundError, ValueError):
            return ""

    def require_empty(self, token: str) -> None:
        """Check the folder. Raises InvalidArgument; NotEmpty if the folder has files of something
        else than the restore with this token.
        """
        data = self.data
        if data.exists() and not data.is_dir():
            raise InvalidArgument(f"{data} is a file: give a folder")
        if not data.is_dir() or (token and self.made_by() == token):
            return
        if {each.name for each in data.iterdir()} - {f"{MARK_FILE}.tmp"}:
            raise NotEmpty(f"{data} is not empty: restore into a new folder")


class ReplicaFolderWriter:
    def __init__(self, objects: BackupObjects, disk: Disk, target: ReplicaTarget) -> None:
        self._objects = objects
        self._disk = disk
        self._target = target

    def write(
        self, group: BackedUpGroup, settings: DelaySettings | None, secret: str, token: str
    ) -> None:
        """Write the folder from the beginning, with the replica's identity last. Raises StoreAway,
        BackupDamaged, DiskFull, FlushFailed.
        """
        data, disk = self._target.data, self._disk
        make_private(data)
        disk.replace(data / MARK_FILE, json.dumps(token).encode())
        store = data / "broker"
        shutil.rmtree(store, ignore_errors=True)
        for name, segments in zip(("message", "action"), group.logs, strict=True):
            make_private(store / name)
            for segment in segments:
                self._write(store / name / segment_name(segment.base), segment.content)
            disk.sync_folder(store / name)
        if group.schedule is not None:
            make_private(store / SCHEDULE)
            for file in group.schedule.files:
                self._write(store / SCHEDULE / file.name, file.content)
            Schedule.adopt(store / SCHEDULE, self._objects.read_bytes(group.schedule.state), disk)
        disk.sync_folder(store)
        process.note_folder(disk, data, settings)
        self._identity(group, secret).save(disk, data)

    def _identity(self, group: BackedUpGroup, secret: str) -> identity.ReplicaIdentity:
        """The identity of a replica with all data, which has promised no epoch of the log."""
        new = identity.new(group.name, self._target.replica)
        known = replace(
            new,
            boot=identity.CLEAN,
            membership=self._target.membership.encode().decode(),
            secret=secret,
        )
        return known.with_state(DurableState(group.epoch, is_whole=True, resetting_until=0))

    def _write(self, path: Path, content: ChunkedBytes) -> None:
        fd = self._disk.open_append(path)
        try:
            at = 0
            for chunk in self._objects.read_chunks(content):
                self._disk.write(fd, [chunk], at)
                at += len(chunk)
            self._disk.sync(fd)
        finally:
            self._disk.close(fd)


class Restore:
    """A restore of one backup into one cluster."""

    def __init__(
        self,
        store: CoordinationStore,
        objects: BackupObjects,
        manifest: BackupManifest,
        disk: Disk | None = None,
    ) -> None:
        self._store = store
        self._objects = objects
        self._manifest = manifest
        self._disk = disk or Disk()

    async def run(self, targets: list[ReplicaTarget]) -> list[str]:
        """Restore the store's keys, if they are not there yet, and these replicas. Returns the
        groups whose data is still missing.

        Raises CoordinationError, StoreAway, BackupDamaged, InvalidArgument, InvalidName; NotEmpty,
        BackupNotFound; after these two, nothing was changed.
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
            raise BackupNotFound(
                f"backup {self._manifest.id} has no group {target.group!r}: it has {known}"
            )
        return found

    # --- the coordination store -------------------------------------------------------------------

    async def _restore_keys(self, known: RestoreMark | None) -> tuple[RestoreMark, Items]:
        items = decode_items(
            await asyncio.to_thread(self._objects.read_bytes, self._manifest.items)
        )
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

    # --- a replica's folder -----------------------------------------------------------------------

    async def _restore_replica(
        self, group: BackedUpGroup, target: ReplicaTarget, items: Items, mark: RestoreMark
    ) -> None:
        if not await self._awaits_data(group.name):
            if target.made_by() == mark.token:
                return  # an earlier attempt did it
            raise NotEmpty(
                f"the data of {group.name} is restored already: start its replica, and let "
                "others join by `qmq replica add`"
            )
        secret = await self._secret(group.name)
        writer = ReplicaFolderWriter(self._objects, self._disk, target)
        await asyncio.to_thread(
            writer.write, group, delay_settings(items, group.name), secret, mark.token
        )
        await self._admit(group.name, target.membership)

    async def _secret(self, group: str) -> str:
        found = await self._store.get(group_key(group, SECRET))
        return "" if found is None else found.value.decode()

    async def _admit(self, group: str, membership: ReplicaMembership) -> None:
        key = group_key(group, "members")
        found = await self._store.get(key)
        if found is None or not awaits_data(found.value):
            raise NotEmpty(
                f"the data of {group} was restored into another folder meanwhile: delete this one"
            )
        try:
            done = await self._store.txn([unchanged(found)], [Put(key, membership.encode())])
        except CoordinationUnknown:
            now = await self._store.get(key)
            if now is not None and now.value == membership.encode():
                return
            raise
        if not done.succeeded:
            raise NotEmpty(
                f"the data of {group} was restored into another folder meanwhile: delete this one"
            )
