"""Backups in an object store or a folder. The calls block: use a thread.

chunks/AB/DIGEST        up to 8 MiB of a log, a schedule's file or the coordination store's keys
backups/ID/manifest     written last, read back: a backup without it does not exist
running/…               see qmq/backup/prune.py
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from qmq.backup.manifest import (
    CHUNK_PREFIX,
    MANIFEST_PREFIX,
    BackupManifest,
    ChunkedBytes,
    chunk_name,
    decode_manifest,
    digest_of,
    id_of,
    manifest_name,
)
from qmq.errors import BackupDamaged, BackupNotFound
from qmq.tiering.object_store import ObjectConflict, Objects, put_checked
from qmq.tiering.stored_segment import CHUNK_BYTES

LATEST: Final = ""


class BackupObjects:
    def __init__(self, objects: Objects, *, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.store = objects
        self.chunk_bytes = chunk_bytes
        self.copied_bytes = 0
        """The bytes of chunks that were not there before."""

    # --- chunks -----------------------------------------------------------------------------------

    def put_chunk(self, data: bytes) -> bytes:
        """Put a chunk and read it back. Returns its digest. Raises StoreAway, BackupDamaged."""
        digest = digest_of(data)
        name = chunk_name(digest)
        try:
            if put_checked(self.store, name, data):
                self.copied_bytes += len(data)
        except ObjectConflict as cause:
            raise BackupDamaged(
                f"{name} is damaged in the object store: delete it, and create the backup again"
            ) from cause
        return digest

    def put_bytes(self, data: bytes) -> ChunkedBytes:
        """Raises StoreAway, BackupDamaged."""
        chunks = [
            self.put_chunk(data[at : at + self.chunk_bytes])
            for at in range(0, len(data), self.chunk_bytes)
        ]
        return ChunkedBytes(len(data), tuple(chunks))

    def read_chunks(self, content: ChunkedBytes) -> Iterator[bytes]:
        """Read chunks and check their digests. Raises StoreAway, BackupDamaged."""
        size = 0
        for digest in content.chunks:
            name = chunk_name(digest)
            data = self.store.get(name)
            if data is None:
                raise BackupDamaged(f"{name} is missing: use another backup")
            if digest_of(data) != digest:
                raise BackupDamaged(f"{name} has other bytes than were written: use another backup")
            size += len(data)
            if size > content.size:
                break
            yield data
        if size != content.size:
            raise BackupDamaged(
                f"the chunks have {size:,} bytes, and the manifest says {content.size:,}"
            )

    def read_bytes(self, content: ChunkedBytes) -> bytes:
        """Raises StoreAway, BackupDamaged."""
        return b"".join(self.read_chunks(content))

    def chunk_names(self) -> list[str]:
        """Raises StoreAway."""
        return self.store.names(CHUNK_PREFIX)

    # --- manifests --------------------------------------------------------------------------------

    def put_manifest(self, manifest: BackupManifest) -> None:
        """Write the manifest; with it the backup exists. Raises StoreAway, BackupDamaged."""
        try:
            put_checked(self.store, manifest_name(manifest.id), manifest.encode())
        except ObjectConflict as cause:
            raise BackupDamaged(f"there is another backup {manifest.id} already") from cause

    def ids(self) -> list[str]:
        """The backups, oldest first. Raises StoreAway."""
        return sorted(filter(None, map(id_of, self.store.names(MANIFEST_PREFIX))))

    def manifest(self, backup_id: str = LATEST) -> BackupManifest:
        """A backup's manifest, by default the newest one's. Raises StoreAway, BackupNotFound,
        BackupDamaged, BackupVersion.
        """
        if not backup_id:
            known = self.ids()
            if not known:
                raise BackupNotFound("there is no backup here: `qmq backup create` makes one")
            backup_id = known[-1]
        data = self.store.get(manifest_name(backup_id))
        if data is None:
            raise BackupNotFound(
                f"there is no backup {backup_id!r}: `qmq backup list` shows those that there are"
            )
        return decode_manifest(backup_id, data)
