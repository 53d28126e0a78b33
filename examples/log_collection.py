"""Log collection: lines of many services' log files to one subject, from there into archives, an
alarm and dashboards.

    python examples/log_collection.py                             on its own node; 30,000 lines
    python examples/log_collection.py --server localhost:20880    on a cluster that is there
    python examples/log_collection.py --lines 300000 --json

    services ──▶ files ──▶ collector ──▶ logs
         ──▶ archive      a group of two: each line once, a compressed file a service
         ──▶ alarm        a group that wants lines tagged ERROR only
         ──▶ dashboard    a broadcast group: each of its two consumers counts all lines

The collector sends a line only when it is whole, and keeps how far it has sent each file in a
checkpoint, written after the broker has the lines. It is stopped in the middle and started again:
it continues from its checkpoint, and may send some lines twice. A line is named by file and offset,
so the archive keeps one of each. Exit status 1 if an archive is not its service's file, byte for
byte, or if a line is missing elsewhere.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import lzma
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from random import Random

from own_node import own_node
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import qmq

SUBJECT = "logs"
SERVICES = ("checkout", "payment", "search", "shipping")
LEVELS, WEIGHTS = ("DEBUG", "INFO", "WARN", "ERROR"), (40, 50, 8, 2)
CHUNK_BYTES = 64 * 1024
PATIENCE_S = 120.0
WAIT = timedelta(milliseconds=200)


@dataclass(slots=True)
class Result:
    """The result of a run."""

    lines: int = 0
    sent: int = 0
    archived: int = 0
    repeated: int = 0
    """Lines that reached the archive a second time."""
    errors: int = 0
    alarms: int = 0
    dashboards: list[int] = field(default_factory=list)
    """Distinct lines that each consumer of the dashboard saw."""
    is_equal: bool = False


class Service:
    """Writes a log file, a few lines at a time, not always whole ones."""

    def __init__(self, folder: Path, name: str, lines: int) -> None:
        self.name, self.path = name, folder / f"{name}.log"
        coin = Random(name)  # noqa: S311 - a made-up log, not a secret
        self._lines = [
            f"2026-11-21T10:{number // 6000 % 60:02}:{number / 100 % 60:06.3f} "
            f"{coin.choices(LEVELS, WEIGHTS)[0]} {name} request {number} "
            f"took {coin.randint(1, 900)} ms"
            for number in range(lines)
        ]
        self.errors = sum(line.split()[1] == "ERROR" for line in self._lines)
        self._data = "".join(line + "\n" for line in self._lines).encode()
        self._written = 0

    def write(self, size: int) -> bool:
        """Write some more bytes; False if the file is complete."""
        with self.path.open("ab") as file:
            file.write(self._data[self._written : self._written + size])
        self._written += size
        return self._written < len(self._data)


class Collector:
    """Sends the files' lines from its checkpoint on."""

    def __init__(self, mq: qmq.Client, folder: Path, result: Result) -> None:
        self._mq, self._folder, self._result = mq, folder, result
        self._checkpoint = folder / "checkpoint.json"
        self._sent: dict[str, int] = (
            json.loads(self._checkpoint.read_text()) if self._checkpoint.exists() else {}
        )

    async def collect(self) -> int:
        """Send every new whole line. Returns their number."""
        found = 0
        for path in sorted(self._folder.glob("*.log")):
            begin = self._sent.get(path.name, 0)
            with path.open("rb") as file:
                file.seek(begin)
                data = file.read(CHUNK_BYTES)
            lines = list(whole_lines(data))
            if lines:
                await self._send(path.stem, begin, lines)
                found += len(lines)
        return found

    async def _send(self, service: str, begin: int, lines: list[bytes]) -> None:
        offsets, at = [], begin
        for line in lines:
            offsets.append(at)
            at += len(line) + 1
        await self._mq.send_many(
            SUBJECT,
            lines,
            keys=[service] * len(lines),
            tags=[(line.split(b" ", 2)[1].decode(), service) for line in lines],
            headers=[{"offset": str(each)} for each in offsets],
        )
        self._result.sent += len(lines)
        self._sent[f"{service}.log"] = at

    def save(self) -> None:
        """Write the checkpoint: these lines are not sent again."""
        fresh = self._checkpoint.with_suffix(".new")
        fresh.write_text(json.dumps(self._sent))
        fresh.replace(self._checkpoint)


def whole_lines(data: bytes) -> Iterator[bytes]:
    """The whole lines, without their ends; an incomplete last line is left out."""
    yield from data.split(b"\n")[:-1]


