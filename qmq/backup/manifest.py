"""The manifest of a backup: its content, and the digest of each chunk. Pure.

A chunk's name is the digest of its bytes. So a chunk is never written twice, backups share the chunks that they have in common, and a
chunk that changed is found by its name alone.

Whoever can write the object store can write a manifest. So the types refuse what would become another path, object or key.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from datetime import UTC, datetime
from hashlib import blake2b
from typing import Final

import msgspec

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
            raise ValueError(f"{len(self.chunks)} chunks of {self.size} bytes with digests that are none")


class BackedUpSegment(msgspec.Struct, frozen=True, array_like=True):
    """A segment of a log, up to the backup's end."""

    base: int
    content: ChunkedBytes
    is_sealed: bool
    """Whether a later segment follows. The bytes of such a segment never change, and later backups refer to it."""

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
    """The digest of the group's secret. Positions in two backups mean the same bytes only if this digest is the same."""
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
    """The coordination store's keys: see qmq/backup/cluster_items.py."""
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
            release = f"backup {backup_id} has version {written.version}, of release {written.release}"
            raise BackupVersion(f"{release}: use that release to read it")
        return msgspec.msgpack.decode(payload, type=BackupManifest)
    except (*UNREADABLE, InvalidName) as cause:
        raise BackupDamaged(f"the manifest of backup {backup_id} cannot be read ({cause})") from cause


def digest_of(data: bytes) -> bytes:
    return blake2b(data, digest_size=DIGEST_BYTES).digest()


def chunk_name(digest: bytes) -> str:
    """The object name of a chunk. The digest's first byte names a folder, so that no folder has too many files."""
    text = digest.hex()
    return f"{CHUNK_PREFIX}/{text[:2]}/{text}"


def new_id(time_ms: int) -> str:
    """A backup's id, from its time. Ids sort in the order of time."""
    time = time_of(time_ms)
    return f"{time:%Y%m%dT%H%M%S}{time_ms % 1000:03d}Z-{secrets.token_hex(2)}"


def time_of_backup(backup_id: str) -> datetime | None:
    """The time of a backup, from its id; None if this is not the id of a backup."""
    try:
        return datetime.strptime(backup_id.partition("Z-")[0], "%Y%m%dT%H%M%S%f").replace(tzinfo=UTC)
    except ValueError:
        return None


def manifest_name(backup_id: str) -> str:
    return f"{MANIFEST_PREFIX}/{backup_id}/manifest"


def id_of(name: str) -> str:
    """The backup's id, from its manifest's name; empty for any other name."""
    prefix, _, rest = name.partition("/")
    backup_id, _, last = rest.partition("/")
    return backup_id if (prefix, last) == (MANIFEST_PREFIX, "manifest") else ""
