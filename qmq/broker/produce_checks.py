"""Checks the batches of a producer before they are stored. Pure.

A batch is accepted or refused as a whole. The broker never decodes single messages: it checks the producer's checksum, finds the columns,
and checks each column's offsets as a vector, so that no later reader of the log reads outside the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from struct import unpack_from
from typing import Final, NamedTuple

import numpy as np
from qmq_ordering.route import LpRange

from qmq import limits, targeted
from qmq.batch import BATCH_BYTES_MIN, ENVELOPE_BYTES, sent_sizes
from qmq.batch_columns import ONE_ITEM, REGION_BYTES, Layout, RegionHeader, check_region, int_column, parse_header, tag_bloom
from qmq.compression import Compression
from qmq.errors import CorruptBatch, InvalidArgument, MessageTooLarge, OrderMismatch
from qmq.log.batch_filter import logical_partitions
from qmq.log.queue import Queue
from qmq.log.store import Intake
from qmq.model import BATCH_NUMBERS, DEAD_LETTERS

_VECTOR_MIN: Final = 32
"""For fewer offsets a loop is faster than numpy."""
_LEAST: Final = np.minimum.reduce
_MOST: Final = np.maximum.reduce
_COMPRESSIONS: Final = frozenset(map(int, Compression))
_DEAD_LETTERS: Final = DEAD_LETTERS.encode()

CheckDueTimes = Callable[[bytes, RegionHeader, Layout], None]
"""(region, its header, its layout). Raises CallerError."""


class Destination(NamedTuple):
    """The queue of a batch, and its conditions."""

    queue: Queue
    body_bytes_max: int
    lps: LpRange | None = None
    """On an ordered subject: the partition's range."""
    needs_right: bool = False
    """Whether a batch needs the master's write lease."""
    check_due_times: CheckDueTimes | None = None
    """On a delay server: checks a delayed batch. None: delayed batches are refused."""
    awaits_flush: bool = False
    """Whether producers are answered only when a majority has flushed the batch."""


FindQueue = Callable[[bytes, int], Destination]
"""(subject as bytes, partition) -> where it is. Raises UnknownSubject, InvalidName, OrderMismatch, RouteChanged."""


def may_pass_drain(batch: Intake) -> bool:
    """A retry of a stored batch is answered also while drained; and a partition takes messages until it was moved away."""
    if batch.queue.is_ordered:
        return True
    return batch.queue.find_duplicate(batch.header) is not None


def read_batches(payload: memoryview, find_queue: FindQueue) -> list[Intake]:
    """The checked batches of a PRODUCE.

    Raises: CorruptBatch: a checksum or an offset does not hold. MessageTooLarge: a body is over the subject's limit. InvalidArgument,
    OrderMismatch: an invalid directed batch. UnknownSubject, InvalidName: from `find_queue`.
    """
    found: list[Intake] = []
    at = 0
    while at < len(payload):
        total, region_crc = sent_sizes(payload, at)
        region = bytes(payload[at + ENVELOPE_BYTES : at + total])
        if len(region) != total - ENVELOPE_BYTES:
            raise CorruptBatch(f"the frame ends within a batch of {total} bytes")
        found.append(read_batch(region, region_crc, find_queue))
        at += total
    if not found:
        raise InvalidArgument(f"PRODUCE without a batch (the smallest has {BATCH_BYTES_MIN} bytes)")
    return found


def read_batch(region: bytes, region_crc: int, find_queue: FindQueue) -> Intake:
    """One batch, checked. Raises as `read_batches`."""
    check_region(region, region_crc)
    header = parse_header(region)
    _check_header(header)
    layout = Layout.walk(region, header)
    subject = region[REGION_BYTES : REGION_BYTES + header.subject_bytes]
    if subject.startswith(_DEAD_LETTERS):  # before a queue is created for it
        raise InvalidArgument("only brokers write to dead-letter queues: let a message fail, or reject it")
    queue, body_bytes_max, lps, _, check_due_times, awaits_flush = find_queue(subject, header.partition)
    stored = limits.BATCH_BYTES_MAX if header.compression else header.body_bytes
    longest = _check_offsets(region, layout.body, header.count, stored, exact=not header.compression)
    if longest > body_bytes_max:
        raise MessageTooLarge(
            f"a body of {longest} bytes to {subject.decode()!r}, whose limit is {body_bytes_max}: "
            "send a reference to the content instead, or raise the limit with `qmq subject alter`"
        )
    bloom = _check_columns(region, header, layout) if header.columns else 0
    if header.is_directed:
        targeted.check(region, header, to_partition=lps is not None)
        bloom = targeted.LOOK_INSIDE
    if check_due_times is not None:
        check_due_times(region, header, layout)
    elif layout.due >= 0:
        raise InvalidArgument("a delayed batch must go to a delay group, not to a broker: locate with `delayed`")
    if lps is not None:
        _check_order(region, header, layout, lps)
    return Intake(queue, region, region_crc, header, bloom, awaits_flush)