class Archive:
    """Collects lines by service and offset, and writes compressed files at the end. Shared by the
    consumers of its group.
    """

    def __init__(self, result: Result) -> None:
        self._result = result
        self._lines: dict[str, dict[int, bytes]] = {name: {} for name in SERVICES}

    async def take(self, mq: qmq.Client, name: str) -> None:
        """Run one consumer until it is cancelled."""
        async with mq.consumer(SUBJECT, "archive", name=name, ack="explicit") as consumer:
            while True:
                found = await consumer.pull(1_000, WAIT)
                for message in found:
                    lines, offset = self._lines[message.key or ""], int(message.headers["offset"])
                    self._result.repeated += offset in lines
                    lines[offset] = message.body
                found.ack_later()
                self._result.archived = sum(map(len, self._lines.values()))

    def write(self, folder: Path) -> None:
        """Write one file for each service."""
        for name, lines in self._lines.items():
            with lzma.open(folder / f"{name}.log.xz", "wb", preset=1) as file:
                file.writelines(lines[offset] + b"\n" for offset in sorted(lines))


async def collect(server: str, folder: Path, count: int, *, quiet: bool = False) -> Result:
    """Write, collect, consume, compare."""
    result = Result()
    services = [Service(folder, name, count // len(SERVICES)) for name in SERVICES]
    result.lines, result.errors = (
        count // len(SERVICES) * len(SERVICES),
        sum(each.errors for each in services),
    )
    archive, alarms = Archive(result), set[tuple[str, str]]()
    boards: list[set[tuple[str, str]]] = [set(), set()]
    async with qmq.connect(server) as mq:
        await mq.metadata.create_subject(qmq.SubjectConfig(SUBJECT))
        tasks = [asyncio.create_task(archive.take(mq, f"archive-{number}")) for number in range(2)]
        tasks.append(
            asyncio.create_task(_watch(mq.consumer(SUBJECT, "alarm", tags_any=["ERROR"]), alarms))
        )
        tasks += [
            asyncio.create_task(
                _watch(
                    mq.consumer(
                        SUBJECT, "dashboard", name=f"board-{at}", broadcast=True, start="earliest"
                    ),
                    board,
                )
            )
            for at, board in enumerate(boards)
        ]
        with Progress(console=Console(stderr=True), transient=True, disable=quiet) as bar:
            task = bar.add_task("lines", total=result.lines)
            collector = Collector(mq, folder, result)
            is_writing, is_old = True, True
            while is_writing or await collector.collect():
                # Not a generator: each of them writes.
                turns = [service.write(8_000 + 13 * at) for at, service in enumerate(services)]
                is_writing = any(turns)
                await collector.collect()
                if is_old and result.sent > result.lines // 2:
                    collector, is_old = (
                        Collector(mq, folder, result),
                        False,
                    )  # it knows only its checkpoint, which is older
                elif result.sent % 7:
                    collector.save()
                bar.update(task, completed=result.archived)
            wanted = (result.lines, result.errors, result.lines, result.lines)
            until = time.monotonic() + PATIENCE_S
            while (result.archived, len(alarms), *map(len, boards)) != wanted and not any(
                each.done() for each in tasks
            ):
                if time.monotonic() > until:
                    break
                await asyncio.sleep(0.02)
                bar.update(task, completed=result.archived)
        for each in tasks:
            each.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    archive.write(folder)
    result.alarms, result.dashboards = len(alarms), [len(board) for board in boards]
    result.is_equal = all(
        lzma.decompress((folder / f"{each.name}.log.xz").read_bytes()) == each.path.read_bytes()
        for each in services
    )
    return result


async def _watch(consumer: qmq.Consumer, seen: set[tuple[str, str]]) -> None:
    """Record each line, until cancelled."""
    async with consumer:
        async for found in consumer.batches():
            seen.update(
                [(message.key or "", message.headers["offset"].decode()) for message in found]
            )


async def run(chosen: argparse.Namespace) -> int:
    """Run the whole example. Returns the exit status."""
    async with AsyncExitStack() as stack:
        server = chosen.server or await own_node(stack)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        result = await collect(server, folder, chosen.lines, quiet=chosen.json)
    if chosen.json:
        sys.stdout.write(json.dumps(asdict(result), indent=1) + "\n")
    else:
        table = Table(title="log collection", title_justify="left", show_header=False)
        table.add_column()
        table.add_column(justify="right")
        for name, value in asdict(result).items():
            table.add_row(
                name.replace("_", " "),
                str(value) if isinstance(value, list | bool) else f"{value:,}",
            )
        Console().print(table)
    return (
        0
        if result.is_equal
        and Counter(result.dashboards) == {result.lines: 2}
        and result.alarms == result.errors
        else 1
    )


def main() -> int:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument(
        "--server", default="", help="a metaserver's address; without it, its own node"
    )
    options.add_argument("--lines", type=int, default=30_000)
    options.add_argument("--json", action="store_true")
    return asyncio.run(run(options.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
