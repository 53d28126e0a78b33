"""The state file of a load: what is stored for sure, so that another attempt goes on from there. Lines of JSON, of which the last whole
one counts; each is flushed to the disk before the load goes on.

    {"version": 1, "load": {"subject": "orders", ...}, "base": "0123...", "mark": ..., "ends": [["g1", 0, 17]], "records": 4000,
     "is_done": false}

    load       what is loaded where: another load is refused
    base       the first half of the ids that records get which have none
    mark       the source's own note of how far it was read; everything before is stored
    ends       where the target's queues ended then: nothing from the mark on is stored before these places
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from qmq.errors import InvalidArgument

VERSION: Final = 1
Ends = Mapping[tuple[str, int], int]
"""(broker group, partition) -> sequence."""


@dataclass(frozen=True, slots=True)
class LoadState:
    """How far a load has come."""

    base: int
    mark: Any
    ends: Ends
    records: int
    is_done: bool = False

    def to_json(self) -> dict[str, Any]:
        """As the file has it."""
        ends = [[group, partition, sequence] for (group, partition), sequence in sorted(self.ends.items())]
        return {"base": f"{self.base:016x}", "mark": self.mark, "ends": ends, "records": self.records, "is_done": self.is_done}

    @classmethod
    def of_json(cls, found: Mapping[str, Any]) -> LoadState:
        """The inverse. Raises ValueError, KeyError or TypeError."""
        ends = {(group, partition): sequence for group, partition, sequence in found["ends"]}
        return cls(int(found["base"], 16), found["mark"], ends, found["records"], found["is_done"])


class LoadJournal:
    """Of one load; None as the path: nothing is kept. One process holds it, until `close`. Raises InvalidArgument."""

    def __init__(self, path: Path | None, load: Mapping[str, Any]) -> None:
        self.path, self._load, self._fd = path, dict(load), -1
        self.state: LoadState | None = None
        if path is None:
            return
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as cause:
            raise InvalidArgument(f"the state file {path} cannot be opened: {cause}") from None
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.state = self._read(path)
        except OSError:
            self.close()
            raise InvalidArgument(f"{path} is used by another process: wait for it, or give --state another file") from None
        except InvalidArgument:
            self.close()
            raise

    def _read(self, path: Path) -> LoadState | None:
        """The last whole line; what is behind it, torn by a crash, is cut off."""
        data = path.read_bytes()
        end = data.rfind(b"\n") + 1
        os.ftruncate(self._fd, end)
        os.lseek(self._fd, end, os.SEEK_SET)
        if not end:
            return None
        try:
            found = json.loads(data[:end].splitlines()[-1])
            if found["version"] != VERSION:
                raise ValueError(f"version {found['version']}")
            state = LoadState.of_json(found)
        except (ValueError, KeyError, TypeError) as cause:
            raise InvalidArgument(f"{path} is no state file ({cause}): remove it to begin anew, or give --state another file") from None
        if found["load"] != self._load:
            raise InvalidArgument(
                f"{path} is the state of another load ({json.dumps(found['load'])}): remove it, or give --state another file"
            )
        return state

    def save(self, state: LoadState) -> None:
        """Note how far it has come; on the disk when this returns."""
        self.state = state
        if self._fd >= 0:
            line = json.dumps({"version": VERSION, "load": self._load, **state.to_json()}) + "\n"
            os.write(self._fd, line.encode())
            os.fdatasync(self._fd)

    def close(self) -> None:
        """Let another process have it."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1
