"""The chain of manifests on disk: reading it and adding to it.

`manifests/0000000007.json` is created atomically and only if it does not exist. Of two writers that have both read number 6, one creates
number 7; the other reads again, and creates number 8 if its change is still valid. Manifests are never overwritten or deleted, so that a
writer that was suspended for a day finds its number taken.

Snapshots save readers from reading the whole chain. They are derived from it and can be deleted at any time.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from pyspark_qmq.jobs.archive_disk import ArchiveDisk
from pyspark_qmq.jobs.archive_manifest import Archive, Manifest, numbered, parse_manifest, parse_snapshot
from qmq.errors import LogDamaged

SNAPSHOT_EVERY: Final = 64
"""Manifests between snapshots. A snapshot is as large as the list of files."""


class ManifestChain:
    """An archive's manifests. Readers need no write permission. Used by one thread at a time."""

    def __init__(self, folder: Path, disk: ArchiveDisk) -> None:
        """`folder` is the archive's `_qmq`."""
        self._disk = disk
        self._manifests = folder / "manifests"
        self._snapshots = folder / "snapshots"
        self._known: Archive | None = None

    def make_folders(self) -> None:
        """Create the folders of a new archive."""
        self._disk.make_folder(self._manifests)
        self._disk.make_folder(self._snapshots)

    def latest(self) -> Archive:
        """The current archive. Raises LogDamaged if manifests are missing or unreadable."""
        if self._known is None:
            self._known = self._follow(self._newest_snapshot())
            self._check_end(self._known.number)
        else:
            self._known = self._follow(self._known)
        return self._known

    def add(self, manifest: Manifest, now_ms: Callable[[], int], writer: str) -> Manifest | None:
        """Make a change, durable when this returns; None if the change is no longer valid.

        Raises LogDamaged, DiskFull, InvalidArgument; OSError, after which the change may have been made: read again.
        """
        while True:
            archive = self.latest()
            if not archive.fits(manifest):
                return None
            made = numbered(manifest, archive.number + 1, now_ms())
            if self._disk.create(self._path(made.number), made.to_json(), writer):
                break
        self._known = archive.after([made])
        if made.number % SNAPSHOT_EVERY == 0:
            self._save_snapshot(self._known, writer)
        return made

    def _path(self, number: int) -> Path:
        return self._manifests / f"{number:010}.json"

    def _follow(self, archive: Archive) -> Archive:
        found: list[Manifest] = []
        while True:
            path = self._path(archive.number + len(found) + 1)
            try:
                data = path.read_bytes()
            except FileNotFoundError:
                return archive.after(found) if found else archive
            found.append(parse_manifest(data, path.name))

    def _check_end(self, number: int) -> None:
        if not self._manifests.is_dir():
            return
        beyond = [each.name for each in self._manifests.glob("*.json") if each.stem.isdigit() and int(each.stem) > number]
        # Another writer may have created the next ones meanwhile; a manifest that is really missing does not appear.
        if beyond and not self._path(number + 1).exists():
            raise LogDamaged(f"the archive's manifest {number + 1} is missing, but number {max(beyond)} exists: restore it from a copy")

    def _newest_snapshot(self) -> Archive:
        for path in sorted(self._snapshots.glob("[0-9]*.json"), reverse=True):
            try:
                return parse_snapshot(path.read_bytes())
            except (OSError, ValueError):
                continue  # The chain has all the information.
        return Archive()

    def _save_snapshot(self, archive: Archive, writer: str) -> None:
        self._disk.replace(self._snapshots / f"{archive.number:010}.json", archive.to_json(), writer)
        for path in sorted(self._snapshots.glob("[0-9]*.json"))[:-2]:
            self._disk.unlink(path)

    def clear_drafts(self, is_dead: Callable[[str], bool]) -> None:
        """Remove partial files of dead writers."""
        for folder in (self._manifests, self._snapshots):
            for path in folder.glob(".*"):
                if is_dead(path.name.rsplit(".", 1)[-1]):
                    self._disk.unlink(path)
