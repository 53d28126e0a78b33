"""Records: messages in an export, an import or a copy, and the files that hold them: JSON lines or
Parquet, or standard input and output.

A line of JSON has one object. `qmq browse --json` writes the same format, with the body in both
forms.

    {"subject": "orders", "broker_group": "g1", "partition": 0, "sequence": 7, "append_time_ms":
    1795...,
     "id": "0123...", "key": "N14228", "tags": [], "headers": {}, "create_time_ms": 1795..., "body":
     "{}"}

A body that is not UTF-8 is in "body_base64" instead. Keys and header values are text, or "hex:00ff"
where text could not be read back. A line to import needs only a body.

A file has the suffix `.partial` until it is complete, so that a partial export cannot be mistaken
for a complete one.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import os
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final

from qmq import limits
from qmq.cli.transfer.message_source import TransferRecord
from qmq.errors import InvalidArgument
from qmq.model import MessageId
from qmq.operations.text import key_text, parse_key
from qmq.text import INT64_MAX, parse_json

if TYPE_CHECKING:
    from qmq.cli.transfer.parquet_rows import ParquetWriter


SHOWN_CHARS: Final = 80


def json_line(
    record: TransferRecord, place: Mapping[str, Any], *, as_base64: bool = False
) -> bytes:
    """A record as a line with its newline. `as_base64`: encode every body, also text."""
    found = {
        **place,
        "id": None if record.id is None else str(record.id),
        "key": None if record.key is None else key_text(record.key),
        "tags": list(record.tags),
        "headers": {name: key_text(value) for name, value in record.headers.items()},
        "create_time_ms": record.create_time_ms,
        **_body(record.body, as_base64),
    }
    return json.dumps(found, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def _body(body: bytes, as_base64: bool) -> dict[str, str]:
    if not as_base64:
        try:
            return {"body": body.decode()}
        except UnicodeDecodeError:
            pass
    return {"body_base64": base64.b64encode(body).decode()}


def record_of_line(line: bytes, number: int) -> TransferRecord:
    """The inverse of `json_line`. A body that is not a string is kept as JSON text. Raises
    InvalidArgument with the line's number.
    """
    try:
        found = parse_json(line)
        if not isinstance(found, dict):
            raise TypeError(f"it is {type(found).__name__}")
        key, time_ms, headers = (
            found.get("key"),
            found.get("create_time_ms"),
            found.get("headers") or {},
        )
        is_time = time_ms is None or (type(time_ms) is int and 0 <= time_ms <= INT64_MAX)
        if not is_time or not isinstance(headers, dict):
            raise TypeError(
                "create_time_ms must be a number of milliseconds since 1970, and headers an object"
            )
        return TransferRecord(
            _bytes_of(found),
            None if key is None else parse_key(key),
            tuple(found.get("tags") or ()),
            {name: parse_key(value) for name, value in headers.items()},
            time_ms,
            None if found.get("id") is None else MessageId.parse(found["id"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError, InvalidArgument) as cause:
        shown = line[:SHOWN_CHARS].decode(errors="replace").strip()
        raise InvalidArgument(
            f'line {number:,} is not an object with a "body" or a "body_base64" ({cause}): {shown}'
        ) from None


def _bytes_of(found: dict[str, Any]) -> bytes:
    if found.get("body_base64") is not None:
        try:
            return base64.b64decode(found["body_base64"], validate=True)
        except binascii.Error as cause:
            raise ValueError(f"body_base64: {cause}") from None
    body = found["body"]
    return body.encode() if isinstance(body, str) else json.dumps(body).encode()


PARTIAL: Final = ".partial"
HEAD_BYTES: Final = 4096
PIECE_BYTES: Final = 1 << 20
LINE_BYTES_MAX: Final = 6 * limits.LONG_BODY_BYTES_MAX + 8 * limits.MIB
"""The longest line of a file to import: JSON writes a byte of the longest body with six characters
at most (\\u0000).
"""


class RecordForm(Enum):
    """The format of a file of records."""

    JSON_LINES = "jsonl"
    PARQUET = "parquet"

    @classmethod
    def of(cls, name: str, path: Path | None) -> RecordForm:
        """The format given by --format, otherwise by the file's name. Raises InvalidArgument."""
        if not name:
            return cls.PARQUET if path is not None and path.suffix == ".parquet" else cls.JSON_LINES
        try:
            form = cls(name)
        except ValueError:
            raise InvalidArgument(f"--format must be jsonl or parquet, not {name!r}") from None
        if form is cls.PARQUET and path is None:
            raise InvalidArgument(
                "Parquet needs a file, because it is not read or written sequentially: give --file"
            )
        return form


class LineWriter:
    """Writes lines of JSON."""

    def __init__(self, file: BinaryIO, *, as_base64: bool) -> None:
        self._file, self._as_base64 = file, as_base64

    def write(self, record: TransferRecord, place: Mapping[str, Any]) -> None:
        """Write a record, with the position where it was stored."""
        self._file.write(json_line(record, place, as_base64=self._as_base64))

    def close(self) -> None:
        self._file.flush()
        if self._file is not sys.stdout.buffer:
            self._file.close()


