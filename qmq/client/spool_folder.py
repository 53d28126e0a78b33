"""The names of the files in a folder, by what stands before their first hyphen. The folder is read again when it has changed.

Every consumer asks for its own files when it attaches, and again and again later. Reading the whole folder for each would take time that
grows with the square of the number of consumers.

Whether the folder has changed, its modification time says. Files that come within one tick of the file system's clock leave the same time,
so a list counts only if it was read `TICK_S` after that time was seen first.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

TICK_S: Final = 0.1
"""Longer than a tick of any local file system's clock."""


class SpoolFolder:
    """`path` need not exist."""

    def __init__(
        self, path: Path, now_s: Callable[[], float] = time.monotonic, list_names: Callable[[Path], list[str]] = os.listdir
    ) -> None:
        self.path = path
        self._now_s = now_s
        self._list_names = list_names
        self._names: dict[str, list[str]] = {}
        self._changed_ns = -1
        self._seen_s = self._read_s = 0.0

    def files(self, prefix: str, suffix: str) -> list[Path]:
        """The files whose names are `prefix`, a hyphen, anything, and `suffix`; sorted. `prefix` has no hyphen."""
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
