"""Writes rows of a DataFrame to the log, each exactly once (docs/SPARK.md, "Writing").

    options.py                        options and columns (pure)
    row_identity.py                   message ids, producer ids, batch numbers; validates rows
                                      (pure)
    packets.py                        splits rows into chunks at fixed positions, and by subject;
                                      packets in flight to one queue (pure)
    encoding.py, arrow_vectors.py     encodes batches from Arrow's buffers (pure)
    requests.py                       questions of a subject's core, and their answers; fingerprints
                                      of rows (values)
    left_over.py                      whether rows that are stored already are those of this attempt
                                      (pure)
    row_distribution.py               a subject's rows over broker groups, or by route (pure)
    cluster.py                        metaservers and masters; rows of an epoch that are already
                                      stored; connections that carry batches
    write_task.py                     runs one task: rows in, batches out
    writer.py                         the entry points for Spark

Words: a *chunk* is a contiguous range of a task's rows; a *load* has the rows of a chunk for one
subject, either immediate or delayed; a *packet* has the rows of a load for one queue, and becomes
one batch.
"""
