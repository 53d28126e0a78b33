"""For clients that run commands of QMQ beside themselves. No workload itself.

A client and its commands are one session: who kills, stops or ends the client does it to all.
"""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Final

from campaign.client import Job

END_S: Final = 10.0


async def started(job: Job, *words: str, program: tuple[str, ...] = ()) -> Process:
    """A command that runs; its output is in the folder of the test."""
    name = words[0] if not program else program[0].rsplit("/", 1)[-1]
    with (job.folder / f"{job.name}-{name}.log").open("ab") as log:
        return await asyncio.create_subprocess_exec(
            *(program or (sys.executable, "-m", "qmq.cli")), *words, stdout=log, stderr=log
        )


async def ended(process: Process) -> None:
    """End a command, by force if it takes long."""
    with suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(END_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


async def done(job: Job, *words: str) -> bool:
    """Whether a command ended well. A cancelled wait ends it."""
    process = await started(job, *words)
    try:
        return await process.wait() == 0
    except asyncio.CancelledError:
        await ended(process)
        raise


@asynccontextmanager
async def beside(job: Job, *words: str, program: tuple[str, ...] = ()) -> AsyncIterator[Process]:
    """A command that runs during the block."""
    process = await started(job, *words, program=program)
    try:
        yield process
    finally:
        await ended(process)


async def listens(port: int) -> bool:
    """Whether something on this machine takes connections there."""
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
    return True
