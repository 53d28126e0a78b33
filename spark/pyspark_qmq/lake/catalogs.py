"""Catalogs of Iceberg tables, by PyIceberg."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final
from urllib.parse import urlparse

from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.exceptions import ServerError, ServiceUnavailableError, TooManyRequestsError
from requests.exceptions import ConnectionError as NoConnection
from requests.exceptions import Timeout

from qmq.errors import InvalidArgument, Unavailable

_REFUSALS: Final = (
    "unable to open database file",
    "authentication failed",
    "does not exist",
    "no pg_hba.conf entry",
    "not permitted to log in",
)
"""Texts of errors by which SQLite and PostgreSQL refuse a connection for good."""


class CatalogAway(Unavailable):
    """The catalog did not answer, or cannot work for now. A commit in progress may have been made: the table's positions tell."""


@contextmanager
def answering_catalog() -> Iterator[None]:
    """Convert the errors of a catalog that does not answer, which come from several libraries, to CatalogAway."""
    try:
        yield
    except Exception as cause:
        if not is_away(cause):
            raise
        raise _away(cause) from cause


def _away(cause: Exception) -> CatalogAway:
    return CatalogAway(f"{type(cause).__name__}: {str(cause).strip().partition(chr(10))[0]}")


def is_away(cause: Exception) -> bool:
    """Whether an error means that the catalog's server or database does not answer, rather than that a request is invalid."""
    if isinstance(cause, (ServerError, ServiceUnavailableError, TooManyRequestsError, NoConnection, Timeout)):
        return True
    try:
        from sqlalchemy import exc
    except ImportError:  # PyIceberg needs SQLAlchemy only for SQL catalogs
        return False
    is_lost = isinstance(cause, exc.DBAPIError) and cause.connection_invalidated
    return is_lost or isinstance(cause, (exc.OperationalError, exc.InterfaceError, exc.TimeoutError))


def _is_refused(cause: Exception) -> bool:
    """Whether a database says that its address, user or password is wrong. Drivers have no class for that."""
    return any(each in str(cause) for each in _REFUSALS)


def open_catalog(name: str, uri: str, warehouse: str, properties: Iterable[str] = ()) -> Catalog:
    """Open a catalog by its name in PyIceberg's configuration; `uri`, `warehouse` and `properties` (`key=value`) override it.

    Raises InvalidArgument if the catalog is not configured or its configuration is invalid; CatalogAway.
    """
    given = {"uri": uri, "warehouse": warehouse, **dict(map(_property, properties))}
    if uri and "type" not in given:
        given["type"] = "rest" if urlparse(uri).scheme in ("http", "https") else "sql"
    try:
        return load_catalog(name, **{key: value for key, value in given.items() if value})
    except Exception as cause:  # PyIceberg and its catalogs raise errors of every library below them
        if is_away(cause) and not _is_refused(cause):
            raise _away(cause) from cause
        raise InvalidArgument(
            f"catalog {name!r} cannot be opened ({type(cause).__name__}: {cause}): give --catalog-uri and --warehouse, or configure it in "
            "~/.pyiceberg.yaml"
        ) from cause


def _property(text: str) -> tuple[str, str]:
    key, is_given, value = text.partition("=")
    if not is_given or not key:
        raise InvalidArgument(f"a property is KEY=VALUE, not {text!r}")
    return key, value
