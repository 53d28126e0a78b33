"""The least that one awaited send can take on this machine: two bare protocols exchange a request
and an answer, and the server writes each request to a file. The server runs on uvloop, as a node
does; the client on asyncio or uvloop.

`python bench/peers/bare_exchange.py` prints the rate, the median time, and the CPU time of both
sides for each exchange.
"""

from __future__ import annotations

import asyncio
import multiprocessing as mp
import os
import socket
import statistics
import tempfile
import time
from dataclasses import dataclass
from typing import Any, Final, cast

import uvloop
from servers import cpu_s

REQUEST_BYTES, ANSWER_BYTES = 248, 32
"""What a message of 100 bytes and its acknowledgement take on the wire, with their headers."""
WARM, EXCHANGES = 2_000, 30_000
BUFFER_BYTES: Final = 65_536


class _End(asyncio.BufferedProtocol):
    """One end of the connection."""

    def __init__(self) -> None:
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.transport = cast(asyncio.Transport, transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        assert self.transport is not None
        self.received(bytes(self._buffer[:nbytes]), self.transport)

    def received(self, data: bytes, transport: asyncio.Transport) -> None:
        raise NotImplementedError


class Server(_End):
    """Writes each request to a file, then answers."""

    def __init__(self, file: int) -> None:
        super().__init__()
        self._file, self._end = file, 0

    def received(self, data: bytes, transport: asyncio.Transport) -> None:
        self._end += os.pwritev(self._file, [data], self._end)
        transport.write(bytes(ANSWER_BYTES))


class Client(_End):
    """Sends the next request when an answer has come."""

    def __init__(self) -> None:
        super().__init__()
        self.answered = asyncio.Event()
        self.left = 0
        self.took_s: list[float] = []
        self._sent_s = 0.0

    def send(self, count: int) -> None:
        self.left, self.took_s = count, []
        self.answered.clear()
        assert self.transport is not None
        self._send(self.transport)

    def received(self, data: bytes, transport: asyncio.Transport) -> None:
        self.took_s.append(time.perf_counter() - self._sent_s)
        self.left -= 1
        if self.left:
            self._send(transport)
        else:
            self.answered.set()

    def _send(self, transport: asyncio.Transport) -> None:
        self._sent_s = time.perf_counter()
        transport.write(bytes(REQUEST_BYTES))


def serve(ports: Any) -> None:
    """Entry of the server's process."""

    async def run() -> None:
        with tempfile.TemporaryFile() as file:
            server = await asyncio.get_running_loop().create_server(
                lambda: Server(file.fileno()), "127.0.0.1", 0
            )
            ports.put(server.sockets[0].getsockname()[1])
            await server.serve_forever()

    uvloop.run(run())


def exchange(results: Any, port: int, server_pid: int, is_fast: bool) -> None:
    """Entry of the client's process."""

    async def run() -> None:
        _, client = await asyncio.get_running_loop().create_connection(Client, "127.0.0.1", port)
        client.send(WARM)
        await client.answered.wait()
        begin, mine_s, other_s = time.perf_counter(), time.process_time(), cpu_s([server_pid])
        client.send(EXCHANGES)
        await client.answered.wait()
        rate = EXCHANGES / (time.perf_counter() - begin)
        mine_us, other_us = (
            (time.process_time() - mine_s) / EXCHANGES * 1e6,
            (cpu_s([server_pid]) - other_s) / EXCHANGES * 1e6,
        )
        results.put((rate, statistics.median(client.took_s) * 1e3, mine_us, other_us))

    (uvloop.run if is_fast else asyncio.run)(run())


@dataclass(frozen=True, slots=True)
class Exchanged:
    """What an exchange takes: rate, median time, CPU time of both sides."""

    per_s: float
    p50_ms: float
    client_us: float
    server_us: float


def measured(is_fast: bool) -> Exchanged:
    """One run, with a new server and a new client. `is_fast`: the client runs on uvloop."""
    context = mp.get_context("spawn")
    found: Any = context.Queue()
    server = context.Process(target=serve, args=(found,), daemon=True)
    server.start()
    client = context.Process(target=exchange, args=(found, found.get(), server.pid, is_fast))
    client.start()
    try:
        return Exchanged(*found.get())
    finally:
        client.join()
        server.terminate()
        server.join()


def main() -> None:
    for name, is_fast in (("asyncio", False), ("uvloop", True)):
        each = measured(is_fast)
        print(
            f"client on {name:8}{each.per_s:10,.0f}/s  p50 {each.p50_ms:.3f} ms  "
            f"client {each.client_us:.1f} us  server {each.server_us:.1f} us"
        )


if __name__ == "__main__":
    main()
