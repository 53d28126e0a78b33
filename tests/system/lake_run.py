"""Lake writers are killed at random moments while messages arrive and a route changes; each row is
compared with the sent messages.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import random
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyiceberg.catalog import load_catalog
from qmq_ordering.hashing import logical_partition

import qmq
from qmq.cli.app import app
from qmq.model import Order, SubjectConfig
from qmq.proto.v1 import meta_pb2 as pb
from qmq.schemas.declared_schema import SchemaFormat

SUBJECT = "bank"
LPS = 1024
BAD_EVERY = 50
"""In a typed run, each message with such a number does not fit the schema."""
SCHEMA = '{"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}'


@dataclass(slots=True)
class LakeOutcome:
    rows: int = 0
    rejected: int = 0
    sum: int = 0
    """The sum of the numbers in the bodies."""
    snapshots: int = 0
    kills: int = 0
    kills_between_commits: int = 0
    """Writers that were killed after they had opened the table, and before their next commit."""
    changes: int = 0
    anomalies: list[str] = field(default_factory=list)


async def lake_run(
    server: str,
    folder: Path,
    *,
    rows: int,
    kills: int,
    changes: int,
    seed: int,
    is_typed: bool = False,
    step: Callable[[], None] = lambda: None,
) -> LakeOutcome:
    """Send `rows` messages in `kills` parts. Over each part a writer runs that is killed; the last
    one ends by itself.

    `is_typed`: the table is typed, and some messages do not fit the schema.
    """
    body, more = (typed_body, ["--typed"]) if is_typed else (plain_body, [])
    choose, outcome = random.Random(seed), LakeOutcome()
    uri, warehouse = f"sqlite:///{folder}/catalog.db", f"file://{folder}/warehouse"
    async with qmq.connect(server) as mq:
        await mq.metadata.create_subject(
            SubjectConfig(SUBJECT, order=Order.STRICT, logical_partitions=LPS), partitions=2
        )
        if is_typed:
            await mq.metadata.set_subject_schema(SUBJECT, SchemaFormat.JSON_SCHEMA, SCHEMA)
        newest, sent = 2, 0
        async with mq.ordered_producer(SUBJECT) as producer:
            for part in range(kills):
                end = rows * (part + 1) // kills
                await producer.send_many(
                    list(map(body, range(sent, end))), [f"k{n % 97}" for n in range(sent, end)]
                )
                sent = end
                if outcome.changes < changes * (part + 1) // kills:
                    if outcome.changes % 2 == 0:
                        await mq.metadata.change_route(
                            SUBJECT, split=pb.SplitOperation(partition=newest)
                        )
                        newest += 2
                    else:
                        await mq.metadata.change_route(
                            SUBJECT, merge=pb.MergeOperation(partitions=[newest - 1, newest])
                        )
                        newest += 1
                    outcome.changes += 1
                _killed(
                    _follow(server, uri, warehouse, "--interval", "0.1", *more), choose, outcome
                )
                step()
    last, output = _started(_follow(server, uri, warehouse, "--once", *more))
    while os.read(output.fileno(), 1 << 16):
        pass
    last.join()
    assert last.exitcode == 0
    catalog = load_catalog("lake", uri=uri, warehouse=warehouse)
    table = catalog.load_table(("qmq", SUBJECT))
    outcome.snapshots = len(table.metadata.snapshots)
    found = table.scan().to_arrow()
    if is_typed:
        rejected = catalog.load_table(("qmq", f"{SUBJECT}__rejected")).scan().to_arrow()
        outcome.rejected = rejected.num_rows
        outcome.anomalies += misplaced(found, rejected)
        found = pa.concat_tables(
            [
                found.select(rejected.column_names[:-2]),
                rejected.drop_columns(rejected.column_names[-2:]),
            ]
        )
    catalog.close()
    outcome.rows, outcome.sum = found.num_rows, sum(map(number_of, found["body"].to_pylist()))
    outcome.anomalies += anomalies(found, rows)
    return outcome


def _follow(server: str, uri: str, warehouse: str, *more: str) -> list[str]:
    words = [
        "lake",
        "follow",
        "--server",
        server,
        "--subject",
        SUBJECT,
        "--catalog-uri",
        uri,
        "--warehouse",
        warehouse,
    ]
    return [*words, *more]


def _started(words: list[str]) -> tuple[Any, Any]:
    """`qmq` in a separate process, and its output. The process is forked from one that has loaded
    the libraries, which saves most of the start time.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(
        ["qmq.cli.lake", "pyspark_qmq.lake.writer", "pyiceberg.catalog.sql", "pyiceberg.io.pyarrow"]
    )
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_qmq, args=(words, theirs))
    process.start()
    theirs.close()
    return process, ours


def _qmq(words: list[str], out: Any) -> None:
    os.dup2(out.fileno(), 1)
    sys.stdout = os.fdopen(1, "w", buffering=1)
    app(words)


def _killed(words: list[str], choose: random.Random, outcome: LakeOutcome) -> None:
    """Most writers take some rounds first: the moment counts from their first commit, or from their
    start.
    """
    process, output = _started(words)
    if choose.random() < 0.7:
        os.read(output.fileno(), 1)
        outcome.kills_between_commits += 1
        time.sleep(choose.uniform(0, 0.3))
    else:
        time.sleep(choose.uniform(0, 3))
    process.kill()
    process.join()
    output.close()
    if process.exitcode != -signal.SIGKILL:
        outcome.anomalies.append(f"a writer ended by itself, with {process.exitcode}")
    outcome.kills += 1


def plain_body(number: int) -> bytes:
    return b"%d" % number


def typed_body(number: int) -> bytes:
    return b"bad %d" % number if number % BAD_EVERY == 0 else b'{"n":%d}' % number


def number_of(body: bytes) -> int:
    found = re.search(rb"\d+", body)
    assert found is not None
    return int(found[0])


def misplaced(found: pa.Table, rejected: pa.Table) -> list[str]:
    """Rows of a typed run that are in the wrong table, or whose column does not say what their body
    says.
    """
    wrong = [
        f"{body!r} was rejected"
        for body in rejected["body"].to_pylist()
        if not body.startswith(b"bad ")
    ]
    pairs = zip(found["body"].to_pylist(), found["value"].to_pylist(), strict=True)
    return wrong + [
        f"{body!r} has the value {value}"
        for body, value in pairs
        if body != b'{"n":%d}' % value["n"]
    ]


def anomalies(found: pa.Table, rows: int) -> list[str]:
    """Rows that are missing, duplicated, out of their key's order over all routes, or in the wrong
    logical partition.
    """
    order = [(name, "ascending") for name in ("route_version", "partition", "sequence")]
    columns = found.sort_by(order).select(["key", "body", "logical_partition"]).to_pydict()
    numbers = [number_of(each) for each in columns["body"]]
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
