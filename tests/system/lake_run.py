"""Lake writers are killed at random moments while messages arrive and a route changes; each row is compared with the sent messages."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
from pyiceberg.catalog import load_catalog
from qmq_ordering.hashing import logical_partition

import qmq
from qmq.model import Order, SubjectConfig
from qmq.proto.v1 import meta_pb2 as pb

SUBJECT = "bank"
LPS = 1024


@dataclass(slots=True)
class LakeOutcome:
    rows: int = 0
    snapshots: int = 0
    kills: int = 0
    kills_between_commits: int = 0
    """Writers that were killed after they had opened the table, and before their next commit."""
    changes: int = 0
    anomalies: list[str] = field(default_factory=list)


async def lake_run(
    server: str, folder: Path, *, rows: int, kills: int, changes: int, seed: int, step: Callable[[], None] = lambda: None
) -> LakeOutcome:
    """Send `rows` messages in `kills` parts. Over each part a writer runs that is killed; the last one ends by itself."""
    choose, outcome = random.Random(seed), LakeOutcome()
    uri, warehouse = f"sqlite:///{folder}/catalog.db", f"file://{folder}/warehouse"
    async with qmq.connect(server) as mq:
        await mq.metadata.create_subject(SubjectConfig(SUBJECT, order=Order.STRICT, logical_partitions=LPS), partitions=2)
        newest, sent = 2, 0
        async with mq.ordered_producer(SUBJECT) as producer:
            for part in range(kills):
                end = rows * (part + 1) // kills
                await producer.send_many([b"%d" % n for n in range(sent, end)], [f"k{n % 97}" for n in range(sent, end)])
                sent = end
                if outcome.changes < changes * (part + 1) // kills:
                    await mq.metadata.change_route(SUBJECT, split=pb.SplitOperation(partition=newest))
                    newest, outcome.changes = newest + 2, outcome.changes + 1
                _killed(_follow(server, uri, warehouse, "--interval", "0.1"), choose, outcome)
                step()
    subprocess.run(_follow(server, uri, warehouse, "--once"), check=True, stdout=subprocess.DEVNULL)
    catalog = load_catalog("lake", uri=uri, warehouse=warehouse)
    table = catalog.load_table(("qmq", SUBJECT))
    outcome.snapshots = len(table.metadata.snapshots)
    found = table.scan().to_arrow()
    catalog.close()
    outcome.rows = found.num_rows
    outcome.anomalies += anomalies(found, rows)
    return outcome


def _follow(server: str, uri: str, warehouse: str, *more: str) -> list[str]:
    words = ["lake", "follow", "--server", server, "--subject", SUBJECT, "--catalog-uri", uri, "--warehouse", warehouse, *more]
    return [sys.executable, "-m", "qmq.cli", *words]


def _killed(command: list[str], choose: random.Random, outcome: LakeOutcome) -> None:
    """Most writers take some rounds first: the moment counts from their first commit, or from their start."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        if choose.random() < 0.7:
            process.stdout.readline()
            outcome.kills_between_commits += 1
            time.sleep(choose.uniform(0, 0.3))
        else:
            time.sleep(choose.uniform(0, 3))
        process.kill()
    outcome.kills += 1


def anomalies(found: pa.Table, rows: int) -> list[str]:
    """Rows that are missing, duplicated, out of their key's order over all routes, or in the wrong logical partition."""
    order = [(name, "ascending") for name in ("route_version", "partition", "sequence")]
    columns = found.sort_by(order).select(["key", "body", "logical_partition"]).to_pydict()
    numbers = [int(each) for each in columns["body"]]
    counts = Counter(numbers)
    wrong = [f"{number} is missing" for number in range(rows) if not counts[number]]
    wrong += [f"{number} is there {count} times" for number, count in counts.items() if count > 1]
    last: dict[bytes, int] = {}
    for key, number, lp in zip(columns["key"], numbers, columns["logical_partition"], strict=True):
        if last.get(key, -1) > number:
            wrong.append(f"{number} of key {key!r} stands behind {last[key]}")
        if lp != logical_partition(key, LPS):
            wrong.append(f"{number} of key {key!r} is in logical partition {lp}")
        last[key] = number
    return wrong
