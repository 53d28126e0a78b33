"""An archive's folder: its layout, its writers, and what plain readers see.

    data/subject=S/day=D/*.parquet     for plain readers: hard links to the archive's files
    _qmq/archive.json                  the archive's selection, written once
    _qmq/manifests/, _qmq/snapshots/   the chain of manifests, which is authoritative (archive_chain.py)
    _qmq/files/attempt=A/subject=S/…   the files; they are immutable
    _qmq/running/RUN                   locked by a process while it writes to the archive
    _qmq/checkpoint/                   Spark's checkpoints

A change has these steps: write files to the attempt's own folder; flush them; create the manifest, which commits the change; update the
plain folder. A crash before the manifest leaves an unreferenced attempt, which is removed once its process is dead. A crash after it leaves
an outdated plain folder, which the next start of any writer repairs. So `read_archive` sees each change completely or not at all. A plain
reader may see part of a change while it is made, and after a crash until the next start.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

from pyspark_qmq.jobs.archive_chain import ManifestChain
from pyspark_qmq.jobs.archive_disk import ArchiveDisk, walk
from pyspark_qmq.jobs.archive_manifest import Archive, Manifest
from qmq.errors import FolderInUse, InvalidArgument, LogDamaged

_GLOB: Final = frozenset("*?[]{}\\")


def local_path(text: str) -> Path:
    """The folder given by a user. Raises InvalidArgument if it is not on a mounted file system, or if it contains a glob character."""
    path = text.removeprefix("file://")
    if "://" in path or path.startswith(("s3:", "gs:", "hdfs:")):
        raise InvalidArgument(
            f"{text!r} is not a local folder: an archive needs a mounted file system with hard links (copy its data/ there)"
        )
    if _GLOB & set(path):
        raise InvalidArgument(
            f"{text!r}: the folder's name must not contain any of {' '.join(sorted(_GLOB))}, which Spark interprets as a pattern"
        )
    return Path(path).absolute()


class ArchiveFolder:
    """An archive opened for writing; call `close` at the end. Several processes may write at the same time. Not thread-safe."""

    def __init__(self, root: Path, *, disk: ArchiveDisk, now_ms: Callable[[], int], run: str) -> None:
        """Open the archive and repair the effects of a crash. `run`: a unique name for this process, of letters and digits.

        Raises LogDamaged, InvalidArgument, OSError.
        """
        self.root = root
        self._disk = disk
        self._now_ms = now_ms
        self._run = run
        self._attempts = 0
        self._own = root / "_qmq"
        self.data, self.files = root / "data", self._own / "files"
        self._chain = ManifestChain(self._own, disk)
        for folder in (self.data, self.files, self._own / "running", self._own / "checkpoint"):
            disk.make_folder(folder)
        self._chain.make_folders()
        self._lock: int | None = _lock_of_own(self._own / "running" / run)
        self._checkpoint: int | None = None
        try:
            self.mend()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Release the lock, so that others may clean up."""
        self._disk.unlink(self._own / "running" / self._run)
        for each in (self._lock, self._checkpoint):
            if each is not None:
                os.close(each)
        self._lock = self._checkpoint = None

    def latest(self) -> Archive:
        """The current archive. Raises LogDamaged."""
        return self._chain.latest()

    def identify(self, wanted: Mapping[str, str]) -> None:
        """Record the archive's selection, which never changes. Raises InvalidArgument if the recorded selection differs."""
        path = self._own / "archive.json"
        self._disk.create(path, (json.dumps({"format": 1, "selection": dict(sorted(wanted.items()))}) + "\n").encode(), self._run)
        known = json.loads(path.read_bytes())["selection"]
        if known != dict(wanted):
            raise InvalidArgument(
                f"{self.root} has the selection {known or 'everything'}, not {dict(wanted) or 'everything'}: use another folder"
            )

    def checkpoint(self, name: str) -> Path:
        """Lock and return the folder of a query's checkpoint. Raises FolderInUse if another process has it."""
        self._checkpoint = _locked(self._own / "checkpoint" / f"{name}.lock")
        if self._checkpoint is None:
            raise FolderInUse(f"another process is archiving the same subjects to {self.root}: stop that process first")
        return self._own / "checkpoint" / name

    # --- changes -------------------------------------------------------------------------------------------------------

    def attempt(self) -> Path:
        """A unique name for a new folder below `files`. The writer creates the folder."""
        self._attempts += 1
        return self.files / f"attempt={self._run}-{self._attempts}"

    def discard(self, attempt: Path) -> None:
        """Remove the files of an attempt that failed."""
        self._disk.remove_folder(attempt)

    def commit(self, attempt: Path, manifest: Manifest) -> Manifest | None:
        """Commit a change whose new files are in `attempt`. If the change is no longer valid, remove the attempt and return None.

        Raises DiskFull, LogDamaged, OSError. After an error, the next start determines whether the change was committed.
        """
        if attempt.is_dir():
            self._disk.sync_tree(attempt)
        made = self._chain.add(manifest, self._now_ms, self._run)
        if made is None:
            self.discard(attempt)
            return None
        self._show(made)
        return made

    def _show(self, made: Manifest) -> None:
        """Link new files before removing old ones, so that a plain reader may see messages twice, but never misses one."""
        for file in made.files:
            self._link(file.path, file.plain)
        for path in made.gone:
            self._disk.unlink(self.data / _plain(path))
        self._hide(file.path for file in made.files)

    def _hide(self, linked: Iterable[str]) -> None:
        """Check again after linking, because another process may have removed a file from the archive meanwhile."""
        archive = self.latest()
        for path in linked:
            if path not in archive.files:
                self._disk.unlink(self.data / _plain(path))

    def _link(self, path: str, plain: str) -> None:
        target = self.data / plain
        self._disk.make_folder(target.parent)
        try:
            self._disk.link(self.files / path, target)
        except FileNotFoundError:
            raise LogDamaged(f"{self.files / path} is gone, but the archive's manifests name it: restore it from a copy") from None

    # --- maintenance --------------------------------------------------------------------------------------------------------

    def mend(self) -> None:
        """Make the plain folder match the archive, for example after a crash. Raises LogDamaged if files are missing."""
        shown = {str(each.relative_to(self.data)) for each in walk(self.data)}
        archive = self.latest()  # Read after the listing, so that a file hidden meanwhile is not linked again.
        hidden = [file for file in archive.files.values() if file.plain not in shown]
        for file in hidden:
            self._link(file.path, file.plain)
        for path in archive.kept:
            if _plain(path) in shown:
                self._disk.unlink(self.data / _plain(path))
        self._hide(file.path for file in hidden)

    def sweep(self, before_ms: int) -> tuple[str, ...]:
        """Delete files replaced before a time, and leftovers of dead processes. Returns the deleted files. Raises LogDamaged, OSError."""
        self.mend()
        due = tuple(path for path, went_ms in self.latest().kept.items() if went_ms < before_ms)
        for path in due:
            self._disk.unlink(self.files / path)
        if due:
            self._chain.add(Manifest("sweep", gone=due), self._now_ms, self._run)
        self.clean()
        return due

    def clean(self) -> None:
        """Remove attempts of dead processes that no manifest names."""
        attempts = list(self.files.glob("attempt=*"))
        runs = {_run_of(each) for each in attempts} | {each.name for each in (self._own / "running").iterdir()}
        dead = {run for run in runs if self._is_dead(run)}
        archive = self.latest()  # Read after finding the dead processes, because they add no more manifests.
        named = {path.split("/", 1)[0] for path in (*archive.files, *archive.kept)}
        for each in attempts:
            if _run_of(each) in dead and each.name not in named:
                self._disk.remove_folder(each)
        self._chain.clear_drafts(self._is_dead)

    def _is_dead(self, run: str) -> bool:
        if run == self._run:
            return False
        path = self._own / "running" / run
        if not path.exists():
            return True
        lock = _locked(path)
        if lock is None:
            return False
        self._disk.unlink(path)
        os.close(lock)
        return True


def _lock_of_own(path: Path) -> int:
    """Create and lock this process's own lock file. Another process looking for dead ones may hold it briefly, or have just removed it."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        fcntl.flock(fd, fcntl.LOCK_EX)
        try:
            if os.stat(path).st_ino == os.fstat(fd).st_ino:
                return fd
        except FileNotFoundError:
            pass
        os.close(fd)


def _locked(path: Path) -> int | None:
    """Lock a file, created if missing, until it is closed. None if another process holds it or has just removed it."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.stat(path).st_ino == os.fstat(fd).st_ino:
            return fd
    except OSError:
        pass
    os.close(fd)
    return None


def _plain(path: str) -> str:
    return path.split("/", 1)[1]


def _run_of(attempt: Path) -> str:
    return attempt.name.removeprefix("attempt=").rsplit("-", 1)[0]
