"""Turns the errors of damaged or hostile files of the lake into errors that name the file.
PyIceberg and PyArrow raise about any class for them: of their own, of the decoders below them, or
SystemError.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final
from urllib.parse import urlparse

from pyiceberg.exceptions import ValidationError
from pyiceberg.io import FileIO, InputStream
from pyiceberg.table import Table

from pyspark_qmq.lake.catalog import is_away
from qmq.errors import LogDamaged, MessagesExpired, QmqError
from qmq.limits import MIB

_CAUSE_CHARS: Final = 200


@contextmanager
def reading_file(storage: FileIO, location: str) -> Iterator[None]:
    """Reads a data file. Raises MessagesExpired if it is gone, LogDamaged; OSError if the storage
    does not give its bytes.
    """
    try:
        yield
    except FileNotFoundError as cause:
        raise MessagesExpired(
            f"{location} was deleted while it was to be read: the snapshot of the "
            "lake that this read began with has expired; load the DataFrame again, "
            "and keep snapshots longer than a read takes (qmq lake expire --keep)"
        ) from cause
    except Exception as cause:
        if _is_foreign(cause) or (
            isinstance(cause, OSError) and not _gives_bytes(storage, location)
        ):
            raise
        raise _damaged(location, "the lake's snapshot", cause) from cause


@contextmanager
def reading_table(table: Table) -> Iterator[None]:
    """Reads manifests, or commits to the table. Raises LogDamaged, which names the file; OSError if
    the storage does not give its bytes.
    """
    try:
        yield
    except Exception as cause:
        if _is_foreign(cause) or (
            isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError)
        ):
            raise
        raise _damaged(_unreadable(table), f"table {'.'.join(table.name()[-2:])}", cause) from cause


@contextmanager
def reading_metadata(name: str, location: str) -> Iterator[None]:
    """Loads a table. `location`: its metadata file, if the catalog tells. Raises LogDamaged;
    OSError of the storage.
    """
    try:
        yield
    except Exception as cause:
        if _is_foreign(cause) or (
            isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError)
        ):
            raise
        raise _damaged(
            location or f"the metadata file of table {name}", "the catalog", cause
        ) from cause


def _is_foreign(cause: Exception) -> bool:
    """Whether the error says nothing about a file's bytes."""
    is_answer = type(cause).__module__ == "pyiceberg.exceptions" and not isinstance(
        cause, ValidationError
    )
    return isinstance(cause, (QmqError, MemoryError)) or is_answer or is_away(cause)


def _damaged(location: str, owner: str, cause: Exception) -> LogDamaged:
    first = (str(cause).strip().splitlines() or [""])[0][:_CAUSE_CHARS]
    return LogDamaged(
        f"{location} cannot be read ({type(cause).__name__}: {first}), but {owner} names it: "
        "restore it from a copy"
    )


def _gives_bytes(storage: FileIO, location: str) -> bool:
    """PyArrow raises OSError for bytes that are no Parquet,
    and for a storage that does not answer.
    """
    try:
        with storage.new_input(location).open() as stream:
            while stream.read(MIB):
                pass
    except OSError:
        return False
    return True


def _unreadable(table: Table) -> str:
    """The first manifest list or manifest that cannot be read; the metadata file if all can."""
    for snapshot in table.metadata.snapshots:
        at = snapshot.manifest_list
        try:
            for manifest in snapshot.manifests(table.io):
                at = manifest.manifest_path
                manifest.fetch_manifest_entry(table.io)
        except Exception:
            return at
    return table.metadata_location


def require_size(stream: InputStream, location: str, size_bytes: int) -> None:
    """Raises LogDamaged if an open file has another size than the table's manifest says; 0 if that
    is not known.
    """
    found = stream.seek(0, os.SEEK_END)
    if size_bytes and found != size_bytes:
        raise LogDamaged(
            f"{location} cannot be read (it has {found:,} bytes, and its table says "
            f"{size_bytes:,}): restore it from a copy"
        )
    stream.seek(0)


def require_within(folders: Sequence[str], location: str, owner: str) -> None:
    """Raises LogDamaged if a file that `owner` names is in none of its folders: it is another
    table's, or none of the lake.
    """
    if not any(_path(location).startswith(f"{_path(each)}/") for each in folders):
        raise LogDamaged(
            f"{owner} names {location}, which is not in its folder {folders[0]}: restore the "
            "table's metadata from a copy"
        )


def _path(location: str) -> str:
    """Without the scheme, because tools write s3://, s3a:// and s3n:// for one place."""
    parsed = urlparse(location)
    return posixpath.normpath(f"{parsed.netloc}/{parsed.path}")
