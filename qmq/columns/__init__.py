"""The committed log in columns: what Spark's source and the lake read, as Arrow record batches.
Needs pyarrow and numpy, but no Spark.

model.py          queues, routes, pieces of a queue, and the interface to the log (`CommittedLog`)
options.py        the options of a read
offsets.py        positions in queues, and their JSON
planning.py       how far a micro-batch goes, and which tasks read it
reading.py        opens the log; the ranges of a read, and the rows of a task
projector.py      Arrow record batches of stored batches (joined_batches.py)
files/, servers/  the log in segment files, and at brokers
"""
