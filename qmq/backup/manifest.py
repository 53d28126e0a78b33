"""What a backup holds: its manifest with the digest of each chunk, and keys of the coordination
store. Pure.

A chunk's name is the digest of its bytes. So a chunk is never written twice, backups share the
chunks that they have in common, and a chunk that changed is found by its name alone.

Whoever can write the object store can write a manifest. So the types refuse what would become
another path, object or key.

A backup leaves out the keys of the old cluster's processes and machines (leased keys, addresses,
memberships, assignments) and its secrets: a new cluster makes its own.

    /qmq/restored
        the backup from which this cluster was made, and the progress of the restore; absent in
        others
        removed by nobody
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from hashlib import blake2b
from typing import Final

import msgspec
from qmq_coordination.access_records import SERVER_TOKEN
from qmq_coordination.broker_groups import (
    GROUPS,
    PRESENCE,
    REPLICAS,
    DelaySettings,
    EpochClaim,
    group_key,
)
from qmq_coordination.coordination_store import KeyValue
from qmq_replication.membership import ReplicaMembership

from qmq.delay.buckets import is_file_name
from qmq.errors import BackupDamaged, BackupVersion, InvalidName
from qmq.log.segment_index import UNREADABLE, checked_payload, with_checksum
from qmq.model import check_name
from qmq.process.event_loop import time_of

VERSION: Final = 1
CHUNK_PREFIX: Final = "chunks"
MANIFEST_PREFIX: Final = "backups"
DIGEST_BYTES: Final = 32
_MAGIC: Final = b"QMK1"


class ChunkedBytes(msgspec.Struct, frozen=True, array_like=True):
    """Bytes, cut into chunks."""

    size: int
    chunks: tuple[bytes, ...]
    """The digest of each chunk."""

    def __post_init__(self) -> None:
        if self.size < len(self.chunks) or any(len(each) != DIGEST_BYTES for each in self.chunks):
            raise ValueError(
                f"{len(self.chunks)} chunks of {self.size} bytes with digests that are none"
            )


class BackedUpSegment(msgspec.Struct, frozen=True, array_like=True):
    """A segment of a log, up to the backup's end."""

    base: int
    content: ChunkedBytes
    is_sealed: bool
    """Whether a later segment follows. The bytes of such a segment never change, and later backups
    refer to it.
    """

    def __post_init__(self) -> None:
        if self.base < 0:
            raise ValueError(f"a segment at {self.base}")

    @property
    def end(self) -> int:
        return self.base + self.content.size


class BackedUpFile(msgspec.Struct, frozen=True, array_like=True):
    """A file of a delay group's schedule."""

    name: str
    content: ChunkedBytes

    def __post_init__(self) -> None:
        if not is_file_name(self.name):
            raise ValueError(f"{self.name!r} is no file of a schedule")


class BackedUpSchedule(msgspec.Struct, frozen=True, array_like=True):
    """A delay group's schedule as of a checkpoint; the logs have everything after it."""

    index: int
    state: ChunkedBytes
    files: tuple[BackedUpFile, ...]


class BackedUpGroup(msgspec.Struct, frozen=True):
    """A broker group or a delay group: both logs up to one index."""

    name: str
    lineage: str
    """The digest of the group's secret. Positions in two backups mean the same bytes only if this
    digest is the same.
    """
    index: int
    epoch: int
    message: tuple[BackedUpSegment, ...]
    action: tuple[BackedUpSegment, ...]
    schedule: BackedUpSchedule | None = None

    def __post_init__(self) -> None:
        check_name("group", self.name)

    @property
    def logs(self) -> tuple[tuple[BackedUpSegment, ...], tuple[BackedUpSegment, ...]]:
        return self.message, self.action

    def contents(self) -> Iterator[ChunkedBytes]:
        """All parts of the group that have chunks."""
        for segments in self.logs:
            yield from [each.content for each in segments]
        if self.schedule is not None:
            yield self.schedule.state
            yield from [each.content for each in self.schedule.files]


class BackupManifest(msgspec.Struct, frozen=True):
    """A whole backup."""

    version: int
    id: str
    time_ms: int
    revision: int
    """The revision of the coordination store."""
    release: str
    """The release of QMQ that wrote it."""
    items: ChunkedBytes
    """The coordination store's keys: see qmq/backup/manifest.py."""
    groups: tuple[BackedUpGroup, ...]
    copied_bytes: int = 0
    """The bytes written for this backup. The other chunks existed before."""

    def group(self, name: str) -> BackedUpGroup | None:
        return next((each for each in self.groups if each.name == name), None)

    def contents(self) -> Iterator[ChunkedBytes]:
        """All parts that have chunks."""
        yield self.items
        for group in self.groups:
            yield from group.contents()

    @property
    def size(self) -> int:
        """The number of bytes that a restore writes."""
        return sum(each.size for each in self.contents())

    def encode(self) -> bytes:
        payload = msgspec.msgpack.encode(self)
        return with_checksum(_MAGIC, payload)


