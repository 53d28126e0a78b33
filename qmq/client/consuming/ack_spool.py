"""The files in which a client keeps the verdicts that no broker has answered.

While a broker group cannot be reached, each queue of a consumer keeps its unsent verdicts in a file
of the client's folder on this machine, if it has one:

    first line     the ATTACH with which its consumer reconnects, and the broker group, as JSON
    each further   a verdict and when it was given, as JSON

`QueueSpool` (`acks.py`) says when they are written.

Rules:
* Nothing is written while brokers can be reached, and a file is gone as soon as a broker has
  answered everything in it.
* A client locks a file while it writes the file or hands it in. The lock is the operating system's
  (flock) and ends with the process. An unlocked file belongs to a client that died, or was closed
  while the broker was away: one other client may hand it in (`attachment.py`).
* A file is never rewritten in place: a new file is renamed over it. A crash leaves the old or the
  new file, perhaps with an incomplete last line, which is ignored.
* The pull sequences in a file are valid until the master hands other messages out under them. When
  the master announces that (a part became void), the file is rewritten before anything else is
  pulled.
* The spool is best effort: verdicts that cannot be written stay in memory, with a warning. Files
  are not flushed, so they survive the process, not the machine.
* File names are digests, so that no name becomes a path: of the metaservers' addresses, subject and
  group; of the consumer's name and incarnation; of the broker group.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from qmq.errors import InvalidArgument, ProtocolViolation
from qmq.process.files import below_home, home_folder
from qmq.wire.frame_payloads import BY_GROUP_MS, Attach, Settlement, Verdict

with suppress(ImportError):  # Windows has no fcntl, and so no spool: see `store_of`
    import fcntl

log = logging.getLogger("qmq.client")

VERSION: Final = 1
OLD_MS: Final = 7 * 24 * 3600 * 1000
"""A file that could not be sent for this long is deleted."""
SUFFIX: Final = ".verdicts"
BAD_SUFFIX: Final = ".unreadable"
_NEW_SUFFIX: Final = ".new"
TICK_S: Final = 0.1
"""Longer than a tick of any local file system's clock."""


# --- content of a file: pure ----------------------------------------------------------------------


class SpoolOwner(NamedTuple):
    """Identifies the consumer whose verdicts a file holds: the broker group, and the ATTACH with
    which the consumer reconnects.
    """

    broker_group: str
    attach: Attach


class SpooledAck(NamedTuple):
    """A verdict, and when it was given, in milliseconds since 1970."""

    settlement: Settlement
    time_ms: int


def pack_owner(owner: SpoolOwner) -> bytes:
    attach = json.loads(owner.attach.pack())
    return (
        json.dumps(
            {"version": VERSION, "broker_group": owner.broker_group, "attach": attach}
        ).encode()
        + b"\n"
    )


def pack_verdicts(settlements: Iterable[Settlement], time_ms: int) -> bytes:
    lines = [
        {"time_ms": time_ms, **each._asdict(), "verdict": Verdict(each.verdict).name}
        for each in settlements
    ]
    return b"".join([json.dumps(each).encode() + b"\n" for each in lines])


def unpack(data: bytes) -> tuple[SpoolOwner, list[SpooledAck]]:
    """Parse a file. Raises ValueError if it is not a spool file,
    or damaged before its last line.
    """
    first, *lines = data.split(b"\n")[:-1] or [b""]  # an incomplete last line is dropped
    try:
        head = json.loads(first)
        if head["version"] != VERSION:
            raise ValueError(
                f"version {head['version']!r} of the format, which only newer clients know"
            )
        owner = SpoolOwner(
            str(head["broker_group"]), Attach.unpack(json.dumps(head["attach"]).encode())
        )
        return owner, [_ack_of(json.loads(line)) for line in lines]
    except (KeyError, TypeError, RecursionError, ProtocolViolation) as cause:
        raise ValueError(f"not a file of verdicts: {cause!r}") from None


def _ack_of(line: dict[str, Any]) -> SpooledAck:
    numbers = [line[name] for name in ("first", "last", "delay_ms", "time_ms")]
    if (
        not all(type(each) is int for each in numbers)
        or not 0 <= line["first"] <= line["last"]
        or not isinstance(line["error"], str)
    ):
        raise ValueError(f"{line} is not a verdict")
    verdict = Settlement(
        line["first"], line["last"], Verdict[line["verdict"]], line["delay_ms"], line["error"]
    )
    return SpooledAck(verdict, line["time_ms"])


