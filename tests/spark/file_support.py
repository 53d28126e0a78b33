"""Support for the tests of reading files: stores with known traffic, and the rows read from their
files.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest
from support import ManualClock
from support.retention import begin_retention, end_retention

from qmq.columns.files.log import FileAddress, FileLog
from qmq.columns.model import ALL, QueueKey, QueuePiece, ReadSelection, Topology
from qmq.log import commit_mark
from qmq.log.checkpoint import begin_checkpoint, end_checkpoint
from qmq.log.log_config import LogConfig
from qmq.log.queue import Queue
from qmq.log.recovery import open_store
from qmq.log.store import Intake, Store
from qmq.model import SubjectConfig
from qmq.rpc.channel import LOOK_INSIDE
from qmq.wire.batch import BatchView, encode, sent_sizes
from qmq.wire.batch_columns import BatchFlag, Columns, parse_header, tag_bloom, tag_hash

GROUP = "g1"
TAGS = ("red", "green", "blue")
_MEMORY = Path("/dev/shm")

Row = tuple[int, bytes]
"""Sequence and body."""


@contextmanager
def folder_in_memory() -> Iterator[Path]:
    """A folder in memory, because these tests open hundreds of stores, and each opening calls
    fsync.
    """
    found = Path(tempfile.mkdtemp(dir=_MEMORY if _MEMORY.is_dir() else None, prefix="qmq-"))
    try:
        yield found
    finally:
        shutil.rmtree(found, ignore_errors=True)


def small_log(**options: object) -> LogConfig:
    """A configuration with segments that are smaller than the command line allows."""
    config = LogConfig(producer_expiry_ms=1 << 40, cache_bytes=0, **options)  # type: ignore[arg-type]
    object.__setattr__(config, "segment_bytes", 3_000)
    object.__setattr__(config, "action_segment_bytes", 1_200)
    return config


def batch(
    queue: Queue,
    bodies: list[bytes],
    number: int,
    *,
    tags: list[tuple[str, ...]] | None = None,
    keys: list[bytes] | None = None,
    lps: Sequence[int] | None = None,
    flags: int = 0,
    headers: list[dict[str, bytes]] | None = None,
) -> Intake:
    """A batch as the broker stores it, with the bloom filter of its tags."""
    columns = Columns(bodies, keys=keys, tags=tags, logical_partitions=lps, headers=headers)  # type: ignore[arg-type]
    envelope, region = encode(
        queue.id.subject.encode(),
        columns,
        producer_id=7,
        batch_sequence=number,
        create_time_ms=1,
        flags=flags,
        partition=queue.id.partition,
    )
    hashes = [tag_hash(tag) for each in tags or () for tag in each]
    bloom = LOOK_INSIDE if flags & BatchFlag.DIRECTED else tag_bloom(hashes)
    return Intake(queue, region, sent_sizes(envelope)[1], parse_header(region), bloom)


def mark(store: Store) -> None:
    """Write the commit mark that the broker would write now."""
    marker = commit_mark.Marker(store)
    marker.tick(0)


def checkpoint(store: Store) -> None:
    plan = begin_checkpoint(store)
    plan.run()
    end_checkpoint(store, plan)


def forget_old(store: Store, retention_ms: int) -> None:
    """Delete old segments, as the broker's retention does."""
    taken = begin_retention(store, lambda name: SubjectConfig(name, retention_ms=retention_ms))
    checkpoint(store)
    end_retention(taken)


@dataclass
class Traffic:
    """A store without replicas in `data/broker`, and the messages that were sent to the store."""

    data: Path
    random: Random
    sent: dict[tuple[str, int], list[Row]] = field(default_factory=dict)
    number: int = 0
    clock: ManualClock = field(default_factory=ManualClock)

    def __post_init__(self) -> None:
        self.folder = self.data / GROUP
        self.store = open_store(self.folder, small_log(), self.clock)

    def send(self, subject: str = "", partition: int = 0, count: int = 0) -> None:
        """Send a batch; values that are not given are random."""
        subject = subject or self.random.choice(("a", "b", "ab"))
        queue = self.store.open_queue(subject, partition)
        self.number += 1
        self.clock.now_ms += 10
        bodies = [
            b"%d-%d" % (self.number, at) * self.random.randrange(8)
            for at in range(count or self.random.randrange(1, 6))
        ]
        (produced,) = self.store.append([batch(queue, bodies, self.number)])
        self.store.commit(self.store.index)
        rows = self.sent.setdefault((subject, partition), [])
        rows += [(produced.base_sequence + at, body) for at, body in enumerate(bodies)]

    def reopen(self) -> None:
        self.store.close()
        self.store = open_store(self.folder, small_log(), self.clock)

    def end(self, subject: str, partition: int = 0) -> int:
        rows = self.sent.get((subject, partition))
        return rows[-1][0] + 1 if rows else 0


def opened(*paths: Path | str, committed: str = "", routes: str = "") -> FileLog:
    return FileAddress(tuple(map(str, paths)), committed, routes).open()


def rows_of(
    pieces: Sequence[QueuePiece], selection: ReadSelection = ALL, *, skips_lost: bool = False
) -> list[Row]:
    """The rows that tasks read from these pieces. The log of each task contains only its piece."""
    found: list[Row] = []
    for piece in pieces:
        log = FileAddress(("/nowhere",)).open()
        for each in log.read(piece, selection, skips_lost=skips_lost):
            view = BatchView(each.envelope, bytes(each.region))
            rows = [(view.base_sequence + at, body) for at, body in enumerate(view.bodies())]
            found += [row for row in rows if piece.first <= row[0] < piece.end]
    return found


def read_all(
    log: FileLog, topology: Topology, bytes_max: int = 1 << 20, selection: ReadSelection = ALL
) -> dict[QueueKey, list[Row]]:
    """All rows of the topology's queues."""
    return {
        key: rows_of(log.pieces(key, queue.start, queue.end, bytes_max), selection)
        for key, queue in topology.queues.items()
    }


@pytest.fixture
def traffic() -> Iterator[Traffic]:
    """A store with small segments, which changes while it is read as files."""
    with folder_in_memory() as folder:
        found = Traffic(folder, Random())
        yield found
        found.store.close()
