"""Runs the shards of a broker as processes: starts them, passes signals, waits. `shard_supervision.py` decides (docs/SHARDS.md)."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from qmq.node.shard_supervision import PAUSES_MS, Restart, ShardSupervision, StopAll

log = logging.getLogger("qmq.broker")

READY: Final = b" is ready at "
_PR_SET_PDEATHSIG: Final = 1


@dataclass(frozen=True, slots=True)
class ShardCommand:
    """The command that starts one shard."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str]


class ShardSupervisor:
    """`say` gets the lines that shards print, and `ready_line` when all shards serve. `whole` and `part` are the words for the server and
    a process in the log, because a gateway's processes also run under this supervisor.
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
        self._has_told = False

    async def run(self) -> int:
        """Run until all shards have ended. Returns the exit status. SIGINT and SIGTERM stop the shards."""
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
            process.send_signal(signal.SIGTERM)  # the signal came while the process was being created
        assert process.stdout is not None
        async for line in process.stdout:
            self._say(line.decode(errors="replace").rstrip("\n"))
            if READY in line:
                self._supervision.ready(shard, self._now_ms())
                self._tell()
        status = await process.wait()
        del self._processes[shard]
        if not self._supervision.is_stopping:
            log.error("%s %d of %s ended with status %d", self._part, shard, self._whole, status)
        self._act(partial(self._supervision.ended, shard, status, self._now_ms()))

    def _tell(self) -> None:
        if self._supervision.are_all_serving and not self._has_told:
            self._has_told = True
            self._say(self._ready_line)

    def _act(self, decide: Callable[[], Restart | StopAll | None]) -> None:
        decision = decide()
        if isinstance(decision, Restart):
            log.warning("%s %d of %s starts again in %d ms", self._part, decision.shard, self._whole, decision.after_ms)
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
    """Called in the new process: let the kernel send SIGTERM when the supervisor ends for any reason."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
