"""What the lake has of a subject at one snapshot of its table, and what a read of lake and log
together takes from each. The positions and the files are read from the same metadata.

In a typed lake a message is either in the subject's table or in the table of rejected messages. The
rejected messages of the last round may not be in their table yet; then the subject's table names
their files.

A table has sequences `first` to `end` - 1 of a queue: it is complete from `first` on, and `end` is
its position. The log has the messages that retention has left. A read takes what the table has from
the table, and the rest from the log:

    table              |first ─────────────── end|
    log                               |start ──────────────── end|
    read      |start ── log ──|── lake ──────────|──── log ──|end

Each message is in one of the ranges, or the read fails and names it. Rows of the table below
`first` are not read, because messages between them and `first` are missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any, Final, NamedTuple, TypeVar

import pyiceberg.expressions
from pyiceberg.catalog import Catalog
from pyiceberg.conversions import from_bytes
from pyiceberg.manifest import DataFile
from pyiceberg.table import Table

from pyspark_qmq.lake import typed
from pyspark_qmq.lake.catalog import answering_catalog, open_catalog
from pyspark_qmq.lake.lake_damage import reading_table
from pyspark_qmq.lake.rows import Bounds, LakeFile, TimeRange
from pyspark_qmq.lake.table import LakeTable, read_table
from qmq.columns import reading
from qmq.columns.model import QueueKey, ReadSelection, SourceQueue, Topology
from qmq.columns.offsets import Offsets
from qmq.columns.options import LakeAddress, ReadOptions
from qmq.columns.planning import PlannedRange
from qmq.columns.servers.metaservers import patiently
from qmq.errors import InvalidArgument, MessagesExpired, Overloaded, UnknownSubject
from qmq.process.event_loop import time_of


@dataclass(frozen=True, slots=True)
class LakeExtent:
    """Sequences `first` to `end` - 1 of a queue, all of which a table has."""

    first: int
    end: int


Extents = Mapping[QueueKey, LakeExtent]
_NONE: Final = LakeExtent(0, 0)


class SplitRanges(NamedTuple):
    lake: list[PlannedRange]
    log: list[PlannedRange]


def extents(complete_from: Offsets, positions: Offsets) -> dict[QueueKey, LakeExtent]:
    """What a table has. Queues without messages in the table are left out."""
    found = {key: LakeExtent(complete_from.get(key, 0), end) for key, end in positions.items()}
    return {key: each for key, each in found.items() if each.first < each.end}


def joined(log: Topology, held: Extents, *, may_lag: bool) -> Topology:
    """The queues of table and log together. `may_lag`: the log's ends may be a little old.

    Raises InvalidArgument if a table has messages beyond the log's end.
    """
    queues = dict(log.queues)
    for key, each in held.items():
        known = queues.get(key)
        if known is None:  # its broker group is gone
            queues[key] = SourceQueue(key, each.first, each.end)
            continue
        if each.end > known.end and not may_lag:
            raise InvalidArgument(
                f"the table of {key.subject!r} has messages up to {each.end - 1} of {key}, "
                f"and the log ends at {known.end}: the table belongs to another cluster; "
                "give option qmq.lakeNamespace with the tables of this one"
            )
        start, end = min(each.first, known.start), max(each.end, known.end)
        queues[key] = SourceQueue(
            key, start, end, known.stored_bytes, known.last_append_ms, known.is_sealed
        )
    return Topology(queues, log.routes)


def edges(
    asked: ReadOptions, whole: Topology, log: Topology, find_time: reading.FindTime
) -> tuple[dict[QueueKey, int], dict[QueueKey, int]]:
    """Where a batch read starts and ends. The log cannot find the sequence of a time before its
    oldest message. A read from such a time starts at the table's oldest message, and compares the
    rows with the time.

    Args:
        whole: the result of `joined`.

    Raises InvalidArgument.
    """

    def found(key: QueueKey, time_ms: int, otherwise: int) -> int:
        if key not in log.queues:
            return otherwise
        at = find_time(key, time_ms)
        return at if at > log.queues[key].start else otherwise

    def first(key: QueueKey, time_ms: int) -> int:
        return found(key, time_ms, whole.queues[key].start)

    def last(key: QueueKey, time_ms: int) -> int:
        return found(
            key, time_ms, log.queues[key].start if key in log.queues else whole.queues[key].end
        )

    return reading.edges(asked, whole, first, last)


def split(
    start: Offsets,
    end: Offsets,
    log: Mapping[QueueKey, SourceQueue],
    held: Extents,
    *,
    skips_lost: bool,
) -> SplitRanges:
    """The ranges between two offsets. Raises MessagesExpired if messages are neither in the table
    nor in the log, unless `skips_lost`.
    """
    found = SplitRanges([], [])
    for key in sorted(end):
        first, last = start.get(key, 0), end[key]
        if first >= last:
            continue
        has = held.get(key, _NONE)
        lake = PlannedRange(key, max(first, has.first), min(last, has.end))
        if lake.first < lake.end:
            found.lake.append(lake)
            rest = [(first, lake.first), (lake.end, last)]
        else:
            rest = [(first, last)]
        oldest = log[key].start if key in log else last
        for begin, until in rest:
            if begin < min(until, oldest) and not skips_lost:
                raise _lost(key, begin, min(until, oldest), has)
            if max(begin, oldest) < until:
                found.log.append(PlannedRange(key, max(begin, oldest), until))
    return found


def _lost(key: QueueKey, first: int, end: int, has: LakeExtent) -> MessagesExpired:
    lake = f"which has {has.first} to {has.end - 1}" if has.end else "which has none of this queue"
    return MessagesExpired(
        f"messages {first} to {end - 1} of {key} were deleted by retention, and are not in "
        f"the lake either, {lake}; to continue with the "
        "remaining messages: option failOnDataLoss=false; to lose none: make the retention "
        "longer than the lag of `qmq lake follow`"
    )


_R = TypeVar("_R")
_TERMS: Final[Any] = (
    pyiceberg.expressions
)  # its constructors' types are those of the fields, not of the arguments
_EVERYTHING: Final[Bounds] = (0, 1 << 62)
_TRIES: Final = 20


@dataclass(frozen=True, slots=True)
class LakeSnapshot:
    """A subject's tables, and what they have of its queues."""

    table: LakeTable
    rejected: LakeTable | None
    held: Extents

    @property
    def storage(self) -> dict[str, str]:
        """PyIceberg's properties of the files' storage."""
        return dict(self.table.iceberg.io.properties)


