"""Support for all tests: nodes in this process and in separate ones, batches, a disk that fails."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from inspect import isawaitable
from pathlib import Path
from typing import IO

from qmq.broker.broker import Broker, LookUpSubject
from qmq.broker.config import BrokerConfig
from qmq.errors import DiskFull
from qmq.log.disk import BLOCK_BYTES, Disk
from qmq.log.log_config import LogConfig
from qmq.log.queue import Queue
from qmq.log.store import Intake, Store
from qmq.model import SubjectConfig
from qmq.node.broker_assembly import StandaloneBroker
from qmq.node.dev_node import Node, NodeConfig
from qmq.process.event_loop import Clock
from qmq.rpc.channel import LOOK_INSIDE
from qmq.testing.machine import MortalDisk
from qmq.wire.batch import encode, sent_sizes
from qmq.wire.batch_columns import BatchFlag, Columns, parse_header


class ManualClock:
    """A clock that stops until a test moves it."""

    def __init__(self, now_ms: int = 1_700_000_000_000) -> None:
        self.now_ms = now_ms

    def time_ms(self) -> int:
        return self.now_ms

    def monotonic_ms(self) -> int:
        return self.now_ms


class SmallDisk(Disk):
    """A disk with so many bytes left for appends."""

    def __init__(self, left: int) -> None:
        self.left = left

    def write(self, fd: int, buffers: Sequence[bytes], at: int) -> None:
        size = sum(map(len, buffers))
        if size > self.left:
            super().write(fd, [b"".join(buffers)[: self.left]], at)
            raise DiskFull("no space left (in this test)")
        self.left -= size
        super().write(fd, buffers, at)

    def free_bytes(self, folder: Path) -> int:
        return 1 << 40


@contextmanager
def memory_at_most(size: int) -> Iterator[None]:
    """Fails if the body allocates more than so many bytes at a time, in this process."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= size, f"{peak / 2**20:.1f} MiB were in use at a time"


PLENTY = 1 << 30


