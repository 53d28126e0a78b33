"""The system calls, checksums and copies that messages of 1 KB need in batches of 250, and nothing else: no protocol, no event loop, no
consumer's state. Prints the CPU time in microseconds a message: the least that a node and a client in Python can take on this machine.

`python scripts/bench/floor.py` measures a backlog in the page cache, read by one client, and the way from a producer to a consumer. Compare
it with `scripts/bench/everyday.py --row "1 KB"` and with the rows of 1 KB of `scripts/bench --peers`, in the same minutes.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import socket
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from struct import pack
from time import process_time
from typing import Any, Final

from google_crc32c import value as crc32c

from qmq.client.consuming.ready_form import cut_bodies
from qmq.process.event_loop import tune_process
from qmq.wire.frame_stream import tune_socket

SIZE: Final = 1024
MESSAGES: Final = 250
"""Of a batch."""
BATCHES: Final = 4
"""Of an answer to a pull."""
HEAD: Final = bytes(64)
OFFSETS: Final = pack(f"<{MESSAGES + 1}i", *range(0, SIZE * (MESSAGES + 1), SIZE))
BATCH_BYTES: Final = len(OFFSETS) + SIZE * MESSAGES
ENTRY_BYTES: Final = len(HEAD) + BATCH_BYTES
PULL_BYTES: Final = BATCHES * BATCH_BYTES
ANSWERS: Final = 800
FILE_ANSWERS: Final = 200
"""The length of the backlog's file, which is read several times."""
RUNS: Final = 5

Address = tuple[str, int]


def fill(connection: socket.socket, view: memoryview) -> bool:
    """Receive until the buffer is full. False at the end of the stream."""
    while view:
        received = connection.recv_into(view)
        if not received:
            return False
        view = view[received:]
    return True


def send(connection: socket.socket, buffers: list[bytes]) -> None:
    """Send all buffers."""
    size, sent = sum(map(len, buffers)), connection.sendmsg(buffers)
    if sent < size:
        connection.sendall(b"".join(buffers)[sent:])


def connect(address: Address) -> socket.socket:
    connection = socket.create_connection(address)
    tune_socket(connection)
    return connection


def consume(address: Address, results: Any, asks: bool) -> None:
    """Receive all answers, check each batch, and look at each body."""
    tune_process()
    connection, buffer = connect(address), memoryview(bytearray(PULL_BYTES))
    begin = process_time()
    for _ in range(ANSWERS):
        if asks:
            connection.send(b"pull")
        fill(connection, buffer)
        for at in range(0, PULL_BYTES, BATCH_BYTES):
            region = bytes(buffer[at : at + BATCH_BYTES])
            crc32c(region)
            for _body in cut_bodies(region, 0, len(OFFSETS), MESSAGES):
                pass
    results.put(process_time() - begin)


def produce(address: Address, results: Any) -> None:
    """Send all batches, made of separate bodies."""
    tune_process()
    connection, bodies = connect(address), [os.urandom(SIZE) for _ in range(MESSAGES)]
    begin = process_time()
    for _ in range(ANSWERS * BATCHES):
        region = b"".join((OFFSETS, *bodies))
        crc32c(region)
        connection.sendall(region)
    results.put(process_time() - begin)
    connection.shutdown(socket.SHUT_WR)


@contextmanager
def client(work: Callable[..., None], *words: Any) -> Iterator[tuple[socket.socket, Callable[[], float]]]:
    """A client process. Gives its connection, and a function that waits for the CPU time that it took, in seconds."""
    context = mp.get_context("spawn")
    results = context.Queue()
    with socket.create_server(("127.0.0.1", 0)) as server:
        process = context.Process(target=work, args=(server.getsockname(), results, *words))
        process.start()
        connection, _ = server.accept()
    tune_socket(connection)
    with connection:
        yield connection, lambda: float(results.get(timeout=60))
    process.join()


def backlog(file: int) -> dict[str, float]:
    """Read batches from the page cache, check them, and send four for each pull."""
    os.pwrite(file, (HEAD + OFFSETS + os.urandom(SIZE * MESSAGES)) * BATCHES * FILE_ANSWERS, 0)
    with client(consume, True) as (connection, client_s):
        begin = process_time()
        for answer in range(ANSWERS):
            connection.recv(64)
            answered: list[bytes] = []
            for batch in range(BATCHES):
                entry = os.pread(file, ENTRY_BYTES, (answer % FILE_ANSWERS * BATCHES + batch) * ENTRY_BYTES)
                region = entry[len(HEAD) :]
                crc32c(region)
                answered.append(region)
            send(connection, answered)
        node_s = process_time() - begin
        return {"backlog: node": node_s, "backlog: client": client_s()}


def end_to_end(file: int) -> dict[str, float]:
    """Receive batches, check them, append them to a file, and send them on from memory."""
    buffer = memoryview(bytearray(BATCH_BYTES))
    with client(produce) as (producer, producer_s), client(consume, False) as (consumer, consumer_s):
        begin = process_time()
        for answer in range(ANSWERS):
            answered: list[bytes] = []
            for batch in range(BATCHES):
                fill(producer, buffer)
                region = bytes(buffer)
                crc32c(region)
                os.pwritev(file, (HEAD, region), (answer * BATCHES + batch) * ENTRY_BYTES)
                answered.append(region)
            send(consumer, answered)
        node_s = process_time() - begin
        return {"end to end: producer": producer_s(), "end to end: node": node_s, "end to end: consumer": consumer_s()}


def main() -> None:
    tune_process()
    found: list[dict[str, float]] = []
    for _ in range(RUNS):
        with tempfile.TemporaryFile() as read, tempfile.TemporaryFile() as written:
            found.append(backlog(read.fileno()) | end_to_end(written.fileno()))
    for name in found[0]:
        median_s = statistics.median(each[name] for each in found)
        print(f"{name:24}{median_s / (ANSWERS * BATCHES * MESSAGES) * 1e6:6.2f} us a message")


if __name__ == "__main__":
    main()