def read_snapshots(
    address: LakeAddress, subjects: list[str], retry_ms: int
) -> dict[str, LakeSnapshot]:
    """Read the snapshots, by subject. Subjects without a table are left out.

    Raises:
        CatalogAway: the catalog did not answer for `retry_ms`.
        InvalidArgument: the catalog cannot be opened, or a table is none of `qmq lake`.
        LogDamaged: a table's positions cannot be read.
    """

    def work() -> dict[str, LakeSnapshot]:
        is_uri = "://" in address.catalog
        catalog = open_catalog(
            "lake" if is_uri else address.catalog,
            address.catalog if is_uri else "",
            address.warehouse,
        )
        try:
            found = ((each, _snapshot(catalog, address.namespace, each)) for each in subjects)
            return {subject: each for subject, each in found if each is not None}
        finally:
            catalog.close()

    return _answered(work, retry_ms)


def _answered(work: Callable[[], _R], retry_ms: int) -> _R:
    def once() -> _R:
        with answering_catalog():
            return work()

    return patiently(once, retry_ms)


def _snapshot(catalog: Catalog, namespace: str, subject: str) -> LakeSnapshot | None:
    try:
        table = read_table(catalog, namespace, subject)
    except UnknownSubject:
        return None
    rejected = _rejected(catalog, namespace, table)
    reached, complete_from = table.positions(), table.complete_from()
    if reached and complete_from is None:
        raise InvalidArgument(
            f"table {table.name} does not say from where on it is complete: let `qmq lake "
            "follow` write to it once"
        )
    return LakeSnapshot(table, rejected, extents(complete_from or {}, reached))


