"""The identity of a replica, kept across restarts: above all, its promise. One small file, replaced
atomically and synced, also on a full disk: it never needs more space than it has (`Disk.rewrite`).

`boot` distinguishes a killed process from a machine that lost its power: with `Flush.ASYNC`,
written data survives a killed process, but perhaps not a power cut. `folder` is a random id of the
folder; a replica with the same name but another folder has lost its data.

`generation` shows an older copy of a folder that is put in its place. It grows with each start and
about once a minute while the replica works: first in the folder, then at the replica's record in
the coordination store. So the store's generation is never the higher one, unless the replica
continued after the folder was copied.

    generation 4 in the folder, 4 or 3 in the store     the latest folder; 3 if the process died
                                                        before the store had the 4
    generation 4 in the folder, 6 in the store          an older copy: it may lack what generations
                                                        4 to 6 acknowledged and promised
    the store's record names another folder             the same, or a new folder
    `registered` is 4, and the store has 3              the store has forgotten what it had: its
                                                        data was put back
    none in both                                        the replica ran release 0.2.0 last, which
                                                        keeps and registers none

The generations and the cluster's identity stand beside the content of the file, where release 0.2.0
does not see them: it drops them when it saves.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Final

from google_crc32c import value as crc32c

from qmq.errors import LogDamaged, WrongServer
from qmq.log.disk import Disk
from qmq_replication.membership import ReplicaMembership
from qmq_replication.ready import DurableState

FILE: Final = "replica.json"
CLEAN: Final = "clean"
"""The value of `boot` after a normal end of the process, with everything flushed."""
_BESIDE: Final = ("generation", "registered", "cluster")
_NONE: Final = crc32c(b"{}")
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """An id that changes with each start of the machine. "" if unknown: each start of the process
    then counts as a start of the machine.
    """
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return ""


@dataclass(frozen=True, slots=True)
class ReplicaIdentity:
    """The file's content. `addresses` are the peers' data addresses as last known, for a start
    while the store is away.
    """

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
    """The last known secret of the group,
    with which its replicas prove themselves to each other (links.py).
    """
    generation: int = 0
    registered: int = 0
    """The highest generation of this folder that the coordination store is known to have had."""
    cluster: str = ""
    """The identity of the cluster (qmq_coordination/broker_groups.py);
    empty before the first registration.
    """

    @property
    def state(self) -> DurableState:
        """The part of the identity that the core needs."""
        return DurableState(self.promised, self.is_whole, self.resetting_until)

    def with_state(self, state: DurableState) -> ReplicaIdentity:
        """A copy with another state."""
        return replace(
            self,
            promised=state.promised,
            is_whole=state.is_whole,
            resetting_until=state.resetting_until,
        )

    def members(self) -> ReplicaMembership | None:
        """The last known membership."""
        return ReplicaMembership.decode(self.membership.encode()) if self.membership else None

    def is_older_than(self, folder: str, generation: int) -> bool:
        """True if the replica ran after this folder was copied: with another folder, or in a later
        generation of this one. The arguments are those of its record in the coordination store.
        """
        ran_without = (
            not generation and self.registered > 0
        )  # release 0.2.0 registered last, and it would have dropped ours from the file
        return folder not in ("", self.folder) or self.generation < generation or ran_without

    def shows_older_store(self, folder: str, generation: int) -> bool:
        """True if the coordination store has forgotten a generation of this folder that it had."""
        return folder == self.folder and generation < self.registered

    def grown(self, folder: str, generation: int) -> ReplicaIdentity:
        """The next generation, given the one that the coordination store has."""
        known = generation if folder == self.folder else 0
        return replace(
            self,
            generation=max(self.generation, generation) + 1,
            registered=max(self.registered, known),
        )

    def save(self, disk: Disk, data: Path) -> None:
        """Write the file and sync it. Raises DiskFull, FlushFailed."""
        fields = asdict(self)
        generations = json.dumps({name: fields.pop(name) for name in _BESIDE}, sort_keys=True)
        content = json.dumps(fields, sort_keys=True)
        found = {"crc": crc32c(content.encode()), "content": content}
        found |= {"generations_crc": crc32c(generations.encode()), "generations": generations}
        disk.rewrite(data / FILE, json.dumps(found).encode())


def load(data: Path, group: str, replica: str, disk: Disk | None = None) -> ReplicaIdentity | None:
    """The folder's identity; None for a new folder. Raises LogDamaged if it cannot be read or is
    another replica's.
    """
    path = data / FILE
    if not path.exists():
        return None
    try:
        found = json.loads((disk or Disk()).read_file(path))
        generations = found.get("generations", "{}")
        if crc32c(found["content"].encode()) != found["crc"] or crc32c(
            generations.encode()
        ) != found.get("generations_crc", _NONE):
            raise ValueError("the checksum is wrong")
        identity = ReplicaIdentity(**json.loads(found["content"]), **json.loads(generations))
    except (ValueError, KeyError, TypeError, AttributeError) as cause:
        raise LogDamaged(
            f"{path.name} is damaged ({cause}): the promise of this replica is lost. Move its data "
            "folder away and start it again: it copies its data from the other replicas"
        ) from cause
    if (identity.group, identity.replica) != (group, replica):
        raise LogDamaged(
            f"this folder belongs to replica {identity.replica} of group {identity.group}, "
            f"not {replica} of {group}"
        )
    return identity


def require_cluster(identity: ReplicaIdentity, cluster: str) -> None:
    """Raise WrongServer if the coordination store is that of another cluster than the folder's.
    Empty: not known.
    """
    if identity.cluster and cluster not in ("", identity.cluster):
        raise WrongServer(
            f"the folder of {identity.replica} belongs to cluster {identity.cluster}, "
            f"and the coordination store has cluster {cluster}: correct the addresses of etcd. "
            "To use this replica in the other cluster, move its folder away first"
        )


def new(group: str, replica: str) -> ReplicaIdentity:
    """The identity for a new folder."""
    return ReplicaIdentity(group, replica, os.urandom(8).hex(), boot=boot_id())
