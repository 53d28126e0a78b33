"""The identity of a replica, kept across restarts: above all, its promise. One small file, replaced atomically and synced.

`boot` distinguishes a killed process from a machine that lost its power: with `Flush.ASYNC`, written data survives a killed process, but
perhaps not a power cut. `folder` is a random id of the folder; a replica with the same name but another folder has lost its data.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Final

from google_crc32c import value as crc32c

from qmq.errors import LogDamaged
from qmq.log.disk import Disk
from qmq_replication.ready import DurableState
from qmq_replication.replica_membership import ReplicaMembership

FILE: Final = "replica.json"
CLEAN: Final = "clean"
"""The value of `boot` after a normal end of the process, with everything flushed."""
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """An id that changes with each start of the machine. "" if unknown: each start of the process then counts as a start of the machine."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return ""


@dataclass(frozen=True, slots=True)
class ReplicaIdentity:
    """The file's content. `addresses` are the peers' data addresses as last known, for a start while the store is away."""

    group: str
    replica: str
    folder: str
    promised: int = 0
    is_whole: bool = True
    resetting_until: int = 0
    boot: str = ""
    membership: str = ""
    addresses: dict[str, str] = field(default_factory=dict)
    secret: str = field(default="", repr=False)
    """The last known secret of the group, with which its replicas prove themselves to each other (peer_proof.py)."""

    @property
    def state(self) -> DurableState:
        """The part of the identity that the core needs."""
        return DurableState(self.promised, self.is_whole, self.resetting_until)

    def with_state(self, state: DurableState) -> ReplicaIdentity:
        """A copy with another state."""
        return replace(self, promised=state.promised, is_whole=state.is_whole, resetting_until=state.resetting_until)

    def members(self) -> ReplicaMembership | None:
        """The last known membership."""
        return ReplicaMembership.decode(self.membership.encode()) if self.membership else None

    def save(self, disk: Disk, data: Path) -> None:
        """Write the file and sync it. Raises DiskFull, FlushFailed."""
        content = json.dumps(asdict(self), sort_keys=True)
        disk.replace(data / FILE, json.dumps({"crc": crc32c(content.encode()), "content": content}).encode())


def load(data: Path, group: str, replica: str, disk: Disk | None = None) -> ReplicaIdentity | None:
    """The folder's identity; None for a new folder. Raises LogDamaged if it cannot be read or is another replica's."""
    path = data / FILE
    if not path.exists():
        return None
    try:
        found = json.loads((disk or Disk()).read_file(path))
        if crc32c(found["content"].encode()) != found["crc"]:
            raise ValueError("the checksum is wrong")
        identity = ReplicaIdentity(**json.loads(found["content"]))
    except (ValueError, KeyError, TypeError) as cause:
        raise LogDamaged(
            f"{path.name} is damaged ({cause}): the promise of this replica is lost. Move its data folder away and start it again: "
            "it copies its data from the other replicas"
        ) from cause
    if (identity.group, identity.replica) != (group, replica):
        raise LogDamaged(f"this folder belongs to replica {identity.replica} of group {identity.group}, not {replica} of {group}")
    return identity


def new(group: str, replica: str) -> ReplicaIdentity:
    """The identity for a new folder."""
    return ReplicaIdentity(group, replica, os.urandom(8).hex(), boot=boot_id())