def _check_header(header: RegionHeader) -> None:
    """Refuse values that readers of the log could not use: dead letters and delayed messages are built from stored ones."""
    if header.compression not in _COMPRESSIONS:
        raise InvalidArgument(f"compression {header.compression} is unknown: 0 is none, 1 zstd, 2 lz4")
    if header.batch_sequence >= BATCH_NUMBERS:
        text = f"batch number {header.batch_sequence} is over {BATCH_NUMBERS - 1}: begin again under a new producer id"
        raise InvalidArgument(text)
    if not 0 <= header.create_time_ms < limits.CREATE_TIME_MS_END:
        raise InvalidArgument(
            f"create time {header.create_time_ms} is not a valid number of milliseconds since 1970: check the producer's clock"
        )


def _check_order(region: bytes, header: RegionHeader, layout: Layout, lps: LpRange) -> None:
    """Check that all messages for a partition of an ordered subject have keys, and belong to its logical partitions."""
    if layout.key < 0 or layout.logical_partition < 0:
        raise OrderMismatch("messages to an ordered subject need keys and logical partitions: send them with mq.ordered_producer")
    found = logical_partitions(region, layout, header.count)
    if int(found.min()) < lps.first or int(found.max()) >= lps.end:
        raise InvalidArgument(f"messages of logical partitions {found.min()} to {found.max()} were sent to a partition that holds {lps}")


def _check_columns(region: bytes, header: RegionHeader, layout: Layout) -> int:
    """Check the offsets of the optional columns; give the bloom of the tags."""
    count = header.count
    if layout.key >= 0:
        longest = _check_offsets(region, layout.key, count, limits.BATCH_BYTES_MAX)
        if longest > limits.KEY_BYTES_MAX:
            raise MessageTooLarge(f"a key of {longest} bytes; the limit is {limits.KEY_BYTES_MAX}")
    if layout.header_list >= 0:
        _check_offsets(region, layout.header_list, count, limits.BATCH_BYTES_MAX)
        total = _last(region, layout.header_list, count)
        _check_offsets(region, layout.header_name, total, limits.BATCH_BYTES_MAX)
        _check_offsets(region, layout.header_value, total, limits.BATCH_BYTES_MAX)
        _check_header_bytes(region, layout, count, total)
    if layout.tag_list < 0:
        return 0
    most = _check_offsets(region, layout.tag_list, count, limits.BATCH_BYTES_MAX)
    if most > limits.TAGS_MAX:
        raise InvalidArgument(f"a message with {most} tags; the limit is {limits.TAGS_MAX}")
    total = _last(region, layout.tag_list, count)
    if _check_offsets(region, layout.tag, total, limits.BATCH_BYTES_MAX) > limits.TAG_BYTES_MAX:
        raise InvalidArgument(f"a tag has at most {limits.TAG_BYTES_MAX} bytes")
    return tag_bloom(set(int_column(region, layout.tag_hash, "Q", total)))


def _check_header_bytes(region: bytes, layout: Layout, count: int, total: int) -> None:
    """The headers of each message together. Offsets were checked before; a batch with few header bytes in all needs no closer check."""
    names, values = _last(region, layout.header_name, total), _last(region, layout.header_value, total)
    most = limits.STORED_HEADER_BYTES_MAX
    if names + values + total <= most:
        return
    marks = np.frombuffer(region, "<i4", count + 1, layout.header_list)
    begins = np.frombuffer(region, "<i4", total + 1, layout.header_name).astype(np.int64)
    begins += np.frombuffer(region, "<i4", total + 1, layout.header_value)
    begins += np.arange(total + 1)  # a byte for each header, so that empty ones are bounded, too
    longest = int(np.diff(begins[marks]).max())
    if longest > most:
        raise MessageTooLarge(f"headers of {longest} bytes; the limit is {limits.HEADER_BYTES_MAX}")


def _last(region: bytes, at: int, count: int) -> int:
    last: int = unpack_from("<i", region, at + 4 * count)[0]
    return last


def _check_offsets(region: bytes, at: int, count: int, end: int, *, exact: bool = False) -> int:
    """Offsets begin at 0, never decrease, and end at (or before) `end`. Returns the longest item. Raises CorruptBatch."""
    longest: int
    if count == 1:
        first, last = ONE_ITEM.unpack_from(region, at)
        shortest = longest = last - first
    elif count < _VECTOR_MIN:
        marks = unpack_from(f"<{count + 1}i", region, at)
        lengths = [b - a for a, b in pairwise(marks)]
        first, last, shortest, longest = marks[0], marks[-1], min(lengths, default=0), max(lengths, default=0)
    else:
        vector = np.frombuffer(region, "<i4", count + 1, at)
        steps = vector[1:] - vector[:-1]  # as np.diff, min and max, which take twice as long for so few numbers
        first, last, shortest, longest = int(vector[0]), int(vector[-1]), int(_LEAST(steps)), int(_MOST(steps))
    if first != 0 or shortest < 0 or last > end or (exact and last != end):
        raise CorruptBatch(f"the offsets at byte {at} of a region do not rise from 0 to {end}")
    return longest
