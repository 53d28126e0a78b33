"""The archive job: Spark's executors write a subject's Iceberg table, and the driver commits it
with the positions.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import publishing
import pyarrow.parquet as pq
import pytest
from pyiceberg.catalog import Catalog, load_catalog
from pyspark.sql import DataFrame, SparkSession
from pyspark_qmq.jobs.archive import ArchiveJob, read_archive
from pyspark_qmq.jobs.job import main
from pyspark_qmq.source_schema import default_schema
from support import NodeProcess


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    found = load_catalog(
        "lake", uri=f"sqlite:///{tmp_path}/catalog.db", warehouse=f"file://{tmp_path}/warehouse"
    )
    yield found
    found.close()


def archived(spark: SparkSession, node: Path, out: Path, *more: str) -> int:
    catalog = f"--catalog-uri sqlite:///{out}/catalog.db --warehouse file://{out}/warehouse".split()
    return main(
        ArchiveJob(), ["--path", str(node), "--pattern", "orders|pay", *catalog, *more], spark
    )


def everything(rows: DataFrame) -> list[str]:
    """All columns of all rows, as text, sorted: two sets of rows are the same if these are."""
    return sorted(
        str(each.asDict(recursive=True))
        for each in rows.select(*default_schema(with_headers=True).names).collect()
    )


def send(node: NodeProcess, count: int) -> None:
    address = node.start()
    for subject in ("orders", "pay"):
        numbers = range(count)
        publishing.send(
            address,
            subject,
            [f"{subject} {each}" for each in numbers],
            [f"k{each % 7}" for each in numbers],
            tags=[["t", "é"] for _ in numbers],
            headers=[{"number": bytes([each % 256])} for each in numbers],
        )
    assert node.stop() == 0


def test_the_job_takes_what_is_new_once_and_verify_finds_it_the_same_as_the_log(
    spark: SparkSession,
    node_process: NodeProcess,
    catalog: Catalog,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = node_process.data
    send(node_process, 120)
    assert archived(spark, folder, tmp_path, "-o", "maxOffsetsPerTrigger=100") == 0
    assert archived(spark, folder, tmp_path, "--json") == 0
    facts = json.loads(capsys.readouterr().out.splitlines()[-1])["facts"]
    assert (facts["messages"], facts["archived now"], facts["waiting in the log"]) == (240, 0, 0)

    send(node_process, 30)
    assert archived(spark, folder, tmp_path, "--json") == 0
    facts = json.loads(capsys.readouterr().out.splitlines()[-1])["facts"]
    assert (facts["messages"], facts["archived now"], facts["commits now"]) == (300, 60, 2)
    assert archived(spark, folder, tmp_path, "--verify") == 0

    log = (
        spark.read.format("qmq")
        .options(**{"qmq.path": str(folder), "subscribe": "orders", "includeHeaders": "true"})
        .load()
    )
    assert everything(read_archive(spark, catalog, "orders")) == everything(log)

    drop_a_row(next((tmp_path / "warehouse" / "qmq" / "orders").rglob("*.parquet")))
    capsys.readouterr()
    assert archived(spark, folder, tmp_path, "--verify") == 1
    assert "only in the log" in capsys.readouterr().out


def drop_a_row(path: Path) -> None:
    """Rewrite a file of the table, as another tool does."""
    rows = pq.read_table(path, partitioning=None)
    path.with_name(f".{path.name}.crc").unlink(missing_ok=True)
    pq.write_table(rows.slice(1), path)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--path", "/nowhere", "--subject", "orders"], "give --catalog-uri and --warehouse"),
        (["--path", "/nowhere", "--subject", "orders", "LAKE", "--until", "2026-01-01"], "--until"),
        (["--subject", "orders", "LAKE"], "give the log"),
        (["--path", "/nowhere", "LAKE"], "give the subjects"),
        (["--path", "/nowhere", "--subject", "orders", "LAKE"], "[E"),
        (
            ["--path", "/nowhere", "--subject", "orders", "LAKE", "-o", "tags=paid"],
            "leave out tags",
        ),
    ],
)
def test_errors_are_reported_in_one_line(
    spark: SparkSession,
    tmp_path: Path,
    argv: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    lake = f"--catalog-uri=sqlite:///{tmp_path}/catalog.db"
    assert main(ArchiveJob(), [lake if each == "LAKE" else each for each in argv], spark) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("error: [E")
    assert words in printed
    assert printed.count("\n") == 1


def test_verify_of_a_subject_without_a_table_says_so(
    spark: SparkSession,
    node_process: NodeProcess,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    send(node_process, 1)
    assert archived(spark, node_process.data, tmp_path, "--verify") == 2
    assert "has no table qmq.orders" in capsys.readouterr().err