def _rejected(catalog: Catalog, namespace: str, table: LakeTable) -> LakeTable | None:
    """The table of rejected messages. It may lack the last round that `table` names, but has no
    later one.
    """
    for _ in range(_TRIES):
        try:
            found = read_table(catalog, namespace, table.subject, is_rejected=True)
        except UnknownSubject:
            return None
        told = table.iceberg.properties.get(typed.PENDING)
        table.iceberg.refresh()
        if table.iceberg.properties.get(typed.PENDING) == told:
            return found
    raise Overloaded(
        f"writers changed the tables of {table.subject!r} while they were read: read again"
    )


def read_files(
    snapshot: LakeSnapshot, selection: ReadSelection, times: TimeRange, retry_ms: int
) -> list[LakeFile]:
    """The files that may have wanted rows. Raises InvalidArgument, CatalogAway, MessagesExpired."""
    condition = row_filter(selection, times)
    tables = [snapshot.table, *([] if snapshot.rejected is None else [snapshot.rejected])]
    return _answered(
        lambda: [
            *(each for table in tables for each in _files(table, condition)),
            *_pending(snapshot),
        ],
        retry_ms,
    )


def row_filter(
    selection: ReadSelection, times: TimeRange
) -> pyiceberg.expressions.BooleanExpression:
    """The part of the selection by which manifests can exclude files."""
    found: list[Any] = []
    if times.start_ms is not None:
        found.append(_TERMS.GreaterThanOrEqual("append_time", _iso(times.start_ms)))
    if times.end_ms is not None:
        found.append(_TERMS.LessThan("append_time", _iso(times.end_ms)))
    if selection.keys:
        found.append(_TERMS.In("key", selection.keys))
    if selection.key_from is not None:
        found.append(_TERMS.GreaterThanOrEqual("key", selection.key_from))
    if selection.key_until is not None:
        found.append(_TERMS.LessThan("key", selection.key_until))
    condition: pyiceberg.expressions.BooleanExpression = reduce(
        _TERMS.And, found, _TERMS.AlwaysTrue()
    )
    return condition


def _iso(time_ms: int) -> str:
    return time_of(time_ms).isoformat(timespec="milliseconds")


def _files(
    table: LakeTable, condition: pyiceberg.expressions.BooleanExpression
) -> Iterator[LakeFile]:
    for task in table.files(condition):
        if task.delete_files:
            raise InvalidArgument(
                f"table {table.name} has files of deleted rows, which another tool wrote: "
                "let that tool rewrite its data files, or leave out option qmq.lake"
            )
        with reading_table(table.iceberg):
            found = _lake_file(table.iceberg, task.file)
        yield found


def _lake_file(table: Table, file: DataFile) -> LakeFile:
    def bounds(name: str) -> Bounds:
        column: Any = table.schema().find_field(name)
        low, high = (
            each.get(column.field_id) for each in (file.lower_bounds or {}, file.upper_bounds or {})
        )
        if low is None or high is None:
            return _EVERYTHING
        lowest: Any = from_bytes(column.field_type, low)
        highest: Any = from_bytes(column.field_type, high)
        return lowest, highest

    groups = max(len(file.split_offsets or ()), 1)
    return LakeFile(
        file.file_path, file.file_size_in_bytes, groups, bounds("partition"), bounds("sequence")
    )


def _pending(snapshot: LakeSnapshot) -> Iterator[LakeFile]:
    """The files of the last round's rejected messages, if their table does not have them yet."""
    told = snapshot.table.iceberg.properties.get(typed.PENDING)
    if told is None:
        return
    pending = typed.pending_of(told)
    done = (
        snapshot.rejected.iceberg.properties.get(typed.ROUND)
        if snapshot.rejected is not None
        else None
    )
    if pending.round != done:
        typed.require_pending(pending, filter(None, [snapshot.table, snapshot.rejected]))
        for each in pending.files:
            yield LakeFile(each, 0, 1, _EVERYTHING, _EVERYTHING)
