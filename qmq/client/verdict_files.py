"""The files of the client's store of verdicts (`verdict_store.py` has its rules): written, locked, found. Thin.

Files are told apart by digests of their names (a name never becomes a path): the metaservers' addresses, subject and group; the consumer's
life; the broker group. A lock is the operating system's (flock): it ends with the process, however that ends.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from qmq.client.verdict_store import Kept, Origin, pack_origin, pack_verdicts, unpack
from qmq.wire.settle_payloads import Settlement

log = logging.getLogger("qmq.client")

OLD_MS: Final = 7 * 24 * 3600 * 1000
"""A file that nobody could hand in for so long is deleted: no broker group is waited for longer."""
SUFFIX: Final = ".verdicts"
BAD_SUFFIX: Final = ".unreadable"
_NEW_SUFFIX: Final = ".new"


class VerdictFile:
    """The file of one queue of a living consumer. Raises nothing: what fails is logged, once until something works again."""

    def __init__(self, path: Path, origin: Callable[[], Origin], now_ms: Callable[[], int]) -> None:
        self._path, self._origin, self._now_ms = path, origin, now_ms
        self._fd = -1
        self._is_warned = False

    @property
    def exists(self) -> bool:
        """Whether something is written."""
        return self._fd >= 0

    def rewrite(self, settlements: Sequence[Settlement]) -> None:
        """These, and nothing else, are not answered."""
        new = self._path.with_suffix(_NEW_SUFFIX)
        fd = -1
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _write(fd, pack_origin(self._origin()) + pack_verdicts(settlements, self._now_ms()))
            new.rename(self._path)
        except OSError as failure:
            self._warn(failure)
            self.clear()  # what it said is not so any more
            if fd >= 0:
                os.close(fd)
                with suppress(OSError):
                    new.unlink()
            return
        self._close()
        self._fd, self._is_warned = fd, False

    def append(self, settlements: Sequence[Settlement]) -> None:
        """These are not answered either."""
        if self._fd >= 0:
            size = os.fstat(self._fd).st_size
            try:
                _write(self._fd, pack_verdicts(settlements, self._now_ms()))
            except OSError as failure:
                with suppress(OSError):  # half a line must not stay: the next one would stand behind it
                    os.ftruncate(self._fd, size)
                    os.lseek(self._fd, size, os.SEEK_SET)
                self._warn(failure)

    def clear(self) -> None:
        if self._fd >= 0:
            with suppress(OSError):
                self._path.unlink()
            self._close()

    def leave(self) -> None:
        """The consumer goes; what is written is for another to hand in."""
        self._close()

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _warn(self, failure: OSError) -> None:
        if not self._is_warned:
            self._is_warned = True
            log.warning("verdicts wait in memory only, until the broker is back: %s", failure)


class Left(NamedTuple):
    """A file that a client left, locked by us."""

    path: Path
    fd: int
    origin: Origin
    kept: list[Kept]

    def delete(self) -> None:
        """Nothing in it is of use any more."""
        with suppress(OSError):
            self.path.unlink()

    def put_back(self) -> None:
        """Unlock it: another may try. The last thing to do with it, once."""
        os.close(self.fd)


class VerdictStore:
    """The files of one machine's clients of one cluster. `folder` need not be there."""

    def __init__(self, folder: Path, addresses: Iterable[str]) -> None:
        self._folder = folder / "verdicts"
        self._cluster = ",".join(sorted(addresses))

    def file(self, origin: Callable[[], Origin], now_ms: Callable[[], int]) -> VerdictFile:
        """That of one queue of a consumer; nothing is written yet. `origin` is asked whenever something is."""
        (broker_group, attach) = origin()
        name = f"{self._prefix(attach.subject, attach.group)}{attach.incarnation}-{_digest(broker_group)}{SUFFIX}"
        return VerdictFile(self._folder / name, origin, now_ms)

    def left(self, subject: str, group: str, now_ms: int) -> Iterator[Left]:
        """The files that nobody has locked, each locked by us when it is given. What is old or cannot be read is put out of the way."""
        for path in sorted(self._folder.glob(f"{self._prefix(subject, group)}*{SUFFIX}")):
            fd = _lock(path)
            if fd < 0:
                continue
            try:
                found = Left(path, fd, *unpack(_read(fd)))
            except (OSError, ValueError) as failure:
                log.warning("%s is set aside, verdicts in it are lost, and their messages come again: %s", path, failure)
                with suppress(OSError):
                    path.rename(path.with_suffix(BAD_SUFFIX))
                os.close(fd)
                continue
            if now_ms - max((each.time_ms for each in found.kept), default=now_ms) > OLD_MS:
                log.warning("%d verdicts of consumer %s found no broker for a week: %s is deleted", len(found.kept), *_of(found))
                found.delete()
                found.put_back()
                continue
            yield found

    def busy(self, subject: str, group: str) -> Iterator[Origin]:
        """Whose files others have locked: they write them, or hand them in."""
        for path in self._folder.glob(f"{self._prefix(subject, group)}*{SUFFIX}"):
            fd = _lock(path)
            if fd >= 0:
                os.close(fd)
                continue
            with suppress(OSError, ValueError):
                yield unpack(path.read_bytes())[0]

    def _prefix(self, subject: str, group: str) -> str:
        return _digest(self._cluster, subject, group) + "-"


def _of(found: Left) -> tuple[str, Path]:
    return found.origin.attach.consumer, found.path


def _digest(*names: str) -> str:
    return hashlib.blake2b("\0".join(names).encode(), digest_size=10).hexdigest()


def _write(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def _read(fd: int) -> bytes:
    size = os.fstat(fd).st_size
    return os.pread(fd, size, 0)


def _lock(path: Path) -> int:
    """An open descriptor of the file, which nobody else has locked; -1 if somebody has, or it is gone."""
    try:
        fd = os.open(path, os.O_RDWR)
    except OSError:
        return -1
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(fd).st_ino == path.stat().st_ino:
            return fd
    except OSError:
        pass
    os.close(fd)
    return -1
