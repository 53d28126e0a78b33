"""A SparkSession that starts wherever Python does, and knows the data source.

What `session` does for one that PySpark alone would not:

* finds Java, also the one that came with the extra `spark` (java.py);
* runs Python processes with this very interpreter: Spark would take the first `python3` on PATH;
* lets them start without compiling PySpark each time, if the master is local (spark_home.py);
* listens on this machine only, if the master is local;
* counts time in UTC: a day in a table or in a folder's name is the same day, whoever computes it;
* registers the data source (registration.py).

What `conf` and the environment say goes over it. In a program that spark-submit started the JVM is there already: then only what can be set
in a running one is set.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from pyspark import SparkContext
from pyspark.sql import SparkSession

from pyspark_qmq.java import cache_folder, java_home
from pyspark_qmq.registration import register
from pyspark_qmq.spark_home import home_without_archive

ALWAYS: Final[dict[str, str]] = {"spark.sql.session.timeZone": "UTC"}
LOCAL: Final[dict[str, str]] = {
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.sql.shuffle.partitions": "32",  # Spark's 200 are for clusters
}
SPEED: Final[dict[str, str]] = {
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.driver.extraJavaOptions": "-Darrow.enable_null_check_for_get=false",
    "spark.executor.extraJavaOptions": "-Darrow.enable_null_check_for_get=false",
}
"""What made reads and writes faster when it was measured (docs/BENCH.md). Arrow need not look for nulls: Spark asks before it takes a
value."""

_ELSEWHERE: Final = ("SPARK_HOME", "SPARK_CONF_DIR", "PYSPARK_SUBMIT_ARGS", "MASTER")
"""Any of them may name a master, or lead to a file that does."""


def session(app: str = "qmq", *, master: str | None = None, conf: Mapping[str, str] | None = None) -> SparkSession:
    """The process's session, started if there is none.

    Args:
        app: its name in Spark's pages.
        master: such as `local[4]` or `spark://host:7077`. None: what Spark's configuration says, or all of this machine's cores.
        conf: settings that go over ours.

    Raises:
        InvalidArgument: there is no fit Java (java.py), or the cache folder cannot be written.
    """
    given = dict(conf or {})
    if master is not None:
        given["spark.master"] = master
    local = is_local(given, os.environ)
    builder = SparkSession.builder.appName(app)
    for name, value in {**ALWAYS, **SPEED, **(LOCAL if local else {}), **given}.items():
        builder = builder.config(name, value)
    with _environment(variables(os.environ, local=local)):
        found = builder.getOrCreate()
    register(found)
    return found


def is_local(given: Mapping[str, str], environment: Mapping[str, str]) -> bool:
    """Whether driver and executors are one JVM on this machine, as far as it can be known before there is one."""
    if "spark.master" in given:
        return given["spark.master"].split("[")[0] == "local"
    return not any(environment.get(name) for name in _ELSEWHERE)


def variables(environment: Mapping[str, str], *, local: bool) -> dict[str, str]:
    """What a JVM that is started now is to find in its environment, over what is there; nothing if there is a JVM.

    Raises InvalidArgument, as `session` does.
    """
    if "PYSPARK_GATEWAY_PORT" in environment or SparkContext._gateway is not None:
        return {}
    python, cache = environment.get("PYSPARK_PYTHON") or sys.executable, cache_folder(environment)
    found = {"PYSPARK_PYTHON": python, "JAVA_HOME": str(java_home(environment, cache))}
    if local:
        found["SPARK_LOCAL_IP"] = environment.get("SPARK_LOCAL_IP") or "127.0.0.1"
        if python == sys.executable and not environment.get("SPARK_HOME"):
            found["SPARK_HOME"] = str(home_without_archive(cache))
    return found


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set while the JVM is started, as it was behind that; only PYSPARK_PYTHON stays, since each new SparkContext asks for it."""
    before = {name: os.environ.get(name) for name in variables if name != "PYSPARK_PYTHON"}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
