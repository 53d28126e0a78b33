"""Rows of a table's files as record batches of the data source, in executors.

A row group is not read if its Parquet statistics show that it has no wanted partition, sequence,
time or key. Tags are compared after reading.

Rows of older files get the table's current columns: fields that were added later are null, and
types may be wider. PyIceberg's own reader is not used where rows are written again, because it
reads a null list of structs as an empty list (iceberg-python issue 3833).

Tasks say which files are read, which part of them, and which rows:

* A task has either one partition of an ordered subject, or queues of a subject without order: a
  task never mixes partitions.
* A file whose bounds say that it has no wanted row is not read.
* Small files are read together, and large ones in parts of whole row groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from math import ceil
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from pyiceberg.io import FileIO, load_file_io

from pyspark_qmq.lake.lake_damage import reading_file, require_size
from qmq.columns.joined_batches import ROWS_WANTED, shaped
from qmq.columns.model import ReadSelection, Topology
from qmq.columns.planning import Plan, PlannedRange
from qmq.columns.projector import TYPES


def conformed(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    """The rows with the schema's columns."""
    if rows.schema.equals(schema):
        return rows
    columns = []
    for each in schema:
        if each.name not in rows.column_names:
            columns.append(pa.nulls(rows.num_rows, each.type))
        else:
            chunks = [conformed_array(chunk, each.type) for chunk in rows.column(each.name).chunks]
            columns.append(pa.chunked_array(chunks, each.type))
    return pa.Table.from_arrays(columns, schema=schema)


def conformed_array(held: pa.Array, kind: pa.DataType) -> pa.Array:
    """The same values as another type: wider, with more fields, or with other names for the items
    of lists and maps.
    """
    if held.type.equals(kind):
        return held
    if pa.types.is_struct(kind):
        parts = dict(zip((each.name for each in held.type), held.flatten(), strict=True))
        arrays = [
            conformed_array(parts[each.name], each.type)
            if each.name in parts
            else pa.nulls(len(held), each.type)
            for each in kind
        ]
        return pa.StructArray.from_arrays(arrays, fields=list(kind), mask=held.is_null())
    if pa.types.is_list(kind):
        return pa.ListArray.from_arrays(
            held.offsets,
            conformed_array(held.values, kind.value_type),
            type=kind,
            mask=held.is_null(),
        )
    if pa.types.is_map(kind):
        items = conformed_array(held.items, kind.item_type)
        return pa.MapArray.from_arrays(
            held.offsets, held.keys.cast(kind.key_type), items, type=kind, mask=held.is_null()
        )
    return held.cast(kind)


Bounds = tuple[int, int]
"""The lowest and the highest value."""
_TO_THE_LAST: Final = 1 << 62


@dataclass(frozen=True, slots=True)
class LakeFile:
    """A data file, as the table's manifest describes it."""

    location: str
    size_bytes: int
    row_groups: int
    partitions: Bounds
    sequences: Bounds
    """Over all queues of the file."""


class TimeRange(NamedTuple):
    """Rows stored from `start_ms` on and before `end_ms`."""

    start_ms: int | None = None
    end_ms: int | None = None


class FilePart(NamedTuple):
    """Row groups `first` to `end` - 1 of a file. In the last part, `end` is larger than the number
    of row groups.
    """

    location: str
    first: int
    end: int
    size_bytes: int = 0
    """The whole file's, as the table's manifest says; 0 if that is not known."""


@dataclass(frozen=True, slots=True)
class LakeTask:
    """What one Spark partition reads. `storage`: PyIceberg's properties of the table's storage."""

    subject: str
    parts: tuple[FilePart, ...]
    wanted: tuple[PlannedRange, ...]
    route_version: int | None
    times: TimeRange
    storage: Mapping[str, str]


