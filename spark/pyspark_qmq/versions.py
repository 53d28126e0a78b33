"""The releases of PySpark that the data source runs with (docs/adr/0024), and the error for others.

Spark's interface for data sources changes between minor releases. The tests run with the newest
patch release of each that is supported.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, NoReturn

from qmq.errors import InvalidArgument

if TYPE_CHECKING:
    from pyspark.sql.datasource import DataSource

SUPPORTED: Final = ("4.2", "4.3")
INSTALL: Final = "pip install 'pyspark>=4.2,<4.4'"


def unsupported(version: str) -> str:
    """Why the data source does not run with a PySpark; empty if it does."""
    release = re.match(r"\d+\.\d+", version)
    if release is not None and release[0] in SUPPORTED:
        return ""
    return (
        f"QMQ's data source runs with PySpark {' and '.join(SUPPORTED)}, and this is PySpark "
        f"{version}: {INSTALL}"
    )


def refusing_source(reason: str) -> type[DataSource]:
    """A data source for Spark's discovery that raises InvalidArgument as soon as it is used."""
    from pyspark.sql.datasource import DataSource

    def refuse(*_: Any) -> NoReturn:
        raise InvalidArgument(reason)

    methods = ("schema", "reader", "streamReader", "writer", "streamWriter")
    named = {"name": classmethod(lambda _: "qmq"), **dict.fromkeys(methods, refuse)}
    return type("UnsupportedSpark", (DataSource,), named)
