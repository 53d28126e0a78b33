"""The spool of unsent acknowledgements: verdicts that no broker could be told, one file for each queue of a consumer, while its broker
group is away.

    first line     the ATTACH with which its consumer comes back, and the broker group, as JSON
    each further   a verdict and when it was given, as JSON

When verdicts of a queue are in its file, from a verdict that no broker can be told to its answer (`QueueSpool`):

    session ends      everything that is not answered is written
    no session        a new verdict is appended, with the other verdicts of this round of the event loop
    part is void      what is left is written anew, before anything else is pulled
    session begins    nothing is written any more; when all that was unanswered then is answered, the file is deleted
    closing           the file is deleted if the broker heard everything, and else is left to the next process

Rules:
* Nothing is written while brokers can be reached, and a file is gone as soon as a broker has answered everything in it.
* Whoever writes a file, or hands it in, has locked it. The lock is the operating system's (flock): it ends with the process. A file that
  nobody has locked is of a client that died, or was closed while the broker was away: one other client may hand it in (`spool_sender.py`).
* A file is never rewritten in place: a new one takes its name. So what a crash leaves is the old or the new one, and perhaps a last line
  that is cut short, which counts for nothing.
* Pull sequences of a file name messages only as long as the master has handed no others out under them: when it says that it will (a part
  became void), the file is written anew before anything else is pulled.
* The spool is a help, not a promise: what cannot be written waits in memory alone, with a warning. Nothing is forced to disk: a file
  outlives the process, not the machine.
* Files are told apart by digests of their names (a name never becomes a path): the metaservers' addresses, subject and group; the
  consumer's life; the broker group.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from qmq.client.settlements import Settlements, SettleRequest
from qmq.errors import ProtocolViolation
from qmq.wire.frame_payloads import Attach
from qmq.wire.settle_payloads import BY_GROUP_MS, Settlement, Verdict

with suppress(ImportError):  # Windows has none, and so no spool: see `state_folder.store_of`
    import fcntl

log = logging.getLogger("qmq.client")

VERSION: Final = 1
OLD_MS: Final = 7 * 24 * 3600 * 1000
"""A file that nobody could hand in for so long is deleted: no broker group is waited for longer."""
SUFFIX: Final = ".verdicts"
BAD_SUFFIX: Final = ".unreadable"
_NEW_SUFFIX: Final = ".new"


# --- what a file says: pure ----------------------------------------------------------------------------------------


class Origin(NamedTuple):
    """Whose verdicts they are: the broker group, and how the consumer comes back to it."""

    broker_group: str
    attach: Attach


class Kept(NamedTuple):
    """A verdict, and when it was given: milliseconds since 1970."""

    settlement: Settlement
    time_ms: int


def pack_origin(origin: Origin) -> bytes:
    attach = json.loads(origin.attach.pack())
    return json.dumps({"version": VERSION, "broker_group": origin.broker_group, "attach": attach}).encode() + b"\n"


def pack_verdicts(settlements: Iterable[Settlement], time_ms: int) -> bytes:
    lines = [{"time_ms": time_ms, **each._asdict(), "verdict": Verdict(each.verdict).name} for each in settlements]
    return b"".join([json.dumps(each).encode() + b"\n" for each in lines])


def unpack(data: bytes) -> tuple[Origin, list[Kept]]:
    """What a file says. Raises ValueError if it is none of ours, or damaged before its last line."""
    first, *lines = data.split(b"\n")[:-1] or [b""]  # what stands behind the last end of a line was cut short
    try:
        head = json.loads(first)
        if head["version"] != VERSION:
            raise ValueError(f"version {head['version']} of the format, which only newer clients know")
        origin = Origin(str(head["broker_group"]), Attach.unpack(json.dumps(head["attach"]).encode()))
        return origin, [_kept(json.loads(line)) for line in lines]
    except (KeyError, TypeError, RecursionError, ProtocolViolation) as cause:
        raise ValueError(f"no file of verdicts: {cause!r}") from None


def _kept(line: dict[str, Any]) -> Kept:
    numbers = [line[name] for name in ("first", "last", "delay_ms", "time_ms")]
    if not all(type(each) is int for each in numbers) or not 0 <= line["first"] <= line["last"] or not isinstance(line["error"], str):
        raise ValueError(f"{line} is no verdict")
    verdict = Settlement(line["first"], line["last"], Verdict[line["verdict"]], line["delay_ms"], line["error"])
    return Kept(verdict, line["time_ms"])


def still_to_say(kept: Iterable[Kept], next_pull: int, now_ms: int) -> list[Settlement]:
    """What a master is to be told that gives pull sequences from `next_pull` on to other messages. Delays began with their verdicts."""
    found: list[Settlement] = []
    for each, time_ms in kept:
        if each.first < next_pull:
            is_timed = each.verdict == Verdict.NACK and each.delay_ms != BY_GROUP_MS
            delay_ms = max(each.delay_ms - max(now_ms - time_ms, 0), 0) if is_timed else each.delay_ms
            found.append(each._replace(last=min(each.last, next_pull - 1), delay_ms=delay_ms))
    return found


# --- files: thin ---------------------------------------------------------------------------------------------------


class SpoolFile:
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


class AckSpool:
    """The files of one machine's clients of one cluster. `folder` need not be there."""

    def __init__(self, folder: Path, addresses: Iterable[str]) -> None:
        self._folder = folder / "verdicts"
        self._cluster = ",".join(sorted(addresses))

    def file(self, origin: Callable[[], Origin], now_ms: Callable[[], int]) -> SpoolFile:
        """That of one queue of a consumer; nothing is written yet. `origin` is asked whenever something is."""
        (broker_group, attach) = origin()
        name = f"{self._prefix(attach.subject, attach.group)}{attach.incarnation}-{_digest(broker_group)}{SUFFIX}"
        return SpoolFile(self._folder / name, origin, now_ms)

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


