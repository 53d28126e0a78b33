"""Writes rows of a DataFrame to the log, each exactly once (docs/SPARK.md, "Writing").

    options.py, options.py         options and columns (pure)
    row_identity.py                         message ids, producer ids, batch numbers (pure)
    packets.py, packets.py                   splits rows into chunks at fixed positions, and by subject (pure)
    row_identity.py, encoding.py        validates rows; encodes batches from Arrow's buffers (pure)
    requests.py                        questions of a subject's core, and their answers (values)
    packets.py                        the packets in flight to one queue (pure)
    row_distribution.py, row_distribution.py   a subject's rows over broker groups; by route; row_distribution.py: their base (pure)
    cluster.py                         finds rows of an epoch that are already stored
    sink_cluster.py, cluster.py     metaservers and masters; connections that carry batches
    write_task.py                           runs one task: rows in, batches out
    writer.py                               the entry points for Spark

Words: a *chunk* is a contiguous range of a task's rows; a *load* has the rows of a chunk for one subject, either immediate or delayed; a
*packet* has the rows of a load for one queue, and becomes one batch.
"""
