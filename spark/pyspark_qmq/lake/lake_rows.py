"""Rows of a table's files as record batches of the data source, in executors.

A row group is not read if its Parquet statistics show that it has no wanted partition, sequence, time or key. Tags are compared after
reading.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from pyiceberg.io import FileIO, load_file_io

from pyspark_qmq.arrow_schema import TYPES
from pyspark_qmq.coalescing import ROWS_WANTED, shaped
from pyspark_qmq.lake.conformed_columns import conformed_array
from pyspark_qmq.lake.lake_damage import reading_file, require_size
from pyspark_qmq.lake.lake_tasks import FilePart, LakeTask
from pyspark_qmq.source_model import ReadSelection

_FORMAT: Final = ds.ParquetFileFormat()
_SUBJECT: Final = "subject"


def read_lake_task(task: LakeTask, schema: pa.Schema, selection: ReadSelection) -> Iterator[pa.RecordBatch]:
    """The record batches of one task. Raises MessagesExpired if a file is gone, LogDamaged, OSError."""
    return shaped(_record_batches(task, schema, selection))


def _record_batches(task: LakeTask, schema: pa.Schema, selection: ReadSelection) -> Iterator[pa.RecordBatch]:
    names = [each for each in schema.names if each != _SUBJECT]
    columns = list(
        dict.fromkeys([*names, *(["tags"] if selection.tags_any or selection.tags_all else []), *([] if names else ["sequence"])])
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


def _rows(storage: FileIO, part: FilePart, columns: list[str], condition: ds.Expression) -> Iterator[pa.RecordBatch]:
    with storage.new_input(part.location).open() as stream:
        require_size(stream, part.location, part.size_bytes)
        whole = _FORMAT.make_fragment(stream)
        fragment = whole.subset(row_group_ids=list(range(part.first, min(part.end, whole.num_row_groups))))
        yield from fragment.to_batches(
            schema=whole.physical_schema, columns=columns, filter=condition, batch_size=ROWS_WANTED, use_threads=False, batch_readahead=1
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
    is_queue = (ds.field("partition") == queue.partition) & (ds.field("broker_group") == queue.broker_group)
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
        mask[owners[pc.is_in(names, pa.array(wanted, names.type)).to_numpy(zero_copy_only=False)]] = True
        return mask

    masks = [having([each]) for each in selection.tags_all] + ([having(selection.tags_any)] if selection.tags_any else [])
    return np.logical_and.reduce(masks)


def _column(rows: pa.RecordBatch, name: str, task: LakeTask) -> pa.Array:
    if name == _SUBJECT:
        return pa.repeat(pa.scalar(task.subject, TYPES[name]), rows.num_rows)
    if name == "route_version" and task.route_version is not None:
        return pa.repeat(pa.scalar(task.route_version, TYPES[name]), rows.num_rows)
    return conformed_array(rows.column(name), TYPES[name])
