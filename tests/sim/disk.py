"""A replica's disk: its log of entries, and its small state file.

The fault model: a killed process loses nothing that it wrote. A power cut keeps everything synced, and of the writes since then a random
prefix. (A real disk may also tear or reorder writes; the recovery of the real log cuts at the first hole, tests/qmq/log.) A wiped disk
keeps nothing. The state file is always written with a sync. A full disk takes no entries; it takes the state, unless the state's file needs
a block more.
"""

from __future__ import annotations

from random import Random
from typing import NamedTuple

from qmq_replication.history import EpochRun, History
from qmq_replication.ready import DurableState, LogChunk


class Entry(NamedTuple):
    """One entry; a barrier has the value 0."""

    epoch: int
    value: int


class Image:
    """A log at one moment: `entries` follow index `start`."""

    __slots__ = ("entries", "start", "start_epoch")

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.start = 0
        self.start_epoch = 0

    @property
    def last(self) -> int:
        """Index of the last entry."""
        return self.start + len(self.entries)

    def do(self, kind: str, index: int, entries: tuple[Entry, ...]) -> None:
        """One write."""
        if kind == "add":
            self.entries.extend(entries)
        elif kind == "cut":
            del self.entries[index - self.start :]
        elif kind == "drop":
            self.start_epoch = self.entries[index - self.start - 1].epoch
            del self.entries[: index - self.start]
            self.start = index
        else:
            self.entries, self.start, self.start_epoch = [], index, entries[0].epoch

    def history(self) -> History:
        """The shape of the disk's content, as the real store recovers it."""
        runs: list[EpochRun] = []
        for index, entry in enumerate(self.entries, self.start + 1):
            if not runs or runs[-1].epoch != entry.epoch:
                runs.append(EpochRun(entry.epoch, index))
        return History(runs, self.last, self.start, self.start_epoch)


class Disk:
    """A simulated disk. It is also the core's `Log`."""

    checks_places = True

    def __init__(self, read_entries: int) -> None:
        self._read_entries = read_entries
        self.image = Image()
        self.state = DurableState()
        self.folder = 1
        self.is_full = False
        self.takes_state = True
        self._synced = Image()
        self._pending: list[tuple[str, int, tuple[Entry, ...]]] = []

    # --- writing -------------------------------------------------------------------------------------------------------

    def write(self, kind: str, index: int, entries: tuple[Entry, ...] = ()) -> None:
        """Write; not synced yet."""
        self.image.do(kind, index, entries)
        self._pending.append((kind, index, entries))

    def sync(self, count: int) -> None:
        """The first `count` writes that were pending reach the disk."""
        for each in self._pending[:count]:
            self._synced.do(*each)
        del self._pending[:count]

    @property
    def pending(self) -> int:
        """Writes that a power cut may take."""
        return len(self._pending)

    def holds(self, index: int, entry: Entry, *, durably: bool) -> bool:
        """Whether the entry is here."""
        image = self._synced if durably else self.image
        place = index - image.start - 1
        return place < 0 or (place < len(image.entries) and image.entries[place] == entry)

    # --- faults --------------------------------------------------------------------------------------------------------

    def cut_power(self, random: Random) -> bool:
        """Lose some of what was pending; True if there was any."""
        kept = random.randint(0, len(self._pending))
        is_lossy = kept < len(self._pending)
        self.sync(kept)
        self._pending.clear()
        self.image = Image()
        self.image.entries, self.image.start = list(self._synced.entries), self._synced.start
        self.image.start_epoch = self._synced.start_epoch
        return is_lossy

    def fill(self, *, takes_state: bool) -> None:
        """Other programs take the last byte."""
        self.is_full, self.takes_state = True, takes_state

    def empty(self) -> None:
        """There is room again."""
        self.is_full, self.takes_state = False, True

    def wipe(self) -> None:
        """A new disk."""
        self.forget_log()
        self.state = DurableState()
        self.folder += 1

    def forget_log(self) -> None:
        """Delete the log's files, and nothing else."""
        self.image, self._synced = Image(), Image()
        self._pending.clear()

    # --- for the core -----------------------------------------------------------------------------------------------

    def place(self) -> int:
        """The end of the log."""
        return self.image.last

    def read(self, place: int, after: int, bytes_max: int) -> LogChunk | None:
        """Entries after `after`."""
        assert place == after or not self.checks_places, f"read behind {after} at the place of {place}"
        at = after - self.image.start
        if at < 0:
            return None
        found = tuple(self.image.entries[at : at + self._read_entries])
        last = after + len(found)
        return LogChunk(last, found, last, len(found))

    def start(self) -> tuple[int, int, int]:
        """The position after everything in the log."""
        return self.image.start_epoch, self.image.start, self.image.start