def lake_tasks(
    subject: str,
    files: Iterable[LakeFile],
    wanted: Iterable[PlannedRange],
    topology: Topology,
    plan: Plan,
    times: TimeRange,
    storage: Mapping[str, str],
) -> list[LakeTask]:
    """The tasks for these ranges of a subject. Files are read in the order of their sequences."""
    chosen = sorted(files, key=lambda each: (each.sequences, each.location))
    bytes_max = max(
        min(plan.piece_bytes_max, sum(each.size_bytes for each in chosen) // plan.pieces_min + 1), 1
    )
    routes = topology.routes.get(subject)
    found: list[LakeTask] = []
    for lot in _lots(wanted):
        number = lot[0].queue.partition
        partition = routes.partitions.get(number) if routes is not None else None
        version = partition.version if partition is not None else None
        packed = _packed([each for each in chosen if _may_have(each, lot)], number > 0, bytes_max)
        found += [
            LakeTask(subject, tuple(parts), tuple(lot), version, times, storage) for parts in packed
        ]
    return found


def _lots(wanted: Iterable[PlannedRange]) -> list[list[PlannedRange]]:
    """Ranges that one task may read together."""
    found: dict[object, list[PlannedRange]] = {}
    for each in wanted:
        found.setdefault(each.queue if each.queue.partition else 0, []).append(each)
    return list(found.values())


def _may_have(file: LakeFile, lot: Iterable[PlannedRange]) -> bool:
    (lowest, highest), (first, last) = file.partitions, file.sequences
    return any(
        lowest <= each.queue.partition <= highest and first < each.end and each.first <= last
        for each in lot
    )


def _packed(files: Iterable[LakeFile], is_ordered: bool, bytes_max: int) -> list[list[FilePart]]:
    packed: list[list[FilePart]] = []
    room = 0.0
    for file in files:
        share = (
            file.partitions[1] - file.partitions[0] + 1 if is_ordered else 1
        )  # the other partitions' rows are mostly passed over
        for part, size in _parts(file, bytes_max * share):
            if not packed or size / share > room:
                packed.append([])
                room = bytes_max
            packed[-1].append(part)
            room -= size / share
    return packed


def _parts(file: LakeFile, bytes_max: float) -> Sequence[tuple[FilePart, float]]:
    count = max(min(ceil(file.size_bytes / bytes_max), file.row_groups), 1)
    marks = [*(file.row_groups * each // count for each in range(count)), _TO_THE_LAST]
    return [
        (FilePart(file.location, a, b, file.size_bytes), file.size_bytes / count)
        for a, b in pairwise(marks)
    ]


_FORMAT: Final = ds.ParquetFileFormat()
_SUBJECT: Final = "subject"


def read_lake_task(
    task: LakeTask, schema: pa.Schema, selection: ReadSelection
) -> Iterator[pa.RecordBatch]:
    """The record batches of one task. Raises MessagesExpired if a file is gone,
    LogDamaged, OSError.
    """
    return shaped(_record_batches(task, schema, selection))


def _record_batches(
    task: LakeTask, schema: pa.Schema, selection: ReadSelection
) -> Iterator[pa.RecordBatch]:
    names = [each for each in schema.names if each != _SUBJECT]
    columns = list(
        dict.fromkeys(
            [
                *names,
                *(["tags"] if selection.tags_any or selection.tags_all else []),
                *([] if names else ["sequence"]),
            ]
        )
    )
    condition = _condition(task, selection)
    for part in task.parts:
        storage = load_file_io(dict(task.storage), part.location)
        with reading_file(storage, part.location):
            for rows in _rows(storage, part, columns, condition):
                mask = _tagged(rows, selection)
                found = rows if mask is None else rows.filter(pa.array(mask))
                if found.num_rows:
                    arrays = [_column(found, name, task) for name in schema.names]
                    yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def _rows(
    storage: FileIO, part: FilePart, columns: list[str], condition: ds.Expression
) -> Iterator[pa.RecordBatch]:
    with storage.new_input(part.location).open() as stream:
        require_size(stream, part.location, part.size_bytes)
        whole = _FORMAT.make_fragment(stream)
        fragment = whole.subset(
            row_group_ids=list(range(part.first, min(part.end, whole.num_row_groups)))
        )
        yield from fragment.to_batches(
            schema=whole.physical_schema,
            columns=columns,
            filter=condition,
            batch_size=ROWS_WANTED,
            use_threads=False,
            batch_readahead=1,
        )


def _condition(task: LakeTask, selection: ReadSelection) -> ds.Expression:
    key, time, none = ds.field("key"), ds.field("append_time"), pa.binary()
    conditions = [reduce(lambda a, b: a | b, [_of_queue(*each) for each in task.wanted])]
    if task.times.start_ms is not None:
        conditions.append(time >= _time(task.times.start_ms))
    if task.times.end_ms is not None:
        conditions.append(time < _time(task.times.end_ms))
    if selection.keys:
        conditions.append(key.isin(pa.array(selection.keys, none)))
    if selection.has_keys:
        conditions.append(key.is_valid())
    if selection.key_from is not None:
        conditions.append(key >= pa.scalar(selection.key_from, none))
    if selection.key_until is not None:
        conditions.append(key < pa.scalar(selection.key_until, none))
    return reduce(lambda a, b: a & b, conditions)


def _of_queue(queue: Any, first: int, end: int) -> ds.Expression:
    sequence = ds.field("sequence")
    is_queue = (ds.field("partition") == queue.partition) & (
        ds.field("broker_group") == queue.broker_group
    )
    return is_queue & (sequence >= first) & (sequence < end)


def _time(time_ms: int) -> pa.Scalar:
    return pa.scalar(time_ms * 1000, TYPES["append_time"])


def _tagged(rows: pa.RecordBatch, selection: ReadSelection) -> Any:
    """A mask of the rows with the wanted tags; None if all are wanted."""
    if not selection.tags_any and not selection.tags_all:
        return None
    tags = rows.column("tags")
    owners, names = pc.list_parent_indices(tags).to_numpy(), pc.list_flatten(tags)

    def having(wanted: Sequence[str]) -> Any:
        mask = np.zeros(rows.num_rows, np.bool_)
        mask[
            owners[pc.is_in(names, pa.array(wanted, names.type)).to_numpy(zero_copy_only=False)]
        ] = True
        return mask

    masks = [having([each]) for each in selection.tags_all] + (
        [having(selection.tags_any)] if selection.tags_any else []
    )
    return np.logical_and.reduce(masks)


def _column(rows: pa.RecordBatch, name: str, task: LakeTask) -> pa.Array:
    if name == _SUBJECT:
        return pa.repeat(pa.scalar(task.subject, TYPES[name]), rows.num_rows)
    if name == "route_version" and task.route_version is not None:
        return pa.repeat(pa.scalar(task.route_version, TYPES[name]), rows.num_rows)
    return conformed_array(rows.column(name), TYPES[name])
