"""The tutorial's page on Spark runs, and prints what it shows. The other pages:
tests/docs/test_tutorial.py.
"""

from __future__ import annotations

from pathlib import Path

from pyspark.sql import SparkSession
from support import NodeProcess
from support.code_blocks import blocks_of, is_shown, printed_by

PAGE = Path(__file__).resolve().parents[2] / "docs" / "tutorial" / "spark.md"


def test_what_the_page_on_spark_shows_is_what_its_code_prints(
    spark: SparkSession, node_process: NodeProcess, tmp_path: Path
) -> None:
    address = node_process.start()
    for block in blocks_of(PAGE):
        printed = printed_by(block, address, tmp_path)
        assert is_shown(block.output, printed), (
            f"{block.name} shows\n{block.output}\nand prints\n{printed}"
        )
