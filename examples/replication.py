"""Binlog replication: the changes of a table, sent as ordered messages, applied to a table in
SQLite, which ends byte-equal.

    python examples/replication.py                             on its own node; 20,000 changes
    python examples/replication.py --server localhost:20880    on a cluster that is there
    python examples/replication.py --changes 200000 --keys 5000 --json

The table is made up (binlog.py); each change is sent under the key of its row. Two workers of one
group apply what comes, and while they do, partitions are split and merged: the order of each row
survives that. One worker is cancelled in the middle, and another takes its place; what comes again
is known by its serial. Exit status 1 if the tables differ, or if a change came out of order.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from binlog import Change, Source, SqliteReplica
from own_node import own_node
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import qmq
from qmq.proto.v1 import meta_pb2 as pb

SUBJECT = "accounts.binlog"
GROUP = "replica"
WORKERS = 2
PATIENCE_S = 120.0
CHUNK = 1_000


@dataclass(slots=True)
class Result:
    """The result of a run."""

    changes: int = 0
    applied: int = 0
    repeated: int = 0
    """Changes that came a second time, and were skipped."""
    route_versions: int = 0
    is_equal: bool = False


class Worker:
    """A consumer with its own connection to the replica's file."""

    def __init__(self, mq: qmq.Client, path: Path, name: str, result: Result) -> None:
        self._replica = SqliteReplica(path)
        self._result = result
        self._consumer = mq.ordered_consumer(SUBJECT, GROUP, name=name)
        self._running = asyncio.create_task(self._consumer.run(self._apply, concurrency=1))

    async def _apply(self, message: Any) -> None:
        """Apply a change: it is committed with its serial before the message is acknowledged."""
        is_new = self._replica.apply(Change.decode(message.body))
        self._replica.commit()
        self._result.applied += is_new
        self._result.repeated += not is_new

    async def die(self) -> None:
        """Stop without leaving the group: the messages that it holds go to other consumers."""
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)
        await self.close()

    async def close(self) -> None:
        await self._consumer.close()
        await asyncio.gather(self._running, return_exceptions=True)
        self._replica.close()


async def replicate(
    server: str, folder: Path, count: int, keys: int, *, quiet: bool = False
) -> Result:
    """Send, apply, reshard, compare."""
    result, source, path = Result(), Source(seed=1, keys=keys), folder / "replica.db"
    async with qmq.connect(server) as mq:
        config = qmq.SubjectConfig(SUBJECT, order=qmq.Order.STRICT, logical_partitions=64)
        await mq.metadata.create_subject(config, partitions=2)
        workers = [Worker(mq, path, f"worker-{number}", result) for number in range(WORKERS)]
        with Progress(console=Console(stderr=True), transient=True, disable=quiet) as bar:
            task = bar.add_task("changes", total=count)
            steps = {
                count // 4: _split,
                count // 2: _replace_worker(path, result),
                3 * count // 4: _merge,
            }
            for begin in range(0, count, CHUNK):
                some = list(source.changes(min(CHUNK, count - begin)))
                await mq.send_many(
                    SUBJECT, [each.encode() for each in some], keys=[each.key for each in some]
                )
                result.changes += len(some)
                for at in [at for at in steps if at <= result.changes]:
                    await steps.pop(at)(mq, workers)
                bar.update(task, completed=result.applied)
            until = time.monotonic() + PATIENCE_S
            while (
                result.applied < count
                and all(not worker._running.done() for worker in workers)
                and time.monotonic() < until
            ):
                await asyncio.sleep(0.02)
                bar.update(task, completed=result.applied)
        result.route_versions = (await mq.metadata.describe_route(SUBJECT)).latest_version
        for worker in workers:
            await worker.close()
    replica = SqliteReplica(path)
    result.is_equal = replica.dump() == source.dump()
    replica.close()
    return result


async def _split(mq: qmq.Client, _workers: list[Worker]) -> None:
    """Split the first partition, while its messages are read."""
    await mq.metadata.change_route(
        SUBJECT, split=pb.SplitOperation(partition=1, at=[16]), reason="the example splits"
    )


async def _merge(mq: qmq.Client, _workers: list[Worker]) -> None:
    """Merge the two halves."""
    route = (await mq.metadata.describe_route(SUBJECT)).route
    halves = [part.number for part in sorted(route.partitions, key=lambda part: part.lps.first)[:2]]
    await mq.metadata.change_route(
        SUBJECT, merge=pb.MergeOperation(partitions=halves), reason="the example merges"
    )


def _replace_worker(path: Path, result: Result) -> Any:
    async def replace(mq: qmq.Client, workers: list[Worker]) -> None:
        await workers.pop(0).die()
        workers.append(Worker(mq, path, "worker-new", result))

    return replace


async def run(chosen: argparse.Namespace) -> int:
    """Run the whole example. Returns the exit status."""
    async with AsyncExitStack() as stack:
        server = chosen.server or await own_node(stack)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        result = await replicate(server, folder, chosen.changes, chosen.keys, quiet=chosen.json)
    if chosen.json:
        sys.stdout.write(json.dumps(asdict(result), indent=1) + "\n")
    else:
        table = Table(title="binlog replication", title_justify="left", show_header=False)
        table.add_column()
        table.add_column(justify="right")
        for name, value in asdict(result).items():
            table.add_row(
                name.replace("_", " "),
                f"{value:,}" if not isinstance(value, bool) else "yes" if value else "NO",
            )
        Console().print(table)
    return 0 if result.is_equal else 1


def main() -> int:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument(
        "--server", default="", help="a metaserver's address; without it, its own node"
    )
    options.add_argument("--changes", type=int, default=20_000)
    options.add_argument("--keys", type=int, default=1_000)
    options.add_argument("--json", action="store_true")
    return asyncio.run(run(options.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
