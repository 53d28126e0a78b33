"""Catalogs of Iceberg tables, by PyIceberg."""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import urlparse

from pyiceberg.catalog import Catalog, load_catalog

from qmq.errors import InvalidArgument


def open_catalog(name: str, uri: str, warehouse: str, properties: Iterable[str] = ()) -> Catalog:
    """A catalog by its name in PyIceberg's configuration; `uri`, `warehouse` and `properties` (`key=value`) override it.

    Raises InvalidArgument if nothing says what and where the catalog is, or if it cannot be opened.
    """
    given = {"uri": uri, "warehouse": warehouse, **dict(map(_property, properties))}
    if uri and "type" not in given:
        given["type"] = "rest" if urlparse(uri).scheme in ("http", "https") else "sql"
    try:
        return load_catalog(name, **{key: value for key, value in given.items() if value})
    except Exception as cause:  # PyIceberg and its catalogs raise errors of every library below them
        raise InvalidArgument(
            f"catalog {name!r} cannot be opened ({type(cause).__name__}: {cause}): give --catalog-uri and --warehouse, or configure it in "
            "~/.pyiceberg.yaml"
        ) from cause


def _property(text: str) -> tuple[str, str]:
    key, is_given, value = text.partition("=")
    if not is_given or not key:
        raise InvalidArgument(f"a property is KEY=VALUE, not {text!r}")
    return key, value
