"""The settings of QMQ's Spark sessions, and those that they do not change."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pyspark
import pytest
from pyspark import SparkContext
from pyspark.sql import SparkSession
from pyspark_qmq import session
from pyspark_qmq.java import cache_folder
from pyspark_qmq.session import home_without_archive
from pyspark_qmq.source_schema import COLUMNS

from qmq.errors import InvalidArgument

PACKAGE = Path(pyspark.__file__).resolve().parent


@pytest.mark.parametrize(
    ("given", "environment", "local"),
    [
        ({}, {}, True),
        ({"spark.master": "local"}, {"MASTER": "spark://a:7077"}, True),
        ({"spark.master": "local[2,3]"}, {}, True),
        ({"spark.master": "local-cluster[1,1,1024]"}, {}, False),
        ({"spark.master": "spark://a:7077"}, {}, False),
        ({}, {"MASTER": "spark://a:7077"}, False),
        ({}, {"SPARK_HOME": "/opt/spark"}, False),
        ({}, {"SPARK_CONF_DIR": "/etc/spark"}, False),
        ({}, {"SPARK_CONF_DIR": ""}, True),
    ],
)
def test_a_master_is_taken_for_local_only_if_nothing_else_may_name_one(
    given: dict[str, str], environment: dict[str, str], local: bool
) -> None:
    assert session.is_local(given, environment) is local


@pytest.fixture
def no_jvm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SparkContext, "_gateway", None)


@pytest.mark.usefixtures("no_jvm")
def test_a_local_jvm_runs_this_interpreter_listens_on_loopback_and_needs_no_archive(
    tmp_path: Path,
) -> None:
    environment = {"PATH": os.environ["PATH"], "XDG_CACHE_HOME": str(tmp_path)}
    found = session.variables(environment, local=True)
    assert found["PYSPARK_PYTHON"] == sys.executable
    assert found["SPARK_LOCAL_IP"] == "127.0.0.1"
    assert Path(found["SPARK_HOME"]).parent == tmp_path / "qmq"
    assert Path(found["JAVA_HOME"], "bin", "java").exists()


@pytest.mark.usefixtures("no_jvm")
def test_what_the_environment_says_stands(tmp_path: Path) -> None:
    said = {
        "PYSPARK_PYTHON": "/opt/python",
        "SPARK_LOCAL_IP": "10.0.0.1",
        "SPARK_HOME": "/opt/spark",
    }
    found = session.variables(
        {"PATH": os.environ["PATH"], "XDG_CACHE_HOME": str(tmp_path), **said}, local=True
    )
    assert found | said == said | {"JAVA_HOME": found["JAVA_HOME"]}
    assert "SPARK_HOME" not in found, "what is not said is left as it is"


@pytest.mark.usefixtures("no_jvm")
def test_another_interpreter_a_cluster_and_spark_submit_keep_what_is_theirs(tmp_path: Path) -> None:
    known = {"PATH": os.environ["PATH"], "XDG_CACHE_HOME": str(tmp_path)}
    other = session.variables({**known, "PYSPARK_PYTHON": "/opt/python"}, local=True)
    assert "SPARK_HOME" not in other, "it needs the archive"
    assert set(session.variables(known, local=False)) == {"PYSPARK_PYTHON", "JAVA_HOME"}
    assert session.variables({"PYSPARK_GATEWAY_PORT": "4711", "PATH": ""}, local=True) == {}


def test_a_home_without_the_archive_has_all_else(tmp_path: Path) -> None:
    home = home_without_archive(tmp_path)
    for path in ("bin/spark-submit", "bin/spark-class", "sbin/spark-daemon.sh", "jars"):
        assert (home / path).resolve() == PACKAGE / path
    assert list((home / "python" / "lib").iterdir()) == []
    assert home_without_archive(tmp_path) == home


def test_a_home_for_another_pyspark_is_another_one(tmp_path: Path) -> None:
    (tmp_path / "other" / "jars").mkdir(parents=True)
    other = home_without_archive(tmp_path / "cache", tmp_path / "other")
    assert sorted(each.name for each in other.iterdir()) == ["jars", "python"]
    assert other != home_without_archive(tmp_path / "cache")


def test_processes_that_make_a_home_at_once_get_the_same_one(tmp_path: Path) -> None:
    start, found = threading.Barrier(8), list[Path]()

    def make() -> None:
        start.wait()
        found.append(home_without_archive(tmp_path))

    threads = [threading.Thread(target=make) for _ in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert found == [found[0]] * 8
    assert list(tmp_path.iterdir()) == [found[0]], "nothing half-made is left"


def test_a_cache_that_cannot_hold_a_home_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidArgument, match="set XDG_CACHE_HOME"):
        home_without_archive(tmp_path / "file")


def test_a_session_of_ours_counts_in_utc_is_this_machines_and_knows_the_source(
    spark: SparkSession,
) -> None:
    assert spark.sql("select date_format(timestamp_micros(0), 'yyyy-MM-dd HH:mm z')").first() == (
        "1970-01-01 00:00 UTC",
    )
    assert spark.conf.get("spark.driver.host") == "127.0.0.1"
    assert spark.conf.get("spark.driver.bindAddress") == "127.0.0.1"
    assert spark.read.format("qmq").load().columns == [
        name for name in COLUMNS if name != "headers"
    ]


def test_executors_run_this_interpreter_and_load_pyspark_from_its_packages(
    spark: SparkSession,
) -> None:
    def where(_: int) -> tuple[str, str]:
        import sys

        import pyspark

        return sys.executable, pyspark.__file__

    assert spark.sparkContext.parallelize([1], 1).map(where).collect() == [
        (sys.executable, str(PACKAGE / "__init__.py"))
    ]


def test_the_start_of_a_session_leaves_the_environment_as_it_was(spark: SparkSession) -> None:
    assert spark.range(1).count() == 1
    assert os.environ["PYSPARK_PYTHON"] == sys.executable
    assert not os.environ.get("SPARK_HOME", "").startswith(str(cache_folder(os.environ)))
