"""QMQ for Spark: `spark.read.format("qmq")`, `df.write.format("qmq")`, and jobs. docs/SPARK.md says what is promised.

    session.py   a SparkSession that finds Java and the data source
    source.py, stream.py, sink/   what Spark calls
    ports.py     the log as the data source needs it; files/ and servers/ provide it
    jobs/        archive, order_audit, lag_report, duplicates, dead_letters, delay_accuracy
"""
