"""What is in tables that streams write, by their own records of which files count. No workload
itself.

A file that an attempt wrote and nobody committed is in the folder, and no row of the table.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from contextlib import closing, suppress
from pathlib import Path


def parquet_rows(folder: Path, seen: Collection[str]) -> Iterator[tuple[str, list[int]]]:
    """(file, its values) of what Spark's file sink committed, without files that were seen."""
    import pyarrow.parquet as pq

    for path in sorted(_committed(folder) - set(seen)):
        yield path, [int(each) for each in pq.read_table(path)["value"].to_pylist()]


def _committed(folder: Path) -> set[str]:
    """The sink's log has a file for each batch, and now and then one with all before it."""
    found: set[str] = set()
    for batch in (folder / "_spark_metadata").glob("[0-9]*"):
        with suppress(FileNotFoundError):  # a newer one has its lines
            lines = batch.read_text().splitlines()[1:]
            found.update(json.loads(line)["path"].removeprefix("file://") for line in lines)
    return found


def iceberg_rows(
    catalog: Path, warehouse: Path, subject: str, seen: Collection[str]
) -> Iterator[tuple[str, list[int]]]:
    """The same of a subject's table in a lake, as any reader of Iceberg sees it."""
    import pyarrow.parquet as pq
    from pyiceberg.catalog import load_catalog
    from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError
    from pyspark_qmq.lake.catalog import table_name
    from sqlalchemy.exc import OperationalError

    if not catalog.exists():
        return
    where = {"uri": f"sqlite:///{catalog}", "warehouse": f"file://{warehouse}"}
    # Until its writer has made it; and a writer may hold the catalog's lock.
    with suppress(NoSuchNamespaceError, NoSuchTableError, OperationalError):
        with closing(load_catalog("lake", **where, init_catalog_tables="false")) as found:
            files = found.load_table(("qmq", table_name(subject))).scan().plan_files()
            paths = {each.file.file_path.removeprefix("file://") for each in files}
        for path in sorted(paths - set(seen)):
            bodies = pq.read_table(path, columns=["body"])["body"].to_pylist()
            yield path, [int(each) for each in bodies]