def writer_of(
    form: RecordForm, path: Path | None, *, as_base64: bool
) -> LineWriter | ParquetWriter:
    """A writer of the partial file, or of standard output. Raises InvalidArgument."""
    if path is None:
        return LineWriter(sys.stdout.buffer, as_base64=as_base64)
    try:
        if form is RecordForm.JSON_LINES:
            return LineWriter(partial_of(path).open("wb"), as_base64=as_base64)
        require_parquet()
        from qmq.cli.transfer.parquet_rows import ParquetWriter

        return ParquetWriter(partial_of(path))
    except OSError as cause:
        raise InvalidArgument(f"{path} cannot be written: {cause}") from None


def partial_of(path: Path) -> Path:
    """The path of an unfinished file."""
    return path.with_name(path.name + PARTIAL)


def finish(path: Path) -> None:
    """Flush the complete file and rename it to its final name."""
    beside = partial_of(path)
    fd = os.open(beside, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
    beside.replace(path)


def require_parquet() -> None:
    """Raise InvalidArgument if pyarrow is not installed."""
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        raise InvalidArgument("Parquet needs pyarrow: pip install 'qmq[parquet]'") from None


class FileSource:
    """The records of a file or of standard input after the first `skip`.
    A mark is a number of records.
    """

    def __init__(
        self,
        form: RecordForm,
        path: Path | None,
        skip: int = 0,
        line_bytes_max: int = LINE_BYTES_MAX,
    ) -> None:
        self._form, self._path, self._count, self._line_bytes_max = form, path, skip, line_bytes_max

    async def records(self) -> AsyncIterator[TransferRecord]:
        """Yields the records. Raises InvalidArgument or MessageTooLarge with
        the record's number.
        """
        for record in self._read(self._count):
            self._count += 1
            yield record.check(self._count)

    def mark(self) -> int:
        """The number of records read so far, including earlier attempts."""
        return self._count

    def _read(self, skip: int) -> Iterator[TransferRecord]:
        if self._form is RecordForm.PARQUET and self._path is not None:
            require_parquet()
            from qmq.cli.transfer.parquet_rows import parquet_records

            yield from parquet_records(self._path, skip)
        elif self._path is None:
            yield from _lines(sys.stdin.buffer, skip, self._line_bytes_max)
        else:
            with self._path.open("rb") as file:
                yield from _lines(file, skip, self._line_bytes_max)


def _lines(file: BinaryIO, skip: int, line_bytes_max: int) -> Iterator[TransferRecord]:
    """The records of the lines; empty lines are skipped. Raises InvalidArgument."""
    count = 0
    for number, line in bounded_lines(file, line_bytes_max):
        if line.strip():
            count += 1
            if count > skip:
                yield record_of_line(line, number)


def bounded_lines(
    file: BinaryIO, line_bytes_max: int = LINE_BYTES_MAX
) -> Iterator[tuple[int, bytes]]:
    """The lines with their numbers, from 1. Raises InvalidArgument for a line that is longer than
    any record, without reading it to its end: a file without newlines, or a pipe, has any length.
    """
    number = 0
    while line := file.readline(line_bytes_max + 1):
        number += 1
        if len(line) > line_bytes_max:
            raise InvalidArgument(
                f"line {number:,} has more than {line_bytes_max:,} bytes, as no message has: "
                "is this a file of lines?"
            )
        yield number, line


def describe(form: RecordForm, path: Path | None) -> dict[str, Any]:
    """The identity of a file, for the state file.
    Raises InvalidArgument if the file does not exist.
    """
    if path is None:
        return {"from": "standard input"}
    try:
        with path.open("rb") as file:
            head = hashlib.sha256(file.read(HEAD_BYTES)).hexdigest()
        return {
            "from": path.name,
            "format": form.value,
            "bytes": path.stat().st_size,
            "head": head[:16],
        }
    except OSError as cause:
        raise InvalidArgument(f"{path} cannot be read: {cause}") from None


def count_of(form: RecordForm, path: Path | None) -> int | None:
    """The number of records, or None if it cannot be known without consuming a pipe."""
    if path is None:
        return None
    if form is RecordForm.PARQUET:
        require_parquet()
        from qmq.cli.transfer.parquet_rows import row_count

        return row_count(path)
    with path.open("rb") as file:
        return _filled_lines(file)


def _filled_lines(file: BinaryIO) -> int:
    """The number of lines that are not empty, read in pieces: a line may have any length."""
    count, is_filled = 0, False
    while piece := file.readline(PIECE_BYTES):
        is_filled = is_filled or bool(piece.strip())
        if piece.endswith(b"\n"):
            count, is_filled = count + is_filled, False
    return count + is_filled