def still_valid(kept: Iterable[SpooledAck], next_pull: int, now_ms: int) -> list[Settlement]:
    """The verdicts that are still valid at a master which reuses the pull sequences from
    `next_pull` on. Delays count from the time of the verdict.
    """
    found: list[Settlement] = []
    for each, time_ms in kept:
        if each.first < next_pull:
            is_timed = each.verdict == Verdict.NACK and each.delay_ms != BY_GROUP_MS
            delay_ms = (
                max(each.delay_ms - max(now_ms - time_ms, 0), 0) if is_timed else each.delay_ms
            )
            found.append(each._replace(last=min(each.last, next_pull - 1), delay_ms=delay_ms))
    return found


# --- files: thin ----------------------------------------------------------------------------------


class SpoolFile:
    """The file of one queue of a running consumer. Raises no errors:
    the first failure in a row is logged.
    """

    def __init__(
        self, path: Path, owner: Callable[[], SpoolOwner], now_ms: Callable[[], int]
    ) -> None:
        self._path, self._owner, self._now_ms = path, owner, now_ms
        self._fd = -1
        self._is_warned = False

    @property
    def exists(self) -> bool:
        """Whether the file exists."""
        return self._fd >= 0

    def rewrite(self, settlements: Sequence[Settlement]) -> None:
        """Replace the content of the file by these unanswered verdicts."""
        new = self._path.with_suffix(_NEW_SUFFIX)
        fd = -1
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _write(fd, pack_owner(self._owner()) + pack_verdicts(settlements, self._now_ms()))
            new.rename(self._path)
        except OSError as failure:
            self._warn(failure)
            self.clear()  # its content is no longer true
            if fd >= 0:
                os.close(fd)
                with suppress(OSError):
                    new.unlink()
            return
        self.leave()
        self._fd, self._is_warned = fd, False

    def append(self, settlements: Sequence[Settlement]) -> None:
        """Add unanswered verdicts to the file."""
        if self._fd >= 0:
            size = os.fstat(self._fd).st_size
            try:
                _write(self._fd, pack_verdicts(settlements, self._now_ms()))
            except OSError as failure:
                # an incomplete line must go: the next line would be appended to it
                with suppress(OSError):
                    os.ftruncate(self._fd, size)
                    os.lseek(self._fd, size, os.SEEK_SET)
                self._warn(failure)

    def clear(self) -> None:
        if self._fd >= 0:
            with suppress(OSError):
                self._path.unlink()
            self.leave()

    def leave(self) -> None:
        """Close the file, which unlocks it: another client can hand it in."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _warn(self, failure: OSError) -> None:
        if not self._is_warned:
            self._is_warned = True
            log.warning("verdicts wait in memory only, until the broker is back: %s", failure)


class SpoolRemainder(NamedTuple):
    """A file that another client left, locked by this one."""

    path: Path
    fd: int
    owner: SpoolOwner
    kept: list[SpooledAck]

    def delete(self) -> None:
        """Delete the file: its verdicts are answered or no longer useful."""
        with suppress(OSError):
            self.path.unlink()

    def put_back(self) -> None:
        """Unlock the file, so that another client may try. Call it last, and once."""
        os.close(self.fd)


class AckSpool:
    """The spool files of this machine's clients of one cluster. `folder` need not exist."""

    def __init__(self, folder: Path, addresses: Iterable[str]) -> None:
        self._folder = SpoolFolder(folder / "verdicts")
        self._cluster = ",".join(sorted(addresses))

    def file(self, owner: Callable[[], SpoolOwner], now_ms: Callable[[], int]) -> SpoolFile:
        """The file of one queue of a consumer. Nothing is written yet;
        `owner` is called at each write.
        """
        (broker_group, attach) = owner()
        prefix = self._prefix(attach.subject, attach.group)
        name = f"{prefix}-{attach.incarnation}-{_digest(broker_group)}{SUFFIX}"
        return SpoolFile(self._folder.path / name, owner, now_ms)

    def left(self, subject: str, group: str, now_ms: int) -> Iterator[SpoolRemainder]:
        """The unlocked files of a subject and group; each is locked when the iterator yields it.
        Old and unreadable files are removed.
        """
        for path in self._folder.files(self._prefix(subject, group), SUFFIX):
            fd = _lock(path)
            if fd < 0:
                continue
            try:
                found = SpoolRemainder(path, fd, *unpack(os.pread(fd, os.fstat(fd).st_size, 0)))
            except (OSError, ValueError) as failure:
                log.warning(
                    (
                        "%s is set aside; its verdicts are lost, and their messages will be "
                        "delivered again: %s"
                    ),
                    path,
                    failure,
                )
                with suppress(OSError):
                    path.rename(path.with_suffix(BAD_SUFFIX))
                os.close(fd)
                continue
            if now_ms - max((each.time_ms for each in found.kept), default=now_ms) > OLD_MS:
                consumer = found.owner.attach.consumer
                log.warning(
                    "%d verdicts of consumer %s found no broker for a week: %s is deleted",
                    len(found.kept),
                    consumer,
                    path,
                )
                found.delete()
                found.put_back()
                continue
            yield found

    def busy(self, subject: str, group: str) -> Iterator[SpoolOwner]:
        """The consumers whose files are locked by other clients,
        which write them or hand them in.
        """
        for path in self._folder.files(self._prefix(subject, group), SUFFIX):
            fd = _lock(path)
            if fd >= 0:
                os.close(fd)
                continue
            with suppress(OSError, ValueError):
                yield unpack(path.read_bytes())[0]

    def _prefix(self, subject: str, group: str) -> str:
        return _digest(self._cluster, subject, group)


