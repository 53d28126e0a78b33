"""Runs a role as a process until a signal comes."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable


async def until_signal(start: Callable[[], Awaitable[str]]) -> bool:
    """Start, print the returned line, wait for SIGINT or SIGTERM. A signal also cancels a start under way. Returns False then."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    starting = asyncio.ensure_future(start())
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
    is_started = starting.done()
    if is_started:
        sys.stdout.write(starting.result() + "\n")
        sys.stdout.flush()
        await stopping
    stopping.cancel()
    starting.cancel()
    await asyncio.gather(starting, stopping, return_exceptions=True)
    return is_started
