"""Memory of a server, in bytes, for strangers in a TLS handshake: while they stand still, and after
they are gone.
"""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from access_support import HOST, Papers
from support import eventually

from qmq.process.event_loop import run
from qmq.rpc.tls_listener import TlsListener
from qmq.rpc.tls_network import TlsNetwork
from qmq.security.tls import Credentials

HANDSHAKE_BYTES = 55 * 1024
"""Of one handshake under way: docs/SECURITY.md, *Control ports*."""
HELLO_HALF = b"\x16\x03\x01\x02\x00\x01"


def resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@asynccontextmanager
async def listening(tmp_path: Path) -> AsyncIterator[TlsListener]:
    listener = await TlsNetwork(Credentials(Papers(tmp_path / "papers").server)).listen(
        HOST, 0, asyncio.Protocol
    )
    assert isinstance(listener, TlsListener)
    try:
        yield listener
    finally:
        listener.close()


async def stand_still(listener: TlsListener, count: int) -> list[socket.socket]:
    """Open connections that send half a hello and stop."""
    strangers = [socket.create_connection((HOST, listener.port)) for _ in range(count)]
    for each in strangers:
        each.sendall(HELLO_HALF)
    await eventually(lambda: listener.handshakes == count)
    return strangers


async def leave(listener: TlsListener, strangers: list[socket.socket]) -> None:
    for each in strangers:
        each.close()
    await eventually(lambda: listener.handshakes == 0)


async def taken_bytes(folder: Path) -> int:
    """The memory of 400 handshakes that stand still."""
    async with listening(folder) as listener:
        await leave(listener, await stand_still(listener, 50))
        before = resident_bytes()
        strangers = await stand_still(listener, 400)
        taken = resident_bytes() - before
        await leave(listener, strangers)
        return taken


async def grown_bytes(folder: Path) -> int:
    """The memory that remains after 600 failed handshakes."""
    async with listening(folder) as listener:
        await fail(listener, 100)
        before = resident_bytes()
        await fail(listener, 600)
        return resident_bytes() - before


def measured(work: Callable[[Path], Coroutine[Any, Any, int]], folder: Path) -> int:
    """The result, measured in a new process on the servers' event loop: the memory of a test's
    process depends on the tests before.
    """
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        return process.submit(_run, work, folder).result()


def _run(work: Callable[[Path], Coroutine[Any, Any, int]], folder: Path) -> int:
    return run(work(folder))


def test_a_handshake_takes_no_more_memory_than_documented(tmp_path: Path) -> None:
    taken = measured(taken_bytes, tmp_path)
    assert taken < 400 * HANDSHAKE_BYTES * 1.5, f"{taken // 400} bytes each"


def test_handshakes_that_fail_give_their_memory_back(tmp_path: Path) -> None:
    grown = measured(grown_bytes, tmp_path)
    assert grown < 600 * HANDSHAKE_BYTES / 4, f"{grown // 600} bytes of each are left"


async def fail(listener: TlsListener, count: int) -> None:
    """Make failing handshakes, one after the other."""
    for _ in range(count):
        reader, writer = await asyncio.open_connection(HOST, listener.port)
        writer.write(bytes(64))
        await reader.read()
        writer.close()
