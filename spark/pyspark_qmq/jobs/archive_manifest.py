"""What an archive holds, as a chain of manifests. Pure.

Manifest number n + 1 says what changed after n; all of them together are the truth, and nothing else is: a file that no manifest names is
not in the archive, whatever folder it lies in.

| kind | says |
|---|---|
| archive | ranges of queues were taken from the log, their rows are in these files |
| compact | these files hold the rows of those, which are out of the archive now, but kept for a while |
| sweep | of these nobody can be reading any more: they are deleted |

Two rules make it exact, and `Archive.after` refuses what breaks them: a range is taken once; a file goes out of the archive once, and only
if it is in.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from pyspark_qmq import offsets
from pyspark_qmq.jobs import archive_ranges as ranges
from pyspark_qmq.jobs.archive_ranges import Ranges
from pyspark_qmq.offsets import Offsets
from pyspark_qmq.source_model import QueueKey
from qmq.errors import InvalidArgument, LogDamaged

FORMAT: Final = 1

Kind = Literal["archive", "compact", "sweep"]


@dataclass(frozen=True, slots=True)
class Extent:
    """What a file holds of one queue: the first and last sequence, and how many rows."""

    first: int
    last: int
    rows: int


@dataclass(frozen=True, slots=True)
class ArchivedFile:
    """A Parquet file of one subject and day; it never changes."""

    path: str
    """Within the folder of files: `attempt=A/subject=S/day=YYYY-MM-DD/NAME`."""
    size: int
    """Bytes."""
    queues: Mapping[str, Extent]
    """By name within the subject, `0@g1`."""

    @property
    def subject(self) -> str:
        return self.path.split("/")[1].removeprefix("subject=")

    @property
    def day(self) -> str:
        """On which they were stored, UTC: `YYYY-MM-DD`."""
        return self.path.split("/")[2].removeprefix("day=")

    @property
    def plain(self) -> str:
        """Where plain readers find it, within their folder."""
        return self.path.split("/", 1)[1]

    @property
    def rows(self) -> int:
        return sum(each.rows for each in self.queues.values())


@dataclass(frozen=True, slots=True)
class Manifest:
    """One change of an archive."""

    kind: Kind
    ranges: Ranges = field(default_factory=dict)
    """What was taken from the log; only of kind archive."""
    reached: Offsets = field(default_factory=dict)
    """Where the stream was behind it, also in queues that gave nothing; only of kind archive."""
    files: tuple[ArchivedFile, ...] = ()
    """What came in."""
    gone: tuple[str, ...] = ()
    """Paths that went out (compact), or that were deleted (sweep)."""
    origin: str = ""
    """Which query and epoch it was, for people."""
    number: int = 0
    """Its place in the chain, from 1."""
    time_ms: int = 0
    """When it was made."""

    def to_json(self) -> bytes:
        """As it is stored."""
        found = {
            "format": FORMAT,
            "number": self.number,
            "kind": self.kind,
            "time_ms": self.time_ms,
            "origin": self.origin,
            "rows": sum(each.rows for each in self.files),
            "ranges": ranges.to_json(self.ranges),
            "to": offsets.to_json(self.reached),
            "files": [_file_json(each) for each in self.files],
            "gone": list(self.gone),
        }
        return (json.dumps(found, indent=1) + "\n").encode()


def parse_manifest(data: bytes, name: str) -> Manifest:
    """The inverse of `to_json`. Raises LogDamaged, naming the manifest."""
    try:
        found = _checked(data)
        files = tuple(_file(each) for each in found["files"])
        taken, reached = ranges.of_json(found["ranges"]), offsets.of_json(found["to"])
        return Manifest(found["kind"], taken, reached, files, tuple(found["gone"]), found["origin"], found["number"], found["time_ms"])
    except (ValueError, KeyError, TypeError, AttributeError, InvalidArgument) as cause:
        raise LogDamaged(f"the archive's manifest {name} cannot be read ({cause}): restore it from a copy") from cause


@dataclass(frozen=True, slots=True)
class Archive:
    """What an archive holds behind manifest `number`."""

    number: int = 0
    covered: Ranges = field(default_factory=dict)
    """What was ever taken from the log."""
    reached: Offsets = field(default_factory=dict)
    """Where a stream that goes on from here begins."""
    files: Mapping[str, ArchivedFile] = field(default_factory=dict)
    """What is in it, by path."""
    kept: Mapping[str, int] = field(default_factory=dict)
    """Paths that went out and are not deleted yet, and when they went (milliseconds since 1970)."""

    @property
    def rows(self) -> int:
        """How many messages there are."""
        return sum(each.rows for each in self.files.values())

    def fits(self, manifest: Manifest) -> bool:
        """Whether the change can be made: nothing it takes was taken, and all that it takes away is there."""
        away = self.kept if manifest.kind == "sweep" else self.files
        is_new = not any(each.path in self.files for each in manifest.files)
        return is_new and all(path in away for path in manifest.gone) and not ranges.overlap(manifest.ranges, self.covered)

    def after(self, manifests: Iterable[Manifest]) -> Archive:
        """What it holds behind these too, which follow it without a gap. Raises LogDamaged if they do not."""
        number, covered, reached, files, kept = self.number, self.covered, dict(self.reached), dict(self.files), dict(self.kept)
        for each in manifests:
            before = Archive(number, covered, reached, files, kept)
            if each.number != number + 1 or not before.fits(each):
                raise LogDamaged(f"the archive's manifest {each.number} does not follow from {number}: restore its manifests from a copy")
            number, covered = each.number, ranges.add(covered, each.ranges) if each.ranges else covered
            for path in each.gone:
                if each.kind == "sweep":
                    del kept[path]
                else:
                    del files[path]
                    kept[path] = each.time_ms
            files.update({file.path: file for file in each.files})
            reached.update({key: max(sequence, reached.get(key, 0)) for key, sequence in each.reached.items()})
        return Archive(number, covered, reached, files, kept)

    def lacks(self, wanted: Ranges) -> dict[QueueKey, tuple[ranges.Range, ...]]:
        """What of these ranges is not covered."""
        return ranges.subtract(wanted, self.covered)

    def to_json(self) -> bytes:
        """As a snapshot is stored, so that nobody has to read the whole chain."""
        found = {
            "format": FORMAT,
            "number": self.number,
            "covered": ranges.to_json(self.covered),
            "to": offsets.to_json(self.reached),
            "files": [_file_json(each) for each in self.files.values()],
            "kept": dict(self.kept),
        }
        return (json.dumps(found) + "\n").encode()


def parse_snapshot(data: bytes) -> Archive:
    """The inverse of `to_json`. Raises ValueError: a snapshot that cannot be read is done without."""
    try:
        found = _checked(data)
        files = (_file(each) for each in found["files"])
        kept = {str(path): int(time_ms) for path, time_ms in found["kept"].items()}
        covered, reached = ranges.of_json(found["covered"]), offsets.of_json(found["to"])
        return Archive(found["number"], covered, reached, {each.path: each for each in files}, kept)
    except (KeyError, TypeError, AttributeError, InvalidArgument) as cause:
        raise ValueError(str(cause)) from cause


def numbered(manifest: Manifest, number: int, time_ms: int) -> Manifest:
    """The same change, at a place in the chain."""
    return replace(manifest, number=number, time_ms=time_ms)


def _checked(data: bytes) -> Any:
    found = json.loads(data)
    if found["format"] != FORMAT:
        raise ValueError(f"format {found['format']}, known is {FORMAT}")
    return found


def _file_json(file: ArchivedFile) -> dict[str, Any]:
    queues = {within: [each.first, each.last, each.rows] for within, each in sorted(file.queues.items())}
    return {"path": file.path, "bytes": file.size, "rows": file.rows, "queues": queues}


def _file(found: Mapping[str, Any]) -> ArchivedFile:
    queues = {within: Extent(*map(int, extent)) for within, extent in found["queues"].items()}
    return ArchivedFile(found["path"], found["bytes"], queues)
