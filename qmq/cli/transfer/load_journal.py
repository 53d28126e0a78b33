"""The state file of a load: what has been stored, so that another attempt continues from there. The file has lines of JSON; the last whole
line counts. Each line is flushed to disk before the load continues.

    {"version": 1, "load": {"subject": "orders", ...}, "base": "0123...", "mark": ..., "ends": [["g1", 0, 17]], "records": 4000,
     "is_done": false}

    load       source and target; the file is refused for another load
    base       the first half of the ids given to records without one
    mark       the source's position: all records before it are stored
    ends       the ends of the target's queues: records after the mark are stored only behind these positions
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from qmq.errors import DiskFull, InvalidArgument
from qmq.json_values import parse_json
from qmq.private_files import NO_SPACE

VERSION: Final = 1
Ends = Mapping[tuple[str, int], int]
"""(broker group, partition) -> sequence."""


@dataclass(frozen=True, slots=True)
class LoadState:
    """The progress of a load."""

    base: int
    mark: Any
    ends: Ends
    records: int
    is_done: bool = False

    def to_json(self) -> dict[str, Any]:
        """The state as a JSON value."""
        ends = [[group, partition, sequence] for (group, partition), sequence in sorted(self.ends.items())]
        return {"base": f"{self.base:016x}", "mark": self.mark, "ends": ends, "records": self.records, "is_done": self.is_done}

    @classmethod
    def of_json(cls, found: Mapping[str, Any]) -> LoadState:
        """The inverse of `to_json`. Raises ValueError, KeyError or TypeError."""
        ends = {(group, partition): sequence for group, partition, sequence in msgspec.convert(found["ends"], list[tuple[str, int, int]])}
        if re.fullmatch(r"[0-9a-f]{1,16}", found["base"]) is None:
            raise ValueError(f"base {found['base'][:40]!r}")
        records, is_done = msgspec.convert((found["records"], found["is_done"]), tuple[int, bool])
        return cls(int(found["base"], 16), found["mark"], ends, records, is_done)


class LoadJournal:
    """The state file of one load; with None as its path, no state is kept. Locked by one process until `close`. Raises InvalidArgument."""

    def __init__(self, path: Path | None, load: Mapping[str, Any]) -> None:
        self.path, self._load, self._fd = path, dict(load), -1
        self.state: LoadState | None = None
        if path is None:
            return
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as cause:
            raise InvalidArgument(f"the state file {path} cannot be opened: {cause}") from None
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.state = self._read(path)
        except OSError:
            self.close()
            raise InvalidArgument(f"{path} is in use by another process: wait for it, or give another file with --state") from None
        except InvalidArgument:
            self.close()
            raise

    def _read(self, path: Path) -> LoadState | None:
        """The last whole line. A partial line after it, left by a crash, is cut off."""
        data = path.read_bytes()
        end = data.rfind(b"\n") + 1
        os.ftruncate(self._fd, end)
        os.lseek(self._fd, end, os.SEEK_SET)
        if not end:
            return None
        try:
            found = parse_json(data[:end].splitlines()[-1])
            if found["version"] != VERSION:
                raise ValueError(f"version {found['version']}")
            load, state = found["load"], LoadState.of_json(found)
        except (ValueError, KeyError, TypeError) as cause:
            raise InvalidArgument(
                f"{path} is not a state file ({cause}): remove it to start over, or give another file with --state"
            ) from None
        if load != self._load:
            raise InvalidArgument(
                f"{path} is the state file of another load ({json.dumps(load)}): remove it, or give another file with --state"
            )
        return state

    def save(self, state: LoadState) -> None:
        """Record the progress. It is on disk when this returns. Raises DiskFull, and the file is as it was then."""
        if self._fd >= 0:
            line = (json.dumps({"version": VERSION, "load": self._load, **state.to_json()}) + "\n").encode()
            end = os.lseek(self._fd, 0, os.SEEK_CUR)
            try:
                while line:
                    line = line[os.write(self._fd, line) :]
                os.fdatasync(self._fd)
            except OSError as cause:
                os.ftruncate(self._fd, end)  # the next line must not continue a part of this one
                os.lseek(self._fd, end, os.SEEK_SET)
                if cause.errno in NO_SPACE:
                    raise DiskFull(f"no space left for the state file {self.path}: free some space, then run the command again") from None
                raise
        self.state = state

    def close(self) -> None:
        """Release the file's lock."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1
