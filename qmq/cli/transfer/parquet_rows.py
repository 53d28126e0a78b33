"""Records as rows of a Parquet file, by pyarrow (`pip install 'qmq[parquet]'`). Bytes stay bytes;
times are timestamps in UTC.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from qmq.cli.transfer.message_source import TransferRecord
from qmq.errors import InvalidArgument
from qmq.model import MessageId

ROWS_AT_ONCE: Final = 5_000
AT_ONCE_BYTES: Final = 64 << 20
"""At most so many bytes are read at once, or one row."""
ROW_GROUP_BYTES: Final = 64 << 20
_TIME: Final = pa.timestamp("ms", "UTC")
SCHEMA: Final = pa.schema(
    [
        ("subject", pa.string()),
        ("broker_group", pa.string()),
        ("partition", pa.int32()),
        ("sequence", pa.int64()),
        ("append_time", _TIME),
        ("id", pa.string()),
        ("key", pa.binary()),
        ("tags", pa.list_(pa.string())),
        ("headers", pa.map_(pa.string(), pa.binary())),
        ("create_time", _TIME),
        ("body", pa.binary()),
    ]
)


class ParquetWriter:
    """Writes records to a file, one row group at a time."""

    def __init__(self, path: Path) -> None:
        self._file = pq.ParquetWriter(path, SCHEMA, compression="zstd")
        self._rows: list[dict[str, Any]] = []
        self._bytes = 0

    def write(self, record: TransferRecord, place: Mapping[str, Any]) -> None:
        """Add a record."""
        self._rows.append(
            {
                **{name: value for name, value in place.items() if name != "append_time_ms"},
                "append_time": place.get("append_time_ms"),
                "id": None if record.id is None else str(record.id),
                "key": record.key,
                "tags": list(record.tags),
                "headers": list(record.headers.items()),
                "create_time": record.create_time_ms,
                "body": record.body,
            }
        )
        self._bytes += record.size
        if self._bytes >= ROW_GROUP_BYTES:
            self._put()

    def _put(self) -> None:
        if self._rows:
            self._file.write_table(pa.Table.from_pylist(self._rows, SCHEMA))
        self._rows, self._bytes = [], 0

    def close(self) -> None:
        """Write the remaining rows and the file's footer."""
        self._put()
        self._file.close()


def parquet_records(path: Path, skip: int) -> Iterator[TransferRecord]:
    """The records of a file after the first `skip`. Only the column `body` is required.
    Raises InvalidArgument.
    """
    with _opened(path) as file:
        known = [
            name
            for name in ("id", "key", "tags", "headers", "create_time", "body")
            if name in file.schema_arrow.names
        ]
        if "body" not in known:
            raise InvalidArgument(
                f"{path} has no column 'body': its columns are {', '.join(file.schema_arrow.names)}"
            )
        number = 0
        for batch in file.iter_batches(_rows_at_once(file.metadata), columns=known):
            if number + batch.num_rows <= skip:
                number += batch.num_rows
                continue
            for row in _rows(batch):
                number += 1
                if number > skip:
                    yield _record(row, number)


def row_count(path: Path) -> int:
    """The number of rows of a file. Raises InvalidArgument."""
    with _opened(path) as file:
        return int(file.metadata.num_rows)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """The open file. What pyarrow raises inside becomes InvalidArgument: anybody may have written
    the file.
    """
    try:
        # The dictionary of a column is kept as one: a few bytes may stand for thousands of large
        # values.
        footer = pq.read_metadata(path)
        columns = footer.schema.to_arrow_schema()
        kept = [
            each.name
            for each in columns
            if each.name in ("body", "key") and not pa.types.is_nested(each.type)
        ]
        with pq.ParquetFile(path, metadata=footer, read_dictionary=kept) as file:
            yield file
    except (pa.ArrowException, OSError, OverflowError) as cause:
        raise InvalidArgument(f"{path} cannot be read as Parquet: {cause}") from None


def _rows_at_once(told: Any) -> int:
    """So many rows of a file that they take AT_ONCE_BYTES, as its footer tells."""
    groups = [told.row_group(number) for number in range(told.num_row_groups)]
    largest = max((each.total_byte_size // max(each.num_rows, 1) for each in groups), default=0)
    return max(min(AT_ONCE_BYTES // max(largest, 1), ROWS_AT_ONCE), 1)


def _rows(batch: Any) -> Iterator[dict[str, Any]]:
    columns = {name: batch.column(name) for name in batch.schema.names}
    if "create_time" in columns:
        columns["create_time"] = columns["create_time"].cast(_TIME).cast(pa.int64())
    for number in range(batch.num_rows):
        yield {name: column[number].as_py() for name, column in columns.items()}


def _record(row: dict[str, Any], number: int) -> TransferRecord:
    try:
        return TransferRecord(
            _bytes(row["body"]) or b"",
            _bytes(row.get("key")),
            tuple(row.get("tags") or ()),
            {name: _bytes(value) or b"" for name, value in row.get("headers") or ()},
            row.get("create_time"),
            None if row.get("id") is None else MessageId.parse(row["id"]),
        )
    except (TypeError, ValueError, AttributeError, InvalidArgument) as cause:
        raise InvalidArgument(f"row {number:,} is not a message: {cause}") from None


def _bytes(value: object) -> bytes | None:
    if value is None or isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode()
    raise TypeError(f"{value!r:.100} is neither bytes nor text")
