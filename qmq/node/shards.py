"""Runs the shards of a broker as processes: starts them, passes signals, waits. A pure core decides
what the supervisor does at each event of a shard; docs/SHARDS.md has the table.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Final

PAUSES_MS: Final = (500, 1_000, 2_000, 5_000, 10_000)
STEADY_MS: Final = 60_000
"""After serving for this long, a shard that ends restarts with the shortest pause."""


class ShardState(Enum):
    STARTING = "starting"
    SERVING = "serving"
    RESTING = "resting"
    ENDED = "ended"


@dataclass(slots=True)
class _Shard:
    state: ShardState = ShardState.STARTING
    has_served: bool = False
    serving_since_ms: int = 0
    restarts: int = 0


@dataclass(frozen=True, slots=True)
class Restart:
    """Start the shard again after `after_ms`."""

    shard: int
    after_ms: int


@dataclass(frozen=True, slots=True)
class StopAll:
    """Tell all running shards to stop."""


@dataclass(slots=True)
class ShardSupervision:
    """The state of the shards 1 to `count`, which are all starting at first. Times are milliseconds
    of a monotonic clock.
    """

    count: int
    pauses_ms: Sequence[int] = PAUSES_MS
    is_stopping: bool = False
    exit_status: int = 0
    """The supervisor's exit status: that of the first shard that failed for good,
    or did not stop cleanly.
    """
    _shards: dict[int, _Shard] = field(init=False)

    def __post_init__(self) -> None:
        self._shards = {number: _Shard() for number in range(1, self.count + 1)}

    def state(self, shard: int) -> ShardState:
        return self._shards[shard].state

    @property
    def are_all_serving(self) -> bool:
        return all(each.state is ShardState.SERVING for each in self._shards.values())

    @property
    def is_over(self) -> bool:
        """True if all shards have ended."""
        return all(each.state is ShardState.ENDED for each in self._shards.values())

    def started(self, shard: int) -> bool:
        """Note that the shard's pause has ended.
        Returns False if the shard must not start any more.
        """
        found = self._shards[shard]
        found.state = ShardState.ENDED if self.is_stopping else ShardState.STARTING
        return not self.is_stopping

    def ready(self, shard: int, now_ms: int) -> None:
        """Note that the shard serves."""
        found = self._shards[shard]
        found.state, found.has_served, found.serving_since_ms = ShardState.SERVING, True, now_ms

    def ended(self, shard: int, status: int, now_ms: int) -> Restart | StopAll | None:
        """Note that the shard's process ended with an exit status (negative:
        killed by that signal).
        """
        found = self._shards[shard]
        was_steady = (
            found.state is ShardState.SERVING and now_ms - found.serving_since_ms >= STEADY_MS
        )
        if self.is_stopping or not found.has_served:
            found.state = ShardState.ENDED
            self.exit_status = self.exit_status or (
                status if status > 0 else 128 - status if status < 0 else 0
            )
            if self.is_stopping:
                return None
            self.exit_status = (
                self.exit_status or 1
            )  # a broker that ends without a request has failed, with any exit status
            return self.stop()
        found.state = ShardState.RESTING
        found.restarts = 1 if was_steady else found.restarts + 1
        return Restart(shard, self.pauses_ms[min(found.restarts, len(self.pauses_ms)) - 1])

    def stop(self) -> StopAll:
        """Stop all shards. Those in a pause do not start again."""
        self.is_stopping = True
        for each in self._shards.values():
            if each.state is ShardState.RESTING:
                each.state = ShardState.ENDED
        return StopAll()


log = logging.getLogger("qmq.broker")

READY: Final = b" is ready at "
_PR_SET_PDEATHSIG: Final = 1


@dataclass(frozen=True, slots=True)
class ShardCommand:
    """The command that starts one shard."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str]


class ShardSupervisor:
    """`say` gets the lines that shards print, and `ready_line` when all shards serve. `whole` and
    `part` are the words for the server and a process in the log, because a gateway's processes also
    run under this supervisor.
    """

    def __init__(
        self,
        whole: str,
        commands: Sequence[ShardCommand],
        say: Callable[[str], object],
        *,
        part: str = "shard",
        ready_line: str,
        pauses_ms: Sequence[int] = PAUSES_MS,
    ) -> None:
        self._whole, self._part, self._ready_line = whole, part, ready_line
        self._commands = dict(enumerate(commands, 1))
        self._say = say
        self._supervision = ShardSupervision(len(commands), pauses_ms)
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._has_reported = False

    async def run(self) -> int:
        """Run until all shards have ended. Returns the exit status.
        SIGINT and SIGTERM stop the shards.
        """
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.add_signal_handler(number, self._act, self._supervision.stop)
        for shard in self._commands:
            self._spawn(self._serve(shard))
        while not self._supervision.is_over:
            self._changed.clear()
            await self._changed.wait()
        await asyncio.gather(*self._tasks)
        return self._supervision.exit_status

    def _spawn(self, work: asyncio._CoroutineLike[None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, shard: int) -> None:
        """Run one process of a shard."""
        command = self._commands[shard]
        process = await asyncio.create_subprocess_exec(
            *command.arguments,
            env=command.environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            preexec_fn=_end_with_parent if sys.platform == "linux" else None,
        )
        self._processes[shard] = process
        if self._supervision.is_stopping:
            process.send_signal(
                signal.SIGTERM
            )  # the signal came while the process was being created
        assert process.stdout is not None
        async for line in process.stdout:
            self._say(line.decode(errors="replace").rstrip("\n"))
            if READY in line:
                self._supervision.ready(shard, self._now_ms())
                self._report_ready()
        status = await process.wait()
        del self._processes[shard]
        if not self._supervision.is_stopping:
            log.error("%s %d of %s ended with status %d", self._part, shard, self._whole, status)
        self._act(partial(self._supervision.ended, shard, status, self._now_ms()))

    def _report_ready(self) -> None:
        if self._supervision.are_all_serving and not self._has_reported:
            self._has_reported = True
            self._say(self._ready_line)

    def _act(self, decide: Callable[[], Restart | StopAll | None]) -> None:
        decision = decide()
        if isinstance(decision, Restart):
            log.warning(
                "%s %d of %s starts again in %d ms",
                self._part,
                decision.shard,
                self._whole,
                decision.after_ms,
            )
            self._loop.call_later(decision.after_ms / 1000, self._start_again, decision.shard)
        elif isinstance(decision, StopAll):
            for process in list(self._processes.values()):
                if process.returncode is None:
                    process.send_signal(signal.SIGTERM)
        self._changed.set()

    def _start_again(self, shard: int) -> None:
        if self._supervision.started(shard):
            self._spawn(self._serve(shard))
        self._changed.set()

    def _now_ms(self) -> int:
        return int(self._loop.time() * 1000)


def _end_with_parent() -> None:
    """Called in the new process: let the kernel send SIGTERM when the supervisor
    ends for any reason.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
