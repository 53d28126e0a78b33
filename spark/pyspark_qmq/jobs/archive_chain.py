"""The chain of manifests on disk: read it, and add to it.

`manifests/0000000007.json` is made if it is not there, in one step. So of two writers that have both seen number 6 one makes number 7; the
other one looks again, and makes number 8 if its change still fits, or gives up. Nothing is ever written over, and no manifest is ever
deleted: a writer that slept for a day must find its number taken.

Snapshots spare a reader most of the chain. They follow from it, and can be deleted at any time.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from pyspark_qmq.jobs.archive_disk import ArchiveDisk
from pyspark_qmq.jobs.archive_manifest import Archive, Manifest, numbered, parse_manifest, parse_snapshot
from qmq.errors import LogDamaged

SNAPSHOT_EVERY: Final = 64
"""Manifests. A snapshot is as large as the list of files."""


class ManifestChain:
    """An archive's manifests. Reading needs no right to write. Used by one thread at a time."""

    def __init__(self, folder: Path, disk: ArchiveDisk) -> None:
        """`folder` is the archive's `_qmq`."""
        self._disk = disk
        self._manifests = folder / "manifests"
        self._snapshots = folder / "snapshots"
        self._known: Archive | None = None

    def make_folders(self) -> None:
        """Those of a new archive."""
        self._disk.make_folder(self._manifests)
        self._disk.make_folder(self._snapshots)

    def latest(self) -> Archive:
        """What the archive holds now. Raises LogDamaged if manifests are missing or cannot be read."""
        if self._known is None:
            self._known = self._follow(self._newest_snapshot())
            self._check_end(self._known.number)
        else:
            self._known = self._follow(self._known)
        return self._known

    def add(self, manifest: Manifest, now_ms: Callable[[], int], writer: str) -> Manifest | None:
        """Make a change, durable when this returns; None if it does not fit any more.

        Raises LogDamaged, DiskFull, InvalidArgument; OSError, and then the change may have been made or not: look again.
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
        # another writer may have made the next ones since; what is missing for good does not come
        if beyond and not self._path(number + 1).exists():
            raise LogDamaged(f"the archive's manifest {number + 1} is missing, but there is {max(beyond)}: restore it from a copy")

    def _newest_snapshot(self) -> Archive:
        for path in sorted(self._snapshots.glob("[0-9]*.json"), reverse=True):
            try:
                return parse_snapshot(path.read_bytes())
            except (OSError, ValueError):
                continue  # the chain has it all
        return Archive()

    def _save_snapshot(self, archive: Archive, writer: str) -> None:
        self._disk.replace(self._snapshots / f"{archive.number:010}.json", archive.to_json(), writer)
        for path in sorted(self._snapshots.glob("[0-9]*.json"))[:-2]:
            self._disk.unlink(path)

    def clear_drafts(self, is_dead: Callable[[str], bool]) -> None:
        """Remove what dead writers left half-written."""
        for folder in (self._manifests, self._snapshots):
            for path in folder.glob(".*"):
                if is_dead(path.name.rsplit(".", 1)[-1]):
                    self._disk.unlink(path)
