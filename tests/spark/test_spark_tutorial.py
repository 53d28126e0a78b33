"""The tutorial's page on Spark runs, and prints what it shows. The other pages:
tests/docs/test_tutorial.py.
"""

from __future__ import annotations

from pathlib import Path

from pyspark.sql import SparkSession
from support import NodeProcess
from support.code_blocks import require_shown

PAGE = Path(__file__).resolve().parents[2] / "docs" / "tutorial" / "spark.md"


def test_what_the_page_on_spark_shows_is_what_its_code_prints(
    spark: SparkSession, node_process: NodeProcess, tmp_path: Path
) -> None:
    require_shown(PAGE, node_process.start(), tmp_path)
