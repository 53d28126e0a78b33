"""An archive that an older version wrote (tests/golden/archive: with a compaction, a sweep, and
files after them) becomes tables.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyiceberg.catalog import Catalog, load_catalog
from pyspark_qmq.lake.migration import migrate
from pyspark_qmq.lake.table import find_table
from typer.testing import CliRunner

from qmq.cli.app import app
from qmq.errors import InvalidArgument, LogDamaged

OLD = Path(__file__).resolve().parents[1] / "golden" / "archive"


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    found = load_catalog(
        "lake", uri=f"sqlite:///{tmp_path}/catalog.db", warehouse=f"file://{tmp_path}/warehouse"
    )
    yield found
    found.close()


def test_every_row_is_in_the_tables_once_with_the_positions_behind_them(
    catalog: Catalog, tmp_path: Path
) -> None:
    words = [
        "lake",
        "migrate",
        str(OLD),
        "--catalog-uri",
        f"sqlite:///{tmp_path}/catalog.db",
        "--warehouse",
        f"file://{tmp_path}/warehouse",
    ]
    for _ in range(2):  # who begins again finds that all is there
        assert CliRunner().invoke(app, words).exit_code == 0
        for subject in ("orders", "pay"):
            table = find_table(catalog, "qmq", subject)
            found = table.iceberg.scan().to_arrow().sort_by("sequence")
            assert found["sequence"].to_pylist() == list(range(25))
            assert found["body"].to_pylist() == [
                f"{subject} {number}".encode() for number in range(25)
            ]
            assert found["key"].to_pylist() == [f"k{number % 7}".encode() for number in range(25)]
            assert found["headers"].to_pylist() == [
                [("number", bytes([number]))] for number in range(25)
            ]
            assert found["tags"].to_pylist() == [["t", "é"]] * 25
            assert list(table.positions().values()) == [25]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(OLD, tmp_path / "old"))


def test_a_migration_that_dies_between_two_subjects_continues_with_the_second(
    catalog: Catalog, copy: Path
) -> None:
    assert next(migrate(copy, catalog, "qmq")).subject == "orders"
    assert [each.subject for each in migrate(copy, catalog, "qmq")] == ["pay"]


def test_a_subject_that_has_a_table_from_elsewhere_is_refused(
    catalog: Catalog, copy: Path, tmp_path: Path
) -> None:
    list(migrate(copy, catalog, "qmq"))
    with pytest.raises(InvalidArgument, match="has messages in qmq already"):
        list(migrate(copy.rename(tmp_path / "other"), catalog, "qmq"))


def test_a_damaged_archive_is_refused_and_leaves_no_row(catalog: Catalog, copy: Path) -> None:
    file = next((copy / "_qmq" / "files").rglob("subject=orders/**/*.parquet"))
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(LogDamaged, match="cannot be read"):
        list(migrate(copy, catalog, "damaged"))
    assert find_table(catalog, "damaged", "orders").iceberg.scan().to_arrow().num_rows == 0
    (copy / "_qmq" / "manifests" / "0000000003.json").unlink()
    with pytest.raises(LogDamaged, match="manifest 3 is missing"):
        list(migrate(copy, catalog, "qmq"))
    with pytest.raises(InvalidArgument, match="there is no archive"):
        list(migrate(copy / "nowhere", catalog, "qmq"))
