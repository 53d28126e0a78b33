"""How Spark gets to know the name `qmq`.

Spark looks through the Python path for packages named `pyspark_*` that have a `DefaultSource`, once in a session, in a process of its
own. It does so with `python3` from PATH unless PYSPARK_PYTHON names another one, and one such package that cannot be imported makes it
forget all of them, with a warning in the log. So discovery is good to have, and `register` is sure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def register(spark: SparkSession) -> None:
    """Make `spark.read.format("qmq")` and its kin known to a session, however it was made. Doing it twice does no harm.

    Raises ImportError if the extra `spark` is not installed: pip install 'qmq[spark]'.
    """
    from pyspark_qmq.source import QmqDataSource

    spark.dataSource.register(QmqDataSource)
