"""Catalogs of Iceberg tables, by PyIceberg; the name and the columns of a subject's table; and the
folder of a table's data files, a value that can be pickled for other processes, unlike PyIceberg's
own storage.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlparse

import pyarrow as pa
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.exceptions import ServerError, ServiceUnavailableError, TooManyRequestsError
from pyiceberg.io import OutputStream, load_file_io
from requests.exceptions import ConnectionError as NoConnection
from requests.exceptions import Timeout

from pyspark_qmq.lake.typed_columns import arrow_type
from qmq.columns.projector import TYPES
from qmq.errors import InvalidArgument, Unavailable
from qmq.schemas.field_types import Struct

_REFUSALS: Final = (
    "unable to open database file",
    "authentication failed",
    "does not exist",
    "no pg_hba.conf entry",
    "not permitted to log in",
)
"""Texts of errors by which SQLite and PostgreSQL refuse a connection for good."""


class CatalogAway(Unavailable):
    """The catalog did not answer, or cannot work for now. A commit in progress may have been made:
    the table's positions tell.
    """


@contextmanager
def answering_catalog() -> Iterator[None]:
    """Convert the errors of a catalog that does not answer,
    which come from several libraries, to CatalogAway.
    """
    try:
        yield
    except Exception as cause:
        if not is_away(cause):
            raise
        raise _away(cause) from cause


def _away(cause: Exception) -> CatalogAway:
    return CatalogAway(f"{type(cause).__name__}: {str(cause).strip().partition(chr(10))[0]}")


def is_away(cause: Exception) -> bool:
    """Whether an error means that the catalog's server or database does not answer, rather than
    that a request is invalid.
    """
    if isinstance(
        cause, (ServerError, ServiceUnavailableError, TooManyRequestsError, NoConnection, Timeout)
    ):
        return True
    try:
        from sqlalchemy import exc
    except ImportError:  # PyIceberg needs SQLAlchemy only for SQL catalogs
        return False
    is_lost = isinstance(cause, exc.DBAPIError) and cause.connection_invalidated
    return is_lost or isinstance(
        cause, (exc.OperationalError, exc.InterfaceError, exc.TimeoutError)
    )


def _is_refused(cause: Exception) -> bool:
    """Whether a database says that its address, user or password is wrong. Drivers have no class
    for that.
    """
    return any(each in str(cause) for each in _REFUSALS)


def open_catalog(name: str, uri: str, warehouse: str, properties: Iterable[str] = ()) -> Catalog:
    """Open a catalog by its name in PyIceberg's configuration; `uri`, `warehouse` and `properties`
    (`key=value`) override it.

    Raises InvalidArgument if the catalog is not configured or its configuration is invalid;
    CatalogAway.
    """
    given = {"uri": uri, "warehouse": warehouse, **dict(map(_property, properties))}
    if uri and "type" not in given:
        given["type"] = "rest" if urlparse(uri).scheme in ("http", "https") else "sql"
    try:
        return load_catalog(name, **{key: value for key, value in given.items() if value})
    except (
        Exception
    ) as cause:  # PyIceberg and its catalogs raise errors of every library below them
        if is_away(cause) and not _is_refused(cause):
            raise _away(cause) from cause
        raise InvalidArgument(
            f"catalog {name!r} cannot be opened ({type(cause).__name__}: {cause}): "
            "give --catalog-uri and --warehouse, or configure it in ~/.pyiceberg.yaml"
        ) from cause


def _property(text: str) -> tuple[str, str]:
    key, is_given, value = text.partition("=")
    if not is_given or not key:
        raise InvalidArgument(f"a property is KEY=VALUE, not {text!r}")
    return key, value


COLUMNS: Final = (
    "partition",
    "broker_group",
    "sequence",
    "route_version",
    "logical_partition",
    "key",
    "body",
    "tags",
    "headers",
    "message_id",
    "create_time",
    "append_time",
    "epoch",
)
"""The table's columns, in order. There is no column `subject`, because a table has one subject."""

_NULLABLE: Final = frozenset({"route_version", "logical_partition", "key"})

SCHEMA: Final = pa.schema(
    [pa.field(name, TYPES[name], nullable=name in _NULLABLE) for name in COLUMNS]
)
"""The exact schema of the files."""

VALUE: Final = "value"
"""The column of a typed table that has the decoded body."""

REJECTED_SCHEMA: Final = pa.schema(
    [
        *SCHEMA,
        pa.field("reason", pa.string(), nullable=False),
        pa.field("schema_version", pa.int32(), nullable=False),
    ]
)
"""The schema of the files with messages that do not fit their subject's schema."""


def typed_schema(struct: Struct) -> pa.Schema:
    """The schema of a typed table's files; that of an untyped table if there are no fields."""
    return pa.schema([*SCHEMA, pa.field(VALUE, arrow_type(struct))]) if struct.fields else SCHEMA


WITHOUT_BOUNDS: Final = ("body", "tags.element", "headers.key", "headers.value", "message_id")
"""Queries do not search by ranges of these columns, and their minima and maxima would take time and
space in each file.
"""

ORDER: Final = ("logical_partition", "key", "route_version", "partition", "sequence")
"""How a compacted file is sorted: a key's messages lie together, in the order of the log."""


def table_name(subject: str, *, is_rejected: bool = False) -> str:
    """The table of a subject, or of its rejected messages. Engines take a dot for a level of the
    name, so it becomes an underscore.
    """
    return subject.replace(".", "_") + ("__rejected" if is_rejected else "")


@dataclass(frozen=True, slots=True)
class DataFolder:
    """The folder of a table's data files.

    `properties` are PyIceberg's properties of the storage. They may contain its access keys, so
    that executors can write.
    """

    root: str
    properties: Mapping[str, str]

    def location(self, name: str) -> str:
        """The address of a data file of this name."""
        return f"{self.root}/{name}"

    def create(self, location: str) -> OutputStream:
        """Create a file and open it for writing. Raises FileExistsError."""
        return load_file_io(dict(self.properties), location).new_output(location).create()
