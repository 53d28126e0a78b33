"""A client process of the comparison: `phases.py LIBRARY ADDRESS SETTINGS` does the phases that it
is told on standard input.

One line of JSON for each phase: the fields of `Phase`. The client connects, answers {"ready": ...},
begins at the line "begin", and answers {"done": ...} with its messages, seconds and CPU time. A
phase that consumes answers each line "seen" with the number of messages so far and each line
"counts" with their numbers, and ends at the line "stop"; its seconds end with the last number that
changed. Clients in other languages (java, go) speak the same.

Every body begins with its number in the ring of `RING` bodies, 8 bytes, and a time, 8 bytes.
`counts` says how often each number was acknowledged or has arrived: the program that compares adds
them up.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import resource
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

RING: Final = 1_000
HEAD: Final = 16
LARGE: Final = 16_384
LAP_LARGE: Final = 10
KEYS: Final = [b"key-%04d" % number for number in range(RING)]
"""The key of each body of the ring, for ordered rows."""


@dataclass(frozen=True, slots=True)
class Phase:
    """What to do. `work` names a method of the library's client. `seconds`: how long to send;
    `messages`: how many, if not 0.
    """

    work: str
    topic: str
    seconds: float = 5.0
    messages: int = 0
    size: int = 100
    tasks: int = 1
    per_s: int = 0
    partitions: int = 0
    ordered: bool = False
    flushed: bool = False
    each: bool = False
    consumers: int = 1
    groups: int = 1
    prefix: str = "g"

    @property
    def group_names(self) -> list[str]:
        return [f"{self.prefix}{number}" for number in range(self.groups)]


class Run:
    """A phase under way: when to stop, what was counted."""

    def __init__(self, phase: Phase) -> None:
        self.phase = phase
        self.bodies = [
            number.to_bytes(8) + bytes(8) + os.urandom(phase.size - HEAD) for number in range(RING)
        ]
        self.counts: Counter[bytes] = Counter()
        """By the first 8 bytes of a body. A consumer counts here what arrives; each thread in
        `another` one.
        """
        self._all = [self.counts]
        self._lock = threading.Lock()
        self.sent = 0
        self.latencies_ns: list[int] = []
        self.is_over = False
        """True when a consumer shall stop;
        a library that waits without end is cancelled instead.
        """
        self.stop: Callable[[], None] = lambda: None
        self._begin_s = self._end_s = self._cpu_s = 0.0

    def begin(self) -> None:
        """Say that the client is ready, and wait until all others are."""
        say({"ready": self.phase.work})
        assert sys.stdin.readline().strip() == "begin"
        self._begin_s, self._cpu_s = time.monotonic(), cpu_s()
        if self.phase.work == "consume":
            threading.Thread(target=self._answer, daemon=True).start()

    @property
    def may_send(self) -> bool:
        """Whether a producer sends more."""
        if self.phase.messages:
            return self.sent < self.phase.messages
        return time.monotonic() - self._begin_s < self.phase.seconds

    def lap(self) -> list[bytes]:
        """The next bodies of the ring: all, or `LAP_LARGE` long ones, so that the time is looked at
        often enough.
        """
        if self.phase.size <= LARGE:
            self.sent += RING
            return self.bodies
        self.sent += LAP_LARGE
        start = (self.sent - LAP_LARGE) % RING
        return self.bodies[start : start + LAP_LARGE]

    def stamped(self) -> bytes:
        """The next body, with the time."""
        body = self.bodies[self.sent % RING]
        self.sent += 1
        return body[:8] + time.monotonic_ns().to_bytes(8) + body[HEAD:]

    def next(self) -> bytes:
        """The next body of the ring."""
        self.sent += 1
        return self.bodies[(self.sent - 1) % RING]

    def due_s(self) -> float:
        """The time until the next message of a row with a rate is due."""
        return self._begin_s + self.sent / self.phase.per_s - time.monotonic()

    def another(self) -> Counter[bytes]:
        self._all.append(Counter())
        return self._all[-1]

    def arrived(self, body: bytes) -> None:
        """Count a message of a row with a rate, and the time that it took. Threads may call it."""
        took_ns = time.monotonic_ns() - int.from_bytes(body[8:16])
        with self._lock:
            self.counts[body[:8]] += 1
            self.latencies_ns.append(took_ns)

    def _answer(self) -> None:
        """Say how many have arrived, until the end."""
        seen = 0
        while (asked := sys.stdin.readline().strip()) in ("seen", "counts"):
            if asked == "counts":
                say({"counts": self._counted()})
                continue
            found = sum(each.total() for each in self._all)
            if found != seen:
                seen, self._end_s = found, time.monotonic()
            say({"seen": found})
        self.is_over = True
        self.stop()

    def _counted(self) -> list[int]:
        return [sum(each[number.to_bytes(8)] for each in self._all) for number in range(RING)]

    def report(self) -> dict[str, Any]:
        end_s = self._end_s or time.monotonic()
        if self.sent:
            laps, rest = divmod(self.sent, RING)
            counts = [laps + (number < rest) for number in range(RING)]
        else:
            counts = self._counted()
        took = sorted(self.latencies_ns)
        parts = (
            {
                name: took[min(int(len(took) * part), len(took) - 1)] / 1e6
                for name, part in QUANTILES.items()
            }
            if took
            else {}
        )
        return {
            "counts": counts,
            "seconds": end_s - self._begin_s,
            "cpu_s": cpu_s() - self._cpu_s,
            "latency_ms": parts,
        }


QUANTILES: Final = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999}


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)  # all threads: librdkafka has its own
    return used.ru_utime + used.ru_stime


def say(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


async def in_tasks(run: Run, send: Callable[[bytes], Any]) -> None:
    """Each of `tasks` tasks awaits each of its sends."""

    async def sender() -> None:
        while run.may_send:
            await send(run.next())

    await asyncio.gather(*[sender() for _ in range(run.phase.tasks)])


async def at_a_rate(run: Run, send: Callable[[bytes], Any]) -> None:
    """Messages at a rate, each with the time at which it was due to leave."""
    while run.may_send:
        ahead_s = run.due_s()
        if ahead_s > 0:
            await asyncio.sleep(ahead_s)
        await send(run.stamped())


async def main() -> None:
    name, address, settings = sys.argv[1:]
    client = importlib.import_module(name).Client(address, json.loads(settings))
    await client.open()
    loop = asyncio.get_running_loop()
    for line in iter(sys.stdin.readline, ""):
        run = Run(Phase(**json.loads(line)))
        working: asyncio.Task[None] = asyncio.ensure_future(getattr(client, run.phase.work)(run))
        run.stop = lambda working=working: loop.call_soon_threadsafe(working.cancel)  # type: ignore[misc]
        try:
            await working
        except asyncio.CancelledError:
            if not run.is_over:
                raise
        say({"done": run.report()})
    os._exit(0)  # some libraries take seconds to say goodbye


if __name__ == "__main__":
    asyncio.run(main())
