"""Finds the rows of a writer's epoch that a queue already has: FIND lists the batches of its producer id, FETCH reads them.

Rules:
* Usually there are no such rows, and one request for the newest batch shows it.
* For unordered subjects, numbers tell which rows are stored. In a partition, the newest batch is read, then older ones as long as they are
  of this epoch.
* Stored batches are read to compare their rows with those of this attempt (`row_prints.py`). Outside of ordered subjects this needs a right
  that a sink may lack, to browse the subject: then the rows are not compared.
* A closed partition must be sealed *before* the lookup, so that no row is added after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Final

import numpy as np

from pyspark_qmq.servers.server_reader import batches_in, numbers_of
from pyspark_qmq.sink.core_requests import Look, LookedUp
from pyspark_qmq.sink.row_identity import ID_BYTES, NUMBERS_END, Ids, RowTarget, RowWriter
from pyspark_qmq.sink.row_prints import Prints, of_batch, of_ids, unknown
from pyspark_qmq.source_model import QueueKey
from qmq.batch import BatchView
from qmq.errors import AccessDenied, LogDamaged, RouteChanged
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
        return _outside_partitions(ask.target, writer, call)
    if ask.is_final and not wire.unpack_fetched(call(FrameKind.FETCH, numbers_of(_key(ask.target)).pack()))[0].is_sealed:
        raise RouteChanged(f"{ask.target} was closed, and its broker group has not sealed it yet")
    return _in_partition(ask, writer, call)


def _outside_partitions(to: RowTarget, writer: RowWriter, call: Call) -> LookedUp:
    batches = _sent(to, writer, call, NUMBERS_END)
    newest = next(batches, None)
    has_later = newest is not None and newest[0] >= writer.numbers_end
    if has_later:
        batches = _sent(to, writer, call, writer.numbers_end)
    elif newest is not None:
        batches = chain([newest], batches)
    runs: dict[int, Prints] = {}
    for batch in batches:
        if batch[0] < writer.numbers_begin:
            break
        if batch[2]:
            runs[batch[0] - writer.numbers_begin] = _prints_of(to, batch, writer, call)
    return LookedUp(runs=runs, has_later=has_later)


def _prints_of(to: RowTarget, batch: Batch, writer: RowWriter, call: Call) -> Prints:
    try:
        view = _read(to, batch, call)
    except AccessDenied:
        view = None
    if view is None:
        return unknown(batch[2])
    return of_ids(_ids_of(view)) if writer.has_own_ids else of_batch(view)


def _in_partition(ask: Look, writer: RowWriter, call: Call) -> LookedUp:
    number, found, ids, has_later = 0, dict[int, int](), set[bytes](), False
    for batch in _sent(ask.target, writer, call, NUMBERS_END):
        number = max(number, batch[0] + 1)
        if batch[0] < ask.from_number:
            break
        if not batch[2]:
            continue
        view = _read(ask.target, batch, call)
        if view is None:
            continue
        if writer.has_own_ids:
            ids.update(each.tobytes() for each in _ids_of(view))
            continue
        rows, newest_epoch, is_mine = writer.read_ids(_ids_of(view))
        if len(rows):
            found.update(zip(rows.tolist(), of_batch(view)[is_mine].tolist(), strict=True))
        has_later |= newest_epoch > writer.epoch
        if newest_epoch < writer.epoch:
            break
    ordered = sorted(found.items())
    whole = np.array([row for row, _ in ordered], np.int64)
    return LookedUp(number, rows=whole, prints=np.array([each for _, each in ordered], np.uint64), ids=frozenset(ids), has_later=has_later)


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


def _ids_of(view: BatchView) -> Ids:
    return np.frombuffer(view.region, np.uint8, view.count * ID_BYTES, view.layout.message_id).reshape(-1, ID_BYTES)


def _read(to: RowTarget, batch: Batch, call: Call) -> BatchView | None:
    """A stored batch of this writer; None if retention deleted it meanwhile."""
    _, sequence, count = batch
    request = wire.Fetch(to.subject, to.partition, sequence, sequence + count, 0, FETCH_BYTES, [], [], [], 1)
    payload = call(FrameKind.FETCH, request.pack())
    fetched, start = wire.unpack_fetched(payload)
    for envelope, region in batches_in(payload[start:], fetched.batches, _key(to)):
        view = BatchView(envelope, bytes(region))
        if envelope.base_sequence == sequence and view.layout.message_id >= 0:
            return view
    if fetched.start_sequence > sequence:
        return None
    raise LogDamaged(f"{to} listed a batch of {count} messages from {sequence} on, but did not return it")


def _key(to: RowTarget) -> QueueKey:
    return QueueKey(to.subject, to.partition, to.broker_group)
