"""The processes of a soak: `python -m system.soak_worker produce|consume|letters SERVER FILE
[...]`.

Each writes its work into its file before it reports it to the broker: runs of message numbers,
(first, count), 16 bytes each, appended whole.

A message's body is its number, in eight bytes, and padding. One of a hundred messages fails at
every attempt: number % 100 = 37.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from struct import Struct
from typing import Final

import numpy as np
import numpy.typing as npt

import qmq
from qmq.errors import NotConnected, StaleDelivery
from qmq.model import OPERATORS, dead_letter_subject

SUBJECT: Final = "soak"
GROUP: Final = "soakers"
BODY_BYTES: Final = 100
EVERY, FAILS = 100, 37
LEASE_MS: Final = 3_000
SLICE_S: Final = 0.02
Runs = npt.NDArray[np.int64]
"""(first, count) of consecutive numbers, one a row."""
_RUN: Final = Struct("<QQ")
_PADDING: Final = bytes(BODY_BYTES - 8)


def body_of(number: int) -> bytes:
    """The body as sent."""
    return number.to_bytes(8, "little") + _PADDING


def number_of(body: bytes) -> int:
    """The inverse."""
    return int.from_bytes(body[:8], "little")


def runs_of(numbers: Iterable[int]) -> Iterator[tuple[int, int]]:
    """(first, count) of consecutive numbers."""
    first = count = 0
    for number in numbers:
        if count and number == first + count:
            count += 1
            continue
        if count:
            yield first, count
        first, count = number, 1
    if count:
        yield first, count


class Notes:
    """The worker's file."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, runs: Iterable[tuple[int, int]]) -> None:
        """One write: a killed process leaves whole runs."""
        os.write(self._fd, b"".join([_RUN.pack(*run) for run in runs]))


def read_notes(path: Path) -> Runs:
    """The notes of a worker; an incomplete last line is ignored."""
    data = path.read_bytes() if path.exists() else b""
    return np.frombuffer(data, np.int64, len(data) // _RUN.size * 2).reshape(-1, 2)


async def produce(server: str, notes: Notes, rate: float, stop: asyncio.Event) -> None:
    """Send so many a second (0: as many as are taken), and note what was acknowledged."""
    async with qmq.connect(server) as mq:
        number, began = 0, time.monotonic()
        size = max(int(rate * SLICE_S), 1) if rate else 5_000
        while not stop.is_set():
            receipts = await mq.send_many(
                SUBJECT, [body_of(each) for each in range(number, number + size)]
            )
            assert len(receipts) == size
            notes.write([(number, size)])
            number += size
            ahead_s = number / rate - (time.monotonic() - began) if rate else 0.0
            if ahead_s > 0:
                await asyncio.sleep(ahead_s)


async def consume(server: str, notes: Notes, name: str, stop: asyncio.Event) -> None:
    """Handle each message; note it, then settle it."""
    async with (
        qmq.connect(server) as mq,
        mq.consumer(SUBJECT, GROUP, name=name, ack="explicit", lease_ms=LEASE_MS) as consumer,
    ):
        while not stop.is_set():
            found = await consumer.pull(1_000, wait=timedelta(seconds=1))
            if not found:
                continue
            numbers = [number_of(body) for body in found.bodies]
            for place, number in enumerate(numbers):
                if number % EVERY == FAILS:
                    found[place].nack(error=f"{number} always fails")
            notes.write(runs_of([number for number in numbers if number % EVERY != FAILS]))
            try:
                await found.ack_sync()
            except (StaleDelivery, NotConnected):
                # it hung past its lease, and others have them; or past the answer, and the call is
                # repeated
                continue


async def letters(server: str, notes: Notes, stop: asyncio.Event) -> None:
    """Empty the dead-letter queue, noting what is in it."""
    async with (
        qmq.connect(server) as mq,
        mq.consumer(dead_letter_subject(GROUP), OPERATORS, ack="explicit") as consumer,
    ):
        while not stop.is_set():
            found = await consumer.pull(1_000, wait=timedelta(seconds=1))
            if found:
                notes.write(runs_of([number_of(body) for body in found.bodies]))
                await found.ack_sync()


async def main(words: list[str]) -> None:
    """Work until SIGTERM."""
    role, server, path, *more = words
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # see Worker
    notes = Notes(Path(path))
    if role == "produce":
        await produce(server, notes, float(more[0]), stop)
    elif role == "consume":
        await consume(server, notes, more[0], stop)
    else:
        await letters(server, notes, stop)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
