"""One row of the comparison, by one client library, in its own process: `measured.py LIBRARY ROW ADDRESS SIZE SECONDS [COUNT]`.

Prints a line of JSON: messages, seconds, and this process's CPU seconds, all from when the client is connected.

    publish    as fast as the library publishes without waiting for each message; the row ends when all are acknowledged
    awaited    one task waits for each acknowledgement
    awaited256 256 tasks (or threads) do
    consume    the program looks at one message after the other, COUNT at most, and acknowledges as the library's documentation shows; the
               row begins with the first message
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import resource
import sys
import time
from typing import Any


class Clock:
    """The time at which a row may begin and must end, and its duration and CPU time."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.begin()

    def begin(self) -> None:
        """Start measuring; called when the client is connected."""
        self._begin_s, self._cpu_s = time.monotonic(), _cpu_s()

    @property
    def is_over(self) -> bool:
        return time.monotonic() - self._begin_s >= self.seconds

    def report(self, count: int) -> dict[str, float]:
        return {"count": count, "seconds": time.monotonic() - self._begin_s, "cpu_s": _cpu_s() - self._cpu_s}


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)  # all threads: librdkafka has its own
    return used.ru_utime + used.ru_stime


def main() -> None:
    name, row, address, size, seconds, *rest = sys.argv[1:]
    library: Any = importlib.import_module(name)
    clock, bodies = Clock(float(seconds)), [os.urandom(int(size)) for _ in range(1000)]
    arguments: dict[str, tuple[Any, ...]] = {
        "publish": (bodies,),
        "awaited": (bodies, 1),
        "awaited256": (bodies, 256),
        "consume": (int(rest[0]) if rest else 0,),
    }
    work = getattr(library, row.removesuffix("256"))(address, clock, *arguments[row])
    if asyncio.iscoroutine(work):
        import uvloop

        count = uvloop.run(work)
    else:
        count = work
    sys.stdout.write(json.dumps(clock.report(count)) + "\n")
    sys.stdout.flush()
    os._exit(0)  # some libraries take seconds to say goodbye


if __name__ == "__main__":
    main()
