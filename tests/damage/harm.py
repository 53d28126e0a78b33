"""Harms the files of a replica whose process is dead."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from qmq_replication import identity as identities

from damage.cells import Cell, Damage, Kind
from damage.failing_disks import Platter
from qmq.log.disk import Disk
from qmq.wire.batch import ENVELOPE_BYTES, parse_envelope

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
    return [path for pattern in _PATTERNS[kind] for path in sorted(data.glob(pattern)) if path.stat().st_size]


def common_sizes(kind: Kind, folders: Sequence[Path]) -> dict[str, int]:
    """The size of each file of a kind, by name, on the replica that has written least of it."""
    found: dict[str, int] = {}
    for path in (path for folder in folders for path in files_of(kind, folder)):
        found[path.name] = min(path.stat().st_size, found.get(path.name, path.stat().st_size))
    return found


def harm(cell: Cell, data: Path, platter: Platter, sizes: Mapping[str, int]) -> None:
    """Do the cell's damage to a replica's folder, in the middle of the common part of each file: a replica writes a schedule in its own
    time, and what it has not written it takes from its log. Raises LookupError if there is nothing to damage.
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
    """The byte that is damaged: the same on all replicas. In a log, one of an entry in the middle."""
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


_DO: Final[dict[Damage, Callable[[Path, int, Platter], None]]] = {Damage.FLIP: _flip, Damage.CUT: cut, Damage.UNREADABLE: _spoil}


def _forget_boot(data: Path) -> None:
    """The machine starts again: another boot id than the one in replica.json."""
    group, replica = _names_in(data)
    identity = identities.load(data, group, replica)
    assert identity is not None
    replace(identity, boot="another boot").save(Disk(), data)


def _names_in(data: Path) -> tuple[str, str]:

    content = json.loads(json.loads((data / identities.FILE).read_bytes())["content"])
    return content["group"], content["replica"]
