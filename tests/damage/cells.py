"""The cells of the matrix, and what each must end in. docs/reference/damage.md shows them.

Disks of machines that lose power and whose sectors cannot be read. What is wrong with a disk
outlives the machine's process.

Harms the files of a replica whose process is dead.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import product
from pathlib import Path
from typing import Final

from qmq_replication import identity as identities
from support.disks import BadBlocks

from qmq.log.disk import Disk
from qmq.testing.machine import MortalDisk
from qmq.wire.batch import ENVELOPE_BYTES, parse_envelope


class Kind(Enum):
    """The kinds of files of a replica."""

    MESSAGES = "message log"
    ACTIONS = "action log"
    CONSUME = "consume log"
    CHECKPOINT = "checkpoint"
    SCHEDULE = "schedule"
    DISPATCH = "dispatch log"
    IDENTITY = "replica.json"
    MARK = "commit mark"

    @property
    def is_of_delay_group(self) -> bool:
        """Whether only delay groups have such files."""
        return self in (Kind.SCHEDULE, Kind.DISPATCH)


class Damage(Enum):
    FLIP = "flipped bit"
    CUT = "truncated"
    CUT_TAIL = "last entry cut off"
    """Between two entries, which no file shows by itself."""
    LOST_PAGES = "unsynced pages lost"
    UNREADABLE = "unreadable (EIO)"


class Beside(Enum):
    """What happens to the master at the same time. The fault ends when the damaged replicas have
    been started again.
    """

    PAUSE = "paused"
    KILL = "killed"
    CUT_OFF = "cut off"


class End(Enum):
    """The outcome of a cell; see MEANINGS. No outcome allows a wrong message to be served."""

    WHOLE = "whole"
    REFUSED = "refused"
    PARTLY = "partly"
    SHORT = "short"
    REBUILT = "rebuilt"
    ELSEWHERE = "elsewhere"
    REPORTED = "reported"


MEANINGS: Final = {
    End.WHOLE: (
        "All replicas start without an operator, nothing acknowledged is lost, and "
        "afterwards all replicas have the same undamaged files."
    ),
    End.REFUSED: (
        "The damaged replicas do not start, or stop as masters or at a checkpoint, and say "
        "why (E401, EIO). The group serves with the "
        "other replicas if they can elect a master. After the operator has moved the folder "
        "away (or restored it, if all are damaged), "
        "the result is `whole`."
    ),
    End.PARTLY: (
        "The group serves. For messages that are damaged on all replicas, the group answers "
        "E401, which says how to skip them; a delay "
        "group counts them as unreadable. Everything else is there."
    ),
    End.SHORT: (
        "The group serves. Messages that were only in page caches are lost; everything that was "
        "reported as flushed is there."
    ),
    End.REBUILT: (
        "The group serves. A damaged master answers E401 where it needs the file, until it is "
        "restarted, which rebuilds the file."
    ),
    End.ELSEWHERE: (
        "The group serves. A damaged master does not deliver the damaged messages, and "
        "counts them; another master delivers them "
        "(`qmq transfer`)."
    ),
    End.REPORTED: (
        "The group serves everything; the scrubber reports damage that no replica can repair, "
        "where a checkpoint replaces it."
    ),
}


@dataclass(frozen=True, slots=True)
class Cell:
    kind: Kind
    damage: Damage
    replicas: int
    """How many of three are damaged, at the same place: the slaves first, then the master."""
    beside: Beside

    def __str__(self) -> str:
        return f"{self.kind.value}, {self.damage.value}, {self.replicas}, {self.beside.value}"

    def allows(self, end: End) -> bool:
        """Whether this outcome is allowed: the outcome in the table, or a better one where the
        outcome depends on which replica becomes master.
        """
        is_found_by_masters = (
            self.kind in (Kind.CONSUME, Kind.SCHEDULE, Kind.DISPATCH)
            and self.damage is not Damage.CUT
        )
        depends = is_found_by_masters or self.damage is Damage.CUT_TAIL
        return end is self.end or (end is End.WHOLE and depends and self.replicas < REPLICAS)

    @property
    def end(self) -> End:
        """The outcome that the cell must have, with each of the other faults."""
        return ENDS[self.kind, self.damage][self.replicas - 1]


REPLICAS: Final = 3
_W, _R, _P, _S, _B, _N, _T = (
    End.WHOLE,
    End.REFUSED,
    End.PARTLY,
    End.SHORT,
    End.REBUILT,
    End.REPORTED,
    End.ELSEWHERE,
)
ENDS: Final[dict[tuple[Kind, Damage], tuple[End, End, End]]] = {
    (Kind.MESSAGES, Damage.FLIP): (_W, _W, _P),
    (Kind.MESSAGES, Damage.CUT): (_R, _R, _R),
    (Kind.MESSAGES, Damage.CUT_TAIL): (_W, _S, _S),
    (Kind.MESSAGES, Damage.LOST_PAGES): (_W, _W, _S),
    (Kind.MESSAGES, Damage.UNREADABLE): (_W, _W, _P),
    (Kind.ACTIONS, Damage.FLIP): (_W, _W, _N),
    (Kind.ACTIONS, Damage.CUT): (_R, _R, _R),
    (Kind.ACTIONS, Damage.CUT_TAIL): (_W, _S, _S),
    (Kind.ACTIONS, Damage.LOST_PAGES): (_W, _W, _S),
    (Kind.ACTIONS, Damage.UNREADABLE): (_W, _W, _N),
    (Kind.CONSUME, Damage.FLIP): (_B, _B, _B),
    (Kind.CONSUME, Damage.CUT): (_W, _W, _W),
    (Kind.CONSUME, Damage.LOST_PAGES): (_W, _W, _W),
    (Kind.CONSUME, Damage.UNREADABLE): (_B, _B, _B),
    (Kind.CHECKPOINT, Damage.FLIP): (_W, _W, _W),
    (Kind.CHECKPOINT, Damage.CUT): (_W, _W, _W),
    (Kind.CHECKPOINT, Damage.LOST_PAGES): (_W, _W, _W),
    (Kind.CHECKPOINT, Damage.UNREADABLE): (_W, _W, _W),
    (Kind.SCHEDULE, Damage.FLIP): (_T, _T, _P),
    (Kind.SCHEDULE, Damage.CUT): (_R, _R, _R),
    (Kind.SCHEDULE, Damage.LOST_PAGES): (_W, _W, _W),
    (Kind.SCHEDULE, Damage.UNREADABLE): (_R, _R, _R),
    (Kind.DISPATCH, Damage.FLIP): (_R, _R, _R),
    (Kind.DISPATCH, Damage.CUT): (_R, _R, _R),
    (Kind.DISPATCH, Damage.LOST_PAGES): (_W, _W, _W),
    (Kind.DISPATCH, Damage.UNREADABLE): (_R, _R, _R),
    (Kind.IDENTITY, Damage.FLIP): (_R, _R, _R),
    (Kind.IDENTITY, Damage.CUT): (_R, _R, _R),
    (Kind.IDENTITY, Damage.LOST_PAGES): (_W, _W, _W),
    (Kind.IDENTITY, Damage.UNREADABLE): (_R, _R, _R),
    (Kind.MARK, Damage.FLIP): (_W, _W, _W),
    (Kind.MARK, Damage.CUT): (_W, _W, _W),
    (Kind.MARK, Damage.LOST_PAGES): (_W, _W, _W),
    (Kind.MARK, Damage.UNREADABLE): (_W, _W, _W),
}


def cells() -> Iterator[Cell]:
    """Every cell of the replicas' own files."""
    for (kind, damage), replicas, beside in product(ENDS, (1, 2, 3), Beside):
        yield Cell(kind, damage, replicas, beside)


