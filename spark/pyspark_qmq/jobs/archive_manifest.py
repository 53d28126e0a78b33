"""The content of an archive as a chain of manifests. Pure.

Manifest n + 1 describes the change after manifest n. The chain is authoritative: a file that no manifest names is not in the archive.

| kind | meaning |
|---|---|
| archive | ranges of queues were read from the log; their rows are in these files |
| compact | new files replace old ones with the same rows; the old files are kept for a while |
| sweep | these replaced files are no longer read and are deleted |

`Archive.after` enforces two rules that make the archive exact: a range is archived once, and only a file in the archive can be removed.
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
    """One queue in a file: its first and last sequence, and the number of rows."""

    first: int
    last: int
    rows: int


@dataclass(frozen=True, slots=True)
class ArchivedFile:
    """An immutable Parquet file of one subject and day."""

    path: str
    """Relative to the folder of files: `attempt=A/subject=S/day=YYYY-MM-DD/NAME`."""
    size: int
    """Bytes."""
    queues: Mapping[str, Extent]
    """The extents by queue name within the subject, such as `0@g1`."""

    @property
    def subject(self) -> str:
        return self.path.split("/")[1].removeprefix("subject=")

    @property
    def day(self) -> str:
        """The day of storing in UTC: `YYYY-MM-DD`."""
        return self.path.split("/")[2].removeprefix("day=")

    @property
    def plain(self) -> str:
        """The file's path in the plain readers' folder."""
        return self.path.split("/", 1)[1]

    @property
    def rows(self) -> int:
        return sum(each.rows for each in self.queues.values())


@dataclass(frozen=True, slots=True)
class Manifest:
    """One change of an archive."""

    kind: Kind
    ranges: Ranges = field(default_factory=dict)
    """The ranges read from the log; only for kind archive."""
    reached: Offsets = field(default_factory=dict)
    """The stream's offsets after the change, including queues without new messages; only for kind archive."""
    files: tuple[ArchivedFile, ...] = ()
    """The new files."""
    gone: tuple[str, ...] = ()
    """The paths that were replaced (compact) or deleted (sweep)."""
    origin: str = ""
    """The query and epoch, for information."""
    number: int = 0
    """The number in the chain, from 1."""
    time_ms: int = 0
    """The creation time."""

    def to_json(self) -> bytes:
        """The stored form."""
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
    """The content of an archive after manifest `number`."""

    number: int = 0
    covered: Ranges = field(default_factory=dict)
    """All ranges ever read from the log."""
    reached: Offsets = field(default_factory=dict)
    """The offsets from which a stream continues."""
    files: Mapping[str, ArchivedFile] = field(default_factory=dict)
    """The archive's files by path."""
    kept: Mapping[str, int] = field(default_factory=dict)
    """Replaced paths that are not deleted yet, with the time of replacement (milliseconds since 1970)."""

    @property
    def rows(self) -> int:
        """The number of messages."""
        return sum(each.rows for each in self.files.values())

    def fits(self, manifest: Manifest) -> bool:
        """Whether a change is valid: its ranges are not archived yet, and the files it removes are in the archive."""
        away = self.kept if manifest.kind == "sweep" else self.files
        is_new = not any(each.path in self.files for each in manifest.files)
        return is_new and all(path in away for path in manifest.gone) and not ranges.overlap(manifest.ranges, self.covered)

    def after(self, manifests: Iterable[Manifest]) -> Archive:
        """The archive after these manifests. Raises LogDamaged if they do not follow without a gap."""
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
        """The parts of these ranges that are not archived."""
        return ranges.subtract(wanted, self.covered)

    def to_json(self) -> bytes:
        """The stored form of a snapshot."""
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
    """The inverse of `to_json`. Raises ValueError; readers then ignore the snapshot."""
    try:
        found = _checked(data)
        files = (_file(each) for each in found["files"])
        kept = {str(path): int(time_ms) for path, time_ms in found["kept"].items()}
        covered, reached = ranges.of_json(found["covered"]), offsets.of_json(found["to"])
        return Archive(found["number"], covered, reached, {each.path: each for each in files}, kept)
    except (KeyError, TypeError, AttributeError, InvalidArgument) as cause:
        raise ValueError(str(cause)) from cause


def numbered(manifest: Manifest, number: int, time_ms: int) -> Manifest:
    """The change with a number in the chain."""
    return replace(manifest, number=number, time_ms=time_ms)


def _checked(data: bytes) -> Any:
    found = json.loads(data)
    if found["format"] != FORMAT:
        raise ValueError(f"format {found['format']}; this version supports {FORMAT}")
    return found


def _file_json(file: ArchivedFile) -> dict[str, Any]:
    queues = {within: [each.first, each.last, each.rows] for within, each in sorted(file.queues.items())}
    return {"path": file.path, "bytes": file.size, "rows": file.rows, "queues": queues}


def _file(found: Mapping[str, Any]) -> ArchivedFile:
    queues = {within: Extent(*map(int, extent)) for within, extent in found["queues"].items()}
    return ArchivedFile(found["path"], found["bytes"], queues)
