"""Writes one group of a backup into the data folder of a replica. The calls block."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from qmq_coordination.broker_groups import DelaySettings
from qmq_replication import replica_identity as identities
from qmq_replication.ready import DurableState
from qmq_replication.replica_membership import ReplicaMembership

from qmq.backup.backup_manifest import BackedUpGroup, ChunkedBytes
from qmq.backup.backup_objects import BackupObjects
from qmq.delay.schedule import Schedule
from qmq.errors import InvalidArgument, NotEmpty
from qmq.log.disk import Disk
from qmq.log.segments import segment_name
from qmq.node import bootstrap
from qmq.node.schedule_files import SCHEDULE
from qmq.private_files import make_private

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
        """Check the folder. Raises InvalidArgument; NotEmpty if the folder has files of something else than the restore with this token."""
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

    def write(self, group: BackedUpGroup, settings: DelaySettings | None, secret: str, token: str) -> None:
        """Write the folder from the beginning, with the replica's identity last. Raises StoreAway, BackupDamaged, DiskFull, FlushFailed."""
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
        bootstrap.note_folder(disk, data, settings)
        self._identity(group, secret).save(disk, data)

    def _identity(self, group: BackedUpGroup, secret: str) -> identities.ReplicaIdentity:
        """The identity of a replica with all data, which has promised no epoch of the log."""
        new = identities.new(group.name, self._target.replica)
        known = replace(new, boot=identities.CLEAN, membership=self._target.membership.encode().decode(), secret=secret)
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
