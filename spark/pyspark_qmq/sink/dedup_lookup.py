"""Finds the rows of a writer's epoch that a queue already has: FIND lists the batches of its producer id, FETCH reads them.

Rules:
* Usually there are no such rows, and one request for the newest batch shows it.
* For unordered subjects, numbers are sufficient. In a partition, the newest batch is read, then older ones as long as they are of this
  epoch.
* A closed partition must be sealed *before* the lookup, so that no row is added after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import numpy as np

from pyspark_qmq.servers.server_reader import batches_in, numbers_of
from pyspark_qmq.sink.core_requests import Look, LookedUp
from pyspark_qmq.sink.row_identity import ID_BYTES, NUMBERS_END, Ids, Rows, RowTarget, RowWriter
from pyspark_qmq.source_model import QueueKey
from qmq.batch_columns import Layout, parse_header
from qmq.errors import LogDamaged, RouteChanged
from qmq.limits import MIB
from qmq.wire import frame_payloads as wire
from qmq.wire.frame import FrameKind

Call = Callable[[int, bytes], memoryview]
"""Sends (kind, payload) to the queue's master and returns the answer's payload."""
Batch = tuple[int, int, int]
"""Number, first sequence, number of messages."""

PAGE: Final = 1_000
FETCH_BYTES: Final = 4 * MIB


def look(ask: Look, writer: RowWriter, call: Call) -> LookedUp:
    """Answer a `Look`. Raises RouteChanged for a closed partition that is not sealed yet, LogDamaged, and what `call` raises."""
    if ask.target.partition == 0:
        return LookedUp(runs=_runs(ask.target, writer, call))
    if ask.is_final and not wire.unpack_fetched(call(FrameKind.FETCH, numbers_of(_key(ask.target)).pack()))[0].is_sealed:
        raise RouteChanged(f"{ask.target} was closed, and its broker group has not sealed it yet")
    return _in_partition(ask, writer, call)


def _runs(to: RowTarget, writer: RowWriter, call: Call) -> dict[int, int]:
    runs: dict[int, int] = {}
    for number, _, count in _sent(to, writer, call, writer.numbers_end):
        if number < writer.numbers_begin:
            break
        if count:
            runs[number - writer.numbers_begin] = count
    return runs


def _in_partition(ask: Look, writer: RowWriter, call: Call) -> LookedUp:
    number, rows, ids = 0, [np.empty(0, np.int64)], set[bytes]()
    for batch in _sent(ask.target, writer, call, NUMBERS_END):
        number = max(number, batch[0] + 1)
        if batch[0] < ask.from_number:
            break
        if not batch[2]:
            continue
        stored = _read_ids(ask.target, batch, call)
        if writer.has_own_ids:
            ids.update(each.tobytes() for each in stored)
            continue
        found, newest_epoch = writer.read_ids(stored)
        rows.append(found)
        if newest_epoch < writer.epoch:
            break
    return LookedUp(number, rows=_sorted(rows), ids=frozenset(ids))


def _sorted(rows: list[Rows]) -> Rows:
    return np.unique(np.concatenate(rows))


def _sent(to: RowTarget, writer: RowWriter, call: Call, before: int) -> Iterator[Batch]:
    """The writer's batches with numbers below `before`, the highest first."""
    producer, most = f"{writer.producer_id(to):016x}", 1
    while True:
        request = wire.Find(to.subject, to.partition, producer, before, most)
        found = wire.FoundBatches.unpack(call(FrameKind.FIND, request.pack())).found
        yield from [(number, sequence, count) for number, sequence, count in found]
        if len(found) < most or not found[-1][0]:
            return
        before, most = found[-1][0], PAGE


def _read_ids(to: RowTarget, batch: Batch, call: Call) -> Ids:
    """The message ids of a stored batch of this writer."""
    _, sequence, count = batch
    request = wire.Fetch(to.subject, to.partition, sequence, sequence + count, 0, FETCH_BYTES, [], [], [], 1)
    payload = call(FrameKind.FETCH, request.pack())
    fetched, start = wire.unpack_fetched(payload)
    for envelope, region in batches_in(payload[start:], fetched.batches, _key(to)):
        header = parse_header(region)
        layout = Layout.walk(region, header)
        if envelope.base_sequence == sequence and layout.message_id >= 0:
            return np.frombuffer(region, np.uint8, header.count * ID_BYTES, layout.message_id).reshape(-1, ID_BYTES)
    if fetched.start_sequence > sequence:
        return np.empty((0, ID_BYTES), np.uint8)
    raise LogDamaged(f"{to} listed a batch of {count} messages from {sequence} on, but did not return it")


def _key(to: RowTarget) -> QueueKey:
    return QueueKey(to.subject, to.partition, to.broker_group)