def _digest(*names: str) -> str:
    return hashlib.blake2b("\0".join(names).encode(), digest_size=10).hexdigest()


def _write(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def _lock(path: Path) -> int:
    """An open and locked descriptor of the file; -1 if another process holds the lock, or the file
    is gone.
    """
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


# --- names of files -------------------------------------------------------------------------------


class SpoolFolder:
    """The names of the files in a folder, which need not exist, by what stands before their first
    hyphen.

    Every consumer asks for its own files when it attaches, and again and again later. Reading the
    whole folder for each would take time that grows with the square of the number of consumers, so
    the folder is read again only when it has changed. The folder's modification time shows that. A
    file that is created within the same tick of the file system's clock does not change this time,
    so a list counts only if it was read `TICK_S` after that time was seen first.
    """

    def __init__(
        self,
        path: Path,
        now_s: Callable[[], float] = time.monotonic,
        list_names: Callable[[Path], list[str]] = os.listdir,
    ) -> None:
        self.path = path
        self._now_s = now_s
        self._list_names = list_names
        self._names: dict[str, list[str]] = {}
        self._changed_ns = -1
        self._seen_s = self._read_s = 0.0

    def files(self, prefix: str, suffix: str) -> list[Path]:
        """The files whose names are `prefix`, a hyphen, anything, and `suffix`; sorted. `prefix`
        has no hyphen.
        """
        try:
            changed_ns = self.path.stat().st_mtime_ns
        except OSError:
            return []
        now_s = self._now_s()
        if changed_ns != self._changed_ns:
            self._changed_ns, self._seen_s = changed_ns, now_s
            self._read(now_s)
        elif self._read_s - self._seen_s < TICK_S:
            self._read(now_s)
        return [self.path / name for name in self._names.get(prefix, ()) if name.endswith(suffix)]

    def _read(self, now_s: float) -> None:
        try:
            found = sorted(self._list_names(self.path))
        except OSError:
            found = []
        self._read_s = now_s
        self._names = {}
        for name in found:
            self._names.setdefault(name.partition("-")[0], []).append(name)


StateDir = str | os.PathLike[str] | Literal[False] | None
"""A folder; None for the default; False for none."""


def folder_of(
    state_dir: StateDir, environment: Mapping[str, str], home: Path | None
) -> Path | None:
    """QMQ_STATE_DIR, else `qmq` below XDG_STATE_HOME or ~/.local/state, unless one is named. Raises
    InvalidArgument. Pure.
    """
    if state_dir is False:
        return None
    if state_dir is not None:
        if not isinstance(state_dir, str | os.PathLike) or not os.fspath(state_dir):
            raise InvalidArgument(f"state_dir is a folder, or False for none, not {state_dir!r}")
        return Path(state_dir)
    if environment.get("QMQ_STATE_DIR"):
        return Path(environment["QMQ_STATE_DIR"])
    if environment.get("XDG_STATE_HOME") or home is not None:
        return user_state_folder(environment, home)
    return None


def user_state_folder(environment: Mapping[str, str], home: Path | None = None) -> Path:
    """`qmq` below XDG_STATE_HOME, else below ~/.local/state. Raises InvalidArgument if the user has
    no home folder.
    """
    base = environment.get("XDG_STATE_HOME")
    if not base and home is not None:
        return home / ".local" / "state" / "qmq"
    return below_home(base, ".local", "state", variable="XDG_STATE_HOME") / "qmq"


def store_of(state_dir: StateDir, addresses: Sequence[str]) -> AckSpool | None:
    """The spool for the clients of a cluster on this machine; None without a folder, and on systems
    without file locks.
    """
    folder = folder_of(state_dir, os.environ, home_folder())
    if folder is None or sys.platform == "win32":
        return None

    return AckSpool(folder, addresses)
