"""Registers the name `qmq` with Spark.

Once per session, in another process, Spark searches the Python path for packages named `pyspark_*` with a `DefaultSource`. It uses
`python3` from PATH unless PYSPARK_PYTHON names another interpreter, and if one of the packages cannot be imported, it ignores all of them
with a warning in the log. So discovery is convenient, but only `register` is reliable.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def register(spark: SparkSession) -> None:
    """Register `spark.read.format("qmq")` and its relatives in a session. Calling it again has no effect.

    Raises ImportError if the extra `spark` is not installed: pip install 'qmq[spark]'.
    """
    from pyspark_qmq.source import QmqDataSource

    spark.dataSource.register(QmqDataSource)