class _Version(msgspec.Struct):
    version: int
    release: str = "unknown"


def decode_manifest(backup_id: str, data: bytes) -> BackupManifest:
    """Raises BackupDamaged, BackupVersion."""
    payload = checked_payload(_MAGIC, data)
    if payload is None:
        raise BackupDamaged(f"the manifest of backup {backup_id} is damaged: use another backup")
    try:
        written = msgspec.msgpack.decode(payload, type=_Version)
        if written.version != VERSION:
            release = (
                f"backup {backup_id} has version {written.version}, of release {written.release}"
            )
            raise BackupVersion(f"{release}: use that release to read it")
        return msgspec.msgpack.decode(payload, type=BackupManifest)
    except (*UNREADABLE, InvalidName) as cause:
        raise BackupDamaged(
            f"the manifest of backup {backup_id} cannot be read ({cause})"
        ) from cause


def digest_of(data: bytes) -> bytes:
    return blake2b(data, digest_size=DIGEST_BYTES).digest()


def chunk_name(digest: bytes) -> str:
    """The object name of a chunk. The digest's first byte names a folder, so that no folder has too
    many files.
    """
    text = digest.hex()
    return f"{CHUNK_PREFIX}/{text[:2]}/{text}"


def new_id(time_ms: int) -> str:
    """A backup's id, from its time. Ids sort in the order of time."""
    time = time_of(time_ms)
    return f"{time:%Y%m%dT%H%M%S}{time_ms % 1000:03d}Z-{secrets.token_hex(2)}"


def time_of_backup(backup_id: str) -> datetime | None:
    """The time of a backup, from its id; None if this is not the id of a backup."""
    try:
        return datetime.strptime(backup_id.partition("Z-")[0], "%Y%m%dT%H%M%S%f").replace(
            tzinfo=UTC
        )
    except ValueError:
        return None


def manifest_name(backup_id: str) -> str:
    return f"{MANIFEST_PREFIX}/{backup_id}/manifest"


def id_of(name: str) -> str:
    """The backup's id, from its manifest's name; empty for any other name."""
    prefix, _, rest = name.partition("/")
    backup_id, _, last = rest.partition("/")
    return backup_id if (prefix, last) == (MANIFEST_PREFIX, "manifest") else ""


ROOT: Final = "/qmq/"
RESTORED: Final = ROOT + "restored"
"""The backup from which this cluster was made, and the progress of the restore."""
_LEFT_OUT: Final = (
    REPLICAS,
    PRESENCE,
    ROOT + "members/",
    ROOT + "assignments/",
    ROOT + "meta/",
    RESTORED,
)
_GROUP_KEYS: Final = ("members", "epoch", "master", "secret")
_NOBODY: Final = "restore-under-way"
"""The only voter of a group whose data is not restored yet: no process has this name, so none can
found the group without its data.
"""

Items = dict[str, bytes]


def kept(items: Iterable[KeyValue]) -> Items:
    """The keys that a backup contains."""
    return {each.key: each.value for each in items if not each.lease and _is_kept(each.key)}


def _is_kept(key: str) -> bool:
    if key.startswith(GROUPS):
        return key.rpartition("/")[2] not in _GROUP_KEYS
    return key != SERVER_TOKEN and not key.startswith(_LEFT_OUT)


def encode_items(items: Mapping[str, bytes]) -> bytes:
    return msgspec.msgpack.encode(sorted(items.items()))


def decode_items(data: bytes) -> Items:
    """Raises BackupDamaged, also for a key that no backup contains:
    a restore writes no other keys.
    """
    try:
        items = dict(msgspec.msgpack.decode(data, type=list[tuple[str, bytes]]))
    except UNREADABLE as cause:
        raise BackupDamaged(f"the coordination store's keys cannot be read ({cause})") from cause
    for key in items:
        if not key.startswith(ROOT) or not _is_kept(key):
            raise BackupDamaged(
                f"the backup has the key {key!r}, which no backup of QMQ contains: use "
                "another backup"
            )
    return items


def delay_settings(items: Mapping[str, bytes], group: str) -> DelaySettings | None:
    """The settings of a delay group; None for a broker group."""
    found = items.get(group_key(group, "delay"))
    return None if found is None else DelaySettings.decode(found)


def group_items(group: BackedUpGroup, backup_id: str, secret: bytes) -> Items:
    """The keys of a group whose data is not restored yet. Its next epoch is above every epoch in
    its log.
    """
    return {
        group_key(group.name, "members"): ReplicaMembership(1, (_NOBODY,)).encode(),
        group_key(group.name, "epoch"): EpochClaim(
            group.epoch, _NOBODY, f"restored from {backup_id}"
        ).encode(),
        group_key(group.name, "secret"): secret,
    }


def awaits_data(members: bytes) -> bool:
    """Whether the group's data is not restored yet."""
    return ReplicaMembership.decode(members).voters == (_NOBODY,)
