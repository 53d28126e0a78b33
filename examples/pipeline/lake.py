"""The Iceberg table: every message once, in columns, by the day of its storing (docs/LAKE.md)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.catalog import load_catalog

from .departures import SUBJECT


def follow(folder: Path, servers: str) -> None:
    """Write the committed messages that the table does not have yet."""
    where(folder).mkdir(exist_ok=True)
    command = [sys.executable, "-m", "qmq.cli", "lake", "follow", "--once", "--typed"]
    command += ["--server", servers, "--subject", SUBJECT]
    command += ["--catalog-uri", _catalog(folder), "--warehouse", where(folder).as_uri()]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)  # noqa: S603


def numbers(folder: Path) -> pa.Array:
    """The numbers of the flights in the table."""
    catalog = load_catalog("lake", uri=_catalog(folder), warehouse=where(folder).as_uri())
    try:
        rows = catalog.load_table(f"qmq.{SUBJECT.replace('.', '_')}").scan().to_arrow()
    finally:
        catalog.close()
    return pc.struct_field(rows["value"].combine_chunks(), "number")


def where(folder: Path) -> Path:
    """The folder of the catalog and of the table's files."""
    return folder / "lake"


def _catalog(folder: Path) -> str:
    return f"sqlite:///{where(folder)}/catalog.db"
