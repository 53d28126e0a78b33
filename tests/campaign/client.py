"""One client of a workload, in a separate process.

    python -m campaign.client --workload log --role producer --number 0 --server A --history FILE
                              --seed 7 --durability async

It runs the role's program of the workload until SIGTERM and then ends by itself: a sender when what
it has begun has an outcome, a reader at once. It appends to its history, so that a client that is
killed and started again continues the file; every life has another name there. It uses the
public client alone.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Final, cast

from history.events import Recorder

import qmq
from campaign.values import SUBJECT, Durability

LIVES: Final = 1 << 32
"""Values of one life: unique among all processes of a machine, since its pid is the upper part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a program has."""

    name: str
    """Of this life, in the history."""
    role: str
    number: int
    subject: str
    client: qmq.Client
    folder: Path
    """Of the test, for files that its processes share."""
    recorder: Recorder
    durability: Durability
    random: Random
    life: int = field(default_factory=os.getpid)
    """Another one than that of any other program of the test."""
    stops: asyncio.Event = field(default_factory=asyncio.Event)
    """Set at SIGTERM: begin nothing more."""

    @property
    def acks(self) -> str:
        """What senders ask for."""
        return "flushed" if self.durability == "flushed" else "quorum"

    @property
    def first_value(self) -> int:
        """Values from here on belong to this life."""
        return self.life * LIVES

    async def pause(self, seconds: float) -> bool:
        """Wait, at most until SIGTERM; whether the program is to go on."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self.stops.wait(), seconds)
        return not self.stops.is_set()

    async def until_stopped(self, work: Awaitable[None]) -> None:
        """For readers: run until SIGTERM, or until the work fails."""
        task = asyncio.ensure_future(work)
        waiting = asyncio.create_task(self.stops.wait())
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if not task.done():
            task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def run(
    program: Callable[[Job], Awaitable[None]], chosen: argparse.Namespace, subject: str
) -> None:
    """The program with its client and its history."""
    name = f"{chosen.role}{chosen.number}.{os.getpid()}"
    with Recorder(chosen.history) as recorder:
        async with qmq.connect(chosen.server) as client:
            job = Job(
                name=name,
                role=chosen.role,
                number=chosen.number,
                subject=subject,
                client=client,
                folder=chosen.history.absolute().parent.parent,
                recorder=recorder,
                durability=cast("Durability", chosen.durability),
                random=Random(f"{chosen.seed} {chosen.role} {chosen.number} {os.getpid()}"),
            )
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, job.stops.set)
            await program(job)


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(description=__doc__)
    for name in ("--workload", "--role", "--server", "--durability"):
        options.add_argument(name, required=True)
    options.add_argument("--number", type=int, required=True)
    options.add_argument("--history", type=Path, required=True)
    options.add_argument("--seed", type=int, required=True)
    return options


def main() -> int:
    from campaign.table import workloads

    chosen = parser().parse_args()
    program = workloads()[chosen.workload].programs[chosen.role]
    asyncio.run(run(program, chosen, SUBJECT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