class Platter:
    """The part of a machine's disk that outlives its process: bad blocks, and what was overwritten
    since the last sync.
    """

    def __init__(self) -> None:
        self.blocks = BadBlocks()
        self.lock = threading.Lock()
        self._before: list[tuple[Path, int, bytes, int]] = []
        """(file, place, what was there, the file's size), oldest first, of each write and cut that
        is not synced.
        """
        self._new: set[Path] = set()
        """Files whose names are not synced."""

    def make(self, path: Path) -> None:
        """A file is made, on other blocks than one of that name before."""
        self._new.add(path)
        self.blocks.cut(path)

    def change(self, path: Path, at: int, size: int) -> None:
        """A part of a file is about to change."""
        with path.open("rb") as file:
            file.seek(at)
            self._before.append((path, at, file.read(size), path.stat().st_size))

    def sync(self, path: Path) -> None:
        """The file's data is on the disk."""
        self._before = [each for each in self._before if each[0] != path]

    def sync_folder(self, folder: Path) -> None:
        """The names of a folder's files are on the disk."""
        self._new = {path for path in self._new if path.parent != folder}

    def lose_power(self, loses: Callable[[Path], bool]) -> int:
        """Take back every change of these files that no sync followed. Returns the number of
        changes taken back.
        """
        with self.lock:
            lost = [each for each in self._before if loses(each[0])]
            for path, at, data, size in reversed(lost):
                if path.exists():
                    with path.open("r+b") as file:
                        file.seek(at)
                        file.write(data)
                        file.truncate(size)
            new = [path for path in self._new if loses(path) and path.exists()]
            for path in new:
                path.unlink()
            self._before.clear()
            self._new.clear()
            return len(lost) + len(new)


