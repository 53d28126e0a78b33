"""Tests of PySpark's streaming, with a subject of QMQ in the place of a folder of text files."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Final

import pyspark

from judges.outcomes import Outcomes
from judges.suite import FOLDER, Stage, Suite

TESTS: Final = "python/pyspark/sql/tests/streaming"
INPUT: Final = "python/test_support/sql/streaming"
FILES: Final = ("test_streaming_foreach", "test_streaming_foreach_batch")


def run(stage: Stage) -> Outcomes:
    """PySpark is the installed one."""
    shutil.copy(FOLDER / "cases" / "pyspark_conftest.py", stage.source / "conftest.py")
    return stage.pytest(
        *("--import-mode", "importlib", *(f"{TESTS}/{each}.py" for each in FILES)),
        SPARK_HOME=str(Path(pyspark.__file__).parent),
        PYSPARK_PYTHON=sys.executable,
    )


SUITE: Final = Suite(
    name="pyspark-streaming",
    project="apache/spark",
    run=run,
    about=", ".join(f"`{each}`" for each in FILES),
    changes=(
        'a stream of `format("text")` reads a subject that has the lines of the files '
        "(`tests/judges/cases/pyspark_conftest.py`)"
    ),
    tag=f"v{pyspark.__version__}",
    parts=(TESTS, INPUT),
    programs=("java",),
)
