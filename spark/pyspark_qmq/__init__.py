"""QMQ for Spark: `spark.read.format("qmq")`, `df.write.format("qmq")`, and jobs. docs/SPARK.md has the guarantees.

session.py   a SparkSession that finds Java and the data source
source.py, stream.py, sink/   what Spark calls
committed_log.py     the log as the data source needs it; files/ and servers/ provide it
jobs/        archive, order_audit, lag_report, duplicates, dead_letters, delay_accuracy
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyspark_qmq.registration import register

if TYPE_CHECKING:
    from pyspark_qmq.source import QmqDataSource as DefaultSource

__all__ = ["DefaultSource", "register"]


def __getattr__(name: str) -> Any:
    """Import `DefaultSource`, which Spark's discovery asks for, at its first use.

    If a required library is missing, the name does not exist: another error would keep Spark from finding the data sources of other
    packages.
    """
    if name != "DefaultSource":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from pyspark_qmq.source import QmqDataSource
    except ImportError as cause:
        raise AttributeError(f"the data source needs another package ({cause}): pip install 'qmq[spark]'") from cause
    return QmqDataSource