# --- when there is a file ------------------------------------------------------------------------------------------


class QueueSpool:
    """The verdicts of one queue, and whether they are in its file.

    `unanswered` gives everything that no broker has answered, in the order in which it was said.
    """

    def __init__(self, file: SpoolFile | None, unanswered: Callable[[], Sequence[Settlement]]) -> None:
        self._file = file
        self._unanswered = unanswered
        self._loop = asyncio.get_running_loop()
        self._is_attached = True
        self._given = Settlements()
        """Not written yet."""
        self._waited_for: set[SettleRequest] = set()
        """What was not answered when the session began, and is not yet."""

    def given(self, settlement: Settlement) -> None:
        """A verdict, while there is no session."""
        if self._file is not None and not self._is_attached:
            if not self._given.messages:
                self._loop.call_soon(self._write)
            self._given.add(*settlement)

    def _write(self) -> None:
        settlements = self._given.take()
        if self._file is None or not settlements:
            return
        if self._file.exists:
            self._file.append(settlements)
        else:
            self._write_all()

    def _write_all(self) -> None:
        self._given.take()
        if self._file is not None:
            settlements = self._unanswered()
            if settlements:
                self._file.rewrite(settlements)
            else:
                self._file.clear()

    def detached(self) -> None:
        """The session has ended. Harmless to repeat."""
        if self._is_attached:
            self._is_attached = False
            self._write_all()

    def voided(self) -> None:
        """A part of what was said is not ours any more."""
        if self._file is not None and self._file.exists:
            self._write_all()

    def attached(self, requests: Iterable[SettleRequest]) -> None:
        """A session has begun, and these are on their way: everything there is."""
        self._is_attached = True
        self._given.take()
        self._waited_for = set(requests)
        self._clear_if_answered()

    def over(self, request: SettleRequest) -> None:
        """It was answered, or came too late."""
        if request in self._waited_for:
            self._waited_for.remove(request)
            self._clear_if_answered()

    def _clear_if_answered(self) -> None:
        if self._file is not None and self._is_attached and not self._waited_for:
            self._file.clear()

    def close(self, *, is_told: bool) -> None:
        """Nothing is said any more. `is_told`: the master heard everything."""
        if self._file is None:
            return
        if is_told:
            self._file.clear()
        elif self._is_attached:
            self.detached()
        else:
            self._write()
        self._file.leave()
        self._file = None
