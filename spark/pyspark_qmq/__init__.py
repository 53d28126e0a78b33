"""QMQ for Spark: `spark.read.format("qmq")`, `df.write.format("qmq")`, and jobs. docs/SPARK.md has
the guarantees.

`qmq.columns` reads the log; this package has what Spark calls.

session.py   a SparkSession that finds Java and the data source
versions.py  the supported releases of PySpark
source.py, stream.py, sink/
             what Spark calls
jobs/        archive, order_audit, lag_report, duplicates, dead_letters, delay_accuracy
lake/        subjects as Iceberg tables, also without Spark
needed.py    what a Python of Spark must have
progress_lines.py
             a line for each micro-batch

Once per session, in another process, Spark searches the Python path for packages named `pyspark_*`
with a `DefaultSource`. It uses `python3` from PATH unless PYSPARK_PYTHON names another interpreter,
and if one of the packages cannot be imported, it ignores all of them with a warning in the log. So
discovery is convenient, but only `register` is reliable.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from qmq.errors import InvalidArgument

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    from pyspark_qmq.source import QmqDataSource as DefaultSource

__all__ = ["DefaultSource", "progress", "register"]


def register(spark: SparkSession) -> None:
    """Register `spark.read.format("qmq")` and its relatives in a session. Calling it again has no
    effect. A local session that no setting gives another Python runs this one in its workers.

    Raises ImportError if the extra `spark` is not installed: pip install 'qmq[spark]';
    InvalidArgument if PySpark is of another release than it asks for.
    """
    import pyspark
    from pyspark.sql import SparkSession

    from pyspark_qmq.versions import unsupported

    if reason := unsupported(pyspark.__version__):
        raise InvalidArgument(reason)
    from pyspark_qmq.source import QmqDataSource

    if isinstance(spark, SparkSession):  # not that of Spark Connect, whose server runs the workers
        _use_this_python(spark.sparkContext)
    spark.dataSource.register(QmqDataSource)


def _use_this_python(context: SparkContext) -> None:
    is_named = os.environ.get("PYSPARK_PYTHON") or context.getConf().get("spark.pyspark.python")
    if str(context.master).split("[")[0] == "local" and not is_named:
        context.pythonExec = sys.executable


def progress(spark: SparkSession) -> None:
    """Print one line on standard error for each micro-batch of the session's streaming queries:
    the query, the batch, its rows, rows a second, and the lag in messages.
    """
    from pyspark_qmq.progress_lines import ProgressLines

    spark.streams.addListener(ProgressLines())


def __getattr__(name: str) -> Any:
    """Import `DefaultSource`, which Spark's discovery asks for, at its first use.

    If a required library is missing, the name does not exist: another error would keep Spark from
    finding the data sources of other packages. Standard error says what is missing, since Spark
    says only that there is no such source. With an unsupported PySpark, the data source is found,
    and its use is an error.
    """
    if name != "DefaultSource":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        import pyspark

        from pyspark_qmq.versions import refusing_source, unsupported

        if reason := unsupported(pyspark.__version__):
            return refusing_source(reason)
        from pyspark_qmq.source import QmqDataSource
    except ImportError as cause:
        print(f"qmq: {cause}", file=sys.stderr)
        raise AttributeError(
            f"the data source needs another package ({cause}): pip install 'qmq[spark]'"
        ) from cause
    return QmqDataSource
