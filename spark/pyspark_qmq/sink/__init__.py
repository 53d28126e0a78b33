"""Writing rows of a DataFrame into the log, each once (docs/SPARK.md, "Writing").

    sink_options.py, sink_schema.py         what a user may ask, and which columns there may be (pure)
    row_identity.py                         who writes: message ids, producer ids, numbers of batches (pure)
    chunks.py, packets.py                   rows in chunks at fixed places, and their rows by subject (pure)
    row_checks.py, batch_encoding.py        what rows may hold; batches from Arrow's buffers (pure)
    core_requests.py                        what a subject's core wants to know, and is told (values)
    packet_window.py                        what is under way to one queue (pure)
    balanced_rows.py, partitioned_rows.py   a subject's rows over broker groups; by route; row_sender.py: what both share (pure)
    dedup_lookup.py                         what of an epoch is stored already
    sink_cluster.py, sink_connection.py     metaservers and masters; connections that carry batches
    write_task.py                           one task: rows in, batches out
    writer.py                               what Spark calls

Words: a *chunk* is a run of a task's rows; a *load* those of a chunk that go to one subject, at once or later; a *packet* those of a load
that go to one queue, as one batch.
"""