class FillingDisk(Disk):
    """A disk that has room for so many writes, new files and new names. It refuses the next
    `refusals`, then it has room again. Of a write that it refuses a half is written.
    """

    def __init__(self) -> None:
        self.room = PLENTY
        self.refusals = 0

    def _take(self) -> None:
        if not self.room:
            self.refusals -= 1
            if not self.refusals:
                self.room = PLENTY
            raise DiskFull("no space left (in this test)")
        self.room -= 1

    def open_append(self, path: Path) -> int:
        if not path.exists():
            self._take()
        return super().open_append(path)

    def write(self, fd: int, buffers: Sequence[bytes], at: int) -> None:
        if not self.room:
            whole = b"".join(buffers)
            super().write(fd, [whole[: len(whole) // 2]], at)
        self._take()
        super().write(fd, buffers, at)

    def rename(self, path: Path, to: Path) -> None:
        self._take()
        super().rename(path, to)

    def link(self, path: Path, to: Path) -> None:
        self._take()
        super().link(path, to)

    def free_bytes(self, folder: Path) -> int:
        return 1 << 40


class FullDisk(MortalDisk):
    """A machine's disk that another program can fill to the last byte: a file keeps the blocks that
    it has, and gets no others.
    """

    def __init__(self, is_full: Callable[[], bool]) -> None:
        super().__init__()
        self._is_full = is_full

    def open_append(self, path: Path) -> int:
        if self._is_full() and not path.exists():
            raise DiskFull(f"no space left for {path.name} (in this test)")
        return super().open_append(path)

    def write(self, fd: int, buffers: Sequence[bytes], at: int) -> None:
        if (
            self._is_full()
            and at + sum(map(len, buffers)) > -(-self.size(fd) // BLOCK_BYTES) * BLOCK_BYTES
        ):
            raise DiskFull("no space left (in this test)")
        super().write(fd, buffers, at)

    def free_bytes(self, folder: Path) -> int:
        return 0 if self._is_full() else 1 << 40


def alone(
    store: Store,
    clock: Clock,
    config: BrokerConfig | None = None,
    *,
    look_up: LookUpSubject = SubjectConfig,
    fatal: Callable[[BaseException], None],
    tick_s: float = 0.0005,
) -> StandaloneBroker:
    """A broker alone on a store, with what runs beside it, which ticks often."""
    return StandaloneBroker(
        lambda parts: Broker(
            store,
            look_up,
            clock,
            config or BrokerConfig(),
            asyncio.get_running_loop(),
            make_parts=parts,
        ),
        fatal=fatal,
        tick_s=tick_s,
    )


def intake(
    queue: Queue,
    bodies: list[bytes],
    *,
    producer: int = 7,
    number: int = 0,
    tags: list[tuple[str, ...]] | None = None,
    flags: int = 0,
    headers: list[dict[str, bytes]] | None = None,
) -> Intake:
    """A batch as the broker takes it in."""
    envelope, region = encode(
        queue.id.subject.encode(),
        Columns(bodies, tags=tags, headers=headers),
        producer_id=producer,
        batch_sequence=number,
        create_time_ms=1,
        flags=flags,
    )
    return Intake(
        queue,
        region,
        sent_sizes(envelope)[1],
        parse_header(region),
        LOOK_INSIDE if flags & BatchFlag.DIRECTED else 0,
    )


def node_config(
    data: Path,
    log: LogConfig | None = None,
    *,
    auto_create: bool = True,
    broker: BrokerConfig | None = None,
    delay: bool = False,
) -> NodeConfig:
    """A node on loopback and free ports; without a delay group, unless a test wants one."""
    return NodeConfig(
        data,
        "127.0.0.1",
        0,
        0,
        0,
        auto_create,
        log or LogConfig(),
        broker or BrokerConfig(),
        delay=delay,
    )


@asynccontextmanager
async def running(config: NodeConfig, clock: Clock | None = None) -> AsyncIterator[Node]:
    """A node in this process and loop."""
    node = Node(config, clock=clock)
    await node.start()
    try:
        yield node
    finally:
        await node.stop()


class NodeProcess:
    """`qmq dev` in a separate process, on a given data folder."""

    def __init__(self, data: Path, *options: str, python: Path = Path(sys.executable)) -> None:
        self.data = data
        self._python = python
        self.options = options
        self.variables: dict[str, str] = {}
        """Added to the environment of this process."""
        self.address = ""
        self.data_address = ""
        self.metrics_address = ""
        """Empty without `--metrics-port`."""
        self.errors = ""
        """What it wrote to standard error, once it has ended."""
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> str:
        """Start, wait until it is ready, give the metaserver's address."""
        command = [
            str(self._python),
            "-P",  # not the packages of the folder where tests run
            "-m",
            "qmq.cli",
            "dev",
            "--data",
            str(self.data),
            "--port",
            "0",
            "--data-port",
            "0",
            "--control-port",
            "0",
            "--console",
            "off",
            *self.options,
        ]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **self.variables},
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if "ready at" not in line:
            _, errors = self.process.communicate()
            raise AssertionError(f"the node did not start: {errors}")
        self.address = line.split("ready at ")[1].split()[0]
        self.data_address = line.split("data at ")[1].split(",")[0]
        self.metrics_address = line.partition("metrics at ")[2].rstrip(")\n")
        self._drainer = threading.Thread(
            target=self._drain, args=(self.process.stderr,), daemon=True
        )
        self._drainer.start()
        return self.address

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self._end(signal.SIGKILL)

    def stop(self) -> int:
        """SIGTERM; the exit status."""
        return self._end(signal.SIGTERM)

    def _end(self, number: int) -> int:
        process, self.process = self.process, None
        if process is None:
            return 0
        process.send_signal(number)
        status = process.wait(30)
        assert process.stdout is not None
        process.stdout.close()
        self._drainer.join(10)
        return status

    def _drain(self, stream: IO[str]) -> None:
        with stream:
            self.errors = stream.read()


async def eventually(
    condition: Callable[[], object], *, within_s: float = 60.0, look_s: float = 0.01
) -> None:
    """Wait until a condition holds, which may have to be awaited; for what another process or a
    timer brings about.
    """
    async with asyncio.timeout(within_s):
        while True:
            holds = condition()
            if await holds if isawaitable(holds) else holds:
                return
            await asyncio.sleep(look_s)


def eventually_sync(
    condition: Callable[[], object], *, within_s: float = 60.0, look_s: float = 0.02
) -> None:
    """The same where no event loop runs. Raises TimeoutError."""
    end = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError
        time.sleep(look_s)
