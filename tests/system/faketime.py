"""A wall clock that jumps, for one process: libfaketime, preloaded from the package of that name.

The tests rely on these properties of 0.9.10, the version in libfaketime 3.0.1:

* With FAKETIME_DONT_FAKE_MONOTONIC=1 it does not change CLOCK_MONOTONIC, its _RAW and _COARSE
  forms, and CLOCK_BOOTTIME.
* With FAKETIME_NO_CACHE=1 it reads FAKETIME_TIMESTAMP_FILE at every call of a clock (otherwise
  every ten seconds), so a test can make the clock of a running process jump. The file holds an
  offset such as "+3600". A test replaces the file, so it is never half written.
* Reading the file is not safe in threads: if two read at once, the process may end with "failed to
  parse FAKETIME timestamp". A process with many threads should keep the value for a second
  (`cache_s`).
* A process has a semaphore and a page in /dev/shm under its pid. A killed process leaves them there
  (a later process with that pid works without them): `sweep` deletes them.
* This package is compiled without faking stat, utime and sleep, so file times and timers are real.
* Child processes inherit the environment, so their clocks jump too.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Final

SHARED_MEMORY: Final = Path("/dev/shm")


def _library() -> Path:
    found = find_spec("libfaketime")
    assert found is not None, "run scripts/setup: the package libfaketime is missing"
    assert found.origin is not None
    return Path(found.origin).parent / "vendor" / "libfaketime" / "src" / "libfaketime.so.1"


class FakeTime:
    """One wall clock, for all processes that are started with `environment`. Begins true."""

    def __init__(self, folder: Path, *, cache_s: int = 0) -> None:
        """`cache_s`: how long a process may keep an offset that it has read."""
        self._cache_s = cache_s
        self._file = folder / "wall-clock-offset"
        self.jump(0)

    @property
    def environment(self) -> dict[str, str]:
        """This process's environment plus the variables for the other process's wall clock."""
        return {
            **os.environ,
            "LD_PRELOAD": str(_library()),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            **(
                {"FAKETIME_CACHE_DURATION": str(self._cache_s)}
                if self._cache_s
                else {"FAKETIME_NO_CACHE": "1"}
            ),
        }

    def jump(self, seconds: float) -> None:
        """Set the wall clock this far ahead of the true time (not of its last value). Processes
        notice at their next reading.
        """
        new = self._file.with_suffix(".new")
        new.write_text(f"{seconds:+f}")
        new.replace(self._file)

    def sweep(self, pid: int) -> None:
        """Remove what a process left in shared memory when it was killed."""
        for name in (f"faketime_shm_{pid}", f"sem.faketime_sem_{pid}"):
            (SHARED_MEMORY / name).unlink(missing_ok=True)
