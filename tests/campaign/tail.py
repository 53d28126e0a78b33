"""What processes of a test have written into its histories so far."""

from __future__ import annotations

from collections import Counter
from operator import attrgetter
from pathlib import Path

from history.events import Operation, from_json

from campaign.verdict import name_of


class Tail:
    """The events of files that processes append to, as far as they are written."""

    def __init__(self, folder: Path) -> None:
        self.events: list[Operation] = []
        self.answered: Counter[str] = Counter()
        """Operations that ended with `ok`, by name."""
        self._folder = folder
        self._ends: dict[Path, int] = {}

    def look(self) -> None:
        """Read on."""
        for path in sorted(self._folder.glob("*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._ends.get(path, 0))
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self._ends[path] = self._ends.get(path, 0) + len(line)
                    self._learn(line)

    def _learn(self, line: bytes) -> None:
        event: Operation = from_json(line)
        self.events.append(event)
        if event.type == "ok":
            self.answered[name_of(event)] += 1

    def in_order(self) -> list[Operation]:
        """All events in the order of time; of one moment in the order of the files."""
        return sorted(self.events, key=attrgetter("t_ns"))