class FailingDisk(MortalDisk):
    """A process's way to a platter."""

    def __init__(self, platter: Platter) -> None:
        super().__init__()
        self._platter = platter
        self._paths: dict[int, Path] = {}
        self.failed_reads = 0

    def open_append(self, path: Path) -> int:
        with self._platter.lock:
            is_new = not path.exists()
            fd = super().open_append(path)
            self._paths[fd] = path
            if is_new:
                self._platter.make(path)
        return fd

    def open_read(self, path: Path) -> int:
        fd = super().open_read(path)
        self._paths[fd] = path
        return fd

    def read(self, fd: int, size: int, at: int) -> bytes:
        data = super().read(fd, size, at)
        try:
            self._platter.blocks.require_readable(self._paths[fd], at, at + len(data))
        except OSError:
            self.failed_reads += 1
            raise
        return data

    def write(self, fd: int, buffers: Sequence[bytes], at: int) -> None:
        path, size = self._paths[fd], sum(map(len, buffers))
        with self._platter.lock:
            self._platter.blocks.write(path, at, at + size)
            if path.exists():  # another file may have taken the name
                self._platter.change(path, at, size)
            super().write(fd, buffers, at)

    def truncate(self, fd: int, size: int) -> None:
        path = self._paths[fd]
        with self._platter.lock:
            if path.exists():
                self._platter.change(path, size, path.stat().st_size)
            super().truncate(fd, size)
            self._platter.blocks.cut(path, size)

    def sync(self, fd: int) -> None:
        super().sync(fd)
        with self._platter.lock:
            self._platter.sync(self._paths[fd])

    def sync_folder(self, folder: Path) -> None:
        super().sync_folder(folder)
        with self._platter.lock:
            self._platter.sync_folder(folder)

    def replace(self, path: Path, data: bytes) -> None:
        super().replace(path, data)
        with self._platter.lock:
            self._platter.blocks.cut(path)

    def delete(self, path: Path) -> None:
        super().delete(path)
        with self._platter.lock:
            self._platter.blocks.cut(path)


_PATTERNS: Final[dict[Kind, tuple[str, ...]]] = {
    Kind.MESSAGES: ("broker/message/*.log",),
    Kind.ACTIONS: ("broker/action/*.log",),
    Kind.CONSUME: ("broker/consume/*.idx",),
    Kind.CHECKPOINT: ("broker/checkpoint/*.qmc",),
    Kind.SCHEDULE: ("broker/schedule/*.log", "broker/schedule/*.idx"),
    Kind.DISPATCH: ("broker/schedule/*.done",),
    Kind.IDENTITY: ("replica.json",),
    Kind.MARK: ("broker/committed.qmm",),
}
LOGS: Final = (Kind.MESSAGES, Kind.ACTIONS)


def files_of(kind: Kind, data: Path) -> list[Path]:
    """A replica's files of a kind that have content, oldest first."""
    return [
        path
        for pattern in _PATTERNS[kind]
        for path in sorted(data.glob(pattern))
        if path.stat().st_size
    ]


def common_sizes(kind: Kind, folders: Sequence[Path]) -> dict[str, int]:
    """The size of each file of a kind, by name, on the replica that has written least of it."""
    found: dict[str, int] = {}
    for path in (path for folder in folders for path in files_of(kind, folder)):
        found[path.name] = min(path.stat().st_size, found.get(path.name, path.stat().st_size))
    return found


def harm(cell: Cell, data: Path, platter: Platter, sizes: Mapping[str, int]) -> None:
    """Do the cell's damage to a replica's folder, in the middle of the common part of each file: a
    replica writes a schedule in its own time, and what it has not written it takes from its log.
    Raises LookupError if there is nothing to damage.
    """
    paths = files_of(cell.kind, data)
    if not paths:
        raise LookupError(f"{data} has no {cell.kind.value}")
    if cell.damage is Damage.LOST_PAGES:
        platter.lose_power(lambda path: path in paths)
        _forget_boot(data)
        return
    if cell.damage is Damage.CUT_TAIL:
        cut(paths[-1], last_entry(paths[-1].read_bytes()))
        return
    for path in paths[:1] if cell.kind in LOGS else paths:
        _DO[cell.damage](path, place_in(path, sizes[path.name]), platter)


def place_in(path: Path, size: int) -> int:
    """The byte that is damaged: the same on all replicas. In a log, one of an entry in the
    middle.
    """
    data = path.read_bytes()[:size]
    if path.suffix != ".log":
        return len(data.rstrip(b" ")) // 2  # a text file is padded to whole blocks
    position = 0
    while (following := position + parse_envelope(data, position).total_bytes) < len(data) // 2:
        position = following
    return position + ENVELOPE_BYTES + 40


def last_entry(data: bytes) -> int:
    """Where the last entry of a segment begins."""
    position = 0
    while (following := position + parse_envelope(data, position).total_bytes) < len(data):
        position = following
    return position


def _flip(path: Path, at: int, _: Platter) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def cut(path: Path, at: int, _: Platter | None = None) -> None:
    with path.open("r+b") as file:
        file.truncate(at)


def _spoil(path: Path, at: int, platter: Platter) -> None:
    platter.blocks.spoil(path, at)


_DO: Final[dict[Damage, Callable[[Path, int, Platter], None]]] = {
    Damage.FLIP: _flip,
    Damage.CUT: cut,
    Damage.UNREADABLE: _spoil,
}


def _forget_boot(data: Path) -> None:
    """The machine starts again: another boot id than the one in replica.json."""
    group, replica = _names_in(data)
    identity = identities.load(data, group, replica)
    assert identity is not None
    replace(identity, boot="another boot").save(Disk(), data)


def _names_in(data: Path) -> tuple[str, str]:

    content = json.loads(json.loads((data / identities.FILE).read_bytes())["content"])
    return content["group"], content["replica"]
