"""An archive's folder: where things are, who is writing, and what plain readers see.

    data/subject=S/day=D/*.parquet     for plain readers: second names (hard links) of what the archive holds
    _qmq/archive.json                  what the archive takes: made once
    _qmq/manifests/, _qmq/snapshots/   the chain: the truth (archive_chain.py)
    _qmq/files/attempt=A/subject=S/…   the files; a path never changes and never gets another content
    _qmq/running/RUN                   locked by a process as long as it writes here
    _qmq/checkpoint/                   Spark's

A change goes: files are written into an attempt's own folder; flushed; the manifest is made (from here on it is done); the plain folder
follows. A crash before the manifest leaves an attempt that nobody knows: it is removed when its process is dead. A crash behind it leaves a
plain folder that is behind: the next start of any writer mends it. So `read_archive` sees each change whole or not at all; a plain reader
may see a change in part while it is made, and after a crash until the next start.
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
    """The folder that a user names. Raises InvalidArgument for what is no folder of a mounted file system, or looks like a pattern."""
    path = text.removeprefix("file://")
    if "://" in path or path.startswith(("s3:", "gs:", "hdfs:")):
        raise InvalidArgument(f"{text!r} is no local folder: an archive needs a mounted file system with hard links (copy its data/ there)")
    if _GLOB & set(path):
        raise InvalidArgument(f"{text!r}: a folder's name must not hold any of {' '.join(sorted(_GLOB))}, which Spark takes for a pattern")
    return Path(path).absolute()


class ArchiveFolder:
    """An archive that this process writes to; `close` it. Several processes may, at the same time. Used by one thread at a time."""

    def __init__(self, root: Path, *, disk: ArchiveDisk, now_ms: Callable[[], int], run: str) -> None:
        """`run` names this process's life, like no other's: letters and digits. Mends what a crash left.

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
        """Let others clean up behind this process."""
        self._disk.unlink(self._own / "running" / self._run)
        for each in (self._lock, self._checkpoint):
            if each is not None:
                os.close(each)
        self._lock = self._checkpoint = None

    def latest(self) -> Archive:
        """What the archive holds now. Raises LogDamaged."""
        return self._chain.latest()

    def identify(self, wanted: Mapping[str, str]) -> None:
        """Say what of a log the archive takes; it is the same for all its life. Raises InvalidArgument if it was something else."""
        path = self._own / "archive.json"
        self._disk.create(path, (json.dumps({"format": 1, "selection": dict(sorted(wanted.items()))}) + "\n").encode(), self._run)
        known = json.loads(path.read_bytes())["selection"]
        if known != dict(wanted):
            raise InvalidArgument(
                f"{self.root} was begun with the selection {known or 'everything'}, not {dict(wanted) or 'everything'}: use another folder"
            )

    def checkpoint(self, name: str) -> Path:
        """The folder of a query's checkpoint, for this process alone. Raises FolderInUse if another one has it."""
        self._checkpoint = _locked(self._own / "checkpoint" / f"{name}.lock")
        if self._checkpoint is None:
            raise FolderInUse(f"another process is archiving the same subjects to {self.root}: stop it first, or let it do the work")
        return self._own / "checkpoint" / name

    # --- changes -------------------------------------------------------------------------------------------------------

    def attempt(self) -> Path:
        """A name for a new folder of files, below `files`, that nobody else uses; it is made by whoever writes there."""
        self._attempts += 1
        return self.files / f"attempt={self._run}-{self._attempts}"

    def discard(self, attempt: Path) -> None:
        """Remove what was written in vain."""
        self._disk.remove_folder(attempt)

    def commit(self, attempt: Path, manifest: Manifest) -> Manifest | None:
        """Make a change whose new files lie in `attempt`; None (and the attempt is removed) if it does not fit any more.

        Raises DiskFull, LogDamaged, OSError: whether it was made the next start will see.
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
        """What came is shown before what went is hidden: a plain reader that looks in between sees messages twice, not too few."""
        for file in made.files:
            self._link(file.path, file.plain)
        for path in made.gone:
            self._disk.unlink(self.data / _plain(path))
        self._hide(file.path for file in made.files)

    def _hide(self, linked: Iterable[str]) -> None:
        """Somebody may have taken a file out of the archive while it was being shown: look behind, not before."""
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

    # --- upkeep --------------------------------------------------------------------------------------------------------

    def mend(self) -> None:
        """Have the plain folder show what the archive holds, after a crash or whatever else. Raises LogDamaged if files are gone."""
        shown = {str(each.relative_to(self.data)) for each in walk(self.data)}
        archive = self.latest()  # behind the look: what somebody hides meanwhile is not shown again
        hidden = [file for file in archive.files.values() if file.plain not in shown]
        for file in hidden:
            self._link(file.path, file.plain)
        for path in archive.kept:
            if _plain(path) in shown:
                self._disk.unlink(self.data / _plain(path))
        self._hide(file.path for file in hidden)

    def sweep(self, before_ms: int) -> tuple[str, ...]:
        """Delete files that went out before a time, and what dead processes left; gives the deleted files. Raises LogDamaged, OSError."""
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
        archive = self.latest()  # behind the look at who is dead: who is dead adds nothing more
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
    """Locked for this process alone. Somebody who looks for the dead may hold it for a moment, or have just removed it."""
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
    """Lock a file, made if absent, until the process ends or closes it; None if another one has it, or has just removed it."""
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
